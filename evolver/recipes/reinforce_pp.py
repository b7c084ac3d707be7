"""REINFORCE++ (Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global
Normalization", arXiv 2501.03262): advantages that are normalised over the whole step and not in
groups, with a KL penalty in the reward of each token.

The paper claims to be more stable and better than other methods without a critic, and than PPO in
tasks of agents.

    config.recipe.name = "reinforce_pp"
    config.learner.drop = ("cancelled", "env_error", "stale", "overlong")  # all outcomes count
    config.loss.kl_coef = 0.0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics
from evolver.recipes import Recipe, give
from rl.advantages.batch import Batch
from rl.advantages.outcome import dr_grpo
from rl.bounds import NotNegative, Positive
from rl.packing import Packed
from rl.trajectory import Trajectory


@dataclass(eq=False, kw_only=True)
class ReinforcePP(Recipe):
    """Trains on rewards with a KL penalty, normalised over the tokens of a step; the plug
    `advantage` is not asked.

    beta: coefficient of the penalty. baseline: subtract the mean reward of the group first
    (REINFORCE++-baseline), or nothing. eps: added to the deviation that advantages are divided by.
    """

    beta: NotNegative = 0.01
    baseline: Literal["none", "group"] = "none"
    eps: Positive = 1e-8
    needs_reference = True

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        grading.shape(run.config, run.reward, trajectories, step)
        counted = grading.counted(run.config, trajectories)
        batch = Batch.of(counted, step)
        reward_N = batch.outcome_N
        if self.baseline == "group":
            reward_N = dr_grpo(reward_N, batch.group_N)
        give(counted, reward_N)

    def weigh(self, batches: Sequence[Packed]) -> Metrics:
        found = [penalised(batch, self.beta) for batch in batches]
        whole_n = np.concatenate([value_n for value_n, _ in found] or [np.zeros(1)])
        for batch, (value_n, _) in zip(batches, found):
            normal_n = (value_n - whole_n.mean()) / (whole_n.std() + self.eps)
            batch.advantage_RT = batch.placed(normal_n)
        kl_n = np.concatenate([kl_n for _, kl_n in found] or [np.zeros(1)])
        return {"reinforce_pp/kl": float(kl_n.mean())}


def penalised(batch: Packed, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return A_t = r - beta sum of KL_i over the tokens i >= t of its rollout, and
    KL_t = log(pi_old / pi_ref), of the tokens that train, (n,) each."""
    assert batch.ref_logp_RT is not None
    old_RT = batch.logp_RT if batch.old_logp_RT is None else batch.old_logp_RT
    kl_n = batch.trained(old_RT - batch.ref_logp_RT).astype(np.float64)
    rollout_n = batch.trained(batch.rollout_RT)
    sum_n = np.cumsum(kl_n[::-1])[::-1]  # over this token and all later ones of the mini-batch
    last_n = np.append(np.flatnonzero(np.diff(rollout_n)), len(rollout_n) - 1)
    after = np.append(sum_n, 0.0)[last_n + 1]  # those of later rollouts
    sum_n = sum_n - after[np.searchsorted(last_n, np.arange(len(kl_n)))]
    return batch.trained(batch.advantage_RT) - beta * sum_n, kl_n
