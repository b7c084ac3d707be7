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
resamples the same tasks for both. The mean of a task already contains the randomness of its
rollouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rl.trajectory import Trajectory, groups_of

DRAWS = 2000  # bootstrap resamples for one interval
LEVEL = 0.95  # the share of them that an interval holds


def best_at_k(score_NR: ArrayLike, k: int) -> np.ndarray:
    """Return best_N: the mean over 1000 resamples (size k, with replacement) of the best score of
    each task.

    The draws are those of veRL's `bootstrap_metric` (`np.random.seed(42)` for each task, then one
    `choice` per resample), so the results equal those of the published procedure exactly, not only
    in expectation.
    """
    score_NR = np.asarray(score_NR, np.float64)
    pick_Dk = np.random.RandomState(42).randint(0, score_NR.shape[1], size=(1000, k))
    return np.array([score_R[pick_Dk].max(axis=1).mean() for score_R in score_NR])


def pass_at_k(success_NR: ArrayLike, k: int) -> np.ndarray:
    """Return pass_N: the unbiased estimate of P(at least one success among k fresh rollouts).

    Raises ValueError for k > R.
    """
    success_NR = np.asarray(success_NR, bool)
    rollouts = success_NR.shape[1]
    if k > rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts per task; there are {rollouts}")
    failures_N = rollouts - success_NR.sum(axis=1)
    return np.array([1.0 - math.comb(int(n), k) / math.comb(rollouts, k) for n in failures_N])


def scenarios_of(tasks: Sequence[str]) -> list[list[int]]:
    """Return the places of the tasks of each scenario, in order of appearance. AppWorld numbers the
    tasks of a scenario: "82e2fac_1", "82e2fac_2"; a task whose id does not end in "_NUMBER" is a
    scenario of its own."""
    places: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        head, _, number = task.rpartition("_")
        places.setdefault(head if number.isdigit() else task, []).append(place)
    return list(places.values())


def scenario_pass_at_k(tasks: Sequence[str], success_NR: ArrayLike, k: int) -> np.ndarray:
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
    return min((step for step, score in curve.items() if score >= goal), default=None)


def interval(value_N: ArrayLike) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean over tasks, (nan, nan) if there are
    none.

    It covers the choice of tasks, for the runs at hand, and not how runs differ: where those of one
    method deviate by 5 points, the interval of the difference of two runs on 48 tasks holds the
    true difference in about half of the cases (tests/experiments/test_intervals.py).
    """
    value_N = np.asarray(value_N, np.float64)
    tasks = len(value_N)
    if not tasks:
        return math.nan, math.nan
    pick_DN = np.random.default_rng(0).integers(0, tasks, size=(DRAWS, tasks))
    return _middle(value_N[pick_DN].mean(axis=1))


def interval_over_seeds(value_SN: ArrayLike, *, draws: int = DRAWS) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean of (S, N), S training runs on the
    same N tasks.

    Each draw resamples the runs and, independently, the tasks. A bootstrap over few runs is too
    narrow by sqrt(1 - 1/S), so the deviations of the runs from their mean are widened by the
    inverse first. What remains too narrow is the shape: with 3 runs, Student's t would be wider
    still. (nan, nan) without tasks or runs.
    """
    value_SN = np.asarray(value_SN, np.float64)
    runs, tasks = value_SN.shape
    if not value_SN.size:
        return math.nan, math.nan
    mean_N = value_SN.mean(axis=0)
    if runs > 1:
        value_SN = mean_N + math.sqrt(runs / (runs - 1)) * (value_SN - mean_N)
    rng = np.random.default_rng(0)
    runs_DS = rng.multinomial(runs, np.full(runs, 1 / runs), size=draws) / runs
    tasks_DN = rng.multinomial(tasks, np.full(tasks, 1 / tasks), size=draws) / tasks
    return _middle(((runs_DS @ value_SN) * tasks_DN).sum(axis=1))


