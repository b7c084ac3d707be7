"""Imitation: which demonstrations a batch shows, and what Muon does to which weights."""

import itertools

import jax
import numpy as np
import pytest

from evolver.imitate import batches
from models import qwen
from rl import optim
from rl.samples import Sample


def samples(token: int, n: int) -> list[Sample]:
    return [Sample(np.full(8, token), np.arange(8) > 0) for _ in range(n)]


def test_careless_samples_come_in_by_the_share_given():
    shares = (0.0, 0.5, 1.0)
    found = list(batches(samples(1, 5), samples(2, 7), shares, 4, 32, 0))
    careless = [np.mean(packed.tokens_RT[packed.tokens_RT > 0] == 2) for packed in found]
    assert careless[0] == 0 and careless[2] == 1 and careless[1] == pytest.approx(0.5, abs=0.1)
    assert all(packed.tokens_RT.shape[0] <= 4 for packed in found)
    again = list(batches(samples(1, 5), samples(2, 7), itertools.islice(shares, 3), 4, 32, 0))
    assert all(np.array_equal(a.tokens_RT, b.tokens_RT) for a, b in zip(found, again, strict=True))


def test_muon_moves_every_direction_of_a_matrix_alike_and_adam_the_rest():
    config = qwen.Config(32, 16, 2, 4, 2, 4, 24)
    params = qwen.init(config, 0)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    grads = jax.tree.map(lambda w: jax.random.normal(next(keys), w.shape), params)
    tx = optim.muon(learning_rate=1.0, adam_learning_rate=0.1, clip_norm=1e9)
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, (inputs, outputs) in optim.MATRICES.items():
        step = np.asarray(updates["layers"][name])
        rows = np.prod([step.shape[axis] for axis in inputs])
        for matrix in step.reshape(step.shape[0], rows, -1):
            sizes = np.linalg.svd(matrix, compute_uv=False)
            assert len(inputs) + len(outputs) == step.ndim - 1 and 0.6 < np.median(sizes) <= sizes.max() < 1.4, name
    for step in (updates["embed"], updates["layers"]["q_bias"]):  # Adam's first one: by sign, whatever the size
        np.testing.assert_allclose(np.abs(step), np.abs(step).max(), rtol=1e-3)
