"""Phases 2 to 4: play the tasks of a step, score the outcomes, label the turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from envs.world import Task
from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics, timed
from evolver.phases import tasks
from evolver.phases.play import play, sampling
from evolver.processes import hosts
from evolver.processes.interrupt import RunEnds
from rl.rollout import Job, rollouts
from rl.samples import no_signal
from rl.seeds import seed_of
from rl.trajectory import StopReason, Trajectory, groups_of


def roll_out(
    run: Run, chosen: dict[int, list[Task]], step: int
) -> tuple[list[Trajectory], Metrics]:
    """Return `rollout.group` graded rollouts of each task of `step`, some of them guided.

    With `rollout.async_depth`, rollouts of later steps are started too and continue while this step
    trains.
    """
    if run.pipeline:
        trajectories, metrics = collect(run, chosen, step)
    else:
        jobs = [job for group in jobs_of(run, chosen[step], step) for job in group]
        with timed("rollout") as metrics:
            trajectories = play(run, jobs, "rollouts")
        run.progress.phase("grades")
        trajectories, graded = grading.grade_all(run.grader, trajectories)
        metrics |= graded
    metrics["time/tokens_per_s"] = generated(trajectories) / metrics["time/rollout"]
    return trajectories, metrics


def refill(
    run: Run, trajectories: list[Trajectory], step: int, metrics: Metrics
) -> tuple[list[Trajectory], Metrics]:
    """Replace groups without signal by rollouts of further tasks, in at most `rollout.refill`
    rounds.

    This is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). Groups without signal stay in
    the ledger. Returns all trajectories of the step and its metrics, with the judges' figures;
    `metrics` are those of the first round.
    """
    c, rounds = run.config.rollout, 0
    while rounds < c.refill:
        groups = groups_of(trajectories)
        drawn = {id for id, _ in groups}
        missing = c.tasks - sum(not no_signal(group) for group in groups.values())
        more = (
            tasks.draw(run, rounds, missing, seed_of(run.config.seed, "refill", step), drawn)
            if missing
            else []
        )
        if not more:
            break
        played, measured = roll_out(run, {step: more}, step)
        grading.assign(run.config, run.estimator, played, step)
        trajectories, rounds = [*trajectories, *played], rounds + 1
        seconds = {
            k: metrics.get(k, 0.0) + measured[k]
            for k in ("time/rollout", "time/grade")
            if k in measured
        }
        metrics = metrics | measured | seconds
    if c.refill:
        speed = generated(trajectories) / metrics["time/rollout"]
        metrics = metrics | {"rollout/refills": rounds, "time/tokens_per_s": speed}
    return trajectories, metrics | hosts.merge_metrics(run.grader.metrics())


def generated(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens that the policy generated."""
    return sum(len(turn.completion.tokens) for t in trajectories for turn in t.turns)


def show_faults(run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
    """Print one example of each kind of fault, once per run.

    Raises RunEnds if every rollout failed: nothing can be learned, and later steps would be wasted
    in the same way.
    """
    failed = [
        (t, fault_of(t))
        for t in trajectories
        if t.broken and not t.error.startswith(grading.UNJUDGED)
    ]
    counts = Counter(fault for _, fault in failed)
    for trajectory, fault in failed:
        if len(failed) == len(trajectories):
            raise RunEnds(f"step {step}: {fault} in every rollout: {trajectory.error}")
        fate = "cancelled" if trajectory.stop is StopReason.CANCELLED else "env_error"
        run.progress.once(
            trajectory.error.partition(":")[0],
            f"step {step}: {fault} in {counts[fault]} of {len(trajectories)} rollouts, for example"
            f" {trajectory.error}. They do not train (ledger/{fate}); later ones are counted, but not shown",
        )
    restarted = [t.restarted for t in trajectories if t.restarted]
    if restarted:
        run.progress.once(
            "restart",
            f"step {step}: {len(restarted)} of {len(trajectories)} rollouts were started again in another world, for"
            f" example because of {restarted[0]}. Later ones are counted (rollout/restarts), but not shown",
        )


def fault_of(trajectory: Trajectory) -> str:
    """Return what went wrong in a rollout that did not end by the policy."""
    if trajectory.stop is StopReason.CANCELLED:
        return "rollout.timeout was exceeded"
    return f"the {'context template' if trajectory.error.startswith('template:') else 'environment'} failed"


def jobs_of(run: Run, chosen: Sequence[Task], step: int) -> list[list[Job]]:
    """Return the jobs of each task's group, drawn for `step`."""
    seed, group = run.config.seed, run.config.rollout.group
    guidance = [[[] for _ in range(group)] for _ in chosen]
    if run.navigating:
        guide = partial(run.navigating.guide, chosen, group, seed_of(seed, "guide", step))
        guidance = hosts.on_first(run.navigating, guide)
    return [
        [
            Job(
                task,
                i,
                seed_of(seed, "rollout", step, task.id, i),
                sampling(run.config),
                [(e.id, e.content) for e in shown],
                draw=step,
            )
            for i, shown in enumerate(row)
        ]
        for task, row in zip(chosen, guidance)
    ]


def collect(run: Run, chosen: dict[int, list[Task]], step: int) -> tuple[list[Trajectory], Metrics]:
    """Start the rollouts of `chosen`, and wait for the groups that `step` trains on, which are
    graded as they end.

    `time/rollout` is the time since the groups of the previous step were collected.
    """
    pipeline = run.pipeline
    began = pipeline.collected or time.monotonic()
    groups = {ahead: jobs_of(run, chosen[ahead], ahead) for ahead in chosen}

    async def start_and_wait() -> tuple[list[Trajectory], int]:
        play_group = partial(
            rollouts, actor=run.actor, worlds=run.worlds, concurrency=pipeline.places
        )
        for ahead, jobs in groups.items():
            pipeline.launch(ahead, jobs, play_group, partial(grading.grade, run.grader))
        return await pipeline.collect(
            step, run.config.rollout.tasks, partial(run.progress.phase, "groups")
        )

    with timed("wait") as metrics:
        trajectories, metrics["async/late"] = run.stop.run(start_and_wait())
    metrics["time/rollout"] = pipeline.collected - began
    return trajectories, metrics | pipeline.figures()
