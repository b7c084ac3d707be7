"""The rewards of turns and their returns, for estimators that give each turn its own credit."""

from typing import Literal

import numpy as np

from rl.advantages.batch import Batch

Rewards = Literal["outcome", "world", "both"]


def turn_rewards(batch: Batch, rewards: Rewards) -> np.ndarray:
    """Return reward_NK, what each turn is rewarded with: the outcome, at the last turn; the world's
    own reward of each turn; or their sum."""
    value_NK = np.zeros(batch.on_NK.shape) if rewards == "outcome" else batch.reward_NK.copy()
    if rewards != "world":
        played_N = batch.turns_N > 0
        value_NK[played_N, batch.turns_N[played_N] - 1] += batch.outcome_N[played_N]
    return value_NK


def returns(reward_NK: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted sum of the rewards from each turn on: sum over l >= k of
    discount^(l - k) r_l."""
    return_NK = reward_NK.copy()
    for k in range(reward_NK.shape[1] - 2, -1, -1):
        return_NK[:, k] += discount * return_NK[:, k + 1]
    return return_NK
