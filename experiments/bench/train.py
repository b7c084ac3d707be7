"""Speed and memory of the update on long packed rows: measured on the accelerator at hand, or planned for another.

    python -m experiments.bench.train                                  # measure: one GPU or TPU
    python -m experiments.bench.train --sizes 7b --rows 16384 --set lora.rank=32
    python -m experiments.bench.train --planned h100:1                 # no such device: its compiler's figures
    python -m experiments.bench.train --tiny                           # a CPU, beside TRL and tunix

Random weights, bfloat16 computation, rows filled to the last token by sequences of a quarter of a row. A step is loss,
gradient, clipping and AdamW over `--micro-batches` rows. Each case runs in a process of its own, so its peak of memory
is its own. MFU counts the FLOPs of forward and backward (3 times the forward pass, recomputation not counted) against
the peak of evolver/plan/targets.py. What is planned is marked so: its memory is the compiled program's, its speed the
roofline of that chip, and neither was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs import base
from experiments.bench.contest import ROOT

SIZES, ROWS = ("0.5b", "1.5b", "7b"), (4096, 16384, 32768)
SEQUENCES = 4  # in a row


def config_of(size: str, row: int, micro_batches: int, changes: dict[str, Any]) -> Any:
    """The experiment's config: one update of `micro_batches` rows, one at a time."""
    config = base.get_config()
    config.model.preset, config.model.dtype, config.engine.cache_dtype = size, "bfloat16", "bfloat16"
    config.model.remat = "full"
    config.loss.kl, config.loss.old_logp = 0.0, "sampled"
    config.learner.row = config.rollout.context = row
    config.rollout.max_tokens = row // 8
    config.rollout.tasks, config.rollout.group, config.learner.updates = micro_batches, 1, 1
    config.engine.slots = 1
    config.update_from_flattened_dict(changes)
    config.learner.micro = config.mesh.data * config.mesh.fsdp
    config.rollout.tasks *= config.learner.micro
    return config


