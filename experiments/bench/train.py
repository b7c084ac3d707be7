"""Speed and memory of the update on long packed rows, measured on an accelerator or planned.

    python -m experiments.bench.train                    # measure on this machine's GPU or TPU
    python -m experiments.bench.train --sizes 7b --rows 16384 --set lora.rank=32
    python -m experiments.bench.train --planned h100:1   # no such device: plan with its compiler
    python -m experiments.bench.train --tiny             # compare with TRL and tunix on a CPU

Weights are random, computation is in bfloat16, and rows are filled completely with sequences of a
quarter row. A step is loss, gradient, clipping and AdamW over `--micro-batches` rows. Each case
runs in its own process, because JAX reports the peak memory per process. MFU is the FLOP/s of
forward and backward pass (3 times the forward pass, recomputation not counted) divided by the peak
in evolver/plan/targets.py. Planned figures are not measured: memory is that of the compiled
program, speed is the chip's roofline.
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
SEQUENCES = 4  # per row


def config_of(size: str, row: int, micro_batches: int, changes: dict[str, Any]) -> Any:
    """Return a config of one update of `micro_batches` rows per device, one row at a time."""
    config = base.get_config()
    config.model.preset, config.model.dtype, config.engine.cache_dtype = (
        size,
        "bfloat16",
        "bfloat16",
    )
    config.model.remat = "full"
    config.loss.kl_coef, config.loss.old_logp = 0.0, "sampled"
    config.learner.row = config.rollout.context = row
    config.rollout.max_tokens = row // 8
    config.rollout.tasks, config.rollout.group, config.learner.updates = micro_batches, 1, 1
    config.engine.slots = 1
    config.update_from_flattened_dict(changes)
    config.learner.micro = config.mesh.data * config.mesh.fsdp
    config.rollout.tasks *= config.learner.micro
    return config


def parsed(settings: list[str], config: Any) -> dict[str, Any]:
    """Parse ["lora.rank=32"] to {"lora.rank": 32} by the types of the config. Raises SystemExit for
    an unknown key."""
    from evolver.config.keys import flat

    known, changes = flat(config), {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            sys.exit(f"--set {setting}: there is no config.{key}")
        kind = type(known[key])
        changes[key] = value == "True" if kind is bool else kind(value)
    return changes


def packed(config: Any, vocab: int) -> Any:
    """Return full rows of random tokens; the second half of each sequence is trained."""
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
        rng.integers(0, vocab, shape, np.int32), np.broadcast_to(positions, shape),
        np.broadcast_to(segments, shape), mask, logp, rng.standard_normal(shape, np.float32),
        np.zeros(shape, bool), np.zeros(shape, np.int32), np.zeros(shape, np.int32),
    )  # fmt: skip


def model_flops(config: Any, shape: Any, tokens: float) -> float:
    """Return the FLOPs of forward and backward pass over `tokens` tokens, half of them trained."""
    from evolver.plan import analytic

    return analytic.update_flops(
        shape, tokens, config.learner.row / SEQUENCES, tokens / 2, remat=False
    )


def measure(config: Any, repeats: int) -> dict[str, Any]:
    """Return seconds, tokens, FLOPs and peak memory of the fastest update, after two warm-up
    updates."""
    import jax
    import numpy as np

    from evolver.learner import initial_policy, make_layout, make_optimizer, make_programs
    from models.mesh import make_mesh
    from rl import learner

    mesh = make_mesh(config.mesh.to_dict())
    shape, params = initial_policy(config, mesh)
    optimizer = make_optimizer(config)
    update, _ = make_programs(config, shape, mesh, optimizer)
    state = learner.init_state(shape, params, optimizer, mesh, make_layout(config))
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
        "seconds": min(seconds[2:]), "first": seconds[0], "tokens": tokens,
        "flops": model_flops(config, shape, tokens),
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
    }  # fmt: skip


def measured_case(args: argparse.Namespace, size: str, row: int) -> dict[str, Any]:
    """Measure one size and row in this process; return its record."""
    import jax

    if jax.default_backend() == "cpu":
        sys.exit(
            "this machine has no accelerator: compare on the CPU with --tiny, "
            "or plan with --planned h100:1"
        )
    config = config_of(size, row, args.micro_batches, parsed(args.set, base.get_config()))
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor * config.mesh.sequence
    try:
        result = measure(config, args.repeats)
    except jax.errors.JaxRuntimeError as error:  # out of memory: noted in the table
        return {"size": size, "row": row, "note": str(error).splitlines()[0][:80]}
    chip = chip_of(jax.devices()[0].device_kind)
    rate = result["tokens"] / result["seconds"] / devices
    mfu = result["flops"] / result["seconds"] / devices / chip.flops if chip else None
    return {
        "size": size,
        "row": row,
        "tokens_per_s": rate,
        "mfu": mfu,
        "peak_gb": result["peak_gb"],
    }


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per size and row, each measured in its own process. This process does not
    use the device."""
    records = []
    for size in args.sizes:
        for row in args.rows:
            command = [
                sys.executable,
                "-m",
                "experiments.bench.train",
                "--case",
                "--sizes",
                size,
                "--rows",
                str(row),
            ]
            command += ["--micro-batches", str(args.micro_batches), "--repeats", str(args.repeats)]
            command += ["--set", *args.set] if args.set else []
            process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            if process.returncode > 0:
                sys.exit(process.returncode)  # the child has printed the reason
            killed = {"size": size, "row": row, "note": f"killed by signal {-process.returncode}"}
            records.append(
                killed if process.returncode else json.loads(process.stdout.splitlines()[-1])
            )
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def chip_of(kind: str) -> Any:
    """Return the entry of `targets.CHIPS` for a JAX device kind; None if it is unknown."""
    from evolver.plan.targets import CHIPS

    name = kind.lower().replace(" ", "-")
    return next((chip for key, chip in CHIPS.items() if key.partition("-")[0] in name), None)


