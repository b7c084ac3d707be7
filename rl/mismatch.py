"""Metrics of the gap between engine and learner log-probabilities, by environment and by age of the
weights, and an alarm for an engine that does not sample with the weights it was given."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from rl.packing import Packed

BASELINE = 10  # number of first measurements that later ones are compared with


def figures(batches: Sequence[Packed], version: int, *, recomputed: bool) -> dict[str, float]:
    """Return metrics of the trained tokens of unguided rollouts, before the first update of the
    step. Tokens whose log-probability at sampling is unknown are left out of all but staleness.

    `staleness/mean` and `/max`: versions between the weights that sampled a token and the current
    ones, `version`. With `recomputed`, `old_logp_RT` is the learner's and d = log pi_learner - log
    pi_engine. Then `mismatch/fresh` is the mean |d| over tokens that the current weights sampled,
    which rounding alone should cause. If there are several environments, `mismatch/abs/<env>`,
    `mismatch/max/<env>` and `mismatch/kl/<env>` are the mean |d|, the largest |d| and an estimate
    of KL(engine || learner).
    """
    own = [batch.mask_RT & ~batch.guided_RT for batch in batches]
    if not any(own_RT.any() for own_RT in own):
        return {}

    def of_tokens(array_of: Callable[[Packed], np.ndarray]) -> np.ndarray:
        return np.concatenate([array_of(batch)[own_RT] for batch, own_RT in zip(batches, own)])

    age_N = version - of_tokens(lambda batch: batch.version_RT)
    metrics = {"staleness/mean": float(np.mean(age_N)), "staleness/max": float(np.max(age_N))}
    if not recomputed:
        return metrics
    gap_N = of_tokens(lambda batch: batch.old_logp_RT - batch.logp_RT).astype(np.float64)
    env_N = of_tokens(lambda batch: np.array(batch.envs)[batch.sample_RT])
    known_N = ~np.isnan(gap_N)
    age_N, gap_N, env_N = age_N[known_N], gap_N[known_N], env_N[known_N]
    if (age_N == 0).any():
        metrics["mismatch/fresh"] = float(np.mean(np.abs(gap_N[age_N == 0])))
    envs = np.unique(env_N)
    for env in envs if len(envs) > 1 else ():
        d_N = gap_N[env_N == env]
        metrics[f"mismatch/abs/{env}"] = float(np.mean(np.abs(d_N)))
        metrics[f"mismatch/max/{env}"] = float(np.max(np.abs(d_N)))
        metrics[f"mismatch/kl/{env}"] = float(np.mean(np.expm1(np.clip(d_N, -20, 20)) - d_N))
    return metrics


@dataclass
class Alarm:
    """An alarm for gaps above `floor` and `factor` times the median of the first ten without alarm;
    factor 0 = none."""

    factor: float
    floor: float
    baseline: list[float] = field(default_factory=list)

    def check(self, metrics: dict[str, float]) -> str:
        """Return the warning for the user, "" if there is none.

        Only tokens that the current weights sampled are compared: others differ because the weights
        changed.
        """
        gap = metrics.get("mismatch/fresh")
        if gap is None and metrics.get("staleness/max") == 0:
            gap = metrics.get("mismatch/abs")
        if gap is None or not self.factor:
            return ""
        usual = median(self.baseline) if self.baseline else 0.0
        if not math.isfinite(gap) or gap > max(self.floor, self.factor * usual):
            return (
                f"ALARM: engine and learner differ by {gap:.2g} nats per token (usual {usual:.2g},"
                f" rounding below {self.floor:g}): the engine does not sample with the weights it"
                " was given"
            )
        if len(self.baseline) < BASELINE:
            self.baseline.append(gap)
        return ""
