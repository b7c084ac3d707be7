"""Estimate the memory, time and sizes of a config on a target, with figures of compiled programs
where there are any.

Figures are per device unless stated otherwise. The fullest device is the one that learner and
engine share, if any.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from evolver.config.derived import weight_dtype
from evolver.plan import analytic, compilers
from evolver.plan.analytic import BYTES, EPISODE, Split, checkpoints, held_out_episodes
from evolver.plan.placement import SERVER, Engine, engine_of
from evolver.plan.targets import Target
from models import lora, qwen
from models import mesh as meshes
from rl.engines.jax.engine import FEW

# Assumptions about a run; the plan prints them.
# share of an episode's tokens that the policy writes; the rest is prompts and observations
GENERATED = 0.25
FILL = 0.95  # share of packed rows that holds tokens
DISK = 1e9  # bytes/s at which one host writes checkpoints
# Measured bytes/s of a weight update to vLLM, with the copies at both ends. Files in shared memory:
# the middle of 0.7 to 2.6 GB/s on two CPU cores. NCCL: 61 GB in 4.4 s from 16 to 16 GPUs (verl,
# docs/advance/fully_async.md).
SYNC = {"shm": 1.3e9, "nccl": 14e9, "lora": 1.3e9, "none": math.inf}
LEARNER = ("update", "logp")
PHASES = (*LEARNER, "prefill", "decode")
KINDS = (
    "parameters",
    "optimizer",
    "reference",
    "gradients",
    "temporaries",
    "engine weights",
    "KV cache",
)


@dataclass(frozen=True)
class Case:
    """A config on a target, with the quantities derived from both."""

    config: Any
    shape: qwen.Config
    target: Target | None = None  # not needed for sizes

    @property
    def split(self) -> Split:
        m = self.config.mesh
        return Split(m.data * m.fsdp, m.fsdp * m.tensor * m.sequence, m.tensor, m.sequence)

    @property
    def trajectories(self) -> int:
        return self.config.rollout.tasks * self.config.rollout.group

    @property
    def episode(self) -> float:
        """Mean tokens of an episode."""
        return EPISODE * self.config.rollout.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one update."""
        rows = (
            self.trajectories
            * self.episode
            / FILL
            / self.config.learner.row
            / self.config.learner.updates
        )
        return max(1, math.ceil(rows / self.config.learner.micro))

    @property
    def engine(self) -> Engine:
        return engine_of(self.config, self.shape, self.target)

    @property
    def rank(self) -> int:
        """Rank of the adapters; 0 = the weights are trained."""
        return self.config.lora.rank


def adapted(config: Any, target: Target) -> tuple[Any, list[str]]:
    """Return (config, notes): the config with a mesh for the target's devices if its own is for
    another number."""
    sizes = {axis: config.mesh[axis] for axis in meshes.AXES}
    if math.prod(sizes.values()) == target.count:
        return config, []
    config = config.copy_and_resolve_references()
    rest = sizes["data"] * sizes["tensor"] * sizes["sequence"]
    keep = target.count % rest == 0
    for axis in sizes:
        config.mesh[axis] = sizes[axis] if keep else 1
    config.mesh.fsdp = target.count // rest if keep else target.count
    rows = config.mesh.data * config.mesh.fsdp
    old = config.learner.micro
    config.learner.micro = rows * max(1, old // (sizes["data"] * sizes["fsdp"]))
    text = (
        " * ".join(f"{axis}={config.mesh[axis]}" for axis in sizes if config.mesh[axis] > 1)
        or "one device"
    )
    notes = [f"the config's mesh is for {math.prod(sizes.values())} devices; planned with {text}"]
    if config.learner.micro != old:
        notes[0] += f", learner.micro={config.learner.micro}"
    return config, notes


# --- memory ---------------------------------------------------------------------------------------


def check_mesh(case: Case) -> None:
    """Raise MeshError if the mesh does not divide the model."""
    sizes = tuple(case.config.mesh[axis] for axis in meshes.AXES)
    mesh = AbstractMesh(sizes, meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes))
    meshes.shardings(case.shape, mesh, case.config.sharding.to_dict())


def trained_weights(case: Case) -> Any:
    """Return the tree of `qwen.Weight`s that gets gradients: all weights, or the adapters."""
    if not case.rank:
        return qwen.weights(case.shape)
    c = case.config.lora
    return lora.weights(case.shape, lora.LoRA(c.rank, c.alpha, tuple(c.targets)))


