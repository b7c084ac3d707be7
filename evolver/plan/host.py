"""The needs of a run on each host besides device memory: pinned memory, shares of the GPUs, shared
memory, RAM, disk.

`lines` states it in a plan for another machine; `problems` compares it with this one before
anything is loaded.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from evolver import plan
from evolver.plan import estimate, placement
from evolver.plan.estimate import Case
from evolver.plan.targets import GIB

POOL = (
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    64,
)  # XLA's pool of pinned host memory, and its size in GiB by default
FRACTION = (
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    0.75,
)  # share of each GPU that XLA may use, and its default
SPARE = 0.03  # of a GPU, for contexts and libraries
IN_FLIGHT = 1.1  # pinned buffers of copies under way, on top of what is kept


def needs(case: Case, devices: int) -> dict[str, float]:
    """Return the bytes of {"pinned", "shared", "ram", "disk"} that a host needs.

    devices: those of the learner on this host. shared: in config.engine.vllm.shared. disk: in the
    workdir, which all hosts share.
    """
    c, sizes = case.config, estimate.sizes(case)
    pinned = estimate.state_bytes(case)["host"] * devices
    staged = {"shm": sizes["sync"], "lora": sizes["adapters"]}.get(c.engine.vllm.transfer, 0.0)
    shared = staged if c.engine.name == "vllm" else 0.0
    milestones = c.steps // c.checkpoint.milestones if c.checkpoint.milestones else 0
    kept = c.checkpoint.keep + milestones + 2  # the best one, and one being written
    files = sizes["checkpoint"] * kept + sizes["policy"]
    return {"pinned": pinned, "shared": shared, "ram": pinned + shared, "disk": files}


def fraction_beside_vllm(config: Any) -> float:
    """Return the largest share of a GPU that XLA may take: what a vLLM server on the same devices
    leaves, if any."""
    shared = config.engine.name == "vllm" and not config.engine.vllm.urls
    return round(
        1 - SPARE - (placement.utilisation(config.engine.vllm.flags) if shared else 0.04), 2
    )


def lines(case: Case) -> list[str]:
    """Return the needs of a host of the target as lines of a plan."""
    c, chip = case.config, case.target.chip
    devices = min(case.target.count, chip.host)
    need = needs(case, devices)
    result = [
        f"disk            {need['disk'] / 1e9:,.0f} GB in the workdir, for {c.checkpoint.keep + 2} checkpoints"
    ]
    result += [
        f"host memory     {need['ram'] / GIB:,.0f} GiB, besides the worlds and the program itself"
    ]
    if need["shared"]:
        docker = f"Docker: --shm-size={need['shared'] / GIB + 1:.0f}g"
        result.append(
            f"shared memory   {need['shared'] / GIB:,.1f} GiB in {c.engine.vllm.shared} ({docker})"
        )
    if chip.platform == "cuda":
        if need["pinned"] > 0:
            pool = f"export {POOL[0]}={pool_for(need['pinned'])}"
            result.append(
                f"pinned memory   {need['pinned'] / GIB:,.0f} GiB of the host memory: {pool}"
            )
        result.append(f"share of a GPU  export {FRACTION[0]}={fraction_beside_vllm(c)}")
    return result


def problems(case: Case, workdir: Path, *, platform: str, devices: int) -> Iterator[str]:
    """Yield what this host lacks, in one sentence each. platform: of jax. devices: of the learner,
    on this host."""
    c, need = case.config, needs(case, devices)
    if platform == "gpu":
        yield from gpu_problems(c, need["pinned"])
    free = free_memory()
    if free and need["ram"] > free:
        yield (
            f"the run keeps {need['ram'] / GIB:,.0f} GiB in host memory, and {free / GIB:,.0f} GiB are free: use more"
            " hosts, or set config.optim.offload=False or config.loss.reference=device"
        )
    folder = Path(c.engine.vllm.shared)
    if (
        need["shared"]
        and folder.is_dir()
        and need["shared"] > (room := shutil.disk_usage(folder).free)
    ):
        yield (
            f"config.engine.vllm.shared={folder} has {room / GIB:,.2f} GiB left, and the weights take"
            f" {need['shared'] / GIB:,.2f} GiB: enlarge it (Docker's is 64 MB unless started with"
            f" --shm-size={need['shared'] / GIB + 1:.0f}g), or name another directory"
        )
    existing = next(
        path for path in (workdir.absolute(), *workdir.absolute().parents) if path.is_dir()
    )
    held = sum(
        path.stat().st_size for path in (workdir / "checkpoints").rglob("*") if path.is_file()
    )
    room = shutil.disk_usage(existing).free + held
    if need["disk"] > room:
        yield (
            f"--workdir={workdir} has room for {room / 1e9:,.3g} GB, and checkpoints take up to"
            f" {need['disk'] / 1e9:,.3g} GB (config.checkpoint.keep={c.checkpoint.keep}, the best, and one being"
            " written): choose another disk, or lower config.checkpoint.keep"
        )


def gpu_problems(config: Any, pinned: float) -> Iterator[str]:
    """Yield settings of XLA that the run cannot live with. pinned: bytes of pinned host memory."""
    pool = float(os.environ.get(POOL[0]) or POOL[1]) * GIB
    if pinned > pool:
        yield (
            f"config.optim.offload and config.loss.reference keep {pinned / GIB:,.0f} GiB in pinned host memory, and"
            f" XLA's pool holds {pool / GIB:,.0f} GiB: export {POOL[0]}={pool_for(pinned)}"
        )
    vllm = config.engine.vllm
    if config.engine.name != "vllm" or vllm.urls or not shares_devices(vllm.devices):
        return
    own, theirs = (
        float(os.environ.get(FRACTION[0]) or FRACTION[1]),
        placement.utilisation(vllm.flags),
    )
    if own + theirs > 1:
        yield (
            f"XLA takes {own:.0%} of each GPU ({FRACTION[0]}) and vLLM {theirs:.0%} of the same ones"
            f" (--gpu-memory-utilization): export {FRACTION[0]}={max(0.0, fraction_beside_vllm(config))}, or lower"
            " vLLM's share in config.engine.vllm.flags"
        )


def shares_devices(devices: tuple[str, ...]) -> bool:
    """Return True if vLLM servers on these CUDA devices would share some with this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    theirs = {number.strip() for server in devices for number in server.split(",")}
    return (
        not theirs
        or not visible
        or bool(theirs & {number.strip() for number in visible.split(",")})
    )


def pool_for(pinned: float) -> int:
    """Return the value of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB that holds so many bytes."""
    return -int(-pinned * IN_FLIGHT // GIB)


def free_memory() -> float:
    """Return the bytes of memory that this process can still get on Linux, also inside a container;
    0 if unknown."""
    try:
        pairs = dict(
            line.split(":", 1)
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        free = float(pairs["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0.0
    group = Path("/sys/fs/cgroup")
    try:
        limit = float((group / "memory.max").read_text())  # "max" = none
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - float(used["anon"]) - float(used["shmem"]))
    except (OSError, KeyError, ValueError):
        return free


def shortages(config: Any, workdir: Path) -> list[str]:
    """Return what this host lacks for a run of this config; [] if nothing."""
    used = jax.devices()[: math.prod(config.mesh.values())]
    here = sum(device.process_index == jax.process_index() for device in used)
    case = Case(config, plan.model_shape(config))
    return list(problems(case, workdir, platform=jax.default_backend(), devices=here))
