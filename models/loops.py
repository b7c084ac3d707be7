"""A loop over stacked arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def fold(
    pieces: Any, count: Array | int, body: Callable[[Array, Any, Any], Any], start: Any
) -> Any:
    """Return the result of `result = body(i, pieces[i], result)` for i < count, beginning with
    `start`.

    pieces: a tree of arrays that share one leading axis. The current piece is part of the loop's
    state: if the body sliced it, XLA's CPU code would repeat the look-up at every use of an element
    and vectorise none of them, which makes an `exp` ten times slower.
    """

    def piece(i: Array | int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), pieces)

    def step(i: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        result, current = state
        # past the end, the index is clamped to the last piece
        return body(i, current, result), piece(i + 1)

    return jax.lax.fori_loop(0, count, step, (start, piece(0)))[0]