def weight_bytes(case: Case, weights: Any, size: int) -> float:
    """Return the bytes of a tree of `qwen.Weight`s on one device, at `size` bytes per entry."""
    rules, mesh, total = case.config.sharding.to_dict(), case.config.mesh, 0.0
    for weight in jax.tree.leaves(weights, is_leaf=qwen.is_weight):
        over = [axis for name in weight.axes for axis in rules.get(name, "").split(",") if axis]
        total += size * math.prod(weight.shape) / math.prod(mesh[axis] for axis in over)
    return total


def state_bytes(case: Case) -> dict[str, float]:
    """Return the bytes of {"parameters", "optimizer", "reference", "gradients", "host"}; "host" is
    in host memory."""
    c, base = case.config, qwen.weights(case.shape)
    master = BYTES[c.optim.master]
    trained = trained_weights(case)
    parameters = weight_bytes(case, trained, master)
    if case.rank:
        parameters += weight_bytes(case, base, BYTES[c.model.dtype])
    moments = weight_bytes(case, trained, 8)
    reference = _reference(case)
    offload, on_host = c.optim.offload, c.loss.reference == "host"
    return {
        "parameters": parameters,
        "optimizer": 0.0 if offload else moments,
        "reference": 0.0 if on_host else reference,
        "gradients": weight_bytes(case, trained, 4),
        "host": moments * offload + reference * on_host,
    }


