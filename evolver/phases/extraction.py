"""Phase 7: attempts become experience, and the results of synthetic tasks are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from envs.world import WorldError
from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics, timed
from evolver.phases import tasks
from evolver.phases.play import play, sampling
from evolver.processes import hosts
from evolver.questioning import is_verified
from evolver.replaying import attempt
from rl.rollout import Job
from rl.seeds import seed_of
from rl.trajectory import Trajectory


def fill(run: Run) -> Metrics:
    """Make the first experience from unguided attempts at training tasks, unless a directory
    provides it."""
    c, metrics = run.config.navigating, Metrics()
    if run.navigating is None:
        return metrics
    if (c.rollouts or c.solutions) and not c.pool:
        with timed("pool") as metrics:
            solved, counts = solutions(run)
            attempts = first_attempts(run) + solved
            hosts.on_first(run.navigating, lambda: run.navigating.learn(attempts, step=0))
        metrics |= counts
    return metrics | run.navigating.metrics()


def first_attempts(run: Run) -> list[Trajectory]:
    """Return `navigating.rollouts` unguided rollouts of each task that the first experience is made
    from.

    Outcomes are scored, and turns are labelled if the extractor reads labels: by a language model
    they are not cheap.
    """
    seed, count = run.config.seed, run.config.navigating.rollouts
    jobs = [
        Job(task, i, seed_of(seed, "pool", task.id, i), sampling(run.config))
        for task in tasks.for_experience(run)
        for i in range(count)
    ]
    labelled = getattr(run.navigating.extractor, "reads_labels", True)
    grader = run.grader if labelled else replace(run.grader, turns=None)
    graded, _ = grading.grade_all(grader, play(run, jobs, "first experience"))
    grader.metrics()  # the judges' figures are those of steps
    return graded


def solutions(run: Run) -> tuple[list[Trajectory], Metrics]:
    """Return the explorer's own solutions of the invented tasks as attempts at them, if
    `navigating.solutions`.

    The policy solves few of the tasks that need what it does not know, so its attempts alone teach
    nothing about them. A solution that fails when it is played again, or breaks the world, is left
    out and counted.
    """
    if not (run.config.navigating.solutions and run.tasks.pool):
        return [], Metrics()
    invented = [
        task for task in run.tasks.pool.tasks.values() if task.reference and is_verified(task)
    ]
    found: list[Trajectory] = []
    with closing(run.make_world()) as world:
        for task in invented:
            with contextlib.suppress(WorldError):
                found.append(
                    attempt(world, task, task.reference, rollout=run.config.navigating.rollouts)
                )
    solved = [trajectory for trajectory in found if trajectory.evaluation.success]
    counts = {
        "navigating/solutions": len(solved),
        "navigating/solutions_failed": len(invented) - len(solved),
    }
    return solved, Metrics(counts)


def remember(run: Run, trajectories: Sequence[Trajectory], step: int) -> Metrics:
    """Record the results of synthetic tasks and of experience, and extract more every
    `navigating.every` steps."""
    every, metrics = run.config.navigating.every, Metrics()
    if run.tasks.pool is not None:
        run.tasks.pool.record(
            (t.task.id, t.evaluation.success) for t in trajectories if not (t.broken or t.guided)
        )
        metrics |= run.tasks.pool.metrics()
    if run.navigating is not None:
        run.navigating.record(trajectories)
        if every and step % every == 0:
            with timed("memory") as seconds:
                hosts.on_first(
                    run.navigating, lambda: run.navigating.learn(trajectories, step=step)
                )
            metrics |= seconds
        metrics |= run.navigating.metrics()
    return metrics
