"""Speed of the JAX engine's decode step relative to the memory roofline, measured on an accelerator
or planned.

    python -m experiments.bench.decode                    # measure on this machine's GPU or TPU
    python -m experiments.bench.decode --planned h100:1   # no such device: plan with its compiler

Weights are random; weights and cache are bfloat16. Every row decodes at the given context, or, with
--ragged, the rows at contexts from none to the given one, half of it on average. In the roofline, a
step reads each weight except the embedding table once, and the keys and values of every row; the
table shows the measured speed as a fraction of it. A batch of 0 means the largest power of two that
fits, at most 256.

Planned figures are not measured: memory is that of the compiled program, and the share of the
roofline is modelled for GPUs. The kernels of the compiled loop take `LAUNCH` each, and what they
read and write moves at `REACHED` of the memory's bandwidth.
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
REACHED, LAUNCH = 0.8, 1.5e-6  # assumed share of a GPU's bandwidth, and seconds of a kernel
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


def roofline(size: str, context: float, batch: int, chip: Any) -> float:
    """Return the tokens/s that the memory bandwidth allows."""
    moved = analytic.decode_bytes(
        qwen.PRESETS[size], batch, context, dtype="bfloat16", cache_dtype="bfloat16"
    )
    return batch * chip.bandwidth / moved


def modelled(size: str, context: int, batch: int, chip: Any, loop: Record, ragged: bool) -> float:
    """Return the tokens/s of a compiled loop on a GPU, by the model above.

    loop: of `evolver.plan.hlo.loop`, at equal lengths.
    """
    shape, moved = qwen.PRESETS[size], loop["bytes"]
    if ragged and kv_cache.fuses(shape, chip.platform, jnp.bfloat16):
        moved -= batch * context * analytic.kv_bytes(shape, "bfloat16") / 2
    return batch / (moved / (REACHED * chip.bandwidth) + LAUNCH * loop["kernels"])


def measure(size: str, context: int, batch: int, repeats: int, ragged: bool = False) -> float:
    """Return the tokens/s of the fastest block of `BLOCK` steps that ends at `context`, after two
    warm-up blocks. ragged: at contexts from none to `context`."""
    shape = qwen.PRESETS[size]
    convert = jax.jit(lambda params: kv_cache.for_decoding(shape, params, jnp.bfloat16))
    weights = convert(qwen.init(shape, 0, jnp.bfloat16))
    cache = kv_cache.init_cache(shape, batch, context, jnp.bfloat16, transposed=False)
    fused = kv_cache.fuses(shape, jax.devices()[0].platform, jnp.bfloat16)
    ones, float_ones = np.ones(batch, np.int32), np.ones(batch, np.float32)
    seeds = np.ones((batch, 2), np.uint32)
    draw = decoding.Draw(float_ones, float_ones, 0 * ones, seeds, ones)
    start = context - BLOCK
    starts = np.linspace(0, start, batch).astype(np.int32) if ragged else ones * start
    rows = decoding.Rows(
        np.arange(batch, dtype=np.int32), ones, starts, ones * BLOCK,
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
        if "modelled" in record:
            result += f", {record['modelled'] / record['roofline']:.0%} of the roofline, modelled"
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
    sizes: commands.Words = SIZES,
    contexts: commands.Numbers = CONTEXTS,
    batch: int = 0,
    repeats: int = 5,
    ragged: bool = False,
    planned: str = "",
) -> None:
    """Print a table of all sizes and contexts.

    batch: number of rows; 0 = as many as fit
    ragged: rows have contexts from none to the given one
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
            record["roofline"] = roofline(size, context / (2 if ragged else 1), rows, chip)
            if target:
                config = config_of(size, context, rows)
                record |= compiled_for(config, target, "decode", rows, 1)
                if chip.platform == "cuda" and "loop" in record:
                    case = size, context, rows, chip, record["loop"], ragged
                    record["modelled"] = modelled(*case)
                yield record
            else:
                speed = measure(size, context, rows, repeats, ragged)
                yield record | {"tokens_per_s": speed}

    show(["model", "context", "batch", "roofline tokens/s"], records(), cells, planned)


if __name__ == "__main__":
    commands.program(main)
