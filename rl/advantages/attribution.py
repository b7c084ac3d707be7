"""Attribution-driven credit assignment (ADCA) of AgentEvolver (arXiv 2511.10395, section 5).

The labels of the turns and the outcome of the trajectory are standardised separately within the
group, added, and summed over the turns still to come. The arguments keep the paper's word "step"
for a turn.
"""

import math
import typing
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from rl.advantages.groups import Groups, centred, group_sum, grouped
from rl.bounds import CountOrZero, Positive, Weight

SUCCESS = 0.5  # with scheme="allocation", an outcome above this counts as a success
_TINY = 1e-12  # keeps a division by a standard deviation finite without changing the result

Scheme = Literal["decouple", "allocation"]
Norm = Literal["reference", "step", "trajectory"]
OutcomeAt = Literal["last_step", "all_steps", "none"]
TrajectoryWeight = Literal["equal", "by_steps"]


def alpha_at(step: int, *, alpha: float, alpha_min: float = 0.0, alpha_steps: int = 0) -> float:
    """Return the weight of the labels at a training step: constant, or a half cosine over
    `alpha_steps`."""
    if alpha_steps <= 0:
        return alpha
    progress = min(max(step / alpha_steps, 0.0), 1.0)
    return alpha_min + 0.5 * (alpha - alpha_min) * (1 + math.cos(math.pi * progress))


def adca(
    outcome_N: ArrayLike,
    group_N: ArrayLike,
    label_NK: ArrayLike,
    steps_N: ArrayLike,
    step: int = 0,
    *,
    alpha: Weight = 0.1,
    alpha_min: Weight = 0.0,
    alpha_steps: CountOrZero = 0,
    scheme: Scheme = "decouple",
    norm: Norm = "reference",
    outcome_at: OutcomeAt = "last_step",
    length_normalise: bool = False,
    trajectory_weight: TrajectoryWeight = "equal",
    standardise: bool = True,
    label_value: Positive = 0.2,
    weights: tuple[float, float, float] = (1.0, 0.2, 0.2),
    eps: Positive = 1e-8,
) -> np.ndarray:
    """Return A_k = sum over j >= k of (alpha * label_j + outcome_j), both standardised within the
    group.

    Args:
      outcome_N: scores, (N,) float.
      group_N: any integers, (N,).
      label_NK: (N, K) int: +1 GOOD, -1 BAD, 0 abstain. An abstention is left out of all means and
        earns no label credit; a trajectory of abstentions keeps the credit of its outcome. Turns
        past `steps_N` are ignored.
      steps_N: the number of turns of each trajectory, (N,) int; 0 is allowed and gives a row of
        zeros.
      step: the training step, for the schedule of alpha.
      alpha: weight of the labels against the outcome. With `alpha_steps` it falls to `alpha_min`
        over that many training steps, see `alpha_at`.
      scheme: "decouple": a turn is worth +-`label_value`. "allocation": the turns of a trajectory
        share +1 (outcome > 0.5) or -1 (otherwise) in proportion to `weights`.
      norm: the statistics of a group that standardise its turn values. "reference": as in the
        public code, where the variance is the mean over trajectories of their mean square about the
        group mean. "step": of all turns alike. With both, the root mean square of the standardised
        values is at most 1, weighted as the variance weights them. "trajectory": mean and deviation
        of the averages of the trajectories, as equation 18 says. It has no bound: by chance alone
        the averages of n independent labels deviate by 1 / sqrt(n) of what the labels do, or by
        less if the trajectories are alike, and dividing by that amplifies noise, which is then
        summed over n turns.
      outcome_at: the turns that get the outcome: "last_step" (equation 20), "all_steps", or "none",
        which uses the labels alone, not scaled by alpha.
      length_normalise: divide by the square root of the number of turns (the reference does so for
        "decouple" only).
      trajectory_weight: "equal", or "by_steps" to weight a trajectory by its labelled turns.
        `norm="step"` implies the latter.
      standardise: False uses the turn values as they are.
      label_value: value of a label; standardising cancels it.
      weights: for "allocation": a label that agrees with the outcome; BAD in a success; GOOD in a
        failure.
      eps: a channel whose deviation is at most this is set to 0 (norms "trajectory" and "step");
        "reference" adds it.

    Returns: (N, K) float64, 0 past the end of a trajectory.
    Raises: ValueError for an unknown choice, shapes that do not fit, other labels, an outcome that
    is not finite.
    """
    _check_choices(
        scheme=scheme, norm=norm, outcome_at=outcome_at, trajectory_weight=trajectory_weight
    )
    outcome_N, groups = grouped(outcome_N, group_N)
    label_NK, steps_N = _checked_labels(label_NK, steps_N, outcome_N.size)
    k_K = np.arange(label_NK.shape[1])

    if scheme == "decouple":
        reward_NK = label_value * label_NK
    else:
        reward_NK = _allocated(label_NK, outcome_N, weights)
    if standardise:
        equal = trajectory_weight == "equal" and norm != "step"
        reward_NK = _standardised(reward_NK, label_NK != 0, groups, norm=norm, equal=equal, eps=eps)
    if outcome_at != "none":
        last_NK = k_K == steps_N[:, None] - 1
        here_NK = last_NK if outcome_at == "last_step" else k_K < steps_N[:, None]
        tiny = _TINY if norm == "reference" else eps
        score_N = _standardised_outcome(outcome_N, groups, eps, tiny)
        alpha = alpha_at(step, alpha=alpha, alpha_min=alpha_min, alpha_steps=alpha_steps)
        reward_NK = alpha * reward_NK + here_NK * score_N[:, None]
    if length_normalise and not (norm == "reference" and scheme == "allocation"):
        reward_NK = reward_NK / np.sqrt(np.maximum(steps_N, 1))[:, None]
    return np.cumsum(reward_NK[:, ::-1], axis=1)[:, ::-1]


