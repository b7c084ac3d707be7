"""Evaluation of a policy: avg@k, best@k and pass@k with confidence intervals, and paired comparisons.

Three different measures of `R` rollouts of each of `N` tasks:

- avg@k: the mean score;
- best@k: the expected best score of k rollouts *drawn with replacement* from the R rollouts (1000 draws, seed 42), as
  the reference and the paper report it; for c successes among R = k it tends to 1 - (1 - c/k)^k, below the true pass@k;
- pass@k: the unbiased estimate of the probability of at least one success among k fresh rollouts,
  1 - C(R-c, k) / C(R, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

Tasks are the unit of uncertainty: intervals resample tasks, and a comparison of two policies resamples the same tasks
for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.trajectory import Trajectory, groups_of

DRAWS = 2000  # bootstrap resamples of the tasks for one interval


def best_at_k(score_NR: np.ndarray, k: int, *, draws: int = 1000, seed: int = 42) -> np.ndarray:
    """Return best_N: the mean over `draws` resamples (size k, with replacement) of the best score of each task.

    The draws are those of veRL's `bootstrap_metric` (`np.random.seed(seed)` for each task, then one `choice` per
    resample), so the results equal those of the published procedure exactly, not only in expectation.
    """
    score_NR = np.asarray(score_NR, np.float64)
    pick_Dk = np.random.RandomState(seed).randint(0, score_NR.shape[1], size=(draws, k))
    return np.stack([score_R[pick_Dk].max(axis=1).mean() for score_R in score_NR]) if len(score_NR) else np.zeros(0)


def pass_at_k(success_NR: np.ndarray, k: int) -> np.ndarray:
    """Return pass_N: the unbiased estimate of P(at least one success among k fresh rollouts).

    Raises ValueError for k > R.
    """
    success_NR = np.asarray(success_NR, bool)
    rollouts = success_NR.shape[1]
    if k > rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts per task; there are {rollouts}")
    wins_N = success_NR.sum(axis=1)
    return np.array([1.0 - math.comb(rollouts - int(c), k) / math.comb(rollouts, k) for c in wins_N])


def interval(value_N: np.ndarray, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean over tasks, (nan, nan) if there are none."""
    value_N = np.asarray(value_N, np.float64)
    if not len(value_N):
        return float("nan"), float("nan")
    pick_DN = np.random.default_rng(seed).integers(0, len(value_N), size=(draws, len(value_N)))
    low, high = np.quantile(value_N[pick_DN].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(before_N: np.ndarray, after_N: np.ndarray, **kwargs) -> tuple[float, float, float]:
    """Return (mean, low, high) of after - before on the same tasks in the same order.

    This interval is much tighter than two separate ones.
    """
    before_N, after_N = np.asarray(before_N, np.float64), np.asarray(after_N, np.float64)
    if before_N.shape != after_N.shape:
        raise ValueError(f"a paired comparison needs the same tasks: {before_N.shape} before, {after_N.shape} after")
    low, high = interval(after_N - before_N, **kwargs)
    return float((after_N - before_N).mean()), low, high


@dataclass
class Scores:
    """The results of one evaluation: the input of every estimator, small enough to be stored for every step.

    `score_NR` in [0, 1] and `success_NR` 0/1 are of rollouts at `temperature`, `greedy_N` is success at temperature 0
    ([] if it was not run). A rollout that the environment broke counts as a failure; one that reached its deadline
    counts with the world's evaluation at that point. `broken` is the number of both.
    """

    tasks: list[str]
    difficulty_N: list[int]
    score_NR: list[list[float]]
    success_NR: list[list[int]]
    greedy_N: list[int] = field(default_factory=list)
    broken: int = 0
    temperature: float = 1.0

    def per_task(self, name: str) -> np.ndarray:
        """Return one value per task of "avg@k" (success), "best@k", "pass@k", "score" or "greedy"."""
        success_NR = np.asarray(self.success_NR, np.float64).reshape(len(self.tasks), -1)
        kind, _, k = name.partition("@")
        if kind == "avg":
            return success_NR.mean(axis=1)
        if kind == "best":
            return best_at_k(success_NR, int(k))
        if kind == "pass":
            return pass_at_k(success_NR, int(k))
        if kind == "score":
            return np.asarray(self.score_NR, np.float64).reshape(len(self.tasks), -1).mean(axis=1)
        if kind == "greedy":
            return np.asarray(self.greedy_N, np.float64)
        raise ValueError(f"no measure is called {name}")

    @property
    def names(self) -> list[str]:
        """The measures that `per_task` can give."""
        rollouts = len(self.success_NR[0]) if self.success_NR else 0
        names = [f"avg@{rollouts}", f"best@{rollouts}", f"pass@{rollouts}", "score"] if rollouts else []
        return names + (["greedy"] if self.greedy_N else [])


def scores_of(sampled: Sequence[Trajectory], greedy: Sequence[Trajectory] = (), *, temperature: float = 1.0) -> Scores:
    """Return the scores of rollouts: equally many of each task in `sampled`, at most one of each in `greedy`.

    Raises ValueError if the tasks have different numbers of rollouts.
    """
    groups = groups_of(sampled)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) > 1:
        raise ValueError(f"an evaluation needs equally many rollouts of each task, there are {sorted(sizes)}")
    greedy_success = {trajectory.task.id: trajectory.evaluation.success for trajectory in greedy}
    return Scores(
        tasks=list(groups),
        difficulty_N=[group[0].task.difficulty for group in groups.values()],
        score_NR=[[t.evaluation.score for t in group] for group in groups.values()],
        success_NR=[[int(t.evaluation.success) for t in group] for group in groups.values()],
        greedy_N=[int(greedy_success[id]) for id in groups] if greedy_success else [],
        broken=sum(t.broken for t in [*sampled, *greedy]),
        temperature=temperature,
    )


def measures(scores: Scores) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of each measure, its 95% interval (`/low`, `/high`), and success by difficulty."""
    difficulty_N = np.asarray(scores.difficulty_N)
    for name in scores.names:
        value_N = scores.per_task(name)
        low, high = interval(value_N)
        yield name, float(value_N.mean())
        yield f"{name}/low", low
        yield f"{name}/high", high
        if name.startswith(("avg@", "greedy")):
            for level in sorted(set(scores.difficulty_N)):
                yield f"{name}/difficulty_{level}", float(value_N[difficulty_N == level].mean())
    yield "tasks", float(len(scores.tasks))
    yield "broken", float(scores.broken)
