"""Speed at which the learner's float32 weights are staged in bfloat16 for servers on this machine.

    python -m experiments.bench.staging [--sizes 7b,14b] [--folder /dev/shm]

Two layers of each size and a small vocabulary; the best of five. *Copy* is NumPy's copy of as many
bytes of bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments import commands
from experiments.bench.harness import clocked, load_before
from experiments.compare import markdown
from models import qwen
from rl.engines.vllm.transfer import SharedMemory


def main(*, sizes: commands.Words = ("7b", "14b"), folder: str = "/dev/shm") -> None:
    """Print a table.

    sizes: presets of the model
    folder: of the staged files, which take up to 1.2 GB
    """
    print(load_before())
    rows = [["model", "GB", "staged, GB/s", "copy, GB/s", "ratio"]]
    rows += [measured(size, folder) for size in sizes]
    print(markdown(rows))


def measured(size: str, folder: str) -> list[str]:
    """Return the row of a size."""
    shape = dataclasses.replace(qwen.PRESETS[size], layers=2, vocab=1024)
    params = jax.tree.map(lambda w: jnp.ones(w.shape, jnp.float32), qwen.shapes(shape))
    transfer = SharedMemory(shape, dtype="bfloat16", folder=folder)
    staged = transfer.stage(params)
    source = np.ones(staged // 2, ml_dtypes.bfloat16)
    target = np.empty_like(source)
    calls = (lambda: transfer.stage(params), lambda: np.copyto(target, source))
    ours, copy = (staged / 1e9 / min(clocked(call, 5)) for call in calls)
    transfer.close()
    return [size, *(f"{figure:.2f}" for figure in (staged / 1e9, ours, copy, ours / copy))]


if __name__ == "__main__":
    commands.program(main)