def _check_choices(**chosen: str) -> None:
    """Raise ValueError for an unknown choice."""
    known = {
        "scheme": Scheme,
        "norm": Norm,
        "outcome_at": OutcomeAt,
        "trajectory_weight": TrajectoryWeight,
    }
    for name, value in chosen.items():
        choices = typing.get_args(known[name])
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _checked_labels(
    label_NK: ArrayLike, steps_N: ArrayLike, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels, 0 past the end of a trajectory, and the numbers of turns. Raises
    ValueError."""
    label_NK, steps_N = np.asarray(label_NK), np.asarray(steps_N)
    if label_NK.ndim != 2 or label_NK.shape[0] != n or steps_N.shape != (n,):
        raise ValueError(
            f"label_NK {label_NK.shape} and steps_N {steps_N.shape} do not fit {n} trajectories"
        )
    turns = label_NK.shape[1]
    if n and (steps_N.min() < 0 or steps_N.max() > turns):
        raise ValueError(
            f"steps_N ranges from {steps_N.min()} to {steps_N.max()}, but label_NK has {turns}"
            " columns"
        )
    if not np.isin(label_NK, (-1, 0, 1)).all():
        raise ValueError("a label is +1 (GOOD), -1 (BAD) or 0 (abstain)")
    return np.where(np.arange(turns) < steps_N[:, None], label_NK, 0), steps_N


def _allocated(
    label_NK: np.ndarray, outcome_N: np.ndarray, weights: tuple[float, float, float]
) -> np.ndarray:
    """Return the share of each turn in the sign of the outcome: a row sums to +1 or -1, or to 0 if
    it has no label."""
    consistent, bad_in_success, good_in_failure = (abs(w) for w in weights)
    success_N1 = (outcome_N > SUCCESS)[:, None]
    good_N1 = np.where(success_N1, consistent, good_in_failure)
    bad_N1 = np.where(success_N1, bad_in_success, consistent)
    share_NK = np.where(label_NK > 0, good_N1, bad_N1) * (label_NK != 0)
    total_N1 = share_NK.sum(1, keepdims=True)
    unit_N1 = np.where(total_N1 > 1e-8, 1 / np.maximum(total_N1, 1e-8), 0)
    return np.where(success_N1, 1.0, -1.0) * share_NK * unit_N1


def _standardised(
    value_NK: np.ndarray,
    valid_NK: np.ndarray,
    groups: Groups,
    *,
    norm: Norm,
    equal: bool,
    eps: float,
) -> np.ndarray:
    """Return the values of valid turns minus the mean of their group, divided by its deviation; 0
    for other turns."""
    n_N = valid_NK.sum(1)
    mean_N = value_NK.sum(1) / np.maximum(n_N, 1)
    weight_N = np.asarray(n_N > 0 if equal else n_N, np.float64)
    total_G = np.maximum(group_sum(weight_N, groups), 1)
    mean_G = group_sum(weight_N * mean_N, groups) / total_G
    centred_NK = np.where(valid_NK, value_NK - mean_G[groups.index_N][:, None], 0.0)
    if norm == "trajectory":
        square_N = (mean_N - mean_G[groups.index_N]) ** 2
        variance_G = group_sum(weight_N * square_N, groups) / total_G
    else:
        square_N = (centred_NK**2).sum(1)
        variance_G = group_sum(weight_N * square_N / np.maximum(n_N, 1), groups) / total_G

    std_G = np.sqrt(variance_G)
    if norm == "reference":
        std_G = np.sqrt(variance_G + eps) if equal else np.maximum(std_G, eps)
        return centred_NK / (std_G + _TINY)[groups.index_N][:, None]
    # dividing by eps alone would amplify rounding errors
    scale_G = np.where(std_G > eps, 1 / (std_G + eps), 0.0)
    return centred_NK * scale_G[groups.index_N][:, None]


def _standardised_outcome(
    outcome_N: np.ndarray, groups: Groups, eps: float, tiny: float
) -> np.ndarray:
    """Return (R - mean) / (population std + tiny), or R - mean where the deviation is at most eps
    (equation 19)."""
    centred_N = centred(outcome_N, groups)
    std_N = np.sqrt(group_sum(centred_N**2, groups) / groups.count_G)[groups.index_N]
    return centred_N / np.where(std_N > eps, std_N + tiny, 1.0)
