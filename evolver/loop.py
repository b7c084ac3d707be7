"""The loop: explore, try, grade, learn, remember, and record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evolver import grading
from evolver.build import Run, open_run
from evolver.files import report
from evolver.metrics import Metrics, rollout_metrics
from evolver.phases import extraction, learning, rollouts, tasks
from evolver.phases.record import Recorder
from evolver.processes import hosts
from evolver.processes.interrupt import Interrupted, RunEnds
from models import chat, hf, lora
from rl.samples import no_signal
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of


def train(config: Any, workdir: str | Path) -> None:
    """Train to the end, resuming a run that is in the workdir.

    Raises Interrupted if the user ends the run and RunEnds if it has to end early, both with how to
    resume it, and RunError.
    """
    with open_run(config, workdir) as run:
        tasks.check(run)
        with Recorder(run) as recorder:
            try:
                prepare(run, recorder)
                while run.step < config.steps:
                    iterate(run, recorder, run.step + 1)
                finish(run, recorder)
            except Interrupted:
                raise Interrupted(interrupted(run, recorder)) from None
            except RunEnds as why:
                raise RunEnds(ended(run, recorder, why)) from None


def iterate(run: Run, recorder: Recorder, step: int) -> None:
    """Run one iteration. It can be abandoned without loss until the update, and after `complete`
    only the records are made again.

    Between the two nothing asks a language model, which may end the run: the weights saved then
    would be a step ahead.
    """
    rollouts.clear_caches(run)
    chosen, explored = tasks.choose(run, step)  # 1 tasks
    trajectories, played = rollouts.roll_out(run, chosen, step)  # 2 rollouts, 3 outcomes, 4 labels
    rollouts.show_faults(run, trajectories, step)
    grading.assign(run.config, run.estimator, trajectories, step)  # 5 advantages
    trajectories, played = refill(run, trajectories, step, played)  # 1 to 5 again
    version = run.actor.engine.version
    batches, reasons, ledger = learning.select(run.config, trajectories, version)  # 6 samples
    remembered = extraction.remember(run, trajectories, step)  # 7 memory
    stop_together(run)
    learned = learning.learn(run, batches, step)  # 8 update
    synced = learning.sync(run, step)  # 9 sync
    recorder.write_rollouts(step, trajectories, reasons)  # 10 records
    metrics = explored | played | ledger | learned | synced | remembered
    metrics |= rollout_metrics(trajectories) | asked(run)
    recorder.complete(step, metrics)
    recorder.finish_step()


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
    seed = seed_of(run.config.seed, "refill", step)
    while rounds < c.refill:
        groups = groups_of(trajectories)
        missing = c.tasks - sum(not no_signal(group) for group in groups.values())
        drawn = {id for id, _ in groups}
        more = tasks.draw(run, rounds, missing, seed, drawn) if missing else []
        if not more:
            break
        played, measured = rollouts.roll_out(run, {step: more}, step)
        grading.assign(run.config, run.estimator, played, step)
        trajectories, rounds = [*trajectories, *played], rounds + 1
        for name in ("time/rollout", "time/grade"):
            if name in measured:
                measured[name] += metrics.get(name, 0.0)
        metrics = metrics | measured
    if c.refill:
        speed = rollouts.generated(trajectories) / metrics["time/rollout"]
        metrics = metrics | {"rollout/refills": rounds, "time/tokens_per_s": speed}
    return trajectories, metrics | hosts.merge_metrics(run.grader.metrics())


def stop_together(run: Run) -> None:
    """Raise Interrupted in every process if one of them was asked to end: stopping is safe here."""
    if any(hosts.gather(run.stop.asked)):
        raise Interrupted


def asked(run: Run) -> Metrics:
    """Return what language models were asked since the last call."""
    return run.chat.ledger.metrics() if run.chat else Metrics()


def prepare(run: Run, recorder: Recorder) -> None:
    """Complete step 0, the first synthetic tasks and the first experience, or finish a step that
    was restored."""
    if run.step < 0:
        metrics = tasks.explore(run) | extraction.fill(run)
        recorder.complete(0, metrics | asked(run))
    if recorder.pending_metrics is not None:
        recorder.finish_step()
    if run.step == run.config.steps:
        run.progress.say(f"{run.workdir.path} is finished: step {run.step} of {run.config.steps}")


def interrupted(run: Run, recorder: Recorder) -> str:
    """Save what is complete, and return how to resume."""
    if run.step < 0:
        return "interrupted before the first step; nothing was lost"
    recorder.save()
    recorder.checkpoints.wait()
    return (
        f"interrupted; step {run.step} of {run.config.steps} is saved. The same command resumes"
        " from there."
    )


def ended(run: Run, recorder: Recorder, why: RunEnds) -> str:
    """Save what is complete, export it, and return why the run ends and how to resume."""
    if run.step < 0:
        return (
            f"{why}\nThe run ends before its first step. The same command reuses the answers that"
            " were paid for."
        )
    recorder.save()
    finish(run, recorder)
    return (
        f"{why}\nStep {run.step} of {run.config.steps} is saved and the run ends. The same command"
        " resumes from there."
    )


def finish(run: Run, recorder: Recorder) -> None:
    """Export the policy and write the report."""
    recorder.checkpoints.wait()
    trained, policy = run.learner, run.workdir / "policy"
    card = (
        f"Trained by Evolver: {run.step} steps on `{run.config.env.name}`; see summary.md beside"
        " this directory.\n"
    )
    if recorder.system:
        card += (
            f"\nIt was trained with the system message in {chat.SYSTEM_FILE} and needs it."
            " `python -m rl.engines.serve` gives it to conversations without one; elsewhere clients"
            " have to send it.\n"
        )
    tokenizer = run.actor.tokenizer
    hf.save(
        policy,
        trained.shape,
        trained.policy,
        tokenizer=tokenizer,
        card=card,
        system=recorder.system,
    )
    if trained.layout.lora:
        adapters = hosts.local(trained.state["params"])
        if hosts.first():
            folder, base = run.workdir / "adapter", run.config.model.path
            lora.save(folder, adapters, trained.layout.lora, base=base)
    if hosts.first():
        run.progress.say(f"\n{report.report(run.workdir.path)}policy: {policy}")
        recorder.sinks.picture("curve", run.workdir / "curve.png")
