"""The loop: explore, try, grade, learn, remember, and keep the books."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from evolver import grading
from evolver.build import Run, RunError, open_run
from evolver.files import report
from evolver.files.sinks import Sinks
from evolver.llm.roles import for_evaluation
from evolver.metrics import Metrics, rollout_metrics
from evolver.phases import extraction, learning, record, rollouts, tasks
from evolver.phases.play import forget
from evolver.processes import hosts
from evolver.processes.interrupt import Interrupted, RunEnds
from models import hf, lora
from rl import learner
from rl.checkpoint import Checkpoints
from rl.evaluation import measures


def train(config: Any, workdir: str | Path) -> None:
    """Train to the end, resuming a run that is in the workdir.

    Raises Interrupted if the user ends the run and RunEnds if it has to end early, both with how to
    resume it, and RunError.
    """
    with open_run(config, workdir) as run:
        try:
            tasks.check(run)
            if resume(run) == config.steps:
                run.progress.say(
                    f"{run.workdir.path} is finished: step {run.step} of {config.steps}"
                )
            while run.step < config.steps:
                iterate(run, run.step + 1)
            finish(run)
        except Interrupted:
            raise Interrupted(interrupted(run)) from None
        except RunEnds as why:
            raise RunEnds(ended(run, why)) from None


def iterate(run: Run, step: int) -> None:
    """Run one iteration. It can be abandoned without loss until the update, and after `complete`
    only books are redone.

    Between the two nothing asks a language model, which may end the run: the weights saved then
    would be a step ahead.
    """
    forget(run)
    chosen, explored = tasks.choose(run, step)  # 1 tasks
    trajectories, played = rollouts.roll_out(run, chosen, step)  # 2 rollouts, 3 outcomes, 4 labels
    rollouts.show_faults(run, trajectories, step)
    grading.assign(run.config, run.estimator, trajectories, step)  # 5 advantages
    trajectories, played = rollouts.refill(
        run, trajectories, step, played
    )  # 1 to 5 again, for groups without signal
    batches, reasons, ledger = learning.select(
        run.config, trajectories, run.actor.engine.version
    )  # 6 samples
    remembered = extraction.remember(run, trajectories, step)  # 7 memory
    stop_together(run)
    learned = learning.learn(run, batches, step)  # 8 update
    synced = learning.sync(run, step)  # 9 sync
    record.write_trajectories(run, step, trajectories, reasons)  # 10 books
    metrics = explored | played | ledger | learned | synced | remembered
    run.complete(step, metrics | rollout_metrics(trajectories) | asked(run))
    record.keep(run)


def stop_together(run: Run) -> None:
    """Raise Interrupted in every process if one of them was asked to end: stopping is safe here."""
    if any(hosts.gather(run.stop.asked)):
        raise Interrupted


def asked(run: Run) -> Metrics:
    """Return what language models were asked since the last call."""
    return run.chat.ledger.metrics() if run.chat else Metrics()


def resume(run: Run) -> int:
    """Restore the newest sound checkpoint, or prepare step 0 if there is none; returns the step."""
    c = run.config
    planned = ((run.workdir.config() or {}).get("config") or {}).get("steps", c.steps)
    run.workdir.claim(c.to_dict(), c.seed)
    run.checkpoints = Checkpoints(
        run.workdir / "checkpoints", keep=c.checkpoint.keep, milestones=c.checkpoint.milestones
    )
    checkpoint = run.checkpoints.restore(learner.trained(run.learner.state))
    if checkpoint:
        _, state, manifest = checkpoint
        run.learner.state |= state
        run.load_manifest(manifest)
        learning.sync(run, run.step)
        if run.step < c.steps:
            run.progress.say(f"resuming after step {run.step} of {c.steps}")
        if planned != c.steps and c.optim.schedule != "constant":
            run.progress.say(
                f"config.steps was {planned} so far: from here on the learning rate follows its {c.optim.schedule}"
                f" schedule over {c.steps} steps, so the run differs from one that had {c.steps} steps from the start"
            )
    else:
        run.progress.say(headline(run))
    if run.pipeline:
        run.pipeline.launched = run.step
    run.workdir.rewind(run.step, booked=run.unbooked is None)
    run.progress.begin(run.step)
    run.sinks = Sinks(
        run.workdir.path, c.to_dict(), wandb=c.log.wandb if hosts.first() else "off", project=c.log.project,
        tensorboard=c.log.tensorboard and hosts.first(), id=run.saved.get("wandb", ""),
        group=c.log.group, tags=c.log.tags,
    )  # fmt: skip
    if run.step < 0:
        prepare(run)
    if run.unbooked is not None:
        record.keep(run)
    return run.step


def headline(run: Run) -> str:
    """Return one line about the run that starts."""
    c = run.config
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    return (
        f"{run.workdir.path}: {c.steps} steps of {c.rollout.tasks} tasks x {c.rollout.group} rollouts in {c.env.name}; "
        f"{', '.join(mechanisms) or 'no mechanism'}; {c.advantage.name}"
    )


def prepare(run: Run) -> None:
    """Complete step 0: the first synthetic tasks, the first experience."""
    metrics = tasks.explore(run) | extraction.fill(run)
    run.complete(0, metrics | asked(run))


def interrupted(run: Run) -> str:
    """Save what is complete, and return how to resume."""
    if run.step < 0:
        return "interrupted before the first step; nothing was lost"
    record.save(run)
    run.checkpoints.wait()
    return f"interrupted; step {run.step} of {run.config.steps} is saved. The same command resumes from there."


def ended(run: Run, why: RunEnds) -> str:
    """Save what is complete, export it, and return why the run ends and how to resume."""
    if run.step < 0:
        return f"{why}\nThe run ends before its first step. The same command reuses the answers that were paid for."
    record.save(run)
    finish(run)
    return f"{why}\nStep {run.step} of {run.config.steps} is saved and the run ends. The same command resumes from there."


def finish(run: Run) -> None:
    """Export the policy and write the report."""
    run.checkpoints.wait()
    trained, policy = run.learner, run.workdir / "policy"
    card = f"Trained by Evolver: {run.step} steps on `{run.config.env.name}`; see summary.md beside this directory.\n"
    hf.save(policy, trained.shape, trained.policy, tokenizer=run.actor.tokenizer, card=card)
    if trained.layout.lora:
        adapters = hosts.local(trained.state["params"])
        if hosts.first():
            lora.save(
                run.workdir / "adapter", adapters, trained.layout.lora, base=run.config.model.path
            )
    if hosts.first():
        run.progress.say(f"\n{report.report(run.workdir.path)}policy: {policy}")
        if run.sinks:
            run.sinks.picture("curve", run.workdir / "curve.png")


# --- the other modes ------------------------------------------------------------------------------


def evaluate(config: Any, workdir: str | Path) -> None:
    """Score config.model.path on the held-out tasks.

    The scores are appended to `eval.jsonl` in the workdir and the rollouts written to
    `trajectories/eval.jsonl.gz`, those of further seeds to `eval_1.jsonl.gz` and so on.
    """
    with open_run(for_evaluation(config), workdir, alone=False) as run:
        run.workdir.claim(config.to_dict(), config.seed, "eval")
        seeds = config.eval.seeds
        scores = [
            record.evaluate(run, keep=f"eval_{n}" if n else "eval", repetition=n, sweep=not n)
            for n in range(seeds)
        ]
        scored = {
            "policy": config.model.path,
            "split": config.eval.split,
            **dict(measures(*scores)),
        }
        run.workdir.log_evaluation(scored | {"scores": [asdict(s) for s in scores]})
        run.progress.close()
        print(report.scores_table(scores, config.model.path or "random policy"))


def explore(config: Any, workdir: str | Path) -> None:
    """Invent tasks and write them to `tasks.jsonl` in the workdir."""
    with open_run(config, workdir) as run:
        if run.tasks.pool is None:
            raise RunError("--mode=explore needs config.questioning.enabled=True")
        run.workdir.claim(config.to_dict(), config.seed, "explore")
        try:
            metrics = tasks.explore(run)
        finally:  # keep the tasks that were paid for
            run.workdir.log_tasks(run.tasks.pool.tasks.values())
        show(
            run,
            metrics,
            f"{len(run.tasks.pool.tasks)} synthetic tasks in {run.workdir / 'tasks.jsonl'}",
        )


def pool(config: Any, workdir: str | Path) -> None:
    """Make an experience pool and write it to `experience/` in the workdir."""
    with open_run(config, workdir) as run:
        if run.navigating is None:
            raise RunError("--mode=pool needs config.navigating.enabled=True")
        run.workdir.claim(config.to_dict(), config.seed, "pool")
        metrics = tasks.explore(run) | extraction.fill(run)
        if hosts.first():
            run.navigating.pool.save(run.workdir / "experience")
        show(
            run, metrics, f"{len(run.navigating.pool)} experiences in {run.workdir / 'experience'}"
        )


def show(run: Run, metrics: Metrics, head: str) -> None:
    """Print a line and the metrics below it."""
    run.progress.close()
    print(head, *(f"  {name} {value:g}" for name, value in sorted(metrics.items())), sep="\n")