def parsed(words: list[str], config: Any) -> dict[str, Any]:
    """["lora.rank=32"] -> {"lora.rank": 32}, by the types of the config. Raises SystemExit for an unknown key."""
    from evolver.config import flat

    known, changes = flat(config), {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known:
            sys.exit(f"--set {word}: there is no config.{key}")
        kind = type(known[key])
        changes[key] = value == "True" if kind is bool else kind(value)
    return changes


def packed(config: Any, vocab: int) -> Any:
    """Full rows of random tokens, every second half of a sequence trained."""
    import numpy as np

    from rl.packing import Packed

    rows, row = config.rollout.tasks, config.learner.row
    rng, length = np.random.default_rng(0), row // SEQUENCES
    positions = np.tile(np.arange(length, dtype=np.int32), SEQUENCES)
    segments = np.repeat(np.arange(1, SEQUENCES + 1, dtype=np.int32), length)
    shape = (rows, length * SEQUENCES)
    mask = np.broadcast_to(positions >= length // 2, shape)
    logp = rng.uniform(-2, 0, shape).astype(np.float32)
    return Packed(
        rng.integers(0, vocab, shape, np.int32), np.broadcast_to(positions, shape), np.broadcast_to(segments, shape),
        mask, logp, rng.standard_normal(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, np.int32),
    )  # fmt: skip


def model_flops(config: Any, shape: Any, tokens: float) -> float:
    """Of forward and backward over `tokens` tokens, half of them predicted."""
    from evolver.plan import analytic

    return analytic.update_flops(shape, tokens, config.learner.row / SEQUENCES, tokens / 2, remat=False)


def measure(config: Any, repeats: int) -> dict[str, Any]:
    """Seconds of the fastest update on the devices at hand, after two for warm-up."""
    import jax
    import numpy as np

    from evolver import parts
    from models.mesh import make_mesh
    from rl import learner

    mesh = make_mesh(config.mesh.to_dict())
    shape, params = parts.initial_policy(config, mesh)
    optimizer = parts.make_optimizer(config)
    update, _ = parts.make_programs(config, shape, mesh, optimizer)
    state = learner.init_state(shape, params, optimizer, mesh, parts.make_layout(config))
    del params
    batch, seconds = packed(config, shape.vocab), []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        state, metrics = update(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    tokens = batch.tokens_RT.size
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": min(seconds[2:]), "first": seconds[0], "tokens": tokens, "flops": model_flops(config, shape, tokens),
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
    }  # fmt: skip


def measured_case(args: argparse.Namespace, size: str, row: int) -> dict[str, Any]:
    """The record of one size and row, measured in this process."""
    import jax

    if jax.default_backend() == "cpu":
        sys.exit("no accelerator here: --tiny compares on the CPU, --planned h100:1 asks that chip's compiler")
    config = config_of(size, row, args.micro_batches, parsed(args.set, base.get_config()))
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor * config.mesh.sequence
    try:
        found = measure(config, args.repeats)
    except jax.errors.JaxRuntimeError as error:  # out of memory: the table says so and goes on
        return {"size": size, "row": row, "note": str(error).splitlines()[0][:80]}
    chip = chip_of(jax.devices()[0].device_kind)
    rate = found["tokens"] / found["seconds"] / devices
    mfu = found["flops"] / found["seconds"] / devices / chip.flops if chip else None
    return {"size": size, "row": row, "tokens_per_s": rate, "mfu": mfu, "peak_gb": found["peak_gb"]}


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each size and row, each from a process of its own: jax counts the peak of memory by process. This
    one leaves the accelerator alone."""
    records = []
    for size in args.sizes:
        for row in args.rows:
            words = [sys.executable, "-m", "experiments.bench.train", "--case", "--sizes", size, "--rows", str(row)]
            words += ["--micro-batches", str(args.micro_batches), "--repeats", str(args.repeats)]
            words += ["--set", *args.set] if args.set else []
            done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            if done.returncode > 0:
                sys.exit(done.returncode)  # it said why
            killed = {"size": size, "row": row, "note": f"killed by signal {-done.returncode}"}
            records.append(killed if done.returncode else json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def chip_of(kind: str) -> Any:
    """The entry of `targets.CHIPS` for what jax calls the device, None for one whose peak is not known."""
    from evolver.plan.targets import CHIPS

    name = kind.lower().replace(" ", "-")
    return next((chip for key, chip in CHIPS.items() if key.partition("-")[0] in name), None)


def planned(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same from the target's compiler."""
    from evolver import plan
    from evolver.plan import compilers, estimate, targets

    target, records = targets.parse(args.planned), []
    for size in args.sizes:
        for row in args.rows:
            config = config_of(size, row, args.micro_batches, parsed(args.set, base.get_config()))
            config, _ = estimate.adapted(config, target)
            case = estimate.Case(config, plan.model_shape(config), target)
            found = compilers.compile_programs(
                config.to_dict(), target, phases=["update"], slots=1, micro_batches=args.micro_batches
            )
            records.append({"size": size, "row": row} | roofline(case, found, args.micro_batches))
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def roofline(case: Any, found: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Peak memory of the compiled update, and the tokens/s and MFU that the chip's peaks allow it at most."""
    from evolver.plan import analytic, estimate

    record = found.get("phases", {}).get("update", {})
    if "memory" not in record:
        return {"note": (found.get("error") or record.get("error", "no program")).splitlines()[0][:100]}
    memory, devices = record["memory"], case.target.count
    peak = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    tokens = micro_batches * case.config.learner.micro * case.config.learner.row
    useful = model_flops(case.config, case.shape, tokens) / devices
    local = tokens / devices * case.split.tensor
    work = estimate.phase(
        case.target, flops=useful * 4 / 3, tokens=tokens, reach=0.8,  # the forward pass twice
        moved=analytic.update_bytes(case.shape, local, micro_batches, case.split, dtype="bfloat16"),
        wire=sum(sent for _, sent in record["collectives"].values()),
    )  # fmt: skip
    return {
        "peak_gb": peak / 1e9,
        "fits": peak <= case.target.chip.usable,
        "tokens_per_s": tokens / work["roofline_s"] / devices,
        "mfu": useful / work["roofline_s"] / case.target.chip.flops,
        "bound": work["bound"],
    }


def table(records: list[dict[str, Any]], kind: str) -> str:
    """Markdown. kind: measured, planned."""
    lines = [f"| model | row | tokens/s of a device | MFU | peak memory, GB | {kind} |", "|---|---|---|---|---|---|"]
    for r in records:
        if "note" in r:
            lines.append(f"| {r['size']} | {r['row']:,} | | | | {r['note']} |")
            continue
        bound = f"at most, bound by {r['bound']}" if "bound" in r else ""
        fits = "" if r.get("fits", True) else ", does not fit"
        mfu = f"{r['mfu']:.0%}" if r["mfu"] is not None else ""
        lines.append(
            f"| {r['size']} | {r['row']:,} | {r['tokens_per_s']:,.0f} | {mfu} | {r['peak_gb']:.1f} | {bound}{fits} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="tokens of a packed row")
    parser.add_argument("--micro-batches", type=int, default=4, help="rows of an update, on each device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config values: lora.rank=32")
    parser.add_argument("--planned", default="", metavar="CHIP:COUNT", help="compile for this target, measure nothing")
    parser.add_argument("--tiny", action="store_true", help="the comparison with TRL and tunix on this CPU")
    parser.add_argument("--json", default="", help="also write the records here")
    parser.add_argument("--case", action="store_true", help="one case in this process, as the command starts it")
    args = parser.parse_args()
    if args.tiny:
        from experiments.bench import learner

        sys.argv = [sys.argv[0], "--repeats", str(args.repeats), *(["--json", args.json] if args.json else [])]
        learner.main()
        return
    if args.case:
        print(json.dumps(measured_case(args, args.sizes[0], args.rows[0])))
        return
    records = planned(args) if args.planned else measured(args)
    print(table(records, f"planned for {args.planned}, not measured" if args.planned else "measured"))
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
