"""Statistics of groups, for estimators. A group is every trajectory with the same value in
`group_N`, in any order."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Groups(NamedTuple):
    """The groups of N trajectories."""

    first_G: np.ndarray  # one member of each group
    index_N: np.ndarray  # the group of each trajectory, 0..G-1
    count_G: np.ndarray  # members of each group


def grouped(outcome_N: ArrayLike, group_N: ArrayLike) -> tuple[np.ndarray, Groups]:
    """Return the outcomes as float64 and their groups. Raises ValueError if the shapes differ or
    one is not finite."""
    outcome_N, group_N = np.asarray(outcome_N, np.float64), np.asarray(group_N)
    if outcome_N.ndim != 1 or group_N.shape != outcome_N.shape:
        raise ValueError(
            f"outcome_N {outcome_N.shape} and group_N {group_N.shape} must be 1-D arrays of equal"
            " length"
        )
    bad = np.flatnonzero(~np.isfinite(outcome_N))
    if bad.size:
        raise ValueError(f"outcome_N[{bad[0]}] is {outcome_N[bad[0]]}: an outcome must be finite")
    _, *groups = np.unique(group_N, return_index=True, return_inverse=True, return_counts=True)
    return outcome_N, Groups(*groups)


def group_sum(value_N: np.ndarray, groups: Groups) -> np.ndarray:
    """Return the sum of the values of each group. (N,) -> (G,)."""
    return np.bincount(groups.index_N, value_N, groups.count_G.size)


def centred(outcome_N: np.ndarray, groups: Groups) -> np.ndarray:
    """Return the outcomes minus the mean of their group. (N,) -> (N,).

    One member's outcome is subtracted before the mean is taken, so that a constant group gives
    exactly 0.
    """
    shifted_N = outcome_N - outcome_N[groups.first_G][groups.index_N]
    return shifted_N - (group_sum(shifted_N, groups) / groups.count_G)[groups.index_N]
