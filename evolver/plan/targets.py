"""Accelerators that a plan can be made for: their limits, and their descriptions for XLA's
compilers.

This module imports no jax. Peaks are from the vendors' data sheets, for dense bfloat16. `link` is
the one-way bandwidth of one device into its fastest interconnect (NVLink, ICI).
"""

import math
import re
from dataclasses import dataclass

from evolver.config.values import hint

GIB = 2**30


class TargetError(ValueError):
    """An unknown target; the message lists the known ones."""


@dataclass(frozen=True)
class Chip:
    """One device. memory: bytes. flops: bfloat16 FLOP/s. bandwidth: bytes/s of its memory. link:
    bytes/s.

    mfu: the share of `flops` that dense training is assumed to reach. It follows published runs:
    MaxText and torchtitan reach 40% to 50% on H100, MaxText and levanter 50% to 70% on TPU.
    """

    name: str
    platform: str  # jax's name: cuda or tpu
    memory: int
    flops: float
    bandwidth: float
    link: float
    node: int = 8  # devices joined by `link`
    host: int = 8  # devices of one host, and so of one process
    packs: bool = True  # cuDNN's packed rows, if it is a GPU
    bus: float = 25e9  # bytes/s between one device and its host's memory
    mfu: float = 0.4
    # of the memory that a program can use; the rest is contexts, libraries and fragmentation
    share: float = 0.93

    @property
    def usable(self) -> float:
        """The bytes that a program can use."""
        return self.share * self.memory


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100-40g", "cuda", 42_949_672_960, 312e12, 1.555e12, 300e9, packs=False),
        Chip("a100-80g", "cuda", 84_929_347_584, 312e12, 2.039e12, 300e9, packs=False),
        Chip("h100", "cuda", 84_929_347_584, 989e12, 3.35e12, 450e9),
        Chip("h200", "cuda", 150_123_446_272, 989e12, 4.8e12, 450e9),
        Chip("v5e", "tpu", 16 * GIB, 197e12, 0.82e12, 200e9, 256, mfu=0.5, share=0.98),
        Chip("v5p", "tpu", 95 * GIB, 459e12, 2.765e12, 600e9, 8960, 4, mfu=0.5, share=0.98),
        Chip("v6e", "tpu", 32 * GIB, 918e12, 1.64e12, 400e9, 256, mfu=0.4, share=0.98),
    )
}
# The slices of each kind of TPU, with the names of the TPU runtime.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")
SLICES = {"v5e": FLAT, "v5p": CUBES, "v6e": FLAT}


def topologies(chip: str) -> dict[int, str]:
    """Return {number of devices: name of the slice, such as "v5e:2x4"}; {} for a GPU."""
    slices = SLICES.get(chip, ())
    return {math.prod(map(int, slice.split("x"))): f"{chip}:{slice}" for slice in slices}


@dataclass(frozen=True)
class Target:
    """`count` devices of one kind."""

    chip: Chip
    count: int

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.count}"

    @property
    def per_host(self) -> int:
        """The devices of one host."""
        return min(self.count, self.chip.host)

    @property
    def link(self) -> float:
        """Bytes/s between devices. Across nodes it is that of the network: one 400 Gb/s adapter per
        GPU."""
        return self.chip.link if self.count <= self.chip.node else min(self.chip.link, 50e9)


def parse(text: str) -> Target:
    """Return the Target of a text such as "h100:8". Raises TargetError."""
    known = f"known chips are {', '.join(CHIPS)}; a target is CHIP:COUNT, as in h100:8"
    match = re.fullmatch(r"([\w.-]+):(\d+)", text.strip())
    if not match:
        raise TargetError(f"--target={text} is not a target; {known}")
    name = match[1].lower()
    count = int(match[2])
    if name not in CHIPS:
        raise TargetError(f"--target={text}: unknown chip{hint(name, CHIPS, 0.4)}; {known}")
    counts = topologies(name)
    if counts and count not in counts:
        sizes = ", ".join(map(str, counts))
        raise TargetError(f"--target={text}: slices of {name} have {sizes} chips")
    if count < 1 or (count > 8 and count % 8):
        raise TargetError(f"--target={text}: up to 8 devices, or whole nodes of 8")
    return Target(CHIPS[name], count)


# The figures of a GPU in XLA's description of it (GpuTargetConfig of stream_executor), which its
# cost models and code generators read: compute capability, number of cores, arithmetic units of a
# core, clock in GHz, bytes of shared memory of a core and of a block that asks for more than the
# default, bytes of the L2 cache, bytes/s of the memory.
_GPUS = {
    "a100": ((8, 0), 108, 64, 1.41, 167936, 166912, 41943040, 2039000000000),
    "h100": ((9, 0), 132, 128, 1.98, 233472, 232448, 52428800, 3352320000000),
    "h200": ((9, 0), 132, 128, 1.98, 233472, 232448, 52428800, 4800000000000),
}


def gpu_description(chip: Chip) -> str:
    """Return the text proto that `jax.experimental.topologies` takes as `target_config`."""
    kind = chip.name.partition("-")[0]
    (major, minor), cores, fpus, clock, shared, optin, l2, bandwidth = _GPUS[kind]
    return (
        "gpu_device_info {"
        " threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152"
        f" shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores}"
        f" fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535"
        f" block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}"
        f" clock_rate_ghz: {clock} device_memory_size: {chip.memory}"
        f" shared_memory_per_block_optin: {optin} registers_per_core_limit: 65536"
        " registers_per_block_limit: 65536"
        f" cuda_compute_capability {{ major: {major} minor: {minor} }} }}"
        ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }'
        " runtime_version { major: 13 minor: 0 patch: 0 }"
        f' device_description_str: "{chip.name}"'
    )


def gpu_topology(count: int) -> str:
    """Return "slices x hosts x devices", for nodes of 8."""
    hosts = math.ceil(count / 8)
    return f"1x{hosts}x{count // hosts}"
