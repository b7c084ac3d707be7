"""The check that this machine can hold a run, made before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from evolver import plan
from evolver.plan import advice, estimate, host, targets


def shortage(config: Any) -> str:
    """Return why the run cannot fit in memory, "" if it can. Activations are not counted.

    The limit of an accelerator is what its allocator may use. The limit of a CPU is the memory that
    is free now, which all of its simulated devices share.
    """
    limit, on_cpu = limit_of(jax.devices()[0]), jax.default_backend() == "cpu"
    if not limit:
        return ""
    if on_cpu:
        config = on_one_device(config)
    count = config.mesh.data * config.mesh.fsdp * config.mesh.tensor * config.mesh.sequence
    name = jax.devices()[0].device_kind
    chip = targets.Chip(name, jax.default_backend(), int(limit), 1e12, 1e12, 1e12, share=1.0)
    case = estimate.Case(config, plan.model_shape(config), targets.Target(chip, count))
    record = estimate.estimate(case, {})
    counted = {"parameters", "optimizer", "reference", "gradients"}
    if config.engine.name == "jax":  # a server allocates its own memory
        counted |= {"engine weights", "KV cache"}
    table = [
        {kind: size for kind, size in sizes.items() if kind in counted and size}
        for sizes in record["memory"].values()
    ]
    worst = max(table, key=lambda sizes: sum(sizes.values()))
    needed = sum(worst.values())
    if needed <= limit:
        return ""
    parts = ", ".join(f"{kind} {plan.size(size)}" for kind, size in worst.items())
    whole = limit / host.FRACTION[1] * (1 - host.SPARE)
    narrow = (
        jax.default_backend() == "gpu" and not os.environ.get(host.FRACTION[0]) and needed <= whole
    )
    more = [
        f"XLA takes {host.FRACTION[1]:.0%} of a GPU by default: export {host.FRACTION[0]}={1 - host.SPARE - 0.01}"
    ]
    return "\n".join([
        f"too little memory: {name} has {plan.size(limit)}, and the run holds {plan.size(needed)} at once, activations"
        f" not counted ({parts})",
        *(more if narrow else advice.advise(case, record)),
        "`--mode=plan --target=CHIP:COUNT` shows what fits on other devices",
    ])  # fmt: skip


def shortages(config: Any, workdir: Path) -> list[str]:
    """Return everything that this machine lacks for the run: memory of devices and host, shared
    memory, disk."""
    return [*filter(None, [shortage(config)]), *host.shortages(config, workdir)]


def limit_of(device: Any) -> float:
    """Return the bytes that a program can use on the device, 0 if unknown."""
    if device.platform != "cpu":
        return float((device.memory_stats() or {}).get("bytes_limit", 0))
    return host.free_memory()


def on_one_device(config: Any) -> Any:
    """Return the config for one device, which holds all that the mesh holds, except for the copies
    over `mesh.data`."""
    config = config.copy_and_resolve_references()
    for axis in config.mesh:
        config.mesh[axis] = 1
    return config
