"""Processor time of one product of a decode step, by the dtypes of its factors and its result, on a CPU.

JAX_PLATFORMS=cpu python -m experiments.bench.products
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = ((576, 3072), (576, 49152))  # gate and up of SmolLM2-135M, and its output head
ROWS = (16, 32, 64)
KINDS: dict[str, tuple[Any, Callable]] = {
    "float32": (jnp.float32, lambda x, w: x @ w),
    "bfloat16, float32 sums": (jnp.bfloat16, lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)),
    "bfloat16": (jnp.bfloat16, lambda x, w: x @ w),
}


def measure(product: Callable, x: jax.Array, w: jax.Array, repeats: int = 10) -> float:
    """Return the processor milliseconds of one call, compilation excluded."""
    run = jax.jit(product)
    jax.block_until_ready(run(x, w))
    start = time.process_time()
    for _ in range(repeats):
        result = run(x, w)
    jax.block_until_ready(result)
    return 1e3 * (time.process_time() - start) / repeats


def main() -> None:
    rng = np.random.default_rng(0)
    for inner, outer in SHAPES:
        w = jnp.asarray(rng.standard_normal((inner, outer), np.float32))
        for kind, (dtype, product) in KINDS.items():
            times = [measure(product, jnp.ones((rows, inner), dtype), w.astype(dtype)) for rows in ROWS]
            print(f"{inner} x {outer}, {kind}: {', '.join(f'{t:.2f}' for t in times)} ms with {ROWS} rows", flush=True)


if __name__ == "__main__":
    main()
