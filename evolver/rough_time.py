"""A rough time of --mode=evolve, from the speed of a product of matrices on this machine."""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evolver.config.paths import model_folder
from models import hf, qwen

LENGTH = 400  # tokens of an episode
TASKS = 64  # of a split of unknown size
EFFICIENCY = 0.15  # of a whole run, relative to a product of matrices, on a CPU
# The same on an accelerator, of imitation of a model of 135 million parameters on an H100, and the
# seconds in which its programs compile (docs/speed.md).
ACCELERATED, COMPILING = 0.05, 300.0
SIDE = 8192  # of the matrices there
PRODUCTS = 8  # on a CPU, of which the fastest counts


def seconds(config: Any) -> float:
    """Return a rough estimate of the time that all stages take, with two rounds of imitation: 2
    operations per parameter and token forward and 4 backward, at the speed of a product of
    matrices here."""
    speed, start = (_cpu(), 0.0) if jax.default_backend() == "cpu" else (_accelerator(), COMPILING)
    parameters = qwen.parameter_count(hf.config_of(model_folder(config.model.path)))
    c, length = config, LENGTH
    evaluations = 4 + c.steps // c.eval.every if c.eval.every else 4
    episodes = c.steps * c.rollout.tasks * c.rollout.group
    played = evaluations * (c.eval.tasks or TASKS) * (c.eval.rollouts + 1)
    updates = min(2, c.evolve.rounds) * c.evolve.updates * c.evolve.rows * length
    tokens = length * (3 * episodes + played) + 3 * updates
    return start + 2 * parameters * tokens / speed


def _cpu() -> float:
    """Return the operations per second that a step gets out of this machine's processors."""
    square = np.ones((1536, 1536), np.float32)
    took = []
    for _ in range(PRODUCTS):
        began = time.process_time()  # of all threads, so that other programs do not count
        square @ square
        took.append(time.process_time() - began)
    # Threads that wait for each other beside other programs count, too, hence the shortest.
    return EFFICIENCY * 2 * 1536**3 * (os.cpu_count() or 1) / max(min(took), 1e-3)


def _accelerator() -> float:
    """Return the same of the first device."""
    square, product = jnp.ones((SIDE, SIDE), jnp.bfloat16), jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    began = time.perf_counter()
    jax.block_until_ready(product(square, square))
    return ACCELERATED * 2 * SIDE**3 / (time.perf_counter() - began)
