"""Advantages: from outcomes and step labels to one number per step, in float64 NumPy on the host.

`grpo`, `dr_grpo`, `rloo` and `loop` give one number per trajectory. `adca` is the attribution-driven
credit assignment of AgentEvolver (arXiv 2511.10395, section 5): the labels of the steps and the
outcome of the trajectory are standardised apart within the group, added, and summed over the steps
still to come. `spread` carries the numbers of the steps to their tokens.

Letters: N trajectories, K steps (padded), T tokens, G groups. A group is every trajectory with the
same value in `group_N`, whatever the values are and in whatever order they come.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

SUCCESS = 0.5  # an outcome above this counts as a success where a scheme asks for one (allocation)
_TINY = 1e-12  # keeps a division by a standard deviation finite without moving the result


class _Groups(NamedTuple):
    index_N: np.ndarray  # which group each trajectory belongs to, 0..G-1
    first_G: np.ndarray  # one member of each group
    count_G: np.ndarray  # members of each group


def _read(outcome_N, group_N) -> tuple[np.ndarray, _Groups]:
    outcome_N, group_N = np.asarray(outcome_N, np.float64), np.asarray(group_N)
    if outcome_N.ndim != 1 or group_N.shape != outcome_N.shape:
        raise ValueError(f"outcome_N {outcome_N.shape} and group_N {group_N.shape} must be two lists of one length")
    bad = np.flatnonzero(~np.isfinite(outcome_N))
    if bad.size:
        raise ValueError(f"outcome_N[{bad[0]}] is {outcome_N[bad[0]]}: an outcome must be finite")
    _, first_G, index_N, count_G = np.unique(group_N, return_index=True, return_inverse=True, return_counts=True)
    return outcome_N, _Groups(index_N.reshape(-1), first_G, count_G)


def _sum(value_N: np.ndarray, groups: _Groups) -> np.ndarray:
    return np.bincount(groups.index_N, value_N, groups.count_G.size)


def _centre(outcome_N: np.ndarray, groups: _Groups) -> np.ndarray:
    """Outcome less the mean of its group. Taken from a member first: a constant group gives exactly 0."""
    shifted_N = outcome_N - outcome_N[groups.first_G][groups.index_N]
    return shifted_N - (_sum(shifted_N, groups) / groups.count_G)[groups.index_N]


def dr_grpo(outcome_N, group_N) -> np.ndarray:
    """A = R - mean(R) of the group (Dr. GRPO, arXiv 2503.20783). (N,) -> (N,) float64."""
    return _centre(*_read(outcome_N, group_N))


def grpo(outcome_N, group_N, *, std: str | None = "population", eps: float = 1e-6) -> np.ndarray:
    """A = (R - mean(R)) / (std(R) + eps) of the group (GRPO, arXiv 2402.03300). (N,) -> (N,) float64.

    `std="sample"` divides by n - 1, as verl and the reference of AgentEvolver do; like there, a
    trajectory alone in its group then keeps its raw score, R / (1 + eps). `std=None` is `dr_grpo`.
    """
    outcome_N, groups = _read(outcome_N, group_N)
    centred_N = _centre(outcome_N, groups)
    if std is None:
        return centred_N
    if std not in ("population", "sample"):
        raise ValueError(f"std={std!r}: choose 'population', 'sample' or None")
    free_G = np.maximum(groups.count_G - (std == "sample"), 1)
    std_G = np.sqrt(_sum(centred_N**2, groups) / free_G)
    advantage_N = centred_N / (std_G[groups.index_N] + eps)
    if std == "sample":
        alone_N = groups.count_G[groups.index_N] == 1
        advantage_N = np.where(alone_N, outcome_N / (1 + eps), advantage_N)
    return advantage_N


def rloo(outcome_N, group_N) -> np.ndarray:
    """A = R - mean of the *other* outcomes of the group (RLOO, arXiv 2402.14740); 0 if there is none."""
    outcome_N, groups = _read(outcome_N, group_N)
    n_N = groups.count_G[groups.index_N]
    return _centre(outcome_N, groups) * n_N / np.maximum(n_N - 1, 1)


def loop(outcome_N, group_N, *, drop_below: float = 0.0) -> np.ndarray:
    """A = n / (n - 1) * (R - mean(R)) (LOOP, arXiv 2502.01600); |A| < `drop_below` becomes 0 (the paper: 0.01).

    The estimator is RLOO's, written as the paper writes it. What sets LOOP apart is no division by
    the standard deviation, no KL term, and this threshold.
    """
    advantage_N = rloo(outcome_N, group_N)
    return np.where(np.abs(advantage_N) < drop_below, 0.0, advantage_N)


def alpha_at(step: int, *, alpha: float, alpha_min: float = 0.0, total_steps: int = 0) -> float:
    """The weight of the labels at a training step: constant, or a half cosine over `total_steps`."""
    if total_steps <= 0:
        return alpha
    progress = min(max(step / total_steps, 0.0), 1.0)
    return alpha_min + 0.5 * (alpha - alpha_min) * (1 + math.cos(math.pi * progress))


def adca(
    outcome_N,
    group_N,
    label_NK,
    steps_N,
    *,
    alpha: float,
    scheme: str = "decouple",
    norm: str = "trajectory",
    outcome_at: str = "last_step",
    length_normalise: bool = False,
    trajectory_weight: str = "equal",
    standardise: bool = True,
    label_value: float = 0.2,
    weights: tuple[float, float, float] = (1.0, 0.2, 0.2),
    eps: float = 1e-8,
) -> np.ndarray:
    """Attribution-driven advantages: A_k = sum over j >= k of (alpha * label_j + outcome_j), both standardised.

    Args:
      outcome_N: scores, (N,) float.
      group_N: any integers, (N,).
      label_NK: (N, K) int: +1 GOOD, -1 BAD, 0 abstain. An abstention counts in no mean and earns no
        credit; a trajectory of abstentions keeps the credit of its outcome. Steps past `steps_N` are ignored.
      steps_N: how many steps each trajectory took, (N,) int; 0 is allowed and gives a row of zeros.
      alpha: weight of the labels against the outcome (see `alpha_at`).
      scheme: "decouple": a step is worth +-`label_value`. "allocation": the steps of a trajectory share
        +1 (outcome > 0.5) or -1 (otherwise) in proportion to `weights`.
      norm: how step values become comparable within a group. "trajectory": mean and deviation of the
        trajectories' averages (equation 18). "step": of all steps alike. "reference": what the public
        code does; its variance is the mean over trajectories of each one's mean square about the group mean.
      outcome_at: where the outcome enters: "last_step" (equation 20), "all_steps", or "none", which
        leaves the labels alone, unscaled by alpha.
      length_normalise: divide by the square root of the number of steps (in the reference: "decouple" only).
      trajectory_weight: "equal", or "by_steps": a trajectory weighs as its labelled steps do. "step" implies it.
      standardise: False leaves the step values as they are.
      label_value: value of a label; standardising cancels it.
      weights: of "allocation": a label that agrees with the outcome; BAD in a success; GOOD in a failure.
      eps: a deviation at or below it neutralises its channel (norms "trajectory" and "step"); else added to it.

    Returns: (N, K) float64, 0 past the end of a trajectory.
    Raises: ValueError for an unknown choice, shapes that do not fit, other labels, an outcome that is not finite.
    """
    outcome_N, groups = _read(outcome_N, group_N)
    label_NK, steps_N = _read_labels(label_NK, steps_N, outcome_N.size)
    _choose("scheme", scheme, ("decouple", "allocation"))
    _choose("norm", norm, ("trajectory", "step", "reference"))
    _choose("outcome_at", outcome_at, ("last_step", "all_steps", "none"))
    _choose("trajectory_weight", trajectory_weight, ("equal", "by_steps"))

    value_NK = label_value * label_NK if scheme == "decouple" else _allocate(label_NK, outcome_N, weights)
    if standardise:
        equal = trajectory_weight == "equal" and norm != "step"
        value_NK = _standardise(value_NK, label_NK != 0, groups, norm=norm, equal=equal, eps=eps)

    reward_NK = value_NK if outcome_at == "none" else alpha * value_NK
    if outcome_at != "none":
        k_K = np.arange(label_NK.shape[1])
        here_NK = k_K == steps_N[:, None] - 1 if outcome_at == "last_step" else k_K < steps_N[:, None]
        tiny = _TINY if norm == "reference" else eps
        reward_NK = reward_NK + here_NK * _standard_outcome(outcome_N, groups, eps, tiny)[:, None]
    if length_normalise and not (norm == "reference" and scheme == "allocation"):
        reward_NK = reward_NK / np.sqrt(np.maximum(steps_N, 1))[:, None]
    return np.cumsum(reward_NK[:, ::-1], axis=1)[:, ::-1]


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _read_labels(label_NK, steps_N, n: int) -> tuple[np.ndarray, np.ndarray]:
    label_NK, steps_N = np.asarray(label_NK), np.asarray(steps_N)
    if label_NK.ndim != 2 or label_NK.shape[0] != n or steps_N.shape != (n,):
        raise ValueError(f"label_NK {label_NK.shape} and steps_N {steps_N.shape} do not fit {n} trajectories")
    if n and (steps_N.min() < 0 or steps_N.max() > label_NK.shape[1]):
        raise ValueError(
            f"steps_N: {steps_N.min()} to {steps_N.max()} steps, but label_NK has {label_NK.shape[1]} columns"
        )
    if not np.isin(label_NK, (-1, 0, 1)).all():
        raise ValueError("a label is +1 (GOOD), -1 (BAD) or 0 (abstain)")
    return np.where(np.arange(label_NK.shape[1]) < steps_N[:, None], label_NK, 0), steps_N


def _allocate(label_NK: np.ndarray, outcome_N: np.ndarray, weights: tuple[float, float, float]) -> np.ndarray:
    """The steps of a trajectory share the sign of its outcome: each row sums to +1 or -1, or to 0 without a label."""
    consistent, bad_in_success, good_in_failure = (abs(w) for w in weights)
    success_N1 = (outcome_N > SUCCESS)[:, None]
    good = np.where(success_N1, consistent, good_in_failure)
    bad = np.where(success_N1, bad_in_success, consistent)
    share_NK = np.where(label_NK > 0, good, bad) * (label_NK != 0)
    total_N1 = share_NK.sum(1, keepdims=True)
    unit_N1 = np.where(total_N1 > 1e-8, 1 / np.maximum(total_N1, 1e-8), 0)
    return np.where(success_N1, 1.0, -1.0) * share_NK * unit_N1


def _standardise(value_NK, valid_NK, groups: _Groups, *, norm: str, equal: bool, eps: float) -> np.ndarray:
    """Step values less the mean of their group, over its deviation; `valid_NK` says which steps count."""
    n_N = valid_NK.sum(1)
    mean_N = value_NK.sum(1) / np.maximum(n_N, 1)
    weight_N = (n_N > 0).astype(np.float64) if equal else n_N.astype(np.float64)
    total_G = np.maximum(_sum(weight_N, groups), 1)
    mean_G = _sum(weight_N * mean_N, groups) / total_G
    centred_NK = np.where(valid_NK, value_NK - mean_G[groups.index_N][:, None], 0.0)
    if norm == "trajectory":
        square_N = (mean_N - mean_G[groups.index_N]) ** 2
    else:
        square_N = (centred_NK**2).sum(1) / np.maximum(n_N, 1)
    variance_G = _sum(weight_N * square_N, groups) / total_G

    if norm == "reference":
        std_G = np.sqrt(variance_G + eps) if equal else np.maximum(np.sqrt(variance_G), eps)
        return centred_NK / (std_G + _TINY)[groups.index_N][:, None]
    std_G = np.sqrt(variance_G)
    scale_G = np.where(std_G > eps, 1 / (std_G + eps), 0.0)  # dividing by eps alone would turn rounding into a signal
    return centred_NK * scale_G[groups.index_N][:, None]


def _standard_outcome(outcome_N, groups: _Groups, eps: float, tiny: float) -> np.ndarray:
    """(R - mean) / (population std + tiny); R - mean where the deviation is at most eps (equation 19)."""
    centred_N = _centre(outcome_N, groups)
    std_N = np.sqrt(_sum(centred_N**2, groups) / groups.count_G)[groups.index_N]
    return centred_N / np.where(std_N > eps, std_N + tiny, 1.0)


def spread(advantage_NK, step_ids_NT) -> np.ndarray:
    """Carry advantages from steps to tokens.

    Args:
      advantage_NK: (N, K).
      step_ids_NT: (N, T) integers, 0..K-1, or negative where a token belongs to no step.

    Returns: (N, T) float32, 0 where a token belongs to no step.
    Raises: ValueError when a step id has no column or the rows differ.

    A step is a run of tokens, so this copies runs: several times faster than looking each token up.
    """
    advantage_NK, step_ids_NT = np.asarray(advantage_NK), np.asarray(step_ids_NT)
    n, k = advantage_NK.shape
    if step_ids_NT.ndim != 2 or step_ids_NT.shape[0] != n:
        raise ValueError(f"step_ids_NT {step_ids_NT.shape} does not fit {n} trajectories")
    if not step_ids_NT.size:
        return np.zeros(step_ids_NT.shape, np.float32)
    starts_NT = np.ones(step_ids_NT.shape, bool)
    np.not_equal(step_ids_NT[:, 1:], step_ids_NT[:, :-1], out=starts_NT[:, 1:])
    start_S = np.flatnonzero(starts_NT)
    id_S = np.maximum(step_ids_NT.reshape(-1)[start_S].astype(np.int64), -1)
    if id_S.max() >= k:
        raise ValueError(f"step id {id_S.max()} in a batch of {k} steps")
    padded_NK = np.zeros((n, k + 1), np.float32)  # an id of -1 reads the last column
    padded_NK[:, :k] = advantage_NK
    value_S = padded_NK[start_S // step_ids_NT.shape[1], id_S]
    return np.repeat(value_S, np.diff(start_S, append=step_ids_NT.size)).reshape(step_ids_NT.shape)
