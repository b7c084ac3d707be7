"""The devices of the engine and the memory that it takes there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from evolver.engine import weight_dtype
from evolver.llm.client import INITIAL
from evolver.llm.roles import played
from evolver.plan import analytic
from evolver.plan.analytic import BYTES
from evolver.plan.targets import GIB, Target
from models import qwen

SERVER = 2 * GIB  # memory of a vLLM server besides weights and cache: activations, CUDA graphs
UTILISATION = 0.9  # share of a device that a vLLM server takes unless its flags set another


@dataclass(frozen=True)
class Engine:
    """`replicas` engines of `devices` devices each. shared: the learner uses them too. Bytes are per device."""

    replicas: int
    devices: int
    shared: bool
    weights: float
    cache: float  # as configured; the jax engine's cache holds engine.slots sequences
    sequences: int  # sequences of rollout.context tokens that the cache of one replica holds
    place: str
    initial: float = 0.0  # weights and cache of a second engine, where the initial policy plays a role of config.llm


def engine_of(config: Any, shape: qwen.Config, target: Target) -> Engine:
    """Return the engine of the config on the target."""
    weights = qwen.parameter_count(shape) * BYTES[weight_dtype(config)]
    context = config.rollout.context * analytic.kv_bytes(shape, config.engine.cache_dtype)
    if config.engine.name == "jax":
        slots = config.engine.slots
        second = weights + min(slots, config.llm.concurrency) * context if INITIAL in played(config) else 0.0
        return Engine(1, 1, True, weights, slots * context, slots, "on the learner's first device", second)
    vllm = config.engine.vllm
    share = re.search(r"--gpu-memory-utilization[ =]([\d.]+)", vllm.flags)
    ways = re.search(r"--tensor-parallel-size[ =](\d+)", vllm.flags)
    devices = int(ways[1]) if ways else len(vllm.devices[0].split(",")) if vllm.devices else 1
    replicas = len(vllm.urls) or len(vllm.devices) or vllm.replicas
    memory = target.chip.memory * (float(share[1]) if share else UTILISATION)
    cache = max(0.0, memory - SERVER - weights / devices)
    place = "elsewhere" if vllm.urls else "shared with the learner"
    return Engine(
        replicas, devices, not vllm.urls, weights / devices, cache, int(cache * devices // context),
        f"{replicas} vLLM x {devices} devices, {place}",
    )  # fmt: skip
