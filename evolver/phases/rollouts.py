"""Phases 2 to 4: play the tasks of a step, score the outcomes, label the turns."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from envs.world import Task
from evolver import grading
from evolver.build import Run
from evolver.config.keys import arguments
from evolver.metrics import Played, timed
from evolver.phases.learning import training_turns
from evolver.pipeline import Pipeline
from evolver.processes import hosts
from evolver.processes.interrupt import RunEnds
from rl.rollout import Job, jobs_of, rollouts
from rl.seeds import seed_of
from rl.trajectory import Sampling, StopReason, Trajectory

T = TypeVar("T")
Chosen = dict[int, list[Task]]  # the tasks of steps, by the number of the step


def sampling_of(config: Any, temperature: float | None = None) -> Sampling:
    """Return how the policy samples: as in training, or at another temperature."""
    sampling = Sampling(**arguments(Sampling, config.rollout))
    return sampling if temperature is None else replace(sampling, temperature=temperature)


def clear_caches(run: Run) -> None:
    """Drop what the engines hold of earlier requests, unless rollouts are in flight, so that later
    samples do not depend on it: those of a resumed run could not."""

    # On the loop of the engines, which may still be dropping a cancelled request.
    async def clear() -> None:
        for engine in run.engines:
            engine.clear_cache()

    if not (run.pipeline and run.pipeline.busy):
        run.stop.finish(clear())


def gather_rollouts(run: Run, jobs: Sequence[Job], phase: str) -> list[Trajectory]:
    """Play jobs with the engine's current weights. The result does not depend on earlier rollouts.

    Each host plays its share, and all get all trajectories. What ends the run on one host ends it
    on all of them.
    """
    return of_all_hosts(run, local_rollouts(run, hosts.share(jobs), phase)())


def of_all_hosts(run: Run, played: Coroutine[Any, Any, Sequence[T]]) -> list[T]:
    """Wait for this host's share, and return all of them in their order."""
    return hosts.gather_shares(hosts.together(lambda: run.stop.run(played)))


def local_rollouts(
    run: Run,
    jobs: Sequence[Job],
    phase: str,
    ended: Callable[[Trajectory], None] | None = None,
) -> Callable[[], Coroutine[Any, Any, list[Trajectory]]]:
    """Return what begins to play jobs on this host. ended: called with each rollout that ends."""

    def show(done: int, total: int, trajectory: Trajectory) -> None:
        if ended:
            ended(trajectory)
        run.progress.phase(phase, done, total)

    run.progress.phase(phase, 0, len(jobs))
    clear_caches(run)
    concurrency = run.config.rollout.concurrency
    return partial(rollouts, jobs, run.actor, run.worlds, concurrency=concurrency, progress=show)


def begun_rollouts(
    run: Run, jobs: Sequence[Job], phase: str, pipeline: Pipeline
) -> Callable[[], list[Trajectory]]:
    """Begin rollouts beside the groups of a pipeline, and return what gives them all, as
    `gather_rollouts` does."""
    play = local_rollouts(run, hosts.share(jobs), phase)
    task = run.stop.finish(pipeline.beside(play()))

    async def played() -> list[Trajectory]:
        return await task

    return lambda: of_all_hosts(run, played())


def graded_rollouts(
    run: Run,
    jobs: Sequence[Job],
    phase: str,
    grader: grading.Grader,
    judge: grading.Judge = grading.grade,
) -> Played:
    """Play jobs as `gather_rollouts` does, and grade each group as soon as it has ended, in the
    process that played it; where a policy of this run plays a role, once all have ended.

    jobs: those of a group one after the other.

    Return also the seconds of the rollouts, and those for which their grades were waited for after
    them. judge: what grades groups, in place.
    """
    if judge is grading.grade and not grader:
        with timed("rollout") as metrics:
            return gather_rollouts(run, jobs, phase), metrics
    groups = [list(members) for _, members in itertools.groupby(jobs, lambda job: job.group)]
    mine = hosts.share(groups)
    sizes = {members[0].group: len(members) for members in mine}
    graded = grading.Grading(partial(judge, grader), sizes, grader.concurrency)
    # What an engine of this run answers meanwhile would change the bits of what it samples.
    at_once = run.responder is None and len(run.engines) == 1
    began, ended = time.monotonic(), 0.0
    jobs = list(itertools.chain(*mine))
    play = local_rollouts(run, jobs, phase, graded.add if at_once else None)

    async def played() -> list[Trajectory]:
        nonlocal ended
        found = await play()
        ended = time.monotonic()
        run.progress.phase("grades")
        if not at_once:
            graded.add(*found)
        return found

    results = iter(hosts.together(lambda: run.stop.run(graded.until_graded(played()))))
    waited = {"time/rollout": ended - began, "time/grade": time.monotonic() - ended}
    shares = [list(itertools.islice(results, size)) for size in sizes.values()]
    return list(itertools.chain(*hosts.gather_shares(shares))), hosts.merge_metrics(waited)


