"""Advantages of turns, copied to the tokens of the turns."""

from __future__ import annotations

import numpy as np


def spread(advantage_NK, turn_ids_NT) -> np.ndarray:
    """Return the advantage of each token's turn: (N, T) float32, 0 where a token belongs to no
    turn.

    Args:
      advantage_NK: (N, K).
      turn_ids_NT: (N, T) integers, 0..K-1, or negative where a token belongs to no turn.

    Raises: ValueError if a turn id has no column or the numbers of rows differ.

    The tokens of a turn are contiguous, so this copies runs: several times faster than one look-up
    per token.
    """
    advantage_NK, turn_ids_NT = np.asarray(advantage_NK), np.asarray(turn_ids_NT)
    n, k = advantage_NK.shape
    if turn_ids_NT.ndim != 2 or turn_ids_NT.shape[0] != n:
        raise ValueError(f"turn_ids_NT {turn_ids_NT.shape} does not fit {n} trajectories")
    if not turn_ids_NT.size:
        return np.zeros(turn_ids_NT.shape, np.float32)
    starts_NT = np.ones(turn_ids_NT.shape, bool)
    np.not_equal(turn_ids_NT[:, 1:], turn_ids_NT[:, :-1], out=starts_NT[:, 1:])
    start_S = np.flatnonzero(starts_NT)
    id_S = np.maximum(turn_ids_NT.reshape(-1)[start_S].astype(np.int64), -1)
    if id_S.max() >= k:
        raise ValueError(f"turn id {id_S.max()} in a batch of {k} turns")
    padded_NK = np.zeros((n, k + 1), np.float32)  # an id of -1 reads the last column
    padded_NK[:, :k] = advantage_NK
    value_S = padded_NK[start_S // turn_ids_NT.shape[1], id_S]
    return np.repeat(value_S, np.diff(start_S, append=turn_ids_NT.size)).reshape(turn_ids_NT.shape)
