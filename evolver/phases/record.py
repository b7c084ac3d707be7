"""Phase 10: evaluation, metrics, checkpoints, and the files of the workdir."""

import contextlib
import json
import reprlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from envs.values import Json
from envs.world import Task
from evolver import alarms
from evolver.build import Run, RunError, remembering
from evolver.config.derived import mechanisms_of, updates, warmup, worlds
from evolver.config.keys import arguments
from evolver.files.rollout_files import record_of
from evolver.files.sinks import Sinks
from evolver.files.workdir import plain
from evolver.metrics import Metrics, faults_of, timed
from evolver.phases import learning
from evolver.phases.evaluation import begun
from evolver.processes import hosts
from models.files import Written
from rl import learner
from rl.checkpoint import CheckpointError, Checkpoints
from rl.evaluation import Scores, measures
from rl.trajectory import Trajectory


class Recorder:
    """Records a training run in its workdir, so that it can be resumed.

    A resumed run needs the learner's state (arrays) and the manifest (JSON) of the last complete
    step, and nothing else. In a `with` block it is closed however the run ends.
    """

    def __init__(self, run: Run):
        """Claim the workdir, and restore the newest sound checkpoint if there is one."""
        self.run = run
        c, began = run.config, time.monotonic()
        before = run.workdir.config()
        planned = before["config"].get("steps", c.steps) if before else c.steps
        states(run, {})  # a fault shows now
        run.workdir.claim(c.to_dict())
        kept = arguments(Checkpoints, c.checkpoint)
        self.checkpoints = Checkpoints(run.workdir / "checkpoints", **kept)
        self.manifest: Json = {"pending_metrics": None, "wandb": "", "clock": 0.0}
        self.system = ""  # message with which the policy trains, "" if it is not one
        self._updates = -1  # those of the last complete step
        self._saved_at = time.monotonic()
        self._listed: tuple[list[Task], str] = [], ""  # the tasks and the card of the files
        self._plugs: Json = {}  # the states of plugs that were noted last
        self._explored: Json | None = None  # the explorer's state that the pool keeps
        self._unsettled: Callable[[], None] | None = None  # the rest of `finish_step`
        if found := self.checkpoints.restore(arrays(run)):
            _, state, self.manifest = found
            run.recipe.load_arrays(run, state.pop("recipe", {}))
            run.learner.restore(state)
            self.load_manifest()
            learning.sync(run, run.step)
            if run.step < c.steps:
                run.progress.say(f"resuming after step {run.step} of {c.steps}")
            if planned != c.steps and c.optim.schedule != "constant":
                run.progress.say(
                    f"config.steps was {planned} so far: from here on the learning rate follows"
                    f" its {c.optim.schedule} schedule over {c.steps} steps, so the run differs"
                    f" from one that had {c.steps} steps from the start"
                )
        else:
            run.progress.say(headline(run))
        if warmup(c) < c.optim.warmup:
            run.progress.say(
                f"config.optim.warmup={c.optim.warmup} is not shorter than the {updates(c)} updates"
                f" of the run: its first {warmup(c)} warm up"
            )
        # when the run would have started in one process, on the monotonic clock
        self.began = began - self.manifest["clock"]
        if run.pipeline:
            run.pipeline.launched = run.step
        run.workdir.rewind(run.step, finished=self.pending_metrics is None)
        self.history = run.workdir.metrics()
        run.progress.done = run.step
        writes = run.workdir.writes
        self.sinks = Sinks(run.workdir.path, c, id=self.manifest["wandb"], writes=writes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what is being written. A failure here is only printed, and after a second Ctrl-C
        nothing is waited for."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return
        for part in (self.checkpoints, self.sinks):
            try:
                part.close()
            except Exception as error:
                what = f"{type(part).__name__} could not be closed"
                self.run.progress.say(f"{what}: {type(error).__name__}: {error}")

    @property
    def pending_metrics(self) -> Metrics | None:
        """The metrics of a step that is trained, but not yet evaluated and written."""
        return self.manifest["pending_metrics"]

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken so far, in this process and in those that it was resumed
        from."""
        return time.monotonic() - self.began

    def load_manifest(self) -> None:
        """Restore what the manifest holds of the run's parts."""
        run, manifest = self.run, self.manifest
        run.step, self.system = manifest["step"], manifest["system"]
        self._updates = learner.updates(run.learner.state)
        run.learner.alarm.baseline = list(manifest["alarm"])
        if run.tasks.pool:
            run.tasks.pool.load_state(manifest["questioning"])
        if run.navigating:
            run.navigating.pool.load_state(manifest["navigating"])
        for key, plug in remembering(run).items():
            plug.load_state(manifest["plugs"][key])

    def complete(self, step: int, metrics: Metrics) -> None:
        """Note that `step` is trained, with everything but arrays that later steps depend on; its
        metrics are pending until `finish_step`."""
        run, pool = self.run, self.run.tasks.pool
        metrics = self.numbers(metrics)
        run.step = step
        questioning = pool.state() if pool else None
        if questioning:
            if not equal(questioning["explorer"], self._explored):
                self._explored = plain(questioning["explorer"])
            questioning["explorer"] = self._explored
        self._updates = learner.updates(run.learner.state)
        noted = plain({
            "step": step,
            "pending_metrics": metrics,
            "alarm": run.learner.alarm.baseline,
            "wandb": self.sinks.id,
            "system": self.system,
            "clock": self.elapsed,
        })  # fmt: skip
        # JSON values already: to copy all tasks and experience would take longer than a step.
        navigating = run.navigating.pool.state() if run.navigating else None
        self._plugs = states(run, self._plugs)
        own = {"plugs": self._plugs, "questioning": questioning, "navigating": navigating}
        self.manifest = noted | own

    def numbers(self, metrics: Metrics) -> Metrics:
        """Return the metrics that are numbers, of which a file of metrics consists, and say which
        are not: those of a plug."""
        numbers = Metrics()
        for name, value in plain(metrics).items():
            if isinstance(value, float | int | None):
                numbers[name] = value
                continue
            self.run.progress.once(
                f"metric {name}",
                f"the metric {name} is left out: a plug gave {reprlib.repr(value)}, and metrics are"
                " numbers",
            )
        return numbers

    def finish_step(self, synced: Metrics | None = None) -> None:
        """Evaluate if it is time, write the pending metrics, and save if it is time. synced: the
        metrics of the sync.

        With `rollout.async_depth` the next step begins meanwhile, and before its update `settle`
        does the rest. A run that is interrupted here repeats all of this when it resumes.
        """
        run, c, step = self.run, self.run.config, self.run.step
        metrics, scores = (self.pending_metrics or Metrics()) | (synced or Metrics()), None
        beside = run.pipeline if step < c.steps else None
        if evaluated_at(c, step):
            keep = f"held_out_{step:06d}" if c.log.trajectories else ""
            with timed("eval") as began:
                scores = begun(run, keep=keep, sweep=step == 0, beside=beside)
            metrics |= began
        self._unsettled = partial(self._settle, metrics, scores)
        if not (beside and scores):
            self.settle()

    def settle(self) -> None:
        """Wait for the evaluation, and do the rest of `finish_step`.

        The next update comes later: it consumes the weights that are saved with their score, and
        between it and `complete` nothing may wait for an engine, which may be lost.
        """
        if self._unsettled:
            self._unsettled()
            self._unsettled = None

    def _settle(self, metrics: Metrics, scores: Callable[[], Scores] | None) -> None:
        run, c, step, best = self.run, self.run.config, self.run.step, None
        if scores:
            with timed("eval") as seconds:
                found = scores()
            run.workdir.log_scores(step, found)
            metrics["time/eval"] += seconds["time/eval"]
            metrics |= {f"eval/{name}": value for name, value in measures(found)}
            best = metrics[f"eval/avg@{c.eval.rollouts}"]
        if self.checkpoints.seconds:
            metrics["time/checkpoint"] = self.checkpoints.seconds
        metrics["time/elapsed"] = self.elapsed
        self.history.append(metrics)
        raised = alarms.raised(self.history)
        for name in raised:
            told = alarms.told(name, self.history)
            run.progress.once(f"alarm/{name}", f"step {step}: {told}")
        metrics |= {f"alarm/{name}": float(name in raised) for name in alarms.ALARMS}
        run.workdir.log_metrics(step, metrics)
        self.sinks.log(step, metrics)
        show_step(run, metrics)
        # An evaluation changes nothing else that later steps depend on.
        self.manifest |= {"pending_metrics": None, "clock": self.elapsed}
        if step % c.checkpoint.every == 0 or step == c.steps or self.overdue():
            # The metrics are pending in a checkpoint that an interruption saved.
            self.save(metric=best, replace=True)

    def overdue(self) -> bool:
        """Return True if the last checkpoint is `checkpoint.minutes` old."""
        minutes = self.run.config.checkpoint.minutes
        late = 0 < 60 * minutes <= time.monotonic() - self._saved_at
        return hosts.gather(late)[0]

    def rescue(self, ending: Exception) -> str:
        """Save what is complete as the run ends by an exception, and return what was saved and how
        to resume."""
        done, steps = self.run.step, self.run.config.steps
        if done < 0:
            return (
                "The run ends before its first step. The same command starts it again, with the"
                " answers of language models that were paid for."
            )
        step = f"Step {done} of {steps}"
        try:
            if learner.updates(self.run.learner.state) == self._updates:
                self.save()
                self.checkpoints.wait()
                return f"{step} is saved. The same command resumes from there."
            why = ": it has been updated since"
        except (CheckpointError, OSError) as error:
            why = "" if str(error) in str(ending) else f": {error}"
        last = max(self.checkpoints.steps(), default=None)
        start = "starts over" if last is None else f"resumes after step {last}"
        return f"{step} could not be saved{why}. The same command {start}."

    def save(self, *, metric: float | None = None, replace: bool = False) -> None:
        """Save a checkpoint of the last complete step, and write both pools as files of the
        workdir. replace: also if the step has one."""
        run = self.run
        if run.navigating and hosts.first():
            run.navigating.pool.save(run.workdir / "experience")
        originals, pool = run.tasks.originals, run.tasks.pool
        listed = [*originals, *(pool.tasks.values() if pool else ())], pool.card() if pool else ""
        if listed != self._listed:  # most steps change none of the tasks, which may be very many
            run.workdir.log_tasks(*listed)
            self._listed = listed
        written = self._written()
        self.checkpoints.save(run.step, arrays(run), written, metric=metric, replace=replace)
        self._saved_at = time.monotonic()

    def _written(self) -> Json:
        """Return the manifest with its tasks and experience as JSON, of which most is kept since
        the last checkpoint."""
        manifest, run = dict(self.manifest), self.run
        if tasks := manifest.get("questioning"):
            lines = run.workdir.task_lines.of(tasks["tasks"])
            manifest["questioning"] = tasks | {"tasks": Written(lines)}
        experience = manifest.get("navigating")
        if experience and run.navigating:
            lines = run.navigating.pool.lines.of(experience["experiences"])
            manifest["navigating"] = experience | {"experiences": Written(lines)}
        return manifest

    def write_rollouts(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        reasons: Sequence[str | None],
        extra: Sequence[Trajectory],
    ) -> None:
        """Write one line per rollout, every `log.trajectories` steps, and those of `extra` to a
        file of their own. reasons: why each does not train. Note their system message."""
        self.system = system_of(trajectories) or self.system
        c, fates = self.run.config, [reason or "trained" for reason in reasons]
        if c.log.trajectories and step % c.log.trajectories == 0:
            pairs = zip([*trajectories, *extra], fates)
            records, count = [record_of(t, fate=fate) for t, fate in pairs], len(trajectories)
            self.run.workdir.log_trajectories(step, records[:count])
            if extra:
                self.run.workdir.log_trajectories(f"extra_{step:06d}", records[count:])
        if evaluated_at(c, step):
            self.sinks.rollouts(step, trajectories, fates)


def arrays(run: Run) -> learner.State:
    """Return the arrays that a checkpoint holds: the learner's and those of the recipe, if any."""
    own = run.recipe.arrays(run)
    return run.learner.saved | ({"recipe": own} if own else {})


def states(run: Run, before: Json) -> Json:
    """Return {key: state} of the plugs that remember something. Raises RunError for a state that a
    file of JSON would not give back as it is.

    before: what was returned for the step before. A state that is still equal is not copied, as
    that of an explorer takes longer than all other records of a step.
    """
    found = {}
    for key, plug in remembering(run).items():
        state, kept = plug.state(), None
        if key in before and equal(before[key], state):
            found[key] = before[key]
            continue
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            kept = json.loads(json.dumps(state))
        if kept != state:
            raise RunError(
                f"config.{key}: {type(plug).__name__}.state() has to return JSON values that a file"
                " gives back as they are (lists, dicts with texts as keys, finite numbers), so that"
                f" the run can resume; it returned {reprlib.repr(state)}"
            )
        found[key] = kept
    return found


def equal(state: Any, noted: Any) -> bool:
    """Return True if a state is known to be what was noted, which those with arrays are not."""
    with contextlib.suppress(ValueError, RecursionError):
        return bool(state == noted)
    return False


def system_of(trajectories: Iterable[Trajectory]) -> str:
    """Return the system message that all rollouts without experience began with, "" if it differs
    or there is none."""
    found = set()
    for trajectory in trajectories:
        if trajectory.messages and not trajectory.guided:
            first = trajectory.messages[0]
            found.add(first["content"] if first["role"] == "system" else "")
    return found.pop() if len(found) == 1 else ""


def headline(run: Run) -> str:
    """Return one line about the run that starts."""
    c = run.config
    mechanisms = ", ".join(mechanisms_of(c)) or "no mechanism"
    return (
        f"{run.workdir.path}: {c.steps} steps of {c.rollout.tasks} tasks x {c.rollout.group}"
        f" rollouts in {', '.join(worlds(c))}; {mechanisms}; {c.advantage.name}"
    )


def evaluated_at(config: Any, step: int) -> bool:
    """Return True if the policy is evaluated after this step."""
    every = config.eval.every
    return bool(every) and (step % every == 0 or step == config.steps)


def show_step(run: Run, metrics: Metrics) -> None:
    """Print the line of a step."""
    figures = {}
    if "rollout/success" in metrics:
        figures["success"] = f"{metrics['rollout/success']:.0%}"
        figures["trained"] = f"{metrics['ledger/trained']}/{metrics['ledger/rollouts']}"
        figures["tokens/s"] = f"{metrics['time/tokens_per_s']:,.0f}"
    average = f"avg@{run.config.eval.rollouts}"
    if f"eval/{average}" in metrics:
        figures[f"held-out {average}"] = f"{metrics[f'eval/{average}']:.1%}"
    run.progress.step(run.step, faults_of(metrics), **figures)
