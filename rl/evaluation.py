"""Evaluation of a policy: avg@k, best@k and pass@k with confidence intervals, and paired
comparisons.

Three different measures of `R` rollouts of each of `N` tasks:

- avg@k: the mean success (the mean score is called `score`);
- best@k: the expected best success of k rollouts *drawn with replacement* from the R rollouts (1000
  draws, seed 42), as the reference and the paper report it; for c successes among R = k it tends to
  1 - (1 - c/k)^k, below the true pass@k;
- pass@k: the unbiased estimate of the probability of at least one success among k fresh rollouts,
  1 - C(R-c, k) / C(R, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

Tasks are the unit of uncertainty: intervals resample tasks, and a comparison of two policies
resamples the same tasks for both. `Resample` names the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl.trajectory import Trajectory, groups_of

DRAWS = 2000  # bootstrap resamples for one interval

# The units that a bootstrap resamples.
# "tasks": tasks with the rollouts they have. The interval is for new tasks: the mean of a task already contains
#   the randomness of its rollouts.
# "rollouts": the rollouts of each task, so that differences between tasks do not count. The interval is for the same
#   tasks under another seed. With R rollouts per task it is too narrow by a factor sqrt(1 - 1/R).
# "both": tasks, then their rollouts. It counts the randomness of rollouts twice, so it is the widest.
Resample = Literal["tasks", "rollouts", "both"]


def best_at_k(score_NR: np.ndarray, k: int, *, draws: int = 1000, seed: int = 42) -> np.ndarray:
    """Return best_N: the mean over `draws` resamples (size k, with replacement) of the best score
    of each task.

    The draws are those of veRL's `bootstrap_metric` (`np.random.seed(seed)` for each task, then one
    `choice` per resample), so the results equal those of the published procedure exactly, not only
    in expectation.
    """
    score_NR = np.asarray(score_NR, np.float64)
    pick_Dk = np.random.RandomState(seed).randint(0, score_NR.shape[1], size=(draws, k))
    return (
        np.stack([score_R[pick_Dk].max(axis=1).mean() for score_R in score_NR])
        if len(score_NR)
        else np.zeros(0)
    )


def pass_at_k(success_NR: np.ndarray, k: int) -> np.ndarray:
    """Return pass_N: the unbiased estimate of P(at least one success among k fresh rollouts).

    Raises ValueError for k > R.
    """
    success_NR = np.asarray(success_NR, bool)
    rollouts = success_NR.shape[1]
    if k > rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts per task; there are {rollouts}")
    wins_N = success_NR.sum(axis=1)
    return np.array(
        [1.0 - math.comb(rollouts - int(c), k) / math.comb(rollouts, k) for c in wins_N]
    )


def scenarios_of(tasks: Sequence[str]) -> list[list[int]]:
    """Return the places of the tasks of each scenario, in order of appearance. AppWorld numbers the
    tasks of a
    scenario: "82e2fac_1", "82e2fac_2"; a task whose id does not end in "_NUMBER" is a scenario of
    its own."""
    places: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        head, _, number = task.rpartition("_")
        places.setdefault(head if number.isdigit() else task, []).append(place)
    return list(places.values())


def scenario_pass_at_k(tasks: Sequence[str], success_NR: np.ndarray, k: int) -> np.ndarray:
    """Return one value per scenario: the unbiased estimate of P(k fresh rollouts of each of its
    tasks solve them all).

    AppWorld's SGC is the mean of these (Trivedi et al. 2024, arXiv 2407.18901). Rollouts of
    different tasks are independent, so it is the product of the tasks' `pass_at_k`; for k = R it is
    1 where every task was solved, else 0.
    """
    pass_N = pass_at_k(success_NR, k)
    return np.array([np.prod(pass_N[places]) for places in scenarios_of(tasks)])


def steps_to(curve: Mapping[int, float], goal: float) -> int | None:
    """Return the first evaluated step with a score of at least `goal`, None if there is none.
    curve: {step: score}."""
    return next((step for step, score in sorted(curve.items()) if score >= goal), None)


def mean_height(curve: Mapping[int, float]) -> float:
    """Return the area under {step: score} over the range of its steps, by trapezoids; nan for fewer
    than two steps."""
    steps = sorted(curve)
    if len(steps) < 2:
        return math.nan
    score_E = np.array([curve[step] for step in steps])
    return float((np.diff(steps) * (score_E[1:] + score_E[:-1]) / 2).sum() / (steps[-1] - steps[0]))


def interval(
    value: np.ndarray,
    *,
    resample: Resample = "tasks",
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean over tasks, (nan, nan) if there are
    none.

    value: (N,), one value per task, or (N, R), one per rollout, which `resample` other than "tasks"
    requires.
    """
    mean_D = _drawn_means([value], resample, draws, seed)[0]
    low, high = np.quantile(mean_D, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval_over_seeds(
    value_SN: np.ndarray, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of (S, N), S training runs on the same N
    tasks.

    Each draw resamples the runs and, independently, the tasks. A bootstrap over few runs is too
    narrow by sqrt(1 - 1/S), so the deviations of the runs from their mean are widened by the
    inverse first. What remains too
    narrow is the shape: with 3 runs, Student's t would be wider still. (nan, nan) without tasks or
    runs.
    """
    value_SN = np.asarray(value_SN, np.float64)
    runs, tasks = value_SN.shape
    if not runs or not tasks:
        return math.nan, math.nan
    mean_N = value_SN.mean(axis=0)
    if runs > 1:
        value_SN = mean_N + math.sqrt(runs / (runs - 1)) * (value_SN - mean_N)
    rng = np.random.default_rng(seed)
    runs_DS = rng.multinomial(runs, np.full(runs, 1 / runs), size=draws) / runs
    tasks_DN = rng.multinomial(tasks, np.full(tasks, 1 / tasks), size=draws) / tasks
    mean_D = ((runs_DS @ value_SN) * tasks_DN).sum(axis=1)
    low, high = np.quantile(mean_D, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(
    before: np.ndarray, after: np.ndarray, *, resample: Resample = "tasks", level: float = 0.95, draws: int = DRAWS,
    seed: int = 0,
) -> tuple[float, float, float]:  # fmt: skip
    """Return (mean, low, high) of after - before on the same tasks in the same order, each (N,) or
    (N, R).

    This interval is much tighter than two separate ones.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape[:1] != after.shape[:1]:
        raise ValueError(
            f"a paired comparison needs the same tasks: {before.shape} before, {after.shape} after"
        )
    difference_N = _per_task(after) - _per_task(before)
    if resample == "tasks":
        low, high = interval(difference_N, level=level, draws=draws, seed=seed)
        return float(difference_N.mean()), low, high
    before_D, after_D = _drawn_means([before, after], resample, draws, seed)
    low, high = np.quantile(after_D - before_D, [(1 - level) / 2, (1 + level) / 2])
    return float(difference_N.mean()), float(low), float(high)


def _per_task(value: np.ndarray) -> np.ndarray:
    return value if value.ndim == 1 else value.mean(axis=1)


def _drawn_means(
    values: Sequence[np.ndarray], resample: Resample, draws: int, seed: int
) -> list[np.ndarray]:
    """Return the means over tasks of `draws` resamples, (D,), of each array; all arrays get the
    same tasks."""
    if resample not in ("tasks", "rollouts", "both"):
        raise ValueError(f"resample={resample!r}: choose tasks, rollouts or both")
    values = [np.asarray(value, np.float64) for value in values]
    if resample != "tasks" and any(value.ndim != 2 for value in values):
        raise ValueError(
            f"resample={resample!r} needs one value per rollout, (N, R), not one per task"
        )
    tasks, rng = len(values[0]), np.random.default_rng(seed)
    if not tasks:
        return [np.full(draws, np.nan) for _ in values]
    if resample == "tasks":
        pick_DN = rng.integers(0, tasks, size=(draws, tasks))
        return [_per_task(value)[pick_DN].mean(axis=1) for value in values]
    means = [np.zeros(draws) for _ in values]
    for d in range(draws):
        pick_N1 = (
            rng.integers(0, tasks, size=tasks)[:, None]
            if resample == "both"
            else np.arange(tasks)[:, None]
        )
        for mean_D, value_NR in zip(means, values):
            mean_D[d] = value_NR[
                pick_N1, rng.integers(0, value_NR.shape[1], size=value_NR.shape)
            ].mean()
    return means


@dataclass
class Scores:
    """The results of one evaluation: the input of every estimator, small enough to be stored for
    every step.

    `score_NR` in [0, 1] and `success_NR` 0/1 are of rollouts at `temperature`, `greedy_N` is
    success at temperature 0 ([] if it was not run). `sweep` holds success at further temperatures,
    {temperature: success_NR}. A rollout that the environment broke counts as a failure; a cancelled
    one counts with the world's evaluation at its deadline. `broken` is the number of both, without
    those of the sweep.
    """

    tasks: list[str]
    difficulty_N: list[int]
    score_NR: list[list[float]]
    success_NR: list[list[int]]
    greedy_N: list[int] = field(default_factory=list)
    broken: int = 0
    temperature: float = 1.0
    sweep: dict[str, list[list[int]]] = field(default_factory=dict)

    def best_temperature(self) -> tuple[float, np.ndarray]:
        """Return the temperature with the highest mean success of those that were run (0: greedy),
        and its success_N.

        It is chosen on the tasks that it is measured on, which favours the policy.
        """
        success = {
            float(name): np.asarray(value, np.float64).mean(axis=1)
            for name, value in self.sweep.items()
        }
        success[self.temperature] = self.per_task("avg@")
        if self.greedy_N:
            success[0.0] = self.per_task("greedy")
        best = max(success, key=lambda temperature: (success[temperature].mean(), -temperature))
        return best, success[best]

    def per_task(self, name: str) -> np.ndarray:
        """Return one value per task of "avg@k" (success), "best@k", "pass@k", "score" or "greedy";
        or one per scenario of "sgc@k". avg@k is the mean of all rollouts, whatever k is."""
        success_NR = np.asarray(self.success_NR, np.float64).reshape(len(self.tasks), -1)
        kind, _, k = name.partition("@")
        if kind == "avg":
            return success_NR.mean(axis=1)
        if kind == "best":
            return best_at_k(success_NR, int(k))
        if kind == "pass":
            return pass_at_k(success_NR, int(k))
        if kind == "sgc":
            return scenario_pass_at_k(self.tasks, success_NR, int(k))
        if kind == "score":
            return np.asarray(self.score_NR, np.float64).reshape(len(self.tasks), -1).mean(axis=1)
        if kind == "greedy":
            return np.asarray(self.greedy_N, np.float64)
        raise ValueError(f"no measure is called {name}")

    def per_rollout(self, name: str) -> np.ndarray | None:
        """Return one value per rollout, (N, R), of "avg@k" and "score", which are their means; None
        of others."""
        value_NR = {"avg": self.success_NR, "score": self.score_NR}.get(name.partition("@")[0])
        return (
            None
            if value_NR is None
            else np.asarray(value_NR, np.float64).reshape(len(self.tasks), -1)
        )

    @property
    def names(self) -> list[str]:
        """The measures that `per_task` can give."""
        rollouts = len(self.success_NR[0]) if self.success_NR else 0
        names = (
            [f"avg@{rollouts}", f"best@{rollouts}", f"pass@{rollouts}", "score"] if rollouts else []
        )
        return names + (["greedy"] if self.greedy_N else [])


def scores_of(
    sampled: Sequence[Trajectory],
    greedy: Sequence[Trajectory] = (),
    *,
    temperature: float = 1.0,
    sweep: Mapping[float, Sequence[Trajectory]] | None = None,
) -> Scores:
    """Return the scores of rollouts: equally many of each task in `sampled`, at most one of each in
    `greedy`.

    sweep: {temperature: rollouts}, of the same tasks. Raises ValueError if tasks have different
    numbers of rollouts.
    """
    groups = list(groups_of(sampled).values())
    others = {f"{t:g}": list(groups_of(rollouts).values()) for t, rollouts in (sweep or {}).items()}
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(
            f"an evaluation needs equally many rollouts of each task, there are {sorted(sizes)}"
        )
    greedy_success = {trajectory.task.id: trajectory.evaluation.success for trajectory in greedy}
    return Scores(
        tasks=[group[0].task.id for group in groups],
        difficulty_N=[group[0].task.difficulty for group in groups],
        score_NR=[[t.evaluation.score for t in group] for group in groups],
        success_NR=[[int(t.evaluation.success) for t in group] for group in groups],
        greedy_N=[int(greedy_success[group[0].task.id]) for group in groups]
        if greedy_success
        else [],
        broken=sum(t.broken for t in [*sampled, *greedy]),
        temperature=temperature,
        sweep={
            name: [[int(t.evaluation.success) for t in group] for group in rows]
            for name, rows in others.items()
        },
    )


def measures(*scores: Scores, resample: Resample = "tasks") -> Iterator[tuple[str, float]]:
    """Yield (key, value) of each measure, its 95% interval (`/low`, `/high`), and success by
    difficulty.

    scores: of one evaluation, or of several that differ in the seed only. Then values are means
    over the seeds (`broken` is their sum, and what the sweep of temperatures gives is of the first,
    which alone has one), and `/sd` is the standard deviation (n - 1) of the evaluations. resample:
    for the intervals of "avg@k" and "score"; those of the other measures resample tasks.
    """
    first = scores[0]
    difficulty_N = np.asarray(first.difficulty_N)
    for name in first.names:
        value_SN = np.stack([s.per_task(name) for s in scores if name in s.names])
        value_N = value_SN.mean(axis=0)
        rollouts = [s.per_rollout(name) for s in scores]
        if resample == "tasks" or rollouts[0] is None:
            low, high = interval(value_N)
        else:
            low, high = interval(np.concatenate(rollouts, axis=1), resample=resample)
        yield name, float(value_N.mean())
        yield f"{name}/low", low
        yield f"{name}/high", high
        if len(value_SN) > 1:
            yield f"{name}/sd", float(value_SN.mean(axis=1).std(ddof=1))
        if name.startswith(("avg@", "greedy")):
            for level in sorted(set(first.difficulty_N)):
                yield f"{name}/difficulty_{level}", float(value_N[difficulty_N == level].mean())
    for name in first.sweep:
        yield (
            f"temperature/{name}",
            float(np.mean([s.sweep[name] for s in scores if name in s.sweep])),
        )
    if first.sweep:
        yield "best_temperature", first.best_temperature()[0]
        yield "best_temperature/avg", float(first.best_temperature()[1].mean())
    yield "tasks", float(len(first.tasks))
    yield "broken", float(sum(s.broken for s in scores))
    if len(scores) > 1:
        yield "seeds", float(len(scores))
