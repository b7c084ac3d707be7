"""The evaluation of the policy on held-out tasks."""

import itertools
from collections.abc import Callable
from functools import partial

from evolver.build import Run
from evolver.files.rollout_files import record_of
from evolver.phases.rollouts import begun_rollouts, gather_rollouts, sampling_of
from evolver.pipeline import Pipeline
from rl.evaluation import Scores, scores_of
from rl.rollout import Job, jobs_of
from rl.seeds import seed_of


def begun(
    run: Run,
    *,
    keep: str = "",
    repetition: int = 0,
    sweep: bool = False,
    beside: Pipeline | None = None,
) -> Callable[[], Scores]:
    """Return what gives the scores on the held-out tasks, with the same seeds at every step.

    Args:
      keep: a name under which the rollouts are written to `trajectories/`, without those of the
        sweep; "" = they are not written.
      repetition: number of the evaluation. Each has its own seeds, and only the first (0) has
        greedy rollouts, because no seed changes those.
      sweep: evaluate at `eval.temperatures`, too.
      beside: the pipeline beside whose groups the rollouts begin now.
    """
    c, held_out = run.config.eval, run.tasks.held_out
    seed = run.config.seed
    if repetition:
        seed = seed_of(seed, "evaluation", repetition)
    guidance = {}
    if c.experience and (navigating := run.navigating):
        queries = [task.query for task in held_out]
        retrieved = run.on_first(navigating.pool, lambda: navigating.retrieve(queries))
        for task, found in zip(held_out, retrieved):
            guidance[task.id] = [(e.id, e.content) for e in found]
        navigating.metrics()  # evaluation leaves no trace in the counters of the next step

    def jobs_at(temperature: float, count: int, purpose: str) -> list[Job]:
        jobs = jobs_of(held_out, count, sampling_of(run.config, temperature), seed, purpose)
        for job in jobs:
            if job.rollout < round(c.experience * count):
                job.experience = guidance[job.task.id]
        return jobs

    temperatures = [t for t in c.temperatures if t != c.temperature] if sweep else []
    parts = [
        jobs_at(c.temperature, c.rollouts, "eval"),
        jobs_at(0.0, 1, "greedy") if c.greedy and not repetition else [],
        *(jobs_at(t, c.rollouts, f"eval at {t:g}") for t in temperatures),
    ]
    every = list(itertools.chain(*parts))
    given = run, every, "evaluation"
    rollouts = begun_rollouts(*given, beside) if beside else partial(gather_rollouts, *given)

    def scores() -> Scores:
        played = iter(rollouts())
        sampled, greedy, *others = (list(itertools.islice(played, len(jobs))) for jobs in parts)
        if keep:
            records = [record_of(t, fate="sampled") for t in sampled]
            records += [record_of(t, fate="greedy") for t in greedy]
            run.workdir.log_trajectories(keep, records)
        swept = dict(zip(temperatures, others))
        return scores_of(sampled, greedy, temperature=c.temperature, sweep=swept)

    return scores
