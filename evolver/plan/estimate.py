"""The memory and time of a config on a target, with figures of compiled programs where there are
any.

Figures are per device unless stated otherwise. The fullest device is the one that learner and
engine share, if any.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from evolver.config.derived import needs_reference, networks, recomputed, sleeps, weight_dtype
from evolver.config.plugs import trait
from evolver.llm.roles import engine_context
from evolver.plan import analytic
from evolver.plan.amounts import checkpoints, evaluated_episodes
from evolver.plan.analytic import BYTES
from evolver.plan.case import LEARNER, PHASES, SERVER, Case
from evolver.plan.targets import Target
from models.attention import PACKS_FROM, WHOLE_IDS
from rl.engines.jax.runner import FEW

# Assumptions about a run; the plan prints them.
# share of an episode's tokens that the policy writes; the rest is prompts and observations
GENERATED = 0.25
REACHED = 0.8  # share of the peak of its slowest resource that a program reaches
# the same for decoding, where the resource is the bandwidth of the memory; engines reach 0.3 to 0.6
DECODING = 0.4
DISK = 1e9  # bytes/s at which one host writes checkpoints
# Measured bytes/s of a weight update to vLLM, with the copies at both ends. Files in shared memory:
# the middle of 0.7 to 2.6 GB/s on two CPU cores. NCCL: 61 GB in 4.4 s from 16 to 16 GPUs (verl,
# docs/advance/fully_async.md).
SYNC = {"shm": 1.3e9, "nccl": 14e9, "lora": 1.3e9, "none": math.inf}
# Seconds in which servers fall asleep and wake, apart from copies of weights. Assumed.
SLEEP = 2.0
KINDS = (
    "parameters",
    "optimizer",
    "reference",
    "gradients",
    "temporaries",
    "engine weights",
    "KV cache",
)
Memory = dict[str, dict[str, float]]  # {phase: {kind: bytes}}


# --- memory ---------------------------------------------------------------------------------------


def temporaries(case: Case) -> dict[str, float]:
    """Return {phase: bytes} of activations and buffers, without the accumulated gradients.

    What cuDNN's packed kernel takes in its backward pass is in no compiled program: two float32
    copies of the queries for each of the most samples of a row.
    """
    c = case.config
    shape = case.shape
    found = estimated_temporaries(case)
    found |= {phase: program["memory"]["temp"] for phase, program in case.programs.items()}
    if kernel(case) == "cudnn_packed":
        tokens = c.learner.micro / case.row_shards * c.learner.row
        queries = tokens * shape.heads * shape.head_dim / c.mesh.tensor
        found["update"] += 8 * max(2, c.learner.most_segments) * queries
    if "update" in case.programs:
        found["update"] = max(0.0, found["update"] - case.state["gradients"])
    if case.on_jax:  # the program decodes all rows in place, but copies a few of them
        found["decode"] += case.engine.cache / FEW
    return found


def estimated_temporaries(case: Case) -> dict[str, float]:
    """Return the same by arithmetic.

    `model.remat` decides what each layer saves for the backward pass of an update (see
    `qwen.REMAT`). Added to that are one layer's working set forward and backward, its gathered
    weights and their gradient, three times a chunk of logits, and the gathered unembedding with its
    gradient. A pass of log-probabilities saves nothing. The memory of attention is assumed to be
    linear in the length of a row; a kernel with each sample apart holds a row of queries, keys,
    values and outputs for each of the most samples of a row, and saves as many outputs.
    """
    c = case.config
    shape = case.shape
    tensor = c.mesh.tensor
    size = BYTES[c.model.dtype]
    tokens = c.learner.micro / case.row_shards * c.learner.row / c.mesh.sequence
    working = analytic.layer_activations(shape, tokens, c.model.dtype, tensor)
    layer = analytic.layer_parameters(shape) / tensor
    unembedding = shape.d_model * shape.vocab / tensor
    logits = 4.0 * shape.vocab  # of one token
    chunk = min(c.learner.chunk, tokens) * logits / tensor
    stream = tokens * shape.d_model * size
    attended = tokens * shape.heads * shape.head_dim * size / tensor
    more = c.learner.most_segments - 1 if kernel(case) == "cudnn_apart" else 0
    apart = more * 2 * attended * (1 + shape.kv_heads / shape.heads)
    attended *= 1 + more
    saved = {
        "full": stream,
        "attention": stream + attended,
        "dots": stream + attended + 0.7 * working,
        "none": working + apart,
    }
    working += apart
    gathered = layer * (2 * size + 4) + unembedding * (size + 4)
    update = shape.layers * saved[c.model.remat] + 2 * working + gathered + 3 * chunk
    return {
        "update": update + case.state["gradients"],
        "logp": 2 * working + (2 * layer + unembedding) * size + 2 * chunk,
        "prefill": logits * min(4, case.engine.sequences),
        "decode": 4 * logits * case.engine.sequences,
    }


def kernel(case: Case) -> str:
    """Return the kernel that attends within the samples of a row on the target, "" if none does."""
    c = case.config
    chip = case.target.chip
    if not c.learner.most_segments or chip.platform != "cuda":
        return ""
    if c.model.attention != "auto":
        return c.model.attention if c.model.attention in WHOLE_IDS else ""
    release = case.compiled.get("jax", jax.__version__)
    packs = chip.packs and tuple(map(int, release.split(".")[:3])) >= PACKS_FROM
    return "cudnn_packed" if packs else "cudnn_apart"


def memory(case: Case) -> Memory:
    """Return the memory of the fullest device, with the cache that the config asks for. That of
    servers elsewhere is not of the target."""
    state = case.state
    scratch = temporaries(case)
    engine = case.engine
    table = {}
    for phase in PHASES:
        learns = phase in LEARNER
        if not learns and not engine.shared:
            continue
        row = dict.fromkeys(KINDS, 0.0) | state | {"gradients": 0.0}
        asleep = learns and sleeps(case.config)
        if engine.shared and not asleep:
            row["engine weights"] = engine.weights + engine.initial
            row["KV cache"] = engine.cache
        row["temporaries"] = scratch[phase] if learns or case.on_jax else 0.0
        if asleep or not (learns or case.on_jax):  # a server's context and graphs stay
            row["temporaries"] += SERVER
        table[phase] = row
    table["update"]["gradients"] = state["gradients"]
    # A reference policy in host memory is copied to the device for the pass.
    table["logp"]["reference"] += case.on_host["reference"]
    return table


def peak(case: Case) -> float:
    """Return the bytes of the fullest device in its worst phase."""
    return max(sum(row.values()) for row in memory(case).values())


def learner_peak(case: Case) -> float:
    """Return the same for the phases of the learner, without the engine."""
    rows = [memory(case)[phase] for phase in LEARNER]
    return max(sum(row.values()) - row["engine weights"] - row["KV cache"] for row in rows)


def fits(case: Case) -> bool:
    """Return True if every program can run on the target."""
    return peak(case) <= case.target.chip.usable and not case.refused


def sequences(case: Case) -> int:
    """Return how many whole contexts of keys and values one engine can hold.

    The jax engine needs room for them next to everything else in every phase; a server, in its
    share of the device.
    """
    if not case.on_jax:
        return case.engine.sequences
    others = max(sum(row.values()) - row["KV cache"] for row in memory(case).values())
    room = case.target.chip.usable - others
    return analytic.sequences_that_fit(
        room, case.shape, engine_context(case.config), case.config.engine.cache_dtype
    )


# --- time -----------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """The figures of one phase of a training step. flops, moved and sent: of a device, the last two
    in bytes; sent is None if only a compiler could tell. tokens: of all devices. bound: the slowest
    resource, without what is not known. roofline, expected: seconds."""

    flops: float
    moved: float
    sent: float | None
    tokens: float
    bound: str
    roofline: float
    expected: float


def phase(
    target: Target,
    *,
    flops: float,
    moved: float,
    tokens: float,
    sent: float | None,
    reach: float = REACHED,
    repeat: float = 1.0,
) -> Phase:
    """Return the figures of `repeat` executions of a program with these figures.

    reach: the share of the peak that the slowest resource is assumed to reach. Transfers over links
    and from memory are assumed to overlap with compute.
    """
    chip = target.chip
    compute = flops / chip.flops
    memory = moved / chip.bandwidth
    links = (sent or 0.0) / target.link
    roofline, bound = max((compute, "compute"), (memory, "memory"), (links, "links"))
    expected = max(compute / chip.mfu, roofline / reach, links / REACHED)
    return Phase(
        flops=repeat * flops,
        moved=repeat * moved,
        sent=None if sent is None else repeat * sent,
        tokens=repeat * tokens,
        bound=bound,
        roofline=repeat * roofline,
        expected=repeat * expected,
    )


def phases(case: Case) -> dict[str, Phase]:
    """Return {phase: figures} of one step."""
    return learner_phases(case) | rollout_phases(case)


def learner_phases(case: Case) -> dict[str, Phase]:
    """Return {phase: figures} of the updates and passes of log-probabilities of one step."""
    c = case.config
    shape = case.shape
    devices = case.target.count
    tensor = c.mesh.tensor
    tokens = case.trajectories * case.episode / c.learner.updates  # of one update
    # A kernel that masks what lies between the samples of a row computes it all the same.
    batch = (shape, tokens, case.episode if kernel(case) else c.learner.row, GENERATED * tokens)
    remat = c.model.remat in ("full", "attention")
    local = (shape, tokens / devices * tensor, case.micro_batches)
    sizes = {"dtype": c.model.dtype, "tensor": tensor}
    passes = c.learner.updates * (needs_reference(c) + trait(c, "recipe", "passes", 0))
    # The first update of a step computes the old log-probabilities of its mini-batch itself.
    own = 0 if trait(c, "recipe", "weighs") else 1
    passes += recomputed(c) * (c.learner.updates - own)
    return {
        "update": phase(
            case.target,
            flops=analytic.update_flops(*batch, remat=remat) / devices,
            moved=analytic.update_bytes(*local, shards=devices // c.mesh.data, **sizes),
            sent=bytes_sent(case.programs.get("update"), devices),
            tokens=tokens,
            repeat=c.learner.updates * c.learner.epochs * networks(c),
        ),
        "logp": phase(
            case.target,
            flops=analytic.forward_flops(*batch) / devices,
            moved=analytic.logp_bytes(*local, **sizes),
            sent=bytes_sent(case.programs.get("logp"), devices),
            tokens=tokens,
            repeat=passes,
        ),
    }


def rollout_phases(case: Case) -> dict[str, Phase]:
    """Return {phase: figures} of prefill and decoding, spread over the engine's replicas."""
    c = case.config
    shape = case.shape
    engine = case.engine
    episode = case.episode
    tokens = case.trajectories * episode / engine.replicas
    read = (1 - GENERATED) * tokens
    written = GENERATED * tokens
    fit = min(engine.sequences, sequences(case)) if case.on_jax else sequences(case)
    at_once = max(1, min(fit, c.rollout.concurrency * case.processes // engine.replicas))
    sizes = {"dtype": weight_dtype(c), "cache_dtype": c.engine.cache_dtype}
    # On average, half an episode is in the cache, and a forward pass attends to half a segment.
    return {
        "prefill": phase(
            case.target,
            flops=analytic.forward_flops(shape, read, episode, 0) / engine.devices,
            moved=engine.weights * read / (4 * c.engine.prefill),
            sent=bytes_sent(None, engine.devices),
            tokens=read * engine.replicas,
        ),
        "decode": phase(
            case.target,
            flops=analytic.forward_flops(shape, at_once, episode, at_once) / engine.devices,
            moved=analytic.decode_bytes(shape, at_once, episode / 2, **sizes) / engine.devices,
            sent=bytes_sent(None, engine.devices),
            tokens=at_once * engine.replicas,
            repeat=written / at_once,
            reach=DECODING,
        ),
    }


def step_seconds(case: Case) -> float:
    """Return the expected time of a step. With `rollout.async_depth`, rollouts and updates take
    place at the same time."""
    rollouts, learner = halves(case)
    return max(rollouts, learner) if case.config.rollout.async_depth else rollouts + learner


def halves(case: Case) -> tuple[float, float]:
    """Return the expected seconds of the rollouts and of the learner in a step."""
    rollouts = sum(phase.expected for phase in rollout_phases(case).values())
    return rollouts, sum(phase.expected for phase in learner_phases(case).values())


def overheads(case: Case) -> dict[str, float]:
    """Return the seconds of a whole run besides its phases: {"offload", "weight sync", "sleep and
    wake (assumed)", "checkpoints", "evaluation"}.

    Checkpoints are written while the run goes on: they count as far as one takes longer than the
    steps until the next.
    """
    c = case.config
    updates = c.learner.updates
    host = case.on_host
    moved = 2 * host["optimizer"] * updates * c.learner.epochs + host["reference"] * updates
    sent, rate = weight_sync(case)
    between = c.checkpoint.every * step_seconds(case)
    late = max(0.0, case.sizes["checkpoint"] / DISK - between)
    rollouts, _ = halves(case)
    return {
        "offload": c.steps * moved / case.target.chip.bus,
        "weight sync": c.steps * sent / rate,
        "sleep and wake (assumed)": c.steps * sleep_seconds(case),
        "checkpoints": late * checkpoints(c),
        "evaluation": evaluated_episodes(c, case.held_out) * rollouts / case.trajectories,
    }


def sleep_seconds(case: Case) -> float:
    """Return the seconds in which servers fall asleep and wake in a step. Weights that an update
    does not bring go to the host's memory and back."""
    if not sleeps(case.config):
        return 0.0
    kept = case.engine.weights if case.config.engine.vllm.transfer == "lora" else 0.0
    return SLEEP + 2 * kept / case.target.chip.bus


def weight_sync(case: Case) -> tuple[float, float]:
    """Return (bytes, bytes/s) of a weight update.

    That of vLLM servers is measured. The jax engine copies on its device, which gets what the
    others hold over its link: these two rates are those of the hardware.
    """
    whole = case.sizes["sync"]
    transfer = case.config.engine.vllm.transfer
    if case.on_jax:
        copied = case.target.chip.bandwidth / 2
        return whole, copied if case.target.count == 1 else min(copied, case.target.link)
    return case.sizes["adapters"] if transfer == "lora" else whole, SYNC[transfer]


def bytes_sent(program: Mapping[str, Any] | None, devices: int) -> float | None:
    """Return the bytes that a device sends in one execution of a compiled program, or of any
    program on one device; None if that is not known."""
    if program is None:
        return 0.0 if devices == 1 else None
    return sum(sent for _, sent in program["collectives"].values())
