"""Where the engine stands, and what it takes there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from evolver.plan import analytic
from evolver.plan.analytic import BYTES
from evolver.plan.targets import GIB, Target
from models import qwen

SERVER = 2 * GIB  # of a vLLM server's share that is neither weights nor cache: activations, CUDA graphs
UTILISATION = 0.9  # share of a device that a vLLM server takes unless its flags say otherwise


def read(config: Any, name: str, default: Any) -> Any:
    """A value by its dotted name; the default where the config has no such key."""
    for part in name.split("."):
        if part not in config:
            return default
        config = config[part]
    return config


@dataclass(frozen=True)
class Engine:
    """`replicas` engines of `devices` devices each; `shared`: on devices of the learner. Bytes are per device."""

    replicas: int
    devices: int
    shared: bool
    weights: float
    cache: float  # what the config gives it; the jax engine's as many sequences as engine.slots
    sequences: int  # of rollout.context tokens that this cache of one replica holds
    place: str


def engine_of(config: Any, shape: qwen.Config, target: Target) -> Engine:
    """The engine of the config on the target."""
    weights = qwen.parameter_count(shape) * BYTES[config.model.dtype]
    episode = config.rollout.context * analytic.kv_bytes(shape, config.engine.cache_dtype)
    if config.engine.name == "jax":
        slots = config.engine.slots
        return Engine(1, 1, True, weights, slots * episode, slots, "on the learner's first device")
    urls, groups = read(config, "engine.vllm.urls", ()), read(config, "engine.vllm.devices", ())
    flags = read(config, "engine.vllm.flags", "")
    share = re.search(r"--gpu-memory-utilization[ =]([\d.]+)", flags)
    ways = re.search(r"--tensor-parallel-size[ =](\d+)", flags)
    devices = int(ways[1]) if ways else len(groups[0].split(",")) if groups else 1
    replicas = len(urls) or len(groups) or read(config, "engine.vllm.replicas", 1)
    taken = target.chip.memory * (float(share[1]) if share else UTILISATION)
    cache = max(0.0, taken - SERVER - weights / devices)
    words = f"{replicas} vLLM x {devices} devices"
    return Engine(
        replicas, devices, not urls, weights / devices, cache, int(cache * devices // episode),
        f"{words}, elsewhere" if urls else f"{words}, shared with the learner",
    )  # fmt: skip
