"""Speed of the JAX engine's decode step against the memory roofline: measured on the accelerator at hand, or planned.

    python -m experiments.bench.decode                                 # measure: one GPU or TPU
    python -m experiments.bench.decode --planned h100:1                # no such device: its compiler's figures

Random bfloat16 weights and cache; every row decodes at the given context. The roofline reads each weight but the
embedding table once for a step, and each row's keys and values; the table has the measured speed as a share of it. A
batch of 0 is the largest power of two that fits, at most 256. What is planned is marked so: its memory is the compiled
program's, its speed the roofline, and neither was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from configs import base
from experiments.bench.train import SIZES, chip_of

CONTEXTS = (2048, 8192, 16384)
BLOCK = 32  # tokens decoded in one call
SPARE = 0.9  # of the memory; the rest is for temporaries


def config_of(size: str, context: int, slots: int) -> Any:
    """The engine's side of a config."""
    config = base.get_config()
    config.model.preset, config.model.dtype, config.engine.cache_dtype = size, "bfloat16", "bfloat16"
    config.rollout.context, config.rollout.max_tokens = context, context // 8
    config.engine.slots, config.engine.decode_block = slots, BLOCK
    return config


def batch_of(size: str, context: int, usable: float, wanted: int) -> int:
    """Rows to decode: `wanted`, or the largest power of two that the memory holds beside the weights."""
    from evolver.plan import analytic
    from models import qwen

    shape = qwen.PRESETS[size]
    room = SPARE * usable - 2 * qwen.parameter_count(shape)
    most = min(256, analytic.sequences_that_fit(room, shape, context, "bfloat16"))
    return wanted or (1 << most.bit_length() - 1 if most else 0)


def roofline(size: str, context: int, batch: int, chip: Any) -> float:
    """Tokens/s when memory is all that counts."""
    from evolver.plan import analytic
    from models import qwen

    moved = analytic.decode_bytes(qwen.PRESETS[size], batch, context, dtype="bfloat16", cache_dtype="bfloat16")
    return batch * chip.bandwidth / moved


def measure(size: str, context: int, batch: int, repeats: int) -> float:
    """Tokens/s of the fastest block of `BLOCK` steps that ends at `context`, after two for warm-up."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from models import qwen
    from rl.engines import decoding

    shape = qwen.PRESETS[size]
    weights = jax.jit(lambda params: qwen.for_decoding(shape, params, jnp.bfloat16))(qwen.init(shape, 0, jnp.bfloat16))
    cache = qwen.init_cache(shape, batch, context, jnp.bfloat16)
    ones = np.ones(batch, np.int32)
    draw = decoding.Draw(
        ones.astype(np.float32), ones.astype(np.float32), 0 * ones, np.ones((batch, 2), np.uint32), ones
    )
    rows = decoding.Rows(
        np.arange(batch, dtype=np.int32), ones, ones * (context - BLOCK), ones * BLOCK,
        np.full((batch, 8), -1, np.int32), draw,
    )  # fmt: skip
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        tokens, *_, cache = decoding.decode(
            weights,
            cache,
            rows,
            np.int32(batch),
            config=shape,
            window=context,
            block=BLOCK,
            truncate=False,
            in_place=True,
        )
        jax.block_until_ready((tokens, cache))
        seconds.append(time.perf_counter() - began)
    return batch * BLOCK / min(seconds[2:])


def planned(size: str, context: int, batch: int, target: Any) -> dict[str, Any]:
    """Peak memory of the compiled step."""
    from evolver.plan import compilers

    config = config_of(size, context, batch)
    found = compilers.compile_programs(config.to_dict(), target, phases=["decode"], slots=batch, micro_batches=1)
    record = found.get("phases", {}).get("decode", {})
    if "memory" not in record:
        return {"note": (found.get("error") or record.get("error", "no program")).splitlines()[0][:100]}
    memory = record["memory"]
    return {"peak_gb": (memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]) / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batch", type=int, default=0, help="rows; 0 = as many as fit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--planned", default="", metavar="CHIP:COUNT", help="compile for this target, measure nothing")
    parser.add_argument("--json", default="", help="also write the records here")
    args = parser.parse_args()
    from evolver.plan import targets

    if args.planned:
        target = targets.parse(args.planned)
        chip = target.chip
    else:
        import jax

        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            sys.exit("no accelerator with known peaks here: --planned h100:1 asks that chip's compiler")
    records = []
    for size in args.sizes:
        for context in args.contexts:
            batch = batch_of(size, context, chip.usable, args.batch)
            record = {"size": size, "context": context, "batch": batch, "note": "not one sequence fits"}
            if batch:
                record = {"size": size, "context": context, "batch": batch}
                record["roofline"] = roofline(size, context, batch, chip)
                if args.planned:
                    record |= planned(size, context, batch, target)
                else:
                    record["tokens_per_s"] = measure(size, context, batch, args.repeats)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
    print(table(records, f"planned for {args.planned}, not measured" if args.planned else "measured"))
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")


def table(records: list[dict[str, Any]], kind: str) -> str:
    """Markdown. kind: measured, planned."""
    lines = [f"| model | context | batch | roofline tokens/s | {kind} |", "|---|---|---|---|---|"]
    for r in records:
        found = r.get("note", "")
        if "tokens_per_s" in r:
            found = f"{r['tokens_per_s']:,.0f} tokens/s, {r['tokens_per_s'] / r['roofline']:.0%} of it"
        elif "peak_gb" in r:
            found = f"peak memory {r['peak_gb']:.1f} GB"
        bound = f"{r['roofline']:,.0f}" if "roofline" in r else ""
        lines.append(f"| {r['size']} | {r['context']:,} | {r['batch']} | {bound} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
