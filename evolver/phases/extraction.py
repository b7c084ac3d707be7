"""Phase 7: attempts become experience, and the results of synthetic tasks are recorded."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from envs.world import WorldError
from evolver.build import Run
from evolver.metrics import Metrics, Played, timed
from evolver.navigating.guidance import Navigating
from evolver.phases import tasks
from evolver.phases.rollouts import graded_rollouts, sampling_of
from evolver.questioning import is_verified
from evolver.replaying import attempt
from rl.rollout import jobs_of
from rl.trajectory import Trajectory


def fill(run: Run) -> Metrics:
    """Make the first experience from unguided attempts at training tasks, unless a directory
    provides it."""
    c, navigating, metrics = run.config.navigating, run.navigating, Metrics()
    if navigating is None:
        return metrics
    if (c.rollouts or c.solutions) and not c.pool:
        with timed("pool") as metrics:
            solved, counts = solutions(run)
            attempts = first_attempts(run, navigating) + solved
            run.on_first(navigating.pool, lambda: navigating.learn(attempts, step=0))
        metrics |= counts
    return metrics | navigating.metrics()


def first_attempts(run: Run, navigating: Navigating) -> list[Trajectory]:
    """Return `navigating.rollouts` unguided rollouts of each task that the first experience is made
    from.

    Outcomes are scored, and turns are labelled if the extractor reads labels: by a language model
    they are not cheap.
    """
    c, grader = run.config, run.grader
    if not getattr(navigating.extractor, "reads_labels", True):
        grader = replace(grader, turns=None)
    chosen = tasks.for_experience(run)
    jobs = jobs_of(chosen, c.navigating.rollouts, sampling_of(c), c.seed, "pool")
    graded, _ = graded_rollouts(run, jobs, "first experience", grader)
    grader.metrics()  # the judges' figures are those of steps
    return graded


def solutions(run: Run) -> Played:
    """Return the explorer's own solutions of the invented tasks as attempts at them, if
    `navigating.solutions`.

    The policy solves few of the tasks that need what it does not know, so its attempts alone teach
    nothing about them. A solution that fails when it is played again, or breaks the world, is left
    out and counted.
    """
    c, pool = run.config.navigating, run.tasks.pool
    if not c.solutions or pool is None:
        return [], Metrics()
    invented = [task for task in pool.tasks.values() if task.reference and is_verified(task)]
    solved = []
    with contextlib.closing(run.make_world()) as world:
        for task in invented:
            with contextlib.suppress(WorldError):
                trajectory = attempt(world, task, task.reference, rollout=c.rollouts)
                if trajectory.success:
                    solved.append(trajectory)
    return solved, {
        "navigating/solutions": len(solved),
        "navigating/solutions_failed": len(invented) - len(solved),
    }


def remember(run: Run, trajectories: Sequence[Trajectory], step: int) -> Metrics:
    """Record the results of tasks and of experience, and extract more every
    `navigating.every` steps."""
    every, pool, navigating = run.config.navigating.every, run.tasks.pool, run.navigating
    metrics = Metrics()
    # A branch begins where another rollout led it, so it says less about its task.
    whole = [t for t in trajectories if not t.branched]
    run.sampler.record(whole)
    if pool:
        unguided = [t for t in whole if not (t.broken or t.guided)]
        pool.record((t.task.id, t.success) for t in unguided)
        metrics |= pool.metrics()
    if navigating:
        navigating.record(trajectories)
        if every and step % every == 0:
            with timed("memory") as seconds:
                run.on_first(navigating.pool, lambda: navigating.learn(trajectories, step=step))
            metrics |= seconds
        metrics |= navigating.metrics()
    return metrics
