"""The needs of a run on its devices and hosts: memory of the devices, pinned memory, shares of the
GPUs, shared memory, RAM, disk.

`lines` states those of a host in a plan for another machine; `shortages` compares all of them with
this machine before anything is loaded.
"""

import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from evolver.config.derived import mesh_devices, sleeps, xla_flags
from evolver.plan.advice import advise, changed
from evolver.plan.case import Case, model_shape, servers_of, utilisation
from evolver.plan.estimate import memory
from evolver.plan.targets import GIB, Chip, Target
from evolver.plan.text import size

FLAGS = "XLA_FLAGS"  # to which what the config needs is added
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # size of XLA's pool of pinned host memory, in GiB
POOL_GIB = 64.0  # its default
SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of each GPU that XLA may use
NEW_SHARE = "XLA_CLIENT_MEM_FRACTION"  # its newer name; jax refuses both together
USUAL_SHARE = 0.75  # its default
# XLA's allocator. Only this one gives free memory back to the device (jax's documents), so that
# servers can have it in their turn.
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
SHARING = "platform"
SPARE = 0.03  # of a GPU, for contexts and libraries
ANY_GPU = Chip("a GPU", "cuda", 0, 1e12, 1e12, 1e12, share=1.0)
IN_FLIGHT = 1.1  # pinned buffers of copies under way, on top of what is kept


def shortages(config: Any, workdir: Path) -> list[str]:
    """Return everything that this machine lacks for the run; [] if nothing."""
    devices = jax.devices()[: mesh_devices(config)]
    here = sum(device.process_index == jax.process_index() for device in devices)
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    memory = int(limit_of(devices[0]))
    chip = replace(ANY_GPU, name=devices[0].device_kind, platform=platform, memory=memory)
    case = Case(config, model_shape(config), Target(chip, len(devices)))
    return [*device_shortage(case), *host_shortages(case, workdir, here)]


