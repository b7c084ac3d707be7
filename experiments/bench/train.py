"""Speed and memory of the update on long packed rows, measured on an accelerator or planned.

    python -m experiments.bench.train                    # measure on this machine's GPU or TPU
    python -m experiments.bench.train --sizes 7b --rows 16384 --set lora.rank=32
    python -m experiments.bench.train --planned h100:1   # no such device: plan with its compiler

Weights are random, computation is in bfloat16, and rows are filled completely with sequences of a
quarter row. A step is loss, gradient, clipping and AdamW over `--micro-batches` rows. Each case
runs in its own process, because JAX reports the peak memory per process. MFU is the FLOP/s of
forward and backward pass (3 times the forward pass, recomputation not counted) divided by the peak
in evolver/plan/targets.py. Planned figures are not measured: memory is that of the compiled
program, speed is the chip's roofline.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from envs.values import Json
from evolver.learner import initial_policy, make_layout, make_optimizer, make_programs
from evolver.plan import analytic, estimate
from evolver.plan.case import case_of
from experiments import commands
from experiments.bench.accelerator import (
    SIZES,
    Record,
    bfloat16_config,
    changes_of,
    chip_of,
    compiled_for,
    show,
)
from experiments.bench.harness import ROOT, clocked
from models.mesh import make_mesh
from rl import learner
from rl.packing import Packed, pack
from rl.samples import Sample

ROWS = (4096, 16384, 32768)
SEQUENCES = 4  # per row


def config_of(size: str, row: int, micro_batches: int, changes: Json) -> Any:
    """Return a config of one update of `micro_batches` rows per device, one row at a time."""
    config = bfloat16_config(size)
    settings = {
        "model.remat": "full", "loss.fast": True,
        "learner.row": row, "learner.most_segments": SEQUENCES, "learner.updates": 1,
        "rollout.context": row, "rollout.max_tokens": row // 8, "rollout.tasks": micro_batches,
        "rollout.group": 1, "engine.slots": 1,
    }  # fmt: skip
    config.update_from_flattened_dict(settings | changes)
    config.learner.micro = config.mesh.data * config.mesh.fsdp
    config.rollout.tasks *= config.learner.micro
    return config


def packed(config: Any, vocab: int) -> Packed:
    """Return full rows of random tokens; the second half of each sequence is trained."""
    rng, length = np.random.default_rng(0), config.learner.row // SEQUENCES
    trained = np.arange(length) >= length // 2
    samples = [
        Sample(
            rng.integers(0, vocab, length), trained, version=np.where(trained, 0, -1),
            logp=trained * rng.uniform(-2, 0, length),
            advantage=trained * rng.standard_normal(length),
        )
        for _ in range(config.rollout.tasks * SEQUENCES)
    ]  # fmt: skip
    return pack(samples, config.learner.row)


def model_flops(config: Any, shape: Any, tokens: float) -> float:
    """Return the FLOPs of forward and backward pass over `tokens` tokens, half of them trained."""
    return analytic.update_flops(
        shape, tokens, config.learner.row / SEQUENCES, tokens / 2, remat=False
    )


def measure(config: Any, repeats: int) -> Record:
    """Return tokens/s and FLOP/s of a device, and peak memory, of the fastest update after two
    warm-up updates."""
    mesh = make_mesh(config.mesh.to_dict())
    shape, params = initial_policy(config, mesh)
    optimizer = make_optimizer(config)
    update, _ = make_programs(config, shape, mesh, optimizer)
    state = learner.init_state(shape, params, optimizer, mesh, make_layout(config))
    del params
    batch = packed(config, shape.vocab)

    def step() -> None:
        nonlocal state
        state, metrics = update(state, batch)
        assert np.isfinite(float(metrics["loss"]))

    tokens = batch.tokens_RT.size
    device_seconds = min(clocked(step, repeats + 2)[2:]) * mesh.size
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "tokens_per_s": tokens / device_seconds,
        "flops_per_s": model_flops(config, shape, tokens) / device_seconds,
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
    }


def measured_case(config: Any, repeats: int, micro_batches: int) -> Record:
    """Measure an update in this process and return its figures, or a note, beside the plan's."""
    if jax.default_backend() == "cpu":
        raise commands.Problems("this machine has no accelerator: plan with --planned h100:1")
    try:
        record = measure(config, repeats)
    except jax.errors.JaxRuntimeError as error:  # out of memory: noted in the table
        return {"note": str(error).splitlines()[0][:80]}
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return record | {"mfu": None}
    record["mfu"] = record["flops_per_s"] / chip.flops
    return record | foretold(case_of(config, f"{chip.name}:{jax.device_count()}"), micro_batches)


