"""Rewards: what the outcomes of a step become before an estimator compares them.

A reward is a function of a `Batch`, whose `outcome_N` are the scores; its keyword-only parameters
are the config's `reward.args`. It returns reward_N, which the estimator finds as `outcome_N`.

    def brief(batch: Batch, *, cost: float = 0.01):
        return batch.outcome_N - cost * batch.turns_N
"""

from typing import Protocol

import numpy as np

from rl.advantages.batch import Batch, checked, unbound

REWARDS = {
    "score": "rl.rewards:score",
    "overlong": "rl.rewards.overlong:overlong",
    "novelty": "rl.rewards.novelty:Novelty",
}


class Reward(Protocol):
    """A plug `reward` with its arguments bound."""

    def __call__(self, batch: Batch, /) -> np.ndarray:
        """Return finite rewards, (N,) float."""


def score(batch: Batch) -> np.ndarray:
    """Return the scores."""
    return batch.outcome_N


def shape(reward: Reward, batch: Batch) -> None:
    """Write the reward of each trajectory of a batch. With `score` they have none but the score.

    Raises ValueError, with the name of the reward, if its result is not (N,) or not finite.
    """
    if unbound(reward) is score:
        return
    reward_N = checked(reward, reward(batch), batch, batch.outcome_N.shape)
    for trajectory, value in zip(batch.trajectories, reward_N):
        trajectory.reward = float(value)