def temporaries(case: Case, compiled: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Return {phase: (bytes, "compiled" or "estimated")} without the accumulated gradients."""
    c, state = case.config, state_bytes(case)
    rows = {
        "rows": c.learner.micro,
        "row": c.learner.row,
        "split": case.split,
        "dtype": c.model.dtype,
    }
    rows["chunk"] = c.learner.chunk
    estimated = {
        "update": state["gradients"]
        + analytic.update_temporaries(case.shape, remat=c.model.remat, **rows),
        "logp": analytic.logp_temporaries(case.shape, **rows),
        "prefill": 4.0 * case.shape.vocab * min(4, c.engine.slots),
        "decode": 4.0 * 4 * case.shape.vocab * c.engine.slots,
    }
    result = {phase: (size, "estimated") for phase, size in estimated.items()}
    for phase, record in compiled.items():
        if "memory" in record:
            size = record["memory"]["temp"] - (state["gradients"] if phase == "update" else 0)
            result[phase] = (max(0.0, size), "compiled")
    if c.engine.name == "jax":  # the program decodes all rows in place, but copies a few of them
        size, source = result["decode"]
        result["decode"] = (size + case.engine.cache / FEW, source)
    return result


def memory(case: Case, compiled: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return {phase: {kind: bytes}} on the fullest device, with the cache that the config asks
    for."""
    c, state, scratch, engine = (
        case.config,
        state_bytes(case),
        temporaries(case, compiled),
        case.engine,
    )
    held = {"engine weights": engine.weights + engine.initial, "KV cache": engine.cache}
    table = {}
    for phase in PHASES:
        learns = phase in LEARNER
        row = dict.fromkeys(KINDS, 0.0)
        if learns or engine.shared:
            row |= {kind: state[kind] for kind in ("parameters", "optimizer", "reference")}
        if not learns or engine.shared:
            row |= held
        row["gradients"] = state["gradients"] if phase == "update" else 0.0
        row["temporaries"] = scratch[phase][0] if learns or c.engine.name == "jax" else SERVER
        if phase == "logp" and c.loss.kl_coef and not case.rank and not state["reference"]:
            row["reference"] = state["parameters"]  # copied from the host for the pass
        table[phase] = row
    return table


def learner_bytes(row: dict[str, float]) -> float:
    """Return the bytes of a phase of the learner without the engine."""
    return sum(size for kind, size in row.items() if kind not in ("engine weights", "KV cache"))


def capacity(case: Case, table: dict[str, dict[str, float]]) -> int:
    """Return how many whole contexts of keys and values one engine can hold.

    The jax engine needs room for them next to everything else in every phase; a server, in its
    share of the device.
    """
    if case.config.engine.name != "jax":
        return case.engine.sequences
    fullest = max(sum(row.values()) - row["KV cache"] for row in table.values())
    room = case.target.chip.usable - fullest
    return analytic.sequences_that_fit(
        room, case.shape, case.config.rollout.context, case.config.engine.cache_dtype
    )


# --- time -----------------------------------------------------------------------------------------


def phase(
    target: Target,
    *,
    flops: float,
    moved: float,
    wire: float,
    tokens: float,
    reach: float,
    repeat: float = 1.0,
) -> dict[str, Any]:
    """Return the figures of one phase: `repeat` executions of a program with these figures per
    device.

    reach: the share of the peak that the slowest resource is assumed to reach. Transfers over links
    and from memory are assumed to overlap with compute.
    """
    chip = target.chip
    seconds = {
        "compute": flops / chip.flops,
        "memory": moved / chip.bandwidth,
        "links": wire / target.link,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    roofline = repeat * seconds[bound]
    expected = repeat * max(
        seconds["compute"] / chip.mfu, seconds[bound] / reach, seconds["links"] / 0.8
    )
    return {
        "flops": repeat * flops, "bytes": repeat * moved, "wire": repeat * wire, "bound": bound,
        "roofline_s": roofline, "expected_s": expected, "tokens": repeat * tokens,
    }  # fmt: skip


def times(case: Case, compiled: dict[str, Any], sequences: int) -> dict[str, dict[str, Any]]:
    """Return {phase: see `phase`} of one step, with `sequences` decoding at a time."""
    c, shape, split, devices = case.config, case.shape, case.split, case.target.count
    tokens = case.trajectories * case.episode
    predicted = GENERATED * tokens
    segment, micro = case.episode, case.micro_batches
    wires = {name: _wire(compiled, name) for name in LEARNER}
    passes = (c.loss.old_logp == "recomputed") + bool(c.loss.kl_coef)
    per_update = tokens / c.learner.updates
    forward = analytic.forward_flops(shape, tokens, segment, predicted)
    update = analytic.update_flops(
        shape,
        per_update,
        segment,
        predicted / c.learner.updates,
        remat=c.model.remat in ("full", "attention"),
    )
    local = per_update / devices * split.tensor
    size = c.model.dtype
    result = {
        "update": phase(
            case.target, flops=update / devices, wire=wires["update"], tokens=per_update, reach=0.8,
            moved=analytic.update_bytes(shape, local, micro, split, dtype=size),
            repeat=c.learner.updates * c.learner.epochs,
        ),
        "logp": phase(
            case.target, flops=forward / c.learner.updates / devices, wire=wires["logp"], tokens=per_update, reach=0.8,
            moved=analytic.logp_bytes(shape, local, micro, split, dtype=size), repeat=passes * c.learner.updates,
        ),
    }  # fmt: skip
    result |= rollout_times(case, max(1, sequences))
    for record in result.values():
        record["tokens_per_s"] = (
            record["tokens"] / record["expected_s"] if record["expected_s"] else 0.0
        )
    return result


def rollout_times(case: Case, sequences: int) -> dict[str, dict[str, Any]]:
    """Return the figures of prefill and decoding, spread over the engine's replicas."""
    c, shape, engine = case.config, case.shape, case.engine
    tokens = case.trajectories * case.episode / engine.replicas
    at_once = min(sequences, max(1, c.rollout.concurrency // engine.replicas))
    read_tokens, written = (1 - GENERATED) * tokens, GENERATED * tokens
    sizes = {"dtype": weight_dtype(c), "cache_dtype": c.engine.cache_dtype}
    moved = analytic.decode_bytes(shape, at_once, case.episode / 2, **sizes) / engine.devices
    return {
        "prefill": phase(
            case.target, flops=analytic.forward_flops(shape, read_tokens, case.episode, 0) / engine.devices, wire=0.0,
            tokens=read_tokens * engine.replicas, moved=engine.weights * read_tokens / (4 * c.engine.prefill),
            reach=0.8,
        ),
        "decode": phase(
            case.target, flops=analytic.decode_flops(shape, at_once, case.episode / 2) / engine.devices, moved=moved,
            wire=0.0, tokens=at_once * engine.replicas, repeat=written / at_once, reach=case.target.chip.decode,
        ),
    }  # fmt: skip


def overheads(case: Case, phases: dict[str, dict[str, Any]], held_out: int) -> dict[str, float]:
    """Return the seconds of a whole run besides its phases: {"offload", "weight sync",
    "checkpoints", "evaluation"}.

    Checkpoints are written while the run goes on: they count as far as one takes longer than the
    steps until the next.
    held_out: number of tasks of an evaluation.
    """
    c, chip, size = case.config, case.target.chip, sizes(case)
    reference = _reference(case) if c.loss.reference == "host" else 0.0
    moments = state_bytes(case)["host"] - reference
    moved = 2 * moments * c.learner.updates * c.learner.epochs + reference * c.learner.updates
    sent, rate = weight_sync(case)
    step = sum(record["expected_s"] for record in phases.values())
    late = max(0.0, size["checkpoint"] / DISK - c.checkpoint.every * step)
    episodes = held_out_episodes(c, min(c.eval.tasks or held_out, held_out))
    rollouts = (
        phases["prefill"]["expected_s"] + phases["decode"]["expected_s"]
    ) / case.trajectories
    return {
        "offload": c.steps * moved / chip.bus,
        "weight sync": c.steps * sent / rate,
        "checkpoints": late * checkpoints(c),
        "evaluation": episodes * rollouts,
    }


def weight_sync(case: Case) -> tuple[float, float]:
    """Return (bytes, bytes/s) of a weight update.

    That of vLLM servers is measured. The jax engine copies on its device, which gets what the
    others hold over its
    link: these two rates are those of the hardware.
    """
    size, vllm = sizes(case), case.config.engine.vllm
    if case.config.engine.name != "vllm":
        copied = case.target.chip.bandwidth / 2
        return size["sync"], copied if case.target.count == 1 else min(copied, case.target.link)
    return size["adapters"] if vllm.transfer == "lora" else size["sync"], SYNC[vllm.transfer]


def _reference(case: Case) -> float:
    """Return the bytes per device of a reference policy that is kept beside the trained weights."""
    if not case.config.loss.kl_coef or case.rank:
        return 0.0
    return weight_bytes(case, qwen.weights(case.shape), BYTES[case.config.optim.master])


def _wire(compiled: dict[str, Any], name: str) -> float:
    return sum(sent for _, sent in compiled.get(name, {}).get("collectives", {}).values())


# --- everything -----------------------------------------------------------------------------------


def sizes(case: Case) -> dict[str, float]:
    """Return the numbers of parameters and of trained ones, and the bytes of a checkpoint (trained
    parameters and their moments), of the trained parameters alone (`adapters`), of a weight sync
    and of the exported policy."""
    count, c = qwen.parameter_count(case.shape), case.config
    trained = count
    if case.rank:
        trained = sum(
            math.prod(w.shape)
            for w in jax.tree.leaves(trained_weights(case), is_leaf=qwen.is_weight)
        )
    master = BYTES[c.optim.master]
    return {
        "parameters": count,
        "trained": trained,
        "checkpoint": trained * (8 + master),
        "adapters": trained * master,
        "sync": count * BYTES[c.model.dtype],
        "policy": count * BYTES["bfloat16"],
    }


def compile_case(case: Case) -> dict[str, Any]:
    """Compile the programs of a case for its target, with progress on stderr; see
    `compilers.compile_programs`."""
    c = case.config
    slots = max(1, min(c.engine.slots, estimate(case, {})["sequences"]))
    return compilers.compile_programs(
        c.to_dict(), case.target, phases=[name for name in PHASES if c.engine.name == "jax" or name in LEARNER],
        micro_batches=case.micro_batches, slots=slots,
        show=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )  # fmt: skip


def estimate(case: Case, compiled: dict[str, Any], *, held_out: int = 0) -> dict[str, Any]:
    """Return the plan as one JSON-able record, for `report` and `advice`. compiled: see
    `programs.run`; {} = none.
    held_out: number of tasks of an evaluation, 0 = unknown."""
    records = compiled.get("phases", {})
    table = memory(case, records)
    room = capacity(case, table)
    fits = max(sum(row.values()) for row in table.values()) <= case.target.chip.usable
    refused = {name: record["error"] for name, record in records.items() if "error" in record}
    asked = case.config.engine.slots if case.config.engine.name == "jax" else room
    phases = times(case, records, min(asked, room))
    return {
        "target": case.target.name,
        "mesh": {axis: case.config.mesh[axis] for axis in meshes.AXES},
        "compiler": compiled.get("error") or f"XLA of jax {compiled['jax']}"
        if compiled
        else "not asked",
        "compiled": {name: records[name] for name in PHASES if "memory" in records.get(name, {})},
        "refused": refused,
        "memory": table,
        "sources": {name: source for name, (_, source) in temporaries(case, records).items()},
        "host": state_bytes(case)["host"] * case.target.count,
        "limit": case.target.chip.usable,
        "fits": fits and not refused,
        "learner": max(learner_bytes(table[phase]) for phase in LEARNER),
        "sequences": room,
        "kv_token": analytic.kv_bytes(case.shape, case.config.engine.cache_dtype),
        "phases": phases,
        "step_s": sum(record["expected_s"] for record in phases.values()),
        "sync": weight_sync(case),
        "overheads_s": overheads(case, phases, held_out or case.config.eval.tasks),
        "evaluated": bool(held_out or case.config.eval.tasks or not case.config.eval.every),
        "micro_batches": case.micro_batches,
        "sizes": sizes(case),
        "steps": case.config.steps,
        "engine": case.engine.place,
        "slots": case.config.engine.slots if case.config.engine.name == "jax" else 0,
        "context": case.config.rollout.context,
        "link": case.target.link,
        "assumed": f"{case.trajectories:,} episodes; assumed: {case.episode:,.0f} tokens each, {GENERATED:.0%} of them"
        " generated",
    }