def _middle(mean_D: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle of the draws."""
    low, high = np.quantile(mean_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@dataclass
class Scores:
    """The results of one evaluation: the input of every estimator, small enough to be stored for
    every step.

    `score_NR` and `success_NR` 0/1 are of rollouts at `temperature`, `greedy_N` is
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
    worlds: list[str] = field(default_factory=list)  # of each task; [] if all are of one

    @property
    def parts(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield (kind, name, which tasks) of each difficulty and each world, for tables."""
        for kind, labels in (("difficulty", self.difficulty_N), ("world", self.worlds)):
            for label in sorted(set[Any](labels)):
                yield kind, str(label), np.array([own == label for own in labels])

    @property
    def by_temperature(self) -> dict[float, np.ndarray]:
        """Success at each temperature above 0 that was run, (N, R)."""
        swept = {float(name): np.array(value) for name, value in self.sweep.items()}
        return swept | {self.temperature: np.array(self.success_NR)}

    def best_temperature(self) -> tuple[float, np.ndarray]:
        """Return the temperature with the highest mean success of those that were run (0: greedy),
        and its success_N.

        It is chosen on the tasks that it is measured on, which favours the policy.
        """
        success = {heat: value_NR.mean(axis=1) for heat, value_NR in self.by_temperature.items()}
        if self.greedy_N:
            success[0.0] = self.per_task("greedy")
        best = max(success, key=lambda temperature: (success[temperature].mean(), -temperature))
        return best, success[best]

    def per_task(self, name: str) -> np.ndarray:
        """Return one value per task of "avg@k" (success), "best@k", "pass@k", "score" or "greedy";
        or one per scenario of "sgc@k". avg@k is the mean of all rollouts, whatever k is."""
        success_NR, score_NR = (
            np.asarray(value, np.float64).reshape(len(self.tasks), -1)
            for value in (self.success_NR, self.score_NR)
        )
        kind, _, k = name.partition("@")
        match kind:
            case "avg":
                return success_NR.mean(axis=1)
            case "best":
                return best_at_k(success_NR, int(k))
            case "pass":
                return pass_at_k(success_NR, int(k))
            case "sgc":
                return scenario_pass_at_k(self.tasks, success_NR, int(k))
            case "score":
                return score_NR.mean(axis=1)
            case "greedy":
                return np.asarray(self.greedy_N, np.float64)
        raise ValueError(f"no measure is called {name}")

    @property
    def names(self) -> list[str]:
        """The measures that `per_task` can give."""
        names = []
        if self.success_NR:
            rollouts = len(self.success_NR[0])
            names = [f"avg@{rollouts}", f"best@{rollouts}", f"pass@{rollouts}", "score"]
        return [*names, "greedy"] if self.greedy_N else names


def scores_of(
    sampled: Sequence[Trajectory],
    greedy: Sequence[Trajectory],
    *,
    temperature: float,
    sweep: Mapping[float, Sequence[Trajectory]],
) -> Scores:
    """Return the scores of rollouts: equally many of each task in `sampled`, at most one of each in
    `greedy`.

    sweep: {temperature: rollouts}, of the same tasks. Raises ValueError if tasks have different
    numbers of rollouts.
    """
    groups = list(groups_of(sampled).values())
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(
            f"an evaluation needs equally many rollouts of each task, there are {sorted(sizes)}"
        )
    tasks = [group[0].task for group in groups]
    worlds = [task.env for task in tasks]
    greedily = {trajectory.task.id: int(trajectory.success) for trajectory in greedy}
    return Scores(
        tasks=[task.id for task in tasks],
        difficulty_N=[task.difficulty for task in tasks],
        score_NR=[[t.evaluation.score for t in group] for group in groups],
        success_NR=_successes(sampled),
        greedy_N=[greedily[task.id] for task in tasks] if greedily else [],
        broken=sum(t.broken for t in [*sampled, *greedy]),
        temperature=temperature,
        sweep={f"{t:g}": _successes(rollouts) for t, rollouts in sweep.items()},
        worlds=worlds if len(set(worlds)) > 1 else [],
    )


def _successes(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return success, 0 or 1, of the rollouts of each task."""
    groups = groups_of(trajectories).values()
    return [[int(t.success) for t in group] for group in groups]


def measures(*scores: Scores) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of each measure and its 95% interval (`/low`, `/high`), also by world, and
    of success by difficulty.

    scores: of one evaluation, or of several that differ in the seed only. Then values are means
    over the seeds (`broken` is their sum, and what the sweep of temperatures gives is of the first,
    which alone has one), and `/sd` is the standard deviation (n - 1) of the evaluations.
    """
    first = scores[0]
    for name in first.names:
        value_SN = np.stack([s.per_task(name) for s in scores if name in s.names])
        value_N = value_SN.mean(axis=0)
        yield from _with_interval(name, value_N)
        if len(value_SN) > 1:
            yield f"{name}/sd", float(value_SN.mean(axis=1).std(ddof=1))
        for kind, part, tasks_N in first.parts:
            if kind == "world":
                yield from _with_interval(f"{name}/{kind}_{part}", value_N[tasks_N])
            elif name.startswith(("avg@", "greedy")):
                yield f"{name}/{kind}_{part}", float(value_N[tasks_N].mean())
    for name, success_NR in first.sweep.items():
        yield f"temperature/{name}", float(np.mean(success_NR))
    if first.sweep:
        temperature, best_N = first.best_temperature()
        yield "best_temperature", temperature
        yield "best_temperature/avg", float(best_N.mean())
    yield "tasks", float(len(first.tasks))
    yield "broken", float(sum(s.broken for s in scores))
    if len(scores) > 1:
        yield "seeds", float(len(scores))


def _with_interval(name: str, value_N: np.ndarray) -> Iterator[tuple[str, float]]:
    low, high = interval(value_N)
    yield name, float(value_N.mean())
    yield f"{name}/low", low
    yield f"{name}/high", high