def foretold(case: Any, micro_batches: int) -> Record:
    """Return what a plan says by arithmetic, without a compiler: "planned" tokens/s at most, and
    the "planned_gb" of an update."""
    most = roofline(case, {"peak_gb": 0.0, "collectives": {}}, micro_batches)
    update = sum(estimate.memory(case)["update"].values())
    return {"planned": most["tokens_per_s"], "planned_gb": update / 1e9}


def measured(size: str, row: int, flags: Sequence[str]) -> Record:
    """Measure one case in a process of its own: this one does not use the device."""
    command = [sys.executable, "-m", "experiments.bench.train", "--case", "--sizes", size]
    command += ["--rows", str(row), *flags]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if process.returncode > 0:
        sys.exit(process.returncode)  # the child has printed the reason
    if process.returncode:
        return {"note": f"killed by signal {-process.returncode}"}
    return json.loads(process.stdout.splitlines()[-1])


def roofline(case: Any, record: Record, micro_batches: int) -> Record:
    """Return the peak memory of the compiled update, and upper bounds on its tokens/s and MFU."""
    if "note" in record:
        return record
    devices = case.target.count
    tokens = micro_batches * case.config.learner.micro * case.config.learner.row
    useful = model_flops(case.config, case.shape, tokens) / devices
    tensor, shards = case.config.mesh.tensor, devices // case.config.mesh.data
    local = tokens / devices * tensor
    work = estimate.phase(
        # 4/3: the forward pass runs twice
        case.target, flops=useful * 4 / 3, tokens=tokens,
        moved=analytic.update_bytes(
            case.shape, local, micro_batches, dtype="bfloat16", tensor=tensor, shards=shards
        ),
        sent=estimate.bytes_sent(record, devices),
    )  # fmt: skip
    return {
        "peak_gb": record["peak_gb"],
        "fits": 1e9 * record["peak_gb"] <= case.target.chip.usable,
        "tokens_per_s": tokens / work.roofline / devices,
        "mfu": useful / work.roofline / case.target.chip.flops,
        "bound": work.bound,
    }


def cells(record: Record) -> list[str]:
    """Return the row of the table."""
    name = [record["size"], f"{record['row']:,}"]
    if "note" in record:
        return [*name, "", "", "", record["note"]]
    bound = f"at most, bound by {record['bound']}" if "bound" in record else ""
    if "planned" in record:
        bound = f"planned: {record['planned']:,.0f} at most, {record['planned_gb']:.1f} GB"
    fits = "" if record.get("fits", True) else ", does not fit"
    mfu = f"{record['mfu']:.0%}" if record["mfu"] is not None else ""
    rate, peak = f"{record['tokens_per_s']:,.0f}", f"{record['peak_gb']:.1f}"
    return [*name, rate, mfu, peak, bound + fits]


def main(
    *,
    sizes: commands.Words = SIZES,
    rows: commands.Numbers = ROWS,
    micro_batches: int = 4,
    repeats: int = 5,
    set_: commands.Words = (),
    planned: str = "",
    case: bool = False,
) -> None:
    """Print a table of all sizes and rows.

    rows: tokens of a packed row
    micro_batches: rows of an update per device
    set_: KEY=VALUE of the config, such as lora.rank=32
    planned: CHIP:COUNT to plan for; nothing is measured
    case: measure the first case in this process
    """
    changes = changes_of(set_)
    if case:
        config = config_of(sizes[0], rows[0], micro_batches, changes)
        print(json.dumps(measured_case(config, repeats, micro_batches)))
        return
    flags = ["--micro-batches", str(micro_batches), "--repeats", str(repeats)]
    flags += ["--set", *set_] if set_ else []

    def records() -> Iterator[Record]:
        for size, row in itertools.product(sizes, rows):
            config = config_of(size, row, micro_batches, changes)
            record: Record = {"size": size, "row": row}
            if planned:
                chosen = case_of(config, planned)
                program = compiled_for(chosen.config, chosen.target, "update", 1, micro_batches)
                yield record | roofline(chosen, program, micro_batches)
            else:
                yield record | measured(size, row, flags)

    head = ["model", "row", "tokens/s of a device", "MFU", "peak memory, GB"]
    show(head, records(), cells, planned)


if __name__ == "__main__":
    commands.program(main)
