"""Advantages: from outcomes and labels to one number per turn, in float64 NumPy on the host.

An estimator is a function of a `Batch`; its keyword-only parameters are the config's
`advantage.args`. It returns advantage_NK, or advantage_N to give every turn of a trajectory the
same number.

    def reinforce(batch: Batch, *, baseline: float = 0.5):
        return batch.outcome_N - baseline

`adca` (rl/advantages/attribution.py) and the group baselines (rl/advantages/outcome.py) are
functions of arrays; `rl.advantages.estimators` makes estimators of them. Letters: N trajectories,
K turns (padded), G groups. `rl.advantages.groups` has the statistics of groups.
"""

from rl.advantages.batch import Batch, Estimator, estimate

__all__ = ["ESTIMATORS", "Batch", "Estimator", "estimate"]

NAMES = ("grpo", "rloo", "dr_grpo", "loop", "adca")
ESTIMATORS = {name: f"rl.advantages.estimators:{name}" for name in NAMES}
ESTIMATORS |= {name: f"rl.advantages.{name}:{name}" for name in ("gigpo", "turn_rloo")}
ESTIMATORS["spiral"] = "rl.advantages.spiral:Spiral"
