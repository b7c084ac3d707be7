"""How far the engine's probabilities are from the learner's, by world and by age, and an alarm when that says that the
engine does not sample with the weights it claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from rl.packing import Packed

BASELINE = 10  # measurements that a later one is compared with


def figures(batches: Sequence[Packed], version: int, *, recomputed: bool) -> dict[str, float]:
    """Metrics of the tokens of unguided rollouts, as sampled, before the step's first update.

    `staleness/mean` and `/max`: versions between the weights that sampled a token and the present ones, `version`.
    With `recomputed`, where `old_logp_RT` is the learner's, and d = log pi_learner - log pi_engine: `mismatch/fresh`,
    the mean |d| over tokens of the present weights, where nothing but rounding may be; and where the
    step holds several worlds `mismatch/abs/<env>`, `mismatch/max/<env>` and `mismatch/kl/<env>` (mean |d|, largest |d|,
    estimate of KL(engine || learner)).
    """
    own = [batch.mask_RT & ~batch.guided_RT for batch in batches]
    if not any(own_RT.any() for own_RT in own):
        return {}
    age_N = version - _of_tokens(batches, own, lambda b: b.version_RT)
    found = {"staleness/mean": float(np.mean(age_N)), "staleness/max": float(np.max(age_N))}
    if not recomputed:
        return found
    gap_N = _of_tokens(batches, own, lambda b: b.old_logp_RT - b.logp_RT).astype(np.float64)
    if (age_N == 0).any():
        found["mismatch/fresh"] = float(np.mean(np.abs(gap_N[age_N == 0])))
    world_N = np.concatenate([np.array(b.envs)[b.sample_RT[own_RT]] for b, own_RT in zip(batches, own)])
    worlds = np.unique(world_N)
    for world in worlds if len(worlds) > 1 else ():
        d_N = gap_N[world_N == world]
        found[f"mismatch/abs/{world}"] = float(np.mean(np.abs(d_N)))
        found[f"mismatch/max/{world}"] = float(np.max(np.abs(d_N)))
        found[f"mismatch/kl/{world}"] = float(np.mean(np.expm1(np.clip(d_N, -20, 20)) - d_N))
    return found


def _of_tokens(batches: Sequence[Packed], own: Sequence[np.ndarray], array_of) -> np.ndarray:
    return np.concatenate([array_of(batch)[own_RT] for batch, own_RT in zip(batches, own)])


@dataclass
class Alarm:
    """Raised by a gap above `floor` that is more than `factor` times the median of the first ten."""

    factor: float
    floor: float
    baseline: list[float] = field(default_factory=list)

    def check(self, metrics: dict[str, float]) -> str:
        """What to tell the user, "" if all is well. Looks at tokens of the present weights only: older ones differ."""
        gap = metrics.get("mismatch/fresh")
        if gap is None and metrics.get("staleness/max") == 0:
            gap = metrics.get("mismatch/abs")
        if gap is None or not self.factor:
            return ""
        usual = median(self.baseline) if self.baseline else 0.0
        if not math.isfinite(gap) or gap > max(self.floor, self.factor * usual):
            return (
                f"ALARM: engine and learner differ by {gap:.2g} nats per token (usual {usual:.2g}, rounding below"
                f" {self.floor:g}): the engine does not sample with the weights it was given"
            )
        if len(self.baseline) < BASELINE:
            self.baseline.append(gap)
        return ""
