"""Speed of the JAX engine's decode step relative to the memory roofline, measured on an accelerator
or planned.

    python -m experiments.bench.decode                    # measure on this machine's GPU or TPU
    python -m experiments.bench.decode --planned h100:1   # no such device: plan with its compiler

Weights are random; weights and cache are bfloat16. Every row decodes at the given context. In the
roofline, a step reads each weight except the embedding table once, and the keys and values of every
row; the table shows the measured speed as a fraction of it. A batch of 0 means the largest power of
two that fits, at most 256. Planned figures are not
measured: memory is that of the compiled program, speed is the roofline.
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
MEMORY_SHARE = 0.9  # share of the memory for weights and cache; the rest is for temporaries


def config_of(size: str, context: int, slots: int) -> Any:
    """Return a config with the engine's settings."""
    config = base.get_config()
    config.model.preset, config.model.dtype, config.engine.cache_dtype = (
        size,
        "bfloat16",
        "bfloat16",
    )
    config.rollout.context, config.rollout.max_tokens = context, context // 8
    config.engine.slots, config.engine.decode_block = slots, BLOCK
    return config


def batch_of(size: str, context: int, usable: float, wanted: int) -> int:
    """Return `wanted` if it is not 0, else the largest power of two of rows that fits beside the
    weights."""
    from evolver.plan import analytic
    from models import qwen

    shape = qwen.PRESETS[size]
    room = MEMORY_SHARE * usable - 2 * qwen.parameter_count(shape)
    most = min(256, analytic.sequences_that_fit(room, shape, context, "bfloat16"))
    return wanted or (1 << most.bit_length() - 1 if most else 0)


def roofline(size: str, context: int, batch: int, chip: Any) -> float:
    """Return the tokens/s that the memory bandwidth allows."""
    from evolver.plan import analytic
    from models import qwen

    moved = analytic.decode_bytes(
        qwen.PRESETS[size], batch, context, dtype="bfloat16", cache_dtype="bfloat16"
    )
    return batch * chip.bandwidth / moved


def measure(size: str, context: int, batch: int, repeats: int) -> float:
    """Return the tokens/s of the fastest block of `BLOCK` steps that ends at `context`, after two
    warm-up blocks."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from models import kv_cache, qwen
    from rl.engines.jax import decoding

    shape = qwen.PRESETS[size]
    weights = jax.jit(lambda params: kv_cache.for_decoding(shape, params, jnp.bfloat16))(
        qwen.init(shape, 0, jnp.bfloat16)
    )
    cache = kv_cache.init_cache(shape, batch, context, jnp.bfloat16)
    ones = np.ones(batch, np.int32)
    draw = decoding.Draw(
        ones.astype(np.float32),
        ones.astype(np.float32),
        0 * ones,
        np.ones((batch, 2), np.uint32),
        ones,
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
    """Return the peak memory of the compiled step, or a note if it does not compile."""
    from evolver.plan import compilers

    config = config_of(size, context, batch)
    compiled = compilers.compile_programs(
        config, target, phases=["decode"], slots=batch, micro_batches=1
    )
    record = compiled.get("phases", {}).get("decode", {})
    if "memory" not in record:
        return {
            "note": (compiled.get("error") or record.get("error", "no program")).splitlines()[0][
                :100
            ]
        }
    memory = record["memory"]
    return {
        "peak_gb": (memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]) / 1e9
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batch", type=int, default=0, help="number of rows; 0 = as many as fit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--planned", default="", metavar="CHIP:COUNT", help="plan for this target, do not measure"
    )
    parser.add_argument("--json", default="", help="file to which the records are written too")
    args = parser.parse_args()
    from evolver.plan import targets

    if args.planned:
        target = targets.parse(args.planned)
        chip = target.chip
    else:
        import jax

        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            sys.exit(
                "this machine has no accelerator of a known type; "
                "plan for one with --planned h100:1"
            )
    records = []
    for size in args.sizes:
        for context in args.contexts:
            batch = batch_of(size, context, chip.usable, args.batch)
            record = {"size": size, "context": context, "batch": batch, "note": "no sequence fits"}
            if batch:
                record = {"size": size, "context": context, "batch": batch}
                record["roofline"] = roofline(size, context, batch, chip)
                if args.planned:
                    record |= planned(size, context, batch, target)
                else:
                    record["tokens_per_s"] = measure(size, context, batch, args.repeats)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
    print(
        table(records, f"planned for {args.planned}, not measured" if args.planned else "measured")
    )
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")


def table(records: list[dict[str, Any]], kind: str) -> str:
    """Return the records as a Markdown table. kind: the last column's heading."""
    lines = [f"| model | context | batch | roofline tokens/s | {kind} |", "|---|---|---|---|---|"]
    for r in records:
        result = r.get("note", "")
        if "tokens_per_s" in r:
            share = r["tokens_per_s"] / r["roofline"]
            result = f"{r['tokens_per_s']:,.0f} tokens/s, {share:.0%} of the roofline"
        elif "peak_gb" in r:
            result = f"peak memory {r['peak_gb']:.1f} GB"
        bound = f"{r['roofline']:,.0f}" if "roofline" in r else ""
        lines.append(f"| {r['size']} | {r['context']:,} | {r['batch']} | {bound} | {result} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