def variables(config: Any) -> dict[str, str]:
    """Return the environment variables of XLA that a run on NVIDIA GPUs needs. They count once jax
    looks for devices, so that nothing here asks for those."""
    devices = max(1, mesh_devices(config) // max(1, config.hosts.count))
    pinned = needs(Case(config, model_shape(config), Target(ANY_GPU, devices)), devices)["pinned"]
    if sleeps(config):
        chosen = {ALLOCATOR: SHARING}
    else:
        chosen = {} if own_share() else {SHARE: str(share_beside_vllm(config))}
    if pinned > POOL_GIB * GIB:
        chosen[POOL] = str(pool_for(pinned))
    given = os.environ.get(FLAGS, "")
    if (flags := xla_flags(config, given)) != given:
        chosen[FLAGS] = flags
    return chosen


# --- devices --------------------------------------------------------------------------------------


def device_shortage(case: Case) -> list[str]:
    """Return why the run cannot fit in the memory of the devices. Activations are not counted.

    The limit of an accelerator is what its allocator may use. The limit of a CPU is the memory that
    is free now, which all of its simulated devices share.
    """
    chip = case.target.chip
    if not chip.memory:
        return []
    if chip.platform == "cpu":  # the copies over `mesh.data` are not counted
        one_device = {f"mesh.{axis}": 1 for axis in case.config.mesh}
        case = replace(changed(case, one_device), target=Target(chip, 1))
    counted = ["parameters", "optimizer", "reference", "gradients"]
    if case.on_jax:  # a server allocates its own memory
        counted += ["engine weights", "KV cache"]
    worst = max(memory(case).values(), key=lambda row: sum(row[kind] for kind in counted))
    needed = sum(worst[kind] for kind in counted)
    if needed <= chip.memory:
        return []
    held = ", ".join(f"{kind} {size(worst[kind])}" for kind in counted if worst[kind])
    whole = chip.memory / USUAL_SHARE * (1 - SPARE)
    hints = advise(case)
    if chip.platform == "cuda" and not own_share() and needed <= whole:
        share = f"export {SHARE}={1 - SPARE - 0.01}"
        hints = [f"XLA takes {USUAL_SHARE:.0%} of a GPU by default: {share}"]
    lines = [
        f"too little memory: {chip.name} has {size(chip.memory)}, and the run holds {size(needed)}"
        f" at once, activations not counted ({held})",
        *hints,
        "`--mode=plan --target=CHIP:COUNT` shows what fits on other devices",
    ]
    return ["\n".join(lines)]


def limit_of(device: Any) -> float:
    """Return the bytes that a program can use on the device, 0 if unknown."""
    if device.platform == "cpu":
        return free_memory()
    return float((device.memory_stats() or {}).get("bytes_limit", 0))


# --- hosts ----------------------------------------------------------------------------------------


def needs(case: Case, devices: int) -> dict[str, float]:
    """Return the bytes of {"pinned", "shared", "ram", "disk"} that a host needs.

    devices: those of the learner on this host. shared: in config.engine.vllm.shared. disk: in the
    workdir, which all hosts share.
    """
    c = case.config
    sizes = case.sizes
    pinned = sum(case.on_host.values()) * devices
    staged = {"shm": sizes["sync"], "lora": sizes["adapters"]}
    shared = 0 if case.on_jax else staged.get(c.engine.vllm.transfer, 0)
    resting = 0  # weights that a sleeping server keeps, where updates bring adapters only
    if sleeps(c) and c.engine.vllm.transfer == "lora":
        resting = sizes["sync"] * servers_of(c)[0]
    milestones = c.steps // c.checkpoint.milestones if c.checkpoint.milestones else 0
    kept = c.checkpoint.keep + milestones + 2  # the best one, and one being written
    files = sizes["checkpoint"] * kept + sizes["policy"]
    return {"pinned": pinned, "shared": shared, "ram": pinned + shared + resting, "disk": files}


def lines(case: Case) -> list[str]:
    """Return the needs of a host of the target as lines of a plan."""
    c = case.config
    chip = case.target.chip
    need = needs(case, case.target.per_host)
    ram = need["ram"] / GIB
    shared = need["shared"] / GIB
    pinned = need["pinned"] / GIB
    result = [
        f"disk            {need['disk'] / 1e9:,.0f} GB in the workdir, for"
        f" {c.checkpoint.keep + 2} checkpoints",
        f"host memory     {ram:,.0f} GiB, besides the worlds and the program itself",
    ]
    if shared:
        docker = f"Docker: --shm-size={shared + 1:.0f}g"
        result.append(f"shared memory   {shared:,.1f} GiB in {c.engine.vllm.shared} ({docker})")
    if chip.platform == "cuda" and pinned:
        pool = f"export {POOL}={pool_for(need['pinned'])}"
        result.append(f"pinned memory   {pinned:,.0f} GiB of the host memory: {pool}")
    if chip.platform == "cuda":
        result.append(
            f"allocator       export {ALLOCATOR}={SHARING}, so that servers get what XLA frees"
            if sleeps(c)
            else f"share of a GPU  export {SHARE}={share_beside_vllm(c)}"
        )
        if flags := xla_flags(c):
            result.append(f"flags of XLA    export {FLAGS}={shlex.quote(flags)}")
    return result


def host_shortages(case: Case, workdir: Path, devices: int) -> Iterator[str]:
    """Yield what this host lacks, in one sentence each. devices: of the learner, on this host."""
    c = case.config
    need = needs(case, devices)
    if case.target.chip.platform == "cuda":
        yield from gpu_problems(c, need["pinned"])
    free = free_memory()
    if free and need["ram"] > free:
        yield (
            f"the run keeps {need['ram'] / GIB:,.0f} GiB in host memory, and {free / GIB:,.0f} GiB"
            " are free: use more hosts, or set config.optim.offload=False or"
            " config.loss.reference=device"
        )
    folder = Path(c.engine.vllm.shared)
    shared = need["shared"]
    left = shutil.disk_usage(folder).free if shared and folder.is_dir() else math.inf
    if shared > left:
        yield (
            f"config.engine.vllm.shared={folder} has {left / GIB:,.2f} GiB left, and the weights"
            f" take {shared / GIB:,.2f} GiB: enlarge it (Docker's is 64 MB unless started with"
            f" --shm-size={shared / GIB + 1:.0f}g), or name another directory"
        )
    folders = (workdir.absolute(), *workdir.absolute().parents)
    disk = shutil.disk_usage(next(path for path in folders if path.is_dir())).free
    files = [path for path in (workdir / "checkpoints").rglob("*") if path.is_file()]
    disk += sum(path.stat().st_size for path in files)  # which a resumed run has written already
    if need["disk"] > disk:
        yield (
            f"--workdir={workdir} has room for {disk / 1e9:,.3g} GB, and checkpoints take up to"
            f" {need['disk'] / 1e9:,.3g} GB (config.checkpoint.keep={c.checkpoint.keep}, the best,"
            " and one being written): choose another disk, or lower config.checkpoint.keep"
        )


def gpu_problems(config: Any, pinned: float) -> Iterator[str]:
    """Yield settings of XLA that the run cannot live with. pinned: bytes of pinned host memory."""
    pool = float(os.environ.get(POOL) or POOL_GIB) * GIB
    if pinned > pool:
        yield (
            f"config.optim.offload and config.loss.reference keep {pinned / GIB:,.0f} GiB in pinned"
            f" host memory, and XLA's pool holds {pool / GIB:,.0f} GiB:"
            f" export {POOL}={pool_for(pinned)}"
        )
    if sleeps(config):
        if (allocator := os.environ.get(ALLOCATOR, "default")) != SHARING:
            yield (
                f"config.engine.vllm.sleep=True gives learner and servers the same memory in turns,"
                f" and {ALLOCATOR}={allocator} keeps what it once had: export {ALLOCATOR}={SHARING}"
            )
        return
    own = float(own_share() or USUAL_SHARE)
    theirs = vllm_share(config)
    if theirs and shares_devices(config.engine.vllm.devices) and own + theirs > 1:
        yield (
            f"XLA takes {own:.0%} of each GPU ({SHARE}) and vLLM {theirs:.0%} of the same ones"
            f" (--gpu-memory-utilization): export {SHARE}={max(0.0, share_beside_vllm(config))}, or"
            " lower vLLM's share in config.engine.vllm.flags"
        )


def vllm_share(config: Any) -> float:
    """Return the share of a GPU that servers of the run take, 0 if it starts none."""
    vllm = config.engine.vllm
    if config.engine.name != "vllm" or vllm.urls:
        return 0.0
    return utilisation(vllm.flags)


def own_share() -> str:
    """Return the share of each GPU that the environment gives XLA, "" if it does not say."""
    return os.environ.get(SHARE) or os.environ.get(NEW_SHARE, "")


def share_beside_vllm(config: Any) -> float:
    """Return the largest share of a GPU that XLA may take: what a vLLM server on the same devices
    leaves, if any."""
    return round(1 - SPARE - (vllm_share(config) or 0.04), 2)


def shares_devices(devices: tuple[str, ...]) -> bool:
    """Return True if vLLM servers on these CUDA devices would share some with this process."""
    own = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    theirs = re.findall(r"[^\s,]+", ",".join(devices))
    return not own or not theirs or bool(set(own) & set(theirs))


def pool_for(pinned: float) -> int:
    """Return the value of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB that holds so many bytes."""
    return -int(-pinned * IN_FLIGHT // GIB)


def free_memory() -> float:
    """Return the bytes of memory that this process can still get on Linux, also inside a container;
    0 if unknown."""
    try:
        free = 1024.0 * _table("/proc/meminfo")["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return 0.0
    try:
        limit = float(Path("/sys/fs/cgroup/memory.max").read_text())  # fails on "max", no limit
        used = _table("/sys/fs/cgroup/memory.stat")
        return min(free, limit - used["anon"] - used["shmem"])
    except (OSError, KeyError, ValueError):
        return free


def _table(path: str) -> dict[str, int]:
    """Return the numbers of a file of the kernel with a name and a number in each line."""
    rows = [line.split() for line in Path(path).read_text(encoding="ascii").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows}
