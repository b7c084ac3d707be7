"""The loop: explore, try, grade, learn, remember, and write it all down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evolver import hosts, phases, report
from evolver.books import Sinks, rollout_metrics
from evolver.llm_config import for_evaluation
from evolver.parts import Run, RunError, open_run
from evolver.stop import Interrupted, RunEnds
from models import hf, lora
from rl import learner
from rl.checkpoint import Checkpoints
from rl.evaluation import measures


def train(config: Any, workdir: str | Path) -> None:
    """Train to the end, from where the workdir stands. Raises Interrupted, with how to go on, RunEnds where the run
    has to end early, and RunError."""
    with open_run(config, workdir) as run:
        try:
            phases.enough_tasks(run)
            if resume(run) == config.steps:
                run.progress.say(f"{run.workdir.path} is finished: step {run.step} of {config.steps}")
            while run.step < config.steps:
                iterate(run, run.step + 1)
            finish(run)
        except Interrupted:
            raise Interrupted(interrupted(run)) from None
        except RunEnds as why:
            raise RunEnds(ended(run, why)) from None


def iterate(run: Run, step: int) -> None:
    """One iteration. Until the update it can be abandoned without loss; what follows it is done again if cut short."""
    metrics: dict[str, Any] = {}
    tasks = phases.choose_tasks(run, step)  # 1 tasks
    trajectories = phases.roll_out(run, tasks, step, metrics)  # 2 rollouts, 3 outcomes
    phases.show_faults(run, trajectories, step)
    phases.label(run, trajectories, metrics, labelled=run.pipeline is not None)  # 4 labels
    phases.give_credit(run.config, trajectories, step)  # 5 advantages
    trajectories = phases.replenish(run, trajectories, step, metrics)  # 1 to 5 again, where nothing is to be learnt
    batches, fates = phases.select(run, trajectories, metrics)  # 6 samples
    phases.stop_together(run)
    phases.learn(run, batches, step, metrics)  # 7 update
    phases.sync(run, step, metrics)  # 8 sync
    phases.remember(run, trajectories, step, metrics)  # 9 memory
    phases.write_trajectories(run, step, trajectories, fates)  # 10 books
    run.complete(step, metrics | rollout_metrics(trajectories) | phases.chat_metrics(run))
    phases.keep_books(run)


def resume(run: Run) -> int:
    """Stand where the newest sound checkpoint stands, else at the beginning, with step 0 done; returns the step."""
    run.workdir.claim(run.config.to_dict(), run.config.seed)
    c = run.config.checkpoint
    run.checkpoints = Checkpoints(run.workdir / "checkpoints", keep=c.keep, every=c.milestones)
    found = run.checkpoints.restore(learner.trained(run.state))
    if found:
        _, state, manifest = found
        run.state |= state
        run.load_manifest(manifest)
        phases.sync(run, run.step, {})
        if run.step < run.config.steps:
            run.progress.say(f"resuming after step {run.step} of {run.config.steps}")
    else:
        run.progress.say(headline(run))
    if run.pipeline:
        run.pipeline.launched = run.step
    run.workdir.rewind(run.step, booked=run.unbooked is None)
    run.progress.begin(run.step)
    log = run.config.log
    run.sinks = Sinks(
        run.workdir.path, run.config.to_dict(), wandb=log.wandb if hosts.first() else "off", project=log.project,
        tensorboard=log.tensorboard and hosts.first(), id=run.saved.get("wandb", ""),
    )  # fmt: skip
    if run.step < 0:
        prepare(run)
    if run.unbooked is not None:
        phases.keep_books(run)
    return run.step


def headline(run: Run) -> str:
    """What is about to happen, in a line."""
    c = run.config
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    return (
        f"{run.workdir.path}: {c.steps} steps of {c.rollout.tasks} tasks x {c.rollout.group} rollouts in {c.env.name}; "
        f"{', '.join(mechanisms) or 'no mechanism'}; {c.advantage.name}"
    )


def prepare(run: Run) -> None:
    """Step 0: the first synthetic tasks, the first experience."""
    metrics: dict[str, Any] = {}
    phases.explore_first(run, metrics)
    phases.fill_pool(run, metrics)
    run.complete(0, metrics | phases.chat_metrics(run))


def interrupted(run: Run) -> str:
    """Save what is complete, and say how to go on."""
    if run.step < 0:
        return "interrupted before the first step; nothing was lost"
    phases.save(run)
    run.checkpoints.wait()
    return f"interrupted; step {run.step} of {run.config.steps} is saved. The same command goes on from there."


def ended(run: Run, why: RunEnds) -> str:
    """Save what is complete, export it, and say why it ends here and how to go on."""
    if run.step < 0:
        return f"{why}\nThe run ends before its first step. Answers are kept: the same command pays for none twice."
    phases.save(run)
    finish(run)
    return (
        f"{why}\nStep {run.step} of {run.config.steps} is saved and the run ends. The same command goes on from there."
    )


def finish(run: Run) -> None:
    """Export the policy and write the report."""
    run.checkpoints.wait()
    policy = run.workdir / "policy"
    card = f"Trained by Evolver: {run.step} steps on `{run.config.env.name}`; see summary.md beside this directory.\n"
    hf.save(policy, run.shape, run.policy, tokenizer=run.tokenizer, card=card)
    if run.layout.lora:
        adapters = hosts.local(run.state["params"])
        if hosts.first():
            lora.save(run.workdir / "adapter", adapters, run.layout.lora, base=run.config.model.path)
    if hosts.first():
        run.progress.say(f"\n{report.report(run.workdir.path)}policy: {policy}")


# --- the other modes -------------------------------------------------------------------------------------------------


def evaluate(config: Any, workdir: str | Path) -> None:
    """Score config.model.path on the held-out tasks; appends to `eval.jsonl` in the workdir and writes the rollouts to
    `trajectories/eval.jsonl`."""
    with open_run(for_evaluation(config), workdir) as run:
        run.workdir.claim(config.to_dict(), config.seed, "eval")
        scores = phases.hold_out(run, keep="eval")
        record = {"policy": config.model.path, "split": config.eval.split, **dict(measures(scores))}
        run.workdir.log_evaluation(record)
        print("\n".join(report.columns(report.single_rows(scores), ("", config.model.path or "random policy"))))


def explore(config: Any, workdir: str | Path) -> None:
    """Invent tasks and write them to `tasks.jsonl` in the workdir."""
    with open_run(config, workdir) as run:
        if not run.questioning:
            raise RunError("--mode=explore needs config.questioning.enabled=True")
        run.workdir.claim(config.to_dict(), config.seed, "explore")
        metrics: dict[str, Any] = {}
        try:
            phases.explore_first(run, metrics)
        finally:
            run.workdir.log_tasks(run.questioning.tasks.values())
        print_figures(metrics, f"{len(run.questioning.tasks)} synthetic tasks in {run.workdir / 'tasks.jsonl'}")


def pool(config: Any, workdir: str | Path) -> None:
    """Make an experience pool and write it to `experience/` in the workdir."""
    with open_run(config, workdir) as run:
        if not run.navigating:
            raise RunError("--mode=pool needs config.navigating.enabled=True")
        run.workdir.claim(config.to_dict(), config.seed, "pool")
        metrics: dict[str, Any] = {}
        phases.explore_first(run, metrics)
        phases.fill_pool(run, metrics)
        run.navigating.pool.save(run.workdir / "experience")
        print_figures(metrics, f"{len(run.navigating.pool)} experiences in {run.workdir / 'experience'}")


def print_figures(metrics: dict[str, Any], head: str) -> None:
    """A line and the metrics below it."""
    print(head, *(f"  {name} {value:g}" for name, value in sorted(metrics.items())), sep="\n")
