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

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evolver.plan import analytic, targets
from experiments import commands
from experiments.bench.accelerator import (
    SIZES,
    Record,
    bfloat16_config,
    chip_of,
    compiled_for,
    show,
)
from experiments.bench.harness import clocked
from models import qwen
from rl.engines.jax import decoding, kv_cache

CONTEXTS = (2048, 8192, 16384)
BLOCK = 32  # tokens decoded in one call
MEMORY_SHARE = 0.9  # share of the memory for weights and cache; the rest is for temporaries


def config_of(size: str, context: int, slots: int) -> Any:
    """Return a config with the engine's settings."""
    config = bfloat16_config(size)
    settings = {"rollout.context": context, "rollout.max_tokens": context // 8}
    settings |= {"engine.slots": slots, "engine.decode_block": BLOCK}
    config.update_from_flattened_dict(settings)
    return config


def batch_of(size: str, context: int, usable: float, wanted: int) -> int:
    """Return `wanted` if it is not 0, else the largest power of two of rows that fits beside the
    weights."""
    shape = qwen.PRESETS[size]
    room = MEMORY_SHARE * usable - 2 * qwen.parameter_count(shape)
    most = min(256, analytic.sequences_that_fit(room, shape, context, "bfloat16"))
    return wanted or (1 << most.bit_length() - 1 if most else 0)


def roofline(size: str, context: int, batch: int, chip: Any) -> float:
    """Return the tokens/s that the memory bandwidth allows."""
    moved = analytic.decode_bytes(
        qwen.PRESETS[size], batch, context, dtype="bfloat16", cache_dtype="bfloat16"
    )
    return batch * chip.bandwidth / moved


def measure(size: str, context: int, batch: int, repeats: int) -> float:
    """Return the tokens/s of the fastest block of `BLOCK` steps that ends at `context`, after two
    warm-up blocks."""
    shape = qwen.PRESETS[size]
    convert = jax.jit(lambda params: kv_cache.for_decoding(shape, params, jnp.bfloat16))
    weights = convert(qwen.init(shape, 0, jnp.bfloat16))
    cache = kv_cache.init_cache(shape, batch, context, jnp.bfloat16, transposed=False)
    fused = kv_cache.fuses(shape, jax.devices()[0].platform, jnp.bfloat16)
    ones, float_ones = np.ones(batch, np.int32), np.ones(batch, np.float32)
    seeds = np.ones((batch, 2), np.uint32)
    draw = decoding.Draw(float_ones, float_ones, 0 * ones, seeds, ones)
    rows = decoding.Rows(
        np.arange(batch, dtype=np.int32), ones, ones * (context - BLOCK), ones * BLOCK,
        np.full((batch, 8), -1, np.int32), draw,
    )  # fmt: skip

    def step() -> None:
        nonlocal cache
        tokens, *_, cache = decoding.decode(
            weights, cache, rows, np.int32(batch), config=shape, window=context, block=BLOCK,
            truncate=False, in_place=True, fused=fused,
        )  # fmt: skip
        jax.block_until_ready((tokens, cache))

    return batch * BLOCK / min(clocked(step, repeats + 2)[2:])


def cells(record: Record) -> list[str]:
    """Return the row of the table."""
    result = record.get("note", "")
    if "tokens_per_s" in record:
        share = record["tokens_per_s"] / record["roofline"]
        result = f"{record['tokens_per_s']:,.0f} tokens/s, {share:.0%} of the roofline"
    elif "peak_gb" in record:
        result = f"peak memory {record['peak_gb']:.1f} GB"
    bound = f"{record['roofline']:,.0f}" if "roofline" in record else ""
    return [record["size"], f"{record['context']:,}", str(record["batch"]), bound, result]


def chip_here() -> targets.Chip:
    """Return the accelerator of this machine. Raises commands.Problems."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        hint = "plan for one with --planned h100:1"
        raise commands.Problems(f"this machine has no accelerator of a known type; {hint}")
    return chip


def main(
    *,
    sizes: tuple[str, ...] = SIZES,
    contexts: tuple[int, ...] = CONTEXTS,
    batch: int = 0,
    repeats: int = 5,
    planned: str = "",
) -> None:
    """Print a table of all sizes and contexts.

    batch: number of rows; 0 = as many as fit
    planned: CHIP:COUNT to plan for; nothing is measured
    """
    target = targets.parse(planned) if planned else None
    chip = target.chip if target else chip_here()

    def records() -> Iterator[Record]:
        for size, context in itertools.product(sizes, contexts):
            rows = batch_of(size, context, chip.usable, batch)
            record: Record = {"size": size, "context": context, "batch": rows}
            if not rows:
                yield record | {"note": "no sequence fits"}
                continue
            record["roofline"] = roofline(size, context, rows, chip)
            if target:
                config = config_of(size, context, rows)
                yield record | compiled_for(config, target, "decode", rows, 1)
            else:
                yield record | {"tokens_per_s": measure(size, context, rows, repeats)}

    show(["model", "context", "batch", "roofline tokens/s"], records(), cells, planned)


if __name__ == "__main__":
    commands.program(main)
