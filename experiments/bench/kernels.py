"""Attention kernels on an accelerator: their error, and the time of forward and backward pass.

    python -m experiments.bench.kernels

The error is the norm of the difference from `blockwise` in float32 on the CPU, relative to its
norm, the largest of the output and the three gradients, on three rows of which one is padding. The
time is that of a row with the heads of Qwen2.5-7B, in bfloat16; "segments only" is the rate of the
products within segments, the part of the work that is useful.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.bench.harness import clocked
from experiments.compare import markdown
from models import attention, qwen

KERNELS = ("cudnn", "cudnn_apart", "cudnn_packed", "splash", "blockwise")
CHECKED = 512  # tokens of the rows whose results are compared
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, segments


def segments_of(row: int, count: int, padding: int) -> np.ndarray:
    """Return (row,) int32: `count` segments of random lengths, then padding."""
    rng = np.random.default_rng(count)
    cuts = np.sort(rng.choice(np.arange(1, row - padding), count - 1, replace=False))
    segments = 1 + np.searchsorted(cuts, np.arange(row), side="right")
    return np.where(np.arange(row) < row - padding, segments, 0).astype(np.int32)


def inputs(segments_RT: np.ndarray, dtype: Any) -> Inputs:
    """Return random queries, keys and values of rows, and their segments."""
    shape, rng = qwen.PRESETS["7b"], np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    sizes = [(*segments_RT.shape, n, shape.head_dim) for n in heads]
    # rounded alike, whatever the dtype
    q, k, v = (jnp.asarray(rng.normal(size=n), jnp.bfloat16).astype(dtype) for n in sizes)
    return q, k, v, jnp.asarray(segments_RT)


def both(kernel: str, most_segments: int) -> Callable[..., Any]:
    """Return a compiled function of inputs: the output at real tokens, and its gradients."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> Any:
        out = attention.attention(
            q, k, v, segments, implementation=kernel, most_segments=most_segments
        )
        out = jnp.where((segments > 0)[:, :, None, None], out, 0).astype(jnp.float32)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def error(kernel: str, count: int) -> float:
    """Return the relative error of a kernel in bfloat16 on rows of `count` segments, of padding and
    of one segment."""
    rows = [(count, CHECKED // 5), (1, CHECKED), (1, 1)]
    segments_RT = np.stack([segments_of(CHECKED, n, padding) for n, padding in rows])
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.tree.leaves(both("blockwise", count)(*inputs(segments_RT, jnp.float32)))
    found = jax.tree.leaves(both(kernel, count)(*inputs(segments_RT, jnp.bfloat16)))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, want)]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def milliseconds(kernel: str, segments_T: np.ndarray, repeats: int) -> float:
    """Return the median time of forward and backward pass, after two calls that do not count."""
    arrays, run = inputs(segments_T[None], jnp.bfloat16), both(kernel, int(segments_T.max()))
    return 1e3 * statistics.median(
        clocked(lambda: jax.block_until_ready(run(*arrays)), repeats + 2)[2:]
    )


def useful_flops(segments_T: np.ndarray) -> float:
    """Return the FLOPs of causal attention within segments: two products forward, five backward."""
    shape = qwen.PRESETS["7b"]
    lengths = np.bincount(segments_T)[1:].astype(float)
    return 7 * shape.heads * shape.head_dim * float(np.sum(lengths * (lengths + 1)))


def main(
    *, row: int = 16384, segments: commands.Numbers = (1, 4, 32), kernels: commands.Words = KERNELS,
    repeats: int = 10,
) -> None:  # fmt: skip
    """Print a table of the kernels and numbers of segments.

    row: tokens of the row that is timed
    segments: numbers of segments of it, of random lengths
    kernels: those that are measured; one that does not run here has its error in the table
    """
    if unknown := sorted({*kernels} - {*attention.IMPLEMENTATIONS}):
        known = ", ".join(attention.IMPLEMENTATIONS)
        raise commands.Problems(f"--kernels {' '.join(unknown)}: choose among {known}")
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", file=sys.stderr)
    rows = [["kernel", "segments", "relative error", "ms", "TFLOP/s, segments only"]]
    for kernel in kernels:
        for count in segments:
            timed = segments_of(row, count, padding=row // 16)
            try:
                wrong = error(kernel, count)
                ms = milliseconds(kernel, timed, repeats)
                rate = useful_flops(timed) / ms / 1e9
                cells = [f"{wrong:.1e}", f"{ms:.2f}", f"{rate:,.0f}"]
            except Exception as problem:  # a kernel of another platform, or out of memory
                cells = [str(problem).splitlines()[0][:70], "", ""]
            rows.append([kernel, str(count), *cells])
            print(rows[-1], file=sys.stderr, flush=True)
    print(markdown(rows), end="")


if __name__ == "__main__":
    commands.program(main)
