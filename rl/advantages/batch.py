"""The argument of estimators, and the call of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Batch:
    """The trajectories of a training step, and the arrays that most estimators read."""

    trajectories: Sequence[Trajectory]
    outcome_N: np.ndarray  # float64: the score of each trajectory, or what a reward made of it
    group_N: np.ndarray  # int: equal for rollouts of one group, i.e. of one draw of a task
    label_NK: np.ndarray  # int8: +1 GOOD, -1 BAD, 0 abstain or past the end
    reward_NK: np.ndarray  # float64: the world's reward of each turn, 0 past the end
    turns_N: np.ndarray  # int: the number of turns of each trajectory
    step: int  # the training step

    @property
    def on_NK(self) -> np.ndarray:
        """bool: the turns that there are."""
        return np.arange(self.label_NK.shape[1]) < self.turns_N[:, None]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], step: int) -> Batch:
        """Return the batch of some trajectories; groups are numbered in the order of their first
        trajectory."""
        groups = list(dict.fromkeys(t.group for t in trajectories))
        turns_N = np.array([len(t.turns) for t in trajectories], np.int64)
        label_NK = np.zeros((len(trajectories), max(1, turns_N.max(initial=0))), np.int8)
        reward_NK = np.zeros(label_NK.shape)
        for n, trajectory in enumerate(trajectories):
            label_NK[n, : len(trajectory.turns)] = [turn.label for turn in trajectory.turns]
            reward_NK[n, : len(trajectory.turns)] = [turn.reward for turn in trajectory.turns]
        return cls(
            trajectories=trajectories,
            outcome_N=np.array([t.compared for t in trajectories], np.float64),
            group_N=np.array([groups.index(t.group) for t in trajectories], np.int64),
            label_NK=label_NK,
            reward_NK=reward_NK,
            turns_N=turns_N,
            step=step,
        )


class Estimator(Protocol):
    """A plug `advantage` with its arguments bound.

    It may have an attribute `needs_labels`: True if the turns must have labels, False if it ignores
    them.
    """

    def __call__(self, batch: Batch, /) -> np.ndarray:
        """Return finite advantages: (N, K) float, one per turn, or (N,) float, one per
        trajectory."""


def estimate(estimator: Estimator, batch: Batch) -> np.ndarray:
    """Return advantage_NK, float64 and 0 past the end of a trajectory.

    Raises ValueError, with the name of the estimator, if its result has another shape than (N,) or
    (N, K), or is not finite.
    """
    shape = batch.label_NK.shape
    return checked(estimator, estimator(batch), batch, shape[:1], shape)


def checked(plug: Any, result: Any, batch: Batch, *shapes: tuple[int, ...]) -> np.ndarray:
    """Return what an estimator or a reward returned, in the last of the shapes that it may have,
    float64, and 0 past the end of a trajectory. Raises ValueError, with the name of the plug."""
    value = np.asarray(result, np.float64)
    if value.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{_name(plug)} returned shape {value.shape}; expected {expected}")
    if len(shapes[-1]) == 2:
        value = value if value.ndim == 2 else value[:, None]
        value = np.where(batch.on_NK, value, 0.0)
    for place in np.argwhere(~np.isfinite(value)):
        turn = "".join(f"turn {k} of " for k in place[1:])
        raise ValueError(
            f"{_name(plug)} returned {value[tuple(place)]} for {turn}a rollout of task "
            f"{batch.trajectories[place[0]].task.id}: it must be finite"
        )
    return value


def unbound(estimator: Any) -> Any:
    """Return the function, or the object, behind an estimator with bound arguments."""
    while isinstance(estimator, functools.partial):
        estimator = estimator.func
    return estimator


def _name(estimator: Any) -> str:
    """Return "module:name" of what is behind an estimator."""
    made = unbound(estimator)
    return f"{made.__module__}:{getattr(made, '__qualname__', type(made).__qualname__)}"