def roll_out(run: Run, chosen: Chosen, step: int) -> Played:
    """Return `rollout.group` graded rollouts of each task of `step`, some of them guided.

    With `rollout.async_depth`, rollouts of later steps are started too and continue while this step
    trains.
    """
    if run.pipeline:
        trajectories, metrics = collect(run, run.pipeline, chosen, step)
    else:
        jobs = list(itertools.chain(*groups_of_jobs(run, chosen[step], step)))
        judge = run.recipe.judge
        trajectories, metrics = graded_rollouts(run, jobs, "rollouts", run.grader, judge)
    metrics["time/tokens_per_s"] = generated(trajectories) / metrics["time/rollout"]
    return trajectories, metrics


def groups_of_jobs(run: Run, chosen: Sequence[Task], step: int) -> list[list[Job]]:
    """Return the jobs of each task's group, drawn for `step`."""
    seed, count = run.config.seed, run.config.rollout.group
    jobs = jobs_of(chosen, count, sampling_of(run.config), seed, "rollout", step, draw=step)
    if run.navigating:
        guide = partial(run.navigating.guide, chosen, count, seed_of(seed, "guide", step))
        guidance = run.on_first(run.navigating.pool, guide)
        for job, shown in zip(jobs, itertools.chain(*guidance), strict=True):
            job.experience = [(e.id, e.content) for e in shown]
    return [jobs[start : start + count] for start in range(0, len(jobs), count)]


def collect(run: Run, pipeline: Pipeline, chosen: Chosen, step: int) -> Played:
    """Start the rollouts of `chosen`, and wait for the groups that `step` trains on, which are
    graded as they end. Each host plays its share of the groups, and all get all trajectories."""
    groups = {ahead: groups_of_jobs(run, chosen[ahead], ahead) for ahead in chosen}
    count = len(hosts.share(range(run.config.rollout.tasks)))
    show = partial(run.progress.phase, "groups")

    async def start_and_wait() -> Played:
        for ahead, jobs in groups.items():
            pipeline.launch(ahead, hosts.share(jobs))
        return await pipeline.collect(step, count, show)

    with timed("wait") as seconds:
        played, metrics = hosts.together(lambda: run.stop.run(start_and_wait()))
        trajectories = list(itertools.chain(*hosts.gather(played)))
    return trajectories, hosts.merge_metrics(metrics) | seconds


def generated(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens that the policy generated."""
    return sum(len(turn.completion.tokens) for turn in training_turns(trajectories))


def show_faults(run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
    """Print one example of each kind of fault, once per run.

    Raises RunEnds if every rollout failed: nothing can be learned, and later steps would be wasted
    in the same way.
    """
    total = len(trajectories)
    failed = [t for t in trajectories if t.broken and not t.error.startswith(grading.UNJUDGED)]
    counts = Counter(fault_of(t) for t in failed)
    for t in failed:
        fault = fault_of(t)
        if len(failed) == total:
            raise RunEnds(f"step {step}: {fault} in every rollout: {t.error}")
        reason = "env_error" if t.failed else "cancelled"
        run.progress.once(
            t.error.partition(":")[0].rstrip("0123456789"),  # without the number of the turn
            f"step {step}: {fault} in {counts[fault]} of {total} rollouts, for example {t.error}."
            f" They do not train (ledger/{reason}); later ones are counted, but not shown",
        )
    restarted = [t.restarted for t in trajectories if t.restarted]
    if restarted:
        run.progress.once(
            "restart",
            f"step {step}: {len(restarted)} of {total} rollouts were started again in another"
            f" world, for example because of {restarted[0]}. Later ones are counted"
            " (rollout/restarts), but not shown",
        )


def fault_of(trajectory: Trajectory) -> str:
    """Return what went wrong in a rollout that did not end by the policy."""
    if trajectory.stop is StopReason.CANCELLED:
        return "rollout.timeout was exceeded"
    of_template = trajectory.error.startswith("template:")
    return f"the {'context template' if of_template else 'environment'} failed"
