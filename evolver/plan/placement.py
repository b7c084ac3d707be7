"""The devices of the engine and the memory that it takes there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from evolver.config.derived import weight_dtype
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
    """`replicas` engines of `devices` devices each. shared: the learner uses them too. Bytes are
    per device."""

    replicas: int
    devices: int
    shared: bool
    weights: float
    cache: float  # as configured; the jax engine's cache holds engine.slots sequences
    sequences: int  # sequences of rollout.context tokens that the cache of one replica holds
    place: str
    # weights and cache of a second engine, where the initial policy plays a role of config.llm
    initial: float = 0.0


def utilisation(flags: str) -> float:
    """Return the share of a device that a vLLM server with these flags takes."""
    given = re.search(r"--gpu-memory-utilization[ =]([\d.]+)", flags)
    return float(given[1]) if given else UTILISATION


def servers_of(config: Any) -> tuple[int, int]:
    """Return (vLLM servers, devices of each)."""
    vllm = config.engine.vllm
    ways = re.search(r"--tensor-parallel-size[ =](\d+)", vllm.flags)
    devices = int(ways[1]) if ways else len(vllm.devices[0].split(",")) if vllm.devices else 1
    return len(vllm.urls) or len(vllm.devices) or vllm.replicas, devices


def impossible(config: Any, target: Target) -> list[str]:
    """Return why the config's engine and kernels cannot run on the target; [] if they can."""
    chip, found = target.chip, []
    kernels = {"cudnn": "cuda", "pallas": "cuda", "splash": "tpu"}
    if kernels.get(config.model.attention, chip.platform) != chip.platform:
        found.append(
            f"config.model.attention={config.model.attention} does not run on {chip.name}: set it to auto"
        )
    if config.engine.name != "vllm":
        return found
    if target.count > chip.host:
        found.append(
            f"config.engine.name=vllm supports one process, and {target.name} needs {target.count // chip.host}, one"
            f" for each {chip.host} devices: set config.engine.name=jax, or plan for at most {chip.host} devices"
        )
    replicas, devices = servers_of(config)
    if config.engine.vllm.urls:
        return found
    if chip.platform != "cuda":
        found.append(
            f"config.engine.vllm starts servers on CUDA devices, which {target.name} has not: set"
            " config.engine.name=jax, or give the addresses of servers in config.engine.vllm.urls"
        )
    elif replicas * devices > target.count:
        found.append(
            f"{replicas} vLLM servers of {devices} devices need {replicas * devices}, and {target.name} has"
            f" {target.count}: change config.engine.vllm.devices, replicas or flags"
        )
    return found


def engine_of(config: Any, shape: qwen.Config, target: Target) -> Engine:
    """Return the engine of the config on the target."""
    weights = qwen.parameter_count(shape) * BYTES[weight_dtype(config)]
    context = config.rollout.context * analytic.kv_bytes(shape, config.engine.cache_dtype)
    if config.engine.name == "jax":
        slots = config.engine.slots
        second = (
            weights + min(slots, config.llm.concurrency) * context
            if INITIAL in played(config)
            else 0.0
        )
        return Engine(
            1, 1, True, weights, slots * context, slots, "on the learner's first device", second
        )
    vllm = config.engine.vllm
    replicas, devices = servers_of(config)
    memory = target.chip.memory * utilisation(vllm.flags)
    cache = max(0.0, memory - SERVER - weights / devices)
    place = "elsewhere" if vllm.urls else "shared with the learner"
    return Engine(
        replicas, devices, not vllm.urls, weights / devices, cache, int(cache * devices // context),
        f"{replicas} vLLM x {devices} devices, {place}",
    )  # fmt: skip
