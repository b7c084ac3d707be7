"""Phase 1: choose the tasks of a step: original ones of the world and synthetic ones of self-questioning."""

from __future__ import annotations

from collections.abc import Collection

from envs.world import Task
from evolver import hosts
from evolver.config import originals_needed
from evolver.metrics import Metrics, timed
from evolver.questioning import mixture
from evolver.run import Run, RunError
from rl.seeds import seed_of


def check(run: Run) -> None:
    """Raise RunError if the world has too few tasks. The config check cannot ask workers or services."""
    needed, there = originals_needed(run.config), len(run.tasks.originals)
    if there < needed:
        raise RunError(
            f"a step needs {needed} different original tasks, and there are {there}: lower config.rollout.tasks"
        )
    if run.config.eval.every and not run.tasks.held_out:
        raise RunError(
            f"config.eval.split={run.config.eval.split} has no tasks: set config.eval.every=0 or another split"
        )


def explore(run: Run, step: int = 0) -> Metrics:
    """Invent synthetic tasks: the first ones at step 0, unless a file provides them, and a refresh later.

    Raises RunError if there are fewer than a step needs.
    """
    c, pool, metrics = run.config.questioning, run.tasks.pool, Metrics()
    if pool is None:
        return metrics
    if step or not c.tasks:
        run.progress.phase("exploring")
        seed, budget = seed_of(run.config.seed, "explore", step), c.refresh if step else c.budget
        with timed("explore") as metrics:
            hosts.on_first(pool, lambda: pool.grow(run.tasks.explorer, run.make_world, budget, seed))
    needed = round(c.share * run.config.rollout.tasks)
    if len(pool.tasks) < needed:
        there = f"there are {len(pool.tasks)} synthetic tasks and a step needs {needed}"
        if c.tasks or c.budget < needed:
            raise RunError(f"{there}: raise config.questioning.budget or lower config.questioning.share")
        raise RunError(
            f"{there}: exploring found no more ({pool.rejections()}). Try another explorer or model, or lower"
            " config.questioning.share"
        )
    return metrics if step else metrics | pool.metrics()


def choose(run: Run, step: int) -> tuple[dict[int, list[Task]], Metrics]:
    """Return {step: its tasks}; with `rollout.async_depth`, also those of later steps that are to be started now.

    Every `questioning.every` steps the synthetic tasks are refreshed first.
    """
    every, metrics, chosen = run.config.questioning.every, Metrics(), {}
    pipeline = run.actor.pipeline
    for ahead in pipeline.ahead(step, run.config.steps) if pipeline else (step,):
        if run.tasks.pool is not None and every and ahead > 1 and (ahead - 1) % every == 0:
            metrics |= explore(run, ahead)
        chosen[ahead] = draw(run, ahead - 1, run.config.rollout.tasks, seed_of(run.config.seed, "tasks"))
    return chosen, metrics


def draw(run: Run, place: int, n: int, seed: int, without: Collection[str] = ()) -> list[Task]:
    """Return n tasks in the mixture of the run, the `place`-th of a sequence of draws.

    Tasks whose ids are in `without` are left out; where too few others remain, fewer tasks are returned.
    """
    pool, share = run.tasks.pool, run.config.questioning.share
    originals = [task for task in run.tasks.originals if task.id not in without]
    if pool is None:
        n = min(n, len(originals)) if without else n
        return mixture(originals, [], step=place, n=n, share=0.0, seed=seed)
    synthetic = [task for task in pool.tasks.values() if task.id not in without]
    while without and (round(share * n) > len(synthetic) or n - round(share * n) > len(originals)):
        n -= 1
    learnable = run.config.questioning.learnable
    return pool.mixture(originals, synthetic, step=place, n=n, share=share, seed=seed, learnable=learnable)
