"""Advantages: from outcomes and labels to one number per turn, in float64 NumPy on the host.

An estimator is a function. Its positional parameters name the fields of `Batch` that it reads, or `batch` for all of
them; its keyword-only parameters are the config's `advantage.args`. It returns advantage_NK, or advantage_N to give
every turn of a trajectory the same number. An estimator that names `label_NK` needs labelled turns.

    def reinforce(outcome_N, *, baseline: float = 0.5):
        return outcome_N - baseline

Letters: N trajectories, K turns (padded), T tokens, G groups. `rl.advantages.groups` has the statistics of groups.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl.advantages.attribution import adca, alpha_at
from rl.advantages.outcome import dr_grpo, grpo, loop, rloo
from rl.advantages.tokens import spread
from rl.trajectory import Trajectory

__all__ = [
    "ESTIMATORS", "Batch", "Estimator", "adca", "alpha_at", "dr_grpo", "estimate", "grpo", "loop", "rloo", "spread",
]  # fmt: skip

ESTIMATORS = {name: f"rl.advantages:{name}" for name in ("grpo", "rloo", "dr_grpo", "loop", "adca")}


@dataclass(frozen=True, eq=False)
class Batch:
    """The trajectories of a training step, and the arrays that most estimators read."""

    trajectories: Sequence[Trajectory]
    outcome_N: np.ndarray  # float64: the score of each trajectory
    group_N: np.ndarray  # int: equal for rollouts of one group, i.e. of one draw of a task
    label_NK: np.ndarray  # int8: +1 GOOD, -1 BAD, 0 abstain or past the end
    turns_N: np.ndarray  # int: the number of turns of each trajectory
    step: int  # the training step

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], step: int) -> Batch:
        """Return the batch of some trajectories; groups are numbered in the order of their first trajectory."""
        groups = {group: number for number, group in enumerate(dict.fromkeys(t.group for t in trajectories))}
        turns_N = np.array([len(t.turns) for t in trajectories], np.int64)
        label_NK = np.zeros((len(trajectories), max(1, turns_N.max(initial=0))), np.int8)
        for label_K, trajectory in zip(label_NK, trajectories):
            label_K[: len(trajectory.turns)] = [turn.label for turn in trajectory.turns]
        return cls(
            trajectories=trajectories,
            outcome_N=np.array([t.outcome for t in trajectories], np.float64),
            group_N=np.array([groups[t.group] for t in trajectories], np.int64),
            label_NK=label_NK,
            turns_N=turns_N,
            step=step,
        )


class Estimator(Protocol):
    """An estimator that takes the whole batch. The others name the fields that they read instead of `batch`."""

    def __call__(self, batch: Batch) -> np.ndarray:
        """Return finite advantages: (N, K) float, one per turn, or (N,) float, one per trajectory."""
        ...


def estimate(estimator: Callable[..., np.ndarray], batch: Batch) -> np.ndarray:
    """Return advantage_NK, float64 and 0 past the end of a trajectory.

    The estimator is called with the fields of the batch that its positional parameters name; `steps_N` is another
    name for `turns_N`. Raises ValueError, with the name of the estimator, if its result has another shape than (N,)
    or (N, K), or is not finite.
    """
    fields = vars(batch) | {"batch": batch, "steps_N": batch.turns_N}
    parameters = inspect.signature(estimator).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in fields]
    advantage = np.asarray(estimator(**{name: fields[name] for name in named}), np.float64)
    shape = batch.label_NK.shape
    if advantage.shape == shape[:1]:
        advantage = np.repeat(advantage[:, None], shape[1], axis=1)
    if advantage.shape != shape:
        raise ValueError(f"{_name(estimator)} returned shape {advantage.shape}; expected {shape[:1]} or {shape}")
    advantage_NK = np.where(np.arange(shape[1]) < batch.turns_N[:, None], advantage, 0.0)
    bad = np.argwhere(~np.isfinite(advantage_NK))
    if bad.size:
        n, k = bad[0]
        raise ValueError(
            f"{_name(estimator)} returned {advantage_NK[n, k]} for turn {k} of a rollout of task "
            f"{batch.trajectories[n].task.id}: an advantage must be finite"
        )
    return advantage_NK


def _name(estimator: Callable[..., np.ndarray]) -> str:
    """Return "module:name" of the function behind an estimator."""
    while isinstance(estimator, functools.partial):
        estimator = estimator.func
    return f"{estimator.__module__}:{getattr(estimator, '__qualname__', type(estimator).__qualname__)}"
