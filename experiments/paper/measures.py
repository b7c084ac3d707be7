"""The measures of the paper's tables, from the scores of a cell.

- avg@k, best@k (bootstrap), pass@k (unbiased): `rl.evaluation`; tgc@k is pass@k, sgc@k the same of
  scenarios;
- early: avg@k after a fifth of the steps; auc: the mean height of the curve of avg@k over the
  steps;
- steps@.9: the first evaluated step at which avg@k reaches 90% of the best avg@k of the baseline's
  curve.

All but steps@.9 are means of one value per task (or scenario), in percent, so that they have paired
intervals.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.compare import Curve, height, mean_curve, means_of
from rl.evaluation import Scores

GOAL = 0.9
EARLY = 0.2  # of the steps: step 20 of 100


def shown(published: Mapping[str, float], k: int) -> list[str]:
    """Return the measures to print for a cell: the published ones, or avg@k and best@k; pass@k
    follows best@k, and avg@k a lone "early"."""
    names = list(published) or [f"avg@{k}", f"best@{k}"]
    if names == ["early"]:
        names.append(f"avg@{k}")
    if f"best@{k}" in names:
        names.insert(names.index(f"best@{k}") + 1, f"pass@{k}")
    return names


def per_task(name: str, scores: Scores | None, curve: Curve) -> np.ndarray | None:
    """Return one value per task (or scenario) of a measure, in [0, 1]; None if there is nothing to
    measure.

    scores: the final evaluation; curve: {step: scores} of those during training.
    """
    if name == "early":
        step = early_step(curve)
        return curve[step].per_task("avg@8") if step is not None else None
    if name == "auc":
        return height(curve, "avg@8") if len(curve) > 1 else None
    if scores is None:
        return None
    kind, _, k = name.partition("@")
    if kind != "avg" and int(k) > len(scores.success_NR[0]):
        return None
    return scores.per_task(f"pass@{k}" if kind == "tgc" else name)


def early_step(curve: Curve) -> int | None:
    """Return the evaluated step nearest to a fifth of the steps, None if nothing between the ends
    was evaluated."""
    if len(curve) < 3:
        return None
    return min(curve, key=lambda step: abs(step - EARLY * max(curve)))


def goal_of(curves: Sequence[Curve]) -> float:
    """Return 90% of the best point of the mean of several runs' curves, nan without curves."""
    mean = mean_curve([means_of(curve, "avg@8") for curve in curves])
    return GOAL * max(mean.values(), default=math.nan)
