"""Group baselines: the outcome of a trajectory against the outcomes of its group. (N,) -> (N,)
float64."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from rl.advantages.groups import centred, group_sum, grouped
from rl.bounds import NotNegative, Positive


def dr_grpo(outcome_N: ArrayLike, group_N: ArrayLike) -> np.ndarray:
    """Return A = R - mean(R) of the group (Dr. GRPO, arXiv 2503.20783)."""
    return centred(*grouped(outcome_N, group_N))


def grpo(
    outcome_N: ArrayLike,
    group_N: ArrayLike,
    *,
    std: Literal["sample", "population"] | None = "sample",
    eps: Positive = 1e-6,
    lone: Literal["zero", "score"] = "zero",
) -> np.ndarray:
    """Return A = (R - mean(R)) / (std(R) + eps) of the group (GRPO, arXiv 2402.03300).

    `std="sample"` divides by n - 1, as verl and the reference implementation of AgentEvolver do.
    `std=None` is `dr_grpo`. A trajectory that is alone in its group, because the others broke, has
    no baseline, so its advantage is 0. With `lone="score"` and `std="sample"` it keeps its raw
    score, R / (1 + eps), as in both implementations.
    """
    if lone not in ("zero", "score"):
        raise ValueError(f"lone={lone!r}: choose zero or score")
    outcome_N, groups = grouped(outcome_N, group_N)
    centred_N = centred(outcome_N, groups)
    if std is None:
        return centred_N
    if std not in ("population", "sample"):
        raise ValueError(f"std={std!r}: choose 'population', 'sample' or None")
    divisor_G = np.maximum(groups.count_G - (std == "sample"), 1)
    std_G = np.sqrt(group_sum(centred_N**2, groups) / divisor_G)
    advantage_N = centred_N / (std_G[groups.index_N] + eps)
    if std == "sample" and lone == "score":
        alone_N = groups.count_G[groups.index_N] == 1
        advantage_N = np.where(alone_N, outcome_N / (1 + eps), advantage_N)
    return advantage_N


def rloo(outcome_N: ArrayLike, group_N: ArrayLike) -> np.ndarray:
    """Return A = R - mean of the *other* outcomes of the group (RLOO, arXiv 2402.14740); 0 if there
    are none."""
    outcome_N, groups = grouped(outcome_N, group_N)
    n_N = groups.count_G[groups.index_N]
    return centred(outcome_N, groups) * n_N / np.maximum(n_N - 1, 1)


def loop(outcome_N: ArrayLike, group_N: ArrayLike, *, drop_below: NotNegative = 0.0) -> np.ndarray:
    """Return A = n / (n - 1) * (R - mean(R)), with |A| < `drop_below` set to 0 (LOOP, arXiv
    2502.01600; it uses 0.01).

    The formula equals RLOO's. LOOP differs by this threshold; like RLOO it has no division by the
    standard deviation.
    """
    advantage_N = rloo(outcome_N, group_N)
    return np.where(np.abs(advantage_N) < drop_below, 0.0, advantage_N)
