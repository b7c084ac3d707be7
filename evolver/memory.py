"""Phase 9: attempts become experience, and the results of synthetic tasks are recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evolver import credit, hosts
from evolver.metrics import Metrics, mean, timed
from evolver.navigating.memory import success_without
from evolver.rollouts import play, sampling
from evolver.run import Run
from rl.rollout import Job
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of


def fill(run: Run) -> Metrics:
    """Make the first experience from unguided attempts at training tasks, unless a directory provides it."""
    c, seed, metrics = run.config.navigating, run.config.seed, Metrics()
    if run.navigating is None:
        return metrics
    if c.rollouts and not c.pool:
        tasks = [*run.tasks.originals, *(run.tasks.pool.tasks.values() if run.tasks.pool else ())]
        order = np.random.default_rng(seed_of(seed, "pool")).permutation(len(tasks))[: c.tasks]
        jobs = [
            Job(tasks[n], i, seed_of(seed, "pool", tasks[n].id, i), sampling(run.config))
            for n in order
            for i in range(c.rollouts)
        ]
        with timed("pool") as metrics:
            trajectories = play(run, jobs, "first experience")
            trajectories, _ = credit.grade_all(run.grader, trajectories)
            hosts.on_first(run.navigating, lambda: run.navigating.learn(trajectories, step=0))
    return metrics | run.navigating.metrics()


def remember(run: Run, trajectories: Sequence[Trajectory], step: int) -> Metrics:
    """Record the results of synthetic tasks, and extract experience every `navigating.every` steps."""
    every, metrics = run.config.navigating.every, Metrics()
    if run.tasks.pool is not None:
        run.tasks.pool.record((t.task.id, t.evaluation.success) for t in trajectories if not t.broken)
        metrics |= run.tasks.pool.metrics()
    if run.navigating is not None:
        if every and step % every == 0:
            with timed("memory") as seconds:
                hosts.on_first(run.navigating, lambda: run.navigating.learn(trajectories, step=step))
            metrics |= seconds
        metrics |= run.navigating.metrics() | guided_rates(trajectories)
    return metrics


def guided_rates(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the success rate of a step's guided rollouts and the rate expected from the unguided ones in their groups.

    The pool's own counts, which rank experiences, cover only the steps that experience is extracted from. These two
    rates cover every step and rank nothing. Broken rollouts are left out; without guided ones the result is empty.
    """
    won, expected = [], []
    for group in groups_of(t for t in trajectories if not t.broken).values():
        guided = [t for t in group if t.guided]
        won += [t.evaluation.success for t in guided]
        expected += [success_without(group)] * len(guided)
    rates = {"navigating/step_win_rate": mean(won), "navigating/step_expected_rate": mean(expected)}
    return Metrics(rates if won else {})