def planned(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per size and row, from the target's compiler."""
    from evolver.plan.case import case_of
    from evolver.plan.compilers import compile_programs

    records = []
    for size in args.sizes:
        for row in args.rows:
            config = config_of(size, row, args.micro_batches, parsed(args.set, base.get_config()))
            case = case_of(config, args.planned)
            compiled = compile_programs(
                case.config,
                case.target,
                phases=["update"],
                slots=1,
                micro_batches=args.micro_batches,
            )
            records.append(
                {"size": size, "row": row} | roofline(case, compiled, args.micro_batches)
            )
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def roofline(case: Any, compiled: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Return the peak memory of the compiled update, and upper bounds on its tokens/s and MFU."""
    from evolver.plan import analytic, estimate

    record = compiled.get("phases", {}).get("update", {})
    if "memory" not in record:
        return {
            "note": (compiled.get("error") or record.get("error", "no program")).splitlines()[0][
                :100
            ]
        }
    memory, devices = record["memory"], case.target.count
    peak = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
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
        "peak_gb": peak / 1e9,
        "fits": peak <= case.target.chip.usable,
        "tokens_per_s": tokens / work.roofline / devices,
        "mfu": useful / work.roofline / case.target.chip.flops,
        "bound": work.bound,
    }


def table(records: list[dict[str, Any]], kind: str) -> str:
    """Return the records as a Markdown table. kind: the last column's heading."""
    lines = [
        f"| model | row | tokens/s of a device | MFU | peak memory, GB | {kind} |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        if "note" in r:
            lines.append(f"| {r['size']} | {r['row']:,} | | | | {r['note']} |")
            continue
        bound = f"at most, bound by {r['bound']}" if "bound" in r else ""
        fits = "" if r.get("fits", True) else ", does not fit"
        mfu = f"{r['mfu']:.0%}" if r["mfu"] is not None else ""
        lines.append(
            f"| {r['size']} | {r['row']:,} | {r['tokens_per_s']:,.0f} | {mfu} "
            f"| {r['peak_gb']:.1f} | {bound}{fits} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="tokens of a packed row")
    parser.add_argument("--micro-batches", type=int, default=4, help="rows of an update per device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="config values, such as lora.rank=32",
    )
    parser.add_argument(
        "--planned", default="", metavar="CHIP:COUNT", help="plan for this target, do not measure"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="compare with TRL and tunix on this CPU"
    )
    parser.add_argument("--json", default="", help="file to which the records are written too")
    parser.add_argument("--case", action="store_true", help="measure one case in this process")
    args = parser.parse_args()
    if args.tiny:
        from experiments.bench import learner

        sys.argv = [
            sys.argv[0],
            "--repeats",
            str(args.repeats),
            *(["--json", args.json] if args.json else []),
        ]
        learner.main()
        return
    if args.case:
        print(json.dumps(measured_case(args, args.sizes[0], args.rows[0])))
        return
    records = planned(args) if args.planned else measured(args)
    print(
        table(records, f"planned for {args.planned}, not measured" if args.planned else "measured")
    )
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
