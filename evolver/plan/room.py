"""Whether this machine's memory can hold a run, said before anything is loaded."""

from __future__ import annotations

from typing import Any

import jax

from evolver import plan
from evolver.plan import advice, estimate, targets


def shortage(config: Any) -> str:
    """ "" or why the run cannot fit: what has to be held at once, activations not counted, is more than there is.

    An accelerator's limit is what its allocator may use, a CPU's the memory that is free now, which all of its
    simulated devices share.
    """
    limit, count = limit_of(jax.devices()[0]), config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    if not limit:
        return ""
    if jax.default_backend() == "cpu":
        config, count = whole(config), 1
    else:
        count *= config.mesh.sequence
    name = jax.devices()[0].device_kind
    chip = targets.Chip(name, jax.default_backend(), int(limit), 1e12, 1e12, 1e12, share=1.0)
    case = estimate.Case(config, plan.model_shape(config), targets.Target(chip, count))
    record = estimate.estimate(case, {})
    counted = {"parameters", "optimizer", "reference", "gradients"}
    if config.engine.name == "jax":  # a server's memory is its own affair
        counted |= {"engine weights", "KV cache"}
    held = {
        phase: {kind: size for kind, size in kinds.items() if kind in counted and size}
        for phase, kinds in record["memory"].items()
    }
    worst = max(held.values(), key=lambda kinds: sum(kinds.values()))
    needed = sum(worst.values())
    if needed <= limit:
        return ""
    parts = ", ".join(f"{kind} {plan.size(size)}" for kind, size in worst.items())
    lines = [
        f"too little memory: {name} has {plan.size(limit)} for a run that holds {plan.size(needed)} at once,"
        f" activations not counted ({parts})",
        *advice.advise(case, record),
        "`--mode=plan --target=CHIP:COUNT` shows what fits where",
    ]
    return "\n".join(lines)


def limit_of(device: Any) -> float:
    """Bytes that a program can use on the device; 0 where nothing says."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return float(stats["bytes_limit"])
    if device.platform != "cpu":
        return 0.0
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 0.0


def whole(config: Any) -> Any:
    """The config on one device: what all simulated devices hold together, copies over `mesh.data` not counted."""
    config = config.copy_and_resolve_references()
    for axis in config.mesh:
        config.mesh[axis] = 1
    return config
