"""Processor time of one product of a decode step, by the dtypes of its factors and its result, on a
CPU.

    JAX_PLATFORMS=cpu python -m experiments.bench.products

The last lines are of a product of large square matrices: the operations per second that no decode
step exceeds.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands

SHAPES = ((576, 3072), (576, 49152))  # gate and up of SmolLM2-135M, and its output head
ROWS = (16, 32, 64)
LARGE = 4096
KINDS: dict[str, tuple[Any, Callable]] = {
    "float32": (jnp.float32, lambda x, w: x @ w),
    "bfloat16, float32 sums": (
        jnp.bfloat16,
        lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32),
    ),
    "bfloat16": (jnp.bfloat16, lambda x, w: x @ w),
}


def measure(
    product: Callable,
    x: jax.Array,
    w: jax.Array,
    repeats: int = 10,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the milliseconds of one call, compilation excluded."""
    run = jax.jit(product)
    jax.block_until_ready(run(x, w))
    start = clock()
    for _ in range(repeats):
        result = run(x, w)
    jax.block_until_ready(result)
    return 1e3 * (clock() - start) / repeats


def main() -> None:
    """Print a line for each product and dtype."""
    rng = np.random.default_rng(0)
    for inner, outer in SHAPES:
        w = jnp.asarray(rng.standard_normal((inner, outer), np.float32))
        for kind, (dtype, product) in KINDS.items():
            times = [
                measure(product, jnp.ones((rows, inner), dtype), w.astype(dtype)) for rows in ROWS
            ]
            shown = ", ".join(f"{t:.2f}" for t in times)
            print(f"{inner} x {outer}, {kind}: {shown} ms with {ROWS} rows", flush=True)
    for kind, (dtype, product) in KINDS.items():
        square = jnp.ones((LARGE, LARGE), dtype)
        seconds = (
            min(measure(product, square, square, 1, time.perf_counter) for _ in range(5)) / 1e3
        )
        print(
            f"{LARGE} x {LARGE} x {LARGE}, {kind}: {2e-9 * LARGE**3 / seconds:.0f} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    commands.program(main)
