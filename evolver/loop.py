"""The loop: explore, try, grade, learn, remember, and record."""

from pathlib import Path
from typing import Any

from evolver import alarms
from evolver.build import Run, foretell, open_run
from evolver.config.derived import worlds
from evolver.files import report
from evolver.metrics import Metrics, rollout_metrics
from evolver.phases import extraction, learning, now, rollouts, tasks
from evolver.phases.record import Recorder
from evolver.processes import hosts
from evolver.processes.interrupt import Interrupted, RunEnds
from evolver.recipes import Recipe
from models import chat, hf, lora


def train(config: Any, workdir: str | Path) -> None:
    """Train to the end, resuming a run that is in the workdir. Whatever ends it before, Interrupted
    by the user, RunEnds, RunError or a fault, saves what is complete and says how to resume."""
    with open_run(config, workdir) as run:
        tasks.check(run)
        tasks.look_ahead(run)
        foretell(run)
        with Recorder(run) as recorder, now.shown(run):
            try:
                prepare(run, recorder)
                while run.step < config.steps:
                    iterate(run, recorder, run.step + 1)
                finish(run, recorder)
            except Interrupted as why:
                raise Interrupted(f"interrupted. {recorder.rescue(why)}") from None
            except RunEnds as why:
                saved = recorder.rescue(why)
                if run.step >= 0:
                    finish(run, recorder)
                raise RunEnds(f"{why}\n{saved}") from None
            except Exception as error:  # a lost engine, a dead service, a fault of a plug
                if hosts.alone() or hosts.in_all(error):  # else the others do not save their part
                    error.add_note(recorder.rescue(error))
                raise


def iterate(run: Run, recorder: Recorder, step: int) -> None:
    """Run one iteration. It can be abandoned without loss until the update, and after `complete`
    only the sync and the records are made again.

    Between the two nothing asks a language model or an engine, which may end the run: the update
    would be lost.
    """
    rollouts.clear_caches(run)
    recipe: Recipe = run.recipe
    chosen, explored = recipe.choose(run, step)  # 1 tasks
    trajectories, played = recipe.roll_out(run, chosen, step)  # 2 rollouts, 3 outcomes, 4 labels
    recipe.credit(run, trajectories, step)  # 5 advantages
    extra = recipe.extra(run, trajectories, step)
    batches, reasons, ledger = recipe.select(run, trajectories, extra, step)  # 6 samples
    remembered = recipe.remember(run, trajectories, step)  # 7 memory
    recorder.settle()  # an evaluation that went on since the last step
    hosts.together(run.stop.check)  # ends all processes if one of them was asked to end
    learning.make_room(run)
    learned = recipe.learn(run, batches, step)  # 8 update
    recorder.write_rollouts(step, trajectories, reasons, extra)
    metrics = explored | played | ledger | learned | remembered | recipe.metrics()
    metrics |= rollout_metrics(trajectories, reasons, run.tasks.worlds)
    recorder.complete(step, metrics | alarms.figures(trajectories) | asked(run))
    synced = learning.sync(run, step)  # 9 sync
    recorder.finish_step(synced)  # 10 records


def asked(run: Run) -> Metrics:
    """Return what language models were asked since the last call, by all processes."""
    if not run.chat:
        return Metrics()
    metrics, before = run.chat.ledger.metrics(), run.chat.ledger.before
    if not hosts.first():  # what was spent until this start counts once
        metrics |= {
            name: metrics[name] - spent for name, spent in before.items() if name in metrics
        }
    return hosts.merge_metrics(metrics)


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


def finish(run: Run, recorder: Recorder) -> None:
    """Export the policy and write the report."""
    recorder.checkpoints.wait()
    trained, policy = run.learner, run.workdir / "policy"
    names = ", ".join(f"`{name}`" for name in worlds(run.config).values())
    card = (
        f"Trained by Evolver: {run.step} steps on {names}; see summary.md beside this directory.\n"
    )
    if recorder.system:
        card += (
            f"\nIt was trained with the system message in {chat.SYSTEM_FILE} and needs it."
            " `python -m rl.engines.serve` gives it to conversations without one; elsewhere clients"
            " have to send it.\n"
        )
    hf.save(
        policy,
        trained.shape,
        trained.policy,
        tokenizer=run.actor.tokenizer,
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
