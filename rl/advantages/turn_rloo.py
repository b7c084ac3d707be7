"""RLOO (Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
Human Feedback in LLMs", arXiv 2402.14740), with a baseline for each turn.

The paper claims that REINFORCE with a leave-one-out baseline does better than PPO, DPO and RAFT on
summaries and dialogues, which have one turn. Here the return of a turn is compared with the returns
of the same turn in the other rollouts of the group.
"""

import numpy as np

from rl.advantages.batch import Batch
from rl.advantages.returns import Rewards, returns, turn_rewards
from rl.bounds import Fraction


def turn_rloo(
    batch: Batch, *, discount: Fraction = 1.0, rewards: Rewards = "outcome"
) -> np.ndarray:
    """Return A_ik = G_ik - the mean of G_jk over the other rollouts j of the group that have a turn
    k; 0 where there is none. G are returns.

    discount: factor on the rewards of each later turn. rewards: see `turn_rewards`.
    """
    on_NK = batch.on_NK
    return_NK = returns(turn_rewards(batch, rewards), discount) * on_NK
    advantage_NK = np.zeros(on_NK.shape)
    for group in np.unique(batch.group_N):
        own_N = batch.group_N == group
        others_NK = on_NK[own_N].sum(axis=0) - on_NK[own_N]
        sum_NK = return_NK[own_N].sum(axis=0) - return_NK[own_N]
        baseline_NK = sum_NK / np.maximum(others_NK, 1)
        compared_NK = on_NK[own_N] & (others_NK > 0)
        advantage_NK[own_N] = np.where(compared_NK, return_NK[own_N] - baseline_NK, 0.0)
    return advantage_NK


turn_rloo.needs_labels = False  # type: ignore[attr-defined]
