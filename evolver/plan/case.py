"""A config on a target: its model, its mesh, its training state and its engine there.

Sizes are bytes per device unless stated otherwise.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax

from evolver.config.checks.machine import KERNELS, mesh_error
from evolver.config.derived import mesh_devices, needs_reference, networks, weight_dtype
from evolver.config.paths import model_folder
from evolver.learner import make_layout
from evolver.llm.questions import INITIAL_POLICY
from evolver.llm.roles import engine_context, policy_urls
from evolver.plan import analytic, targets
from evolver.plan.amounts import EPISODE
from evolver.plan.analytic import BYTES
from evolver.plan.targets import GIB, Target
from models import hf, qwen
from models import mesh as meshes

SERVER = 2 * GIB  # memory of a vLLM server besides weights and cache: activations, CUDA graphs
UTILISATION = 0.9  # share of a device that a vLLM server takes unless its flags set another
LEARNER = ("update", "logp")
PHASES = (*LEARNER, "prefill", "decode")  # of a step, a program each
FILL = 0.95  # assumed share of packed rows that holds tokens


class PlanError(ValueError):
    """A config that cannot be planned, or not for the target; the message is for the user."""


class Kept(NamedTuple):
    """A part of what the learner keeps between updates.

    kind: "parameters", "optimizer" or "reference". weights: a tree of `qwen.Weight`s, each entry of
    which takes `size` bytes.
    """

    kind: str
    words: str
    weights: Any
    size: int
    on_host: bool = False


class Engine(NamedTuple):
    """`replicas` engines of `devices` devices each. shared: the learner uses them too."""

    replicas: int
    devices: int
    shared: bool
    weights: float
    cache: float  # as configured; the jax engine's caches hold engine.slots sequences
    sequences: int  # whole sequences that the cache of one replica holds
    place: str
    # weights and cache of a second engine, where the initial policy plays a role of config.llm
    initial: float = 0.0
    used: int = 1  # devices of a process that share the config's slots


@dataclass(frozen=True)
class Case:
    """A config on a target, with the quantities derived from both.

    note: how its mesh was changed for the target, if it was. compiled: the figures of the target's
    compiler, see `programs.run`; {} = it was not asked. held_out: number of tasks of the split that
    is evaluated, 0 = unknown.
    """

    config: Any
    shape: qwen.Config
    target: Target
    note: str = ""
    compiled: Mapping[str, Any] = field(default_factory=dict)
    held_out: int = 0

    @property
    def programs(self) -> dict[str, Any]:
        """{phase: see `programs.compiled`} of the programs that the compiler made."""
        phases = self.compiled.get("phases", {})
        return {name: phases[name] for name in PHASES if "memory" in phases.get(name, {})}

    @property
    def refused(self) -> dict[str, str]:
        """{phase: reason} of the programs that the compiler refuses."""
        phases = self.compiled.get("phases", {})
        return {name: phase["error"] for name, phase in phases.items() if "error" in phase}

    @property
    def on_jax(self) -> bool:
        return self.config.engine.name == "jax"

    @property
    def rank(self) -> int:
        """Rank of the adapters; 0 = the weights are trained."""
        return self.config.lora.rank

    @property
    def row_shards(self) -> int:
        """The number of devices that split the rows of a batch."""
        return self.config.mesh.data * self.config.mesh.fsdp

    @property
    def trajectories(self) -> int:
        """The rollouts of a step."""
        return self.config.rollout.tasks * self.config.rollout.group

    @property
    def episode(self) -> float:
        """Mean tokens of an episode."""
        return EPISODE * self.config.rollout.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one update."""
        c = self.config.learner
        rows = self.trajectories * self.episode / FILL / c.row / c.updates
        return max(1, math.ceil(rows / c.micro))

    def bytes_of(self, weights: Any, size: int) -> float:
        """Return the bytes of a tree of `qwen.Weight`s, at `size` bytes per entry."""
        rules = self.config.sharding.to_dict()
        mesh = self.config.mesh
        total = 0.0
        for weight in jax.tree.leaves(weights):
            split = ",".join(rules.get(name, "") for name in weight.axes)
            over = [mesh[axis] for axis in split.split(",") if axis]
            total += size * math.prod(weight.shape) / math.prod(over)
        return total

    def _kept(self, *, on_host: bool) -> dict[str, float]:
        held = dict.fromkeys(("parameters", "optimizer", "reference"), 0.0)
        for part in kept(self.config, self.shape):
            if part.on_host == on_host:
                held[part.kind] += self.bytes_of(part.weights, part.size)
        return held

    @cached_property
    def state(self) -> dict[str, float]:
        """The {"parameters", "optimizer", "reference", "gradients"} in the memory of a device."""
        gradients = self.bytes_of(trained_weights(self.config, self.shape), BYTES["float32"])
        return self._kept(on_host=False) | {"gradients": gradients}

    @cached_property
    def on_host(self) -> dict[str, float]:
        """The same, without gradients, in the memory of the host."""
        return self._kept(on_host=True)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return sizes(self.config, self.shape)

    @property
    def processes(self) -> int:
        """The processes of the run: one for each host."""
        return -(-self.target.count // self.target.chip.host)

    @cached_property
    def engine(self) -> Engine:
        """The engine of the config on the target."""
        c = self.config
        vllm = c.engine.vllm
        weights = qwen.parameter_count(self.shape) * BYTES[weight_dtype(c)]
        context = engine_context(c) * analytic.kv_bytes(self.shape, c.engine.cache_dtype)
        if self.on_jax:
            local = self.target.per_host
            used = min(c.engine.devices or local, local)
            slots = -(-c.engine.slots // used)
            place = f"{used} of the learner's devices" if used > 1 else "the learner's first device"
            second = weights + -(-min(c.engine.slots, c.llm.concurrency) // used) * context
            initial = second if INITIAL_POLICY in policy_urls(c) else 0.0
            return Engine(
                used * self.target.count // local, 1, True, weights, slots * context, slots,
                f"on {place}", initial, used,
            )  # fmt: skip
        each, devices = servers_of(c)
        # Every process starts servers of its own; those that run already are divided.
        replicas = each if vllm.urls else each * self.processes
        held = weights / devices
        cache = max(0.0, self.target.chip.memory * utilisation(vllm.flags) - SERVER - held)
        place = "elsewhere" if vllm.urls else "shared with the learner"
        place = f"{replicas} vLLM x {devices} devices, {place}"
        if vllm.urls:
            place += "; their memory is not of this target, their speed as of such devices"
        sequences = int(cache * devices // context)
        return Engine(replicas, devices, not vllm.urls, held, cache, sequences, place)


def case_of(config: Any, target: str) -> Case:
    """Return the config on a target such as "h100:8". Raises PlanError if it cannot run there."""
    devices = targets.parse(target)
    config, note = adapted(config, devices)
    case = Case(config, model_shape(config), devices, note)
    if found := list(problems(case)):
        raise PlanError("\n".join(f"--target={target}: {problem}" for problem in found))
    return case


def model_shape(config: Any) -> qwen.Config:
    """Return the shape of the checkpoint or of the preset. Raises PlanError."""
    if not config.model.path:
        return qwen.PRESETS[config.model.preset]
    try:
        return hf.config_of(model_folder(config.model.path))
    except hf.ModelError as error:
        raise PlanError(f"config.model.path={config.model.path}: {error}") from error


def adapted(config: Any, target: Target) -> tuple[Any, str]:
    """Return (config, note): the config with a mesh for the target's devices if its own is for
    another number."""
    devices = mesh_devices(config)
    if devices == target.count:
        return config, ""
    rows = config.mesh.data * config.mesh.fsdp
    config = config.copy_and_resolve_references()
    mesh = config.mesh
    learner = config.learner
    others = mesh.data * mesh.tensor * mesh.sequence
    if target.count % others:
        mesh.data = mesh.tensor = mesh.sequence = others = 1
    mesh.fsdp = target.count // others
    old = learner.micro
    learner.micro = mesh.data * mesh.fsdp * max(1, old // rows)
    chosen = [f"{axis}={mesh[axis]}" for axis in meshes.AXES if mesh[axis] > 1]
    words = " * ".join(chosen) or "one device"
    note = f"the config's mesh is for {devices} devices; planned with {words}"
    return config, note if learner.micro == old else f"{note}, learner.micro={learner.micro}"


def problems(case: Case) -> Iterator[str]:
    """Yield why the config's engine, kernels and mesh cannot run on the target."""
    c = case.config
    target = case.target
    chip = target.chip
    kernel = c.model.attention
    urls = c.engine.vllm.urls
    local = target.per_host
    replicas, devices = servers_of(c)
    backend = chip.platform.replace("cuda", "gpu")
    starts_servers = not case.on_jax and not urls
    if KERNELS.get(kernel, backend) != backend:
        yield f"config.model.attention={kernel} does not run on {chip.name}: set it to auto"
    if 0 < len(urls) < case.processes and not case.on_jax:
        yield (
            f"config.engine.vllm.urls has {len(urls)} servers, and {target.name} needs"
            f" {case.processes} processes with servers of their own, one for each {chip.host}"
            " devices"
        )
    if starts_servers and chip.platform != "cuda":
        yield (
            f"config.engine.vllm starts servers on CUDA devices, which {target.name} has not: set"
            " config.engine.name=jax, or give the addresses of servers in config.engine.vllm.urls"
        )
    elif starts_servers and replicas * devices > local:
        yield (
            f"{replicas} vLLM servers of {devices} devices need {replicas * devices}, and"
            f" {target.name if local == target.count else f'a host of {target.name}'} has {local}:"
            " change config.engine.vllm.devices, replicas or flags"
        )
    if error := mesh_error(c, case.shape):
        yield error


# --- what is trained and kept ---------------------------------------------------------------------


def trained_weights(config: Any, shape: qwen.Config) -> Any:
    """Return the tree of `qwen.Weight`s that gets gradients: all weights, or the adapters."""
    return qwen.weights(shape, make_layout(config).lora)


def kept(config: Any, shape: qwen.Config) -> Iterator[Kept]:
    """Yield the parts of the training state, those on the host last."""
    rank = config.lora.rank
    master = config.optim.master
    weights = qwen.weights(shape)
    trained = trained_weights(config, shape)
    dtype = config.model.dtype if rank else master
    yield Kept("parameters", f"{dtype} weights", weights, BYTES[dtype])
    if rank:
        yield Kept("parameters", f"{master} adapters", trained, BYTES[master])
    yield Kept("optimizer", "two float32 moments", trained, 8, config.optim.offload)
    for _ in range(networks(config) - 1):
        yield Kept("parameters", f"{master} weights of another network", trained, BYTES[master])
        yield Kept("optimizer", "its two float32 moments", trained, 8, config.optim.offload)
    # With adapters, the unchanged weights are the initial policy.
    if needs_reference(config) and (not rank or config.loss.renew_reference):
        words = f"{master} reference policy"
        on_host = config.loss.reference == "host"
        yield Kept("reference", words, trained, BYTES[master], on_host)


def sizes(config: Any, shape: qwen.Config) -> dict[str, int]:
    """Return the numbers of parameters and of trained ones, and the bytes of a checkpoint (trained
    parameters and their moments), of the trained parameters alone (`adapters`), of a weight sync
    and of the exported policy."""
    count = qwen.parameter_count(shape)
    master = BYTES[config.optim.master]
    trained = entries(trained_weights(config, shape))
    return {
        "parameters": count,
        "trained": trained,
        "checkpoint": trained * (8 + master) * networks(config),
        "adapters": trained * master,
        "sync": count * BYTES[config.model.dtype],
        "policy": count * BYTES["bfloat16"],
    }


def entries(weights: Any) -> int:
    """Return the number of entries of a tree of `qwen.Weight`s."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(weights))


# --- vLLM servers ---------------------------------------------------------------------------------


def flag(flags: str, name: str) -> float:
    """Return the value of a flag of vLLM's command line, 0 if it is not set."""
    given = re.search(rf"--{name}[ =]([\d.]+)", flags)
    return float(given[1]) if given else 0.0


def utilisation(flags: str) -> float:
    """Return the share of a device that a vLLM server with these flags takes."""
    return flag(flags, "gpu-memory-utilization") or UTILISATION


def servers_of(config: Any) -> tuple[int, int]:
    """Return (vLLM servers, devices of each)."""
    vllm = config.engine.vllm
    listed = len(vllm.devices[0].split(",")) if vllm.devices else 1
    devices = int(flag(vllm.flags, "tensor-parallel-size")) or listed
    return len(vllm.urls) or len(vllm.devices) or vllm.replicas, devices
