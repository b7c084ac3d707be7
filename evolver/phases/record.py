"""Phase 10: evaluation, metrics, checkpoints, and the files of the workdir."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from evolver.build import Run
from evolver.files.rollout_files import record_of
from evolver.metrics import Metrics, faults_of, timed
from evolver.phases.play import play, sampling
from evolver.processes import hosts
from rl import learner
from rl.evaluation import Scores, measures, scores_of
from rl.rollout import Job
from rl.seeds import seed_of
from rl.trajectory import Trajectory


def write_trajectories(
    run: Run, step: int, trajectories: Sequence[Trajectory], reasons: Sequence[str | None]
) -> None:
    """Write one line per rollout, every `log.trajectories` steps."""
    every, fates = run.config.log.trajectories, [reason or "trained" for reason in reasons]
    if every and step % every == 0:
        records = [record_of(t, fate=fate) for t, fate in zip(trajectories, fates)]
        run.workdir.log_trajectories(step, records)
    if run.sinks and evaluated_at(run, step):
        run.sinks.rollouts(step, trajectories, fates)


def evaluated_at(run: Run, step: int) -> bool:
    """Return True if the policy is evaluated after this step."""
    every = run.config.eval.every
    return bool(every) and (step % every == 0 or step == run.config.steps)


def keep(run: Run) -> None:
    """Evaluate if it is time, write the metrics of the step, and save if it is time.

    A run that is interrupted here repeats all of this when it resumes.
    """
    c, step, metrics = run.config, run.step, Metrics(run.unbooked)
    best = None
    if evaluated_at(run, step):
        with timed("eval") as seconds:
            keep = f"held_out_{step:06d}" if c.log.trajectories else ""
            scores = evaluate(run, keep=keep, sweep=step == 0)
        run.workdir.log_scores(step, scores)
        metrics |= seconds | {f"eval/{name}": value for name, value in measures(scores)}
        best = metrics[f"eval/avg@{c.eval.rollouts}"]
    if run.checkpoints.seconds:
        metrics["time/checkpoint"] = run.checkpoints.seconds
    metrics["time/elapsed"] = run.elapsed
    run.workdir.log_metrics(step, metrics)
    run.sinks.log(step, metrics)
    show(run, step, metrics)
    run.booked()
    if step % c.checkpoint.every == 0 or step == c.steps:
        save(
            run, metric=best, replace=True
        )  # one that was saved when the run was interrupted lacks these books


def save(run: Run, metric: float | None = None, replace: bool = False) -> None:
    """Save a checkpoint of the last complete step, and write both pools as files of the workdir.
    replace: also if the step has one."""
    if run.navigating is not None and hosts.first():
        run.navigating.pool.save(run.workdir / "experience")
    synthetic = run.tasks.pool.tasks.values() if run.tasks.pool else ()
    run.workdir.log_tasks([*run.tasks.originals, *synthetic])
    run.checkpoints.save(
        run.step, learner.trained(run.learner.state), run.saved, metric=metric, replace=replace
    )


def evaluate(run: Run, *, keep: str = "", repetition: int = 0, sweep: bool = False) -> Scores:
    """Return the scores on the held-out tasks, with the same seeds at every step.

    sweep: also at `eval.temperatures`. keep: a name under which the rollouts are written to
    `trajectories/`, without
    those of the sweep. repetition: number of the evaluation; each has its own seeds, and only the
    first (0) has greedy rollouts, because no seed changes those.
    """
    c, held_out = run.config, run.tasks.held_out
    seed = seed_of(c.seed, "evaluation", repetition) if repetition else c.seed
    shown: dict[str, list[tuple[str, str]]] = {}
    if c.eval.experience:
        retrieved = hosts.on_first(
            run.navigating, lambda: run.navigating.retrieve([t.query for t in held_out])
        )
        shown = {t.id: [(e.id, e.content) for e in row] for t, row in zip(held_out, retrieved)}
        run.navigating.metrics()  # evaluation must leave no trace in the counters of the next step

    def jobs_of(name: str, count: int, temperature: float) -> list[Job]:
        return [
            Job(
                task,
                i,
                seed_of(seed, name, task.id, i),
                sampling(c, temperature),
                shown.get(task.id, []) if i < round(c.eval.experience * count) else [],
            )
            for task in held_out
            for i in range(count)
        ]

    sampled = jobs_of("eval", c.eval.rollouts, c.eval.temperature)
    greedy = jobs_of("greedy", 1, 0.0) if c.eval.greedy and not repetition else []
    temperatures = [t for t in c.eval.temperatures if t != c.eval.temperature] if sweep else []
    others = [jobs_of(f"eval at {t:g}", c.eval.rollouts, t) for t in temperatures]
    played = iter(play(run, [*sampled, *greedy, *itertools.chain(*others)], "evaluation"))
    sampled, greedy, *others = ([next(played) for _ in jobs] for jobs in (sampled, greedy, *others))
    if keep:
        kinds = ["sampled"] * len(sampled) + ["greedy"] * len(greedy)
        records = [record_of(t, fate=kind) for t, kind in zip(sampled + greedy, kinds)]
        run.workdir.log_trajectories(keep, records)
    return scores_of(
        sampled, greedy, temperature=c.eval.temperature, sweep=dict(zip(temperatures, others))
    )


def show(run: Run, step: int, metrics: Metrics) -> None:
    """Print the line of a step."""
    figures = {}
    if "rollout/success" in metrics:
        figures["success"] = f"{metrics['rollout/success']:.0%}"
        figures["trained"] = f"{metrics['ledger/trained']}/{metrics['ledger/rollouts']}"
        figures["tokens/s"] = f"{metrics['time/tokens_per_s']:,.0f}"
    name = f"eval/avg@{run.config.eval.rollouts}"
    if name in metrics:
        figures[f"held-out {name.removeprefix('eval/')}"] = f"{metrics[name]:.1%}"
    run.progress.step(step, faults_of(metrics), **figures)
