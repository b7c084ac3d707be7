"""Tests of the loop over pieces against a loop in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import loops


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_fold_visits_the_first_pieces_in_order(count):
    pieces = {"a": np.arange(12.0).reshape(4, 3), "b": np.array([2, 3, 5, 7])}

    def body(i, piece, result):
        return 10 * result + i * piece["a"].sum() + piece["b"]

    expected = 1.0
    for i in range(count):
        expected = body(i, {name: x[i] for name, x in pieces.items()}, expected)
    run = jax.jit(lambda count: loops.fold(pieces, count, body, jnp.float32(1)))
    assert run(count) == expected
    assert run._cache_size() == 1 and run(2) is not None and run._cache_size() == 1, (
        "the count is data"
    )
