"""The parts of a run, built from its config. Below `evolver/` nothing sees a config object."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from envs import boundary
from envs.probed import probed
from envs.process import Deadlines
from envs.source import Source
from envs.world import Task, World, WorldError
from evolver.config.checks import leaks
from evolver.config.paths import model_folder, resolve
from evolver.config.plugs import load, plug
from evolver.engine import jax_engine, make_engine
from evolver.files.progress import Progress
from evolver.files.sinks import Sinks
from evolver.files.workdir import Workdir, WorkdirInUse, plain, read_tasks
from evolver.grading import Grader
from evolver.learner import Learner, initial_policy, make_learner
from evolver.llm.client import Chat
from evolver.llm.policy import PolicyResponder
from evolver.llm.questions import CURRENT_POLICY, INITIAL_POLICY
from evolver.llm.roles import make_chat, policy_urls
from evolver.navigating.experience_pool import ExperiencePool
from evolver.navigating.guidance import Navigating
from evolver.parts import Parts
from evolver.pipeline import Pipeline
from evolver.processes import hosts
from evolver.processes.interrupt import Stop
from evolver.questioning import Explorer, TaskPool, is_verified
from evolver.questioning.words import Words
from models import qwen
from models.files import BrokenFile
from models.mesh import make_mesh
from models.tokenizer import Tokenizer
from rl.checkpoint import CheckpointError, Checkpoints
from rl.contexts import Limits
from rl.engines import Engine, EngineFault
from rl.engines.grammar import Grammars
from rl.rollout import Actor, Worlds


class RunError(Exception):
    """Something outside of this program is missing or broken; the message is for the user."""


@dataclass
class Tasks:
    """The tasks of a run. `pool` holds the synthetic ones; `explorer` makes them and `words` words
    them."""

    originals: list[Task]
    held_out: list[Task]
    pool: TaskPool | None = None
    explorer: Explorer | None = None
    words: Words | None = None


@dataclass
class Run:
    """The parts of a run and its state.

    `step` is the last step whose update is done (0 = the preparations, -1 = none); `unbooked` holds
    the metrics of a step that was trained, but not yet evaluated and written. A resumed run needs
    the learner's state (arrays) and `manifest()` (JSON), and nothing else.
    """

    config: Any
    workdir: Workdir
    stop: Stop
    progress: Progress
    make_world: Callable[[], World]
    parts: Parts
    actor: Actor
    worlds: Worlds
    pipeline: Pipeline | None  # None = the rollouts of a step end before its update begins
    learner: Learner
    tasks: Tasks
    estimator: Callable[..., np.ndarray]  # see rl.advantages.Estimator
    grader: Grader
    navigating: Navigating | None
    chat: Chat | None  # None if no part asks a language model
    responder: PolicyResponder | None = (
        None  # answers for language models with the current policy, if any role needs that
    )
    initial: Engine | None = None  # samples from the initial policy, if it plays a role
    checkpoints: Checkpoints | None = None
    sinks: Sinks | None = None
    step: int = -1
    unbooked: dict[str, Any] | None = None
    saved: dict[str, Any] = field(default_factory=dict)  # the manifest of the last complete step
    clock: float = 0.0  # seconds of earlier processes
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken so far, in this process and in those that it was resumed
        from."""
        return self.clock + time.monotonic() - self.began

    @property
    def engines(self) -> list[Engine]:
        return [self.actor.engine, *([self.initial] if self.initial else [])]

    def complete(self, step: int, metrics: dict[str, Any]) -> None:
        """Record that `step` is done, with everything that later steps depend on, but not yet
        evaluated and written."""
        self.step, self.unbooked = step, plain(metrics)
        self.saved = self.manifest()

    def booked(self) -> None:
        """Record that the step is evaluated and written."""
        self.unbooked = None
        self.saved = self.saved | {
            "unbooked": None,
            "clock": self.elapsed,
        }  # an evaluation changes nothing else

    def manifest(self) -> dict[str, Any]:
        """Return everything but arrays that the next steps depend on, as a copy."""
        manifest = {
            "step": self.step,
            "unbooked": self.unbooked,
            "questioning": self.tasks.pool.state() if self.tasks.pool is not None else None,
            "navigating": self.navigating.state() if self.navigating is not None else None,
            "alarm": self.learner.alarm.baseline,
            "wandb": self.sinks.id if self.sinks else "",
            "clock": self.elapsed,
        }
        return plain(manifest)

    def load_manifest(self, manifest: dict[str, Any]) -> None:
        """Restore the state that `manifest()` returned."""
        self.step, self.unbooked, self.clock = (
            manifest["step"],
            manifest["unbooked"],
            manifest["clock"],
        )
        self.began, self.saved = time.monotonic(), manifest
        self.learner.alarm.baseline = list(manifest["alarm"])
        if self.tasks.pool is not None:
            self.tasks.pool.load_state(manifest["questioning"])
        if self.navigating is not None:
            self.navigating.load_state(manifest["navigating"])


# --- opening and closing --------------------------------------------------------------------------


@contextlib.contextmanager
def open_run(config: Any, workdir: str | Path, *, alone: bool = True):
    """Build every part, and close them again however the run ends.

    alone: keep other processes from writing to the workdir. Raises RunError for problems that only
    show here, and for failures of engines, checkpoints and files during the run.
    """
    with contextlib.ExitStack() as stack:
        # Questions that the policy answers come from any thread, at any time.
        stop = stack.enter_context(
            Stop(background=config.rollout.async_depth > 0 or bool(policy_urls(config)))
        )
        stream = sys.stdout if hosts.first() else io.StringIO()
        progress = Progress(config.steps, stream=stream, leaving=lambda: stop.asked)
        stack.callback(progress.close)
        files = Workdir(workdir, writes=hosts.first())
        try:
            if alone:
                stack.enter_context(files.locked())
            source = stack.enter_context(make_source(config))
            chat = open_chat(config, files, stop, stack)
            run = build(config, files, stop, progress, lambda: probed(source.world()), chat, stack)
        except (EngineFault, WorkdirInUse) as error:
            raise RunError(str(error)) from error
        except (WorldError, ValueError, OSError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        if chat:
            chat.say, chat.ledger.step = progress.say, lambda: run.step + 1
            stack.callback(chat.close)  # before the engines that it asks are closed
        stack.callback(run.worlds.close)
        stack.callback(run.grader.close)
        if run.pipeline:  # closed before the worlds that its rollouts are in
            stack.callback(lambda: stop.finish(run.pipeline.close()))
        try:
            yield run
        except (EngineFault, CheckpointError, BrokenFile, WorldError, OSError) as error:
            raise RunError(files.gone() or f"{type(error).__name__}: {error}") from error
        finally:
            if not isinstance(
                sys.exc_info()[1], KeyboardInterrupt
            ):  # after a second Ctrl-C, do not wait
                close_books(run)


def close_books(run: Run) -> None:
    """Wait for a save that may be in progress, and close the logs. A failure here is only
    printed."""
    for part in (run.checkpoints, run.sinks):
        try:
            if part:
                part.close()
        except Exception as error:
            run.progress.say(
                f"{type(part).__name__} could not be closed: {type(error).__name__}: {error}"
            )


def make_source(config: Any) -> Source:
    """Return the source of the config's worlds: this process, worker processes, or a service."""
    env = config.env
    deadlines = Deadlines(start=env.timeout, reset=env.timeout, step=env.timeout)
    python = str(resolve(env.python)) if env.python else None
    pool = {"workers": env.workers, "python": python, "memory_mb": env.memory_mb or None}
    pool = pool | {"recycle": env.recycle} if env.mode == "worker" else {}
    return Source(
        env.name, env.args.to_dict(), mode=env.mode, url=env.url, deadlines=deadlines, **pool
    )


def open_chat(config: Any, workdir: Workdir, stop: Stop, stack: contextlib.ExitStack) -> Any:
    """Return the language-model client, None if no part needs one. Raises RunError naming every
    unusable server."""
    chat = make_chat(config, workdir.path, resolve, check=stop.check, loop=stop.loop)
    if chat:
        stack.callback(chat.close)
        if problems := chat.server_problems():
            raise RunError("\n".join(problems))
    return chat


def build(
    config: Any,
    workdir: Workdir,
    stop: Stop,
    progress: Progress,
    make_world: Callable[[], World],
    chat: Chat | None,
    closing: contextlib.ExitStack,
) -> Run:
    """Build the parts of a run, before anything is resumed. `closing` closes engines, also if a
    later part fails."""
    c, world = config, make_world()
    originals = (
        read_tasks(resolve(c.env.tasks))
        if c.env.tasks
        else boundary.tasks(world, c.env.split)
        if c.env.split
        else []
    )
    held_out = boundary.tasks(world, c.eval.split) if c.eval.split else []
    world.close()
    given = (
        read_tasks(resolve(c.questioning.tasks))
        if c.questioning.enabled and c.questioning.tasks
        else []
    )
    known = {"env.tasks" if c.env.tasks else "env.split": originals, "questioning.tasks": given}
    if leaking := list(leaks(c, known, held_out)):
        raise RunError("\n".join(leaking))
    held_out = sampled(held_out, c.eval.tasks)
    mesh = make_mesh(c.mesh.to_dict())
    check_memory(c, workdir.path)
    shape, params = initial_policy(c, mesh)
    tokenizer = load_tokenizer(c)
    parts = Parts(make_world, chat, c.llm.shown, c.model.path)
    engine = make_engine(
        c, workdir.path, shape, params, tokenizer, mesh=mesh, stop=stop, say=progress.say
    )
    closing.callback(lambda: stop.finish(engine.close()))
    responder, initial = make_responders(c, chat, engine, tokenizer, shape, params)
    if initial:
        closing.callback(lambda: stop.finish(initial.close()))
    grader = make_grader(c, parts)
    run = Run(
        config=c,
        workdir=workdir,
        stop=stop,
        progress=progress,
        make_world=make_world,
        parts=parts,
        actor=make_actor(c, engine, tokenizer, chat),
        worlds=Worlds(make_world),
        pipeline=make_pipeline(c, grader.concurrency),
        learner=make_learner(c, shape, params, mesh),
        tasks=make_tasks(c, originals, held_out, given, parts, progress),
        estimator=plugged("advantage", c.advantage),
        grader=grader,
        navigating=make_navigating(c, [*originals, *given], parts),
        chat=chat,
        responder=responder,
        initial=initial,
    )
    if c.engine.name == "vllm" and c.engine.vllm.transfer == "lora":
        engine.transfer.source = lambda: run.learner.state["params"]
    return run


def load_tokenizer(c: Any) -> Tokenizer:
    """Return the policy's tokenizer, with Qwen3's thinking switch as the config says. Raises
    TokenizerError."""
    tokenizer = Tokenizer.load(model_folder(c.model.tokenizer or c.model.path))
    return (
        tokenizer
        if c.template.thinking == "auto"
        else tokenizer.with_thinking(c.template.thinking == "on")
    )


def make_responders(
    config: Any,
    chat: Chat | None,
    engine: Engine,
    tokenizer: Tokenizer,
    shape: qwen.Config,
    params: qwen.Params,
) -> tuple[PolicyResponder | None, Engine | None]:
    """Give `chat` the responders of the roles that the policy answers for. Return the one with the
    current policy, and the engine with the initial policy, None where no role needs them.

    A server that is one of the run's own engines has the weights of the current policy, too.
    """
    servers = {role.server for role in chat.roles.values()} if chat else set()
    own = {
        url.rstrip("/").replace("//localhost:", "//127.0.0.1:")
        for url in getattr(engine, "urls", ())
    }
    current = {
        s for s in servers if s.removesuffix("/v1").replace("//localhost:", "//127.0.0.1:") in own
    }
    current |= servers & {CURRENT_POLICY}
    context, responder, initial = config.rollout.context, None, None
    if current:
        grammars = Grammars(tokenizer, shape.vocab) if config.engine.name == "jax" else None
        responder = PolicyResponder(
            engine, tokenizer, context, hosts.local(params), grammars=grammars
        )
        chat.responders |= dict.fromkeys(current, responder)
    if INITIAL_POLICY in servers:
        initial = jax_engine(
            config, shape, params, min(config.engine.slots, config.llm.concurrency)
        )
        grammars = Grammars(tokenizer, shape.vocab)
        chat.responders[INITIAL_POLICY] = PolicyResponder(
            initial, tokenizer, context, hosts.local(params), grammars=grammars
        )
    return responder, initial


def check_memory(config: Any, workdir: Path) -> None:
    """Raise RunError with everything that this machine lacks, before anything is loaded: memory of
    devices and host, shared memory, disk."""
    from evolver.plan.preflight import shortages

    if lacking := shortages(config, workdir):
        raise RunError("\n".join(lacking))


def plugged(key: str, group: Any) -> Callable[[Any], Any]:
    """Return the plug that the config names under `key`, bound to its arguments."""
    return plug(key, group.name, group.args.to_dict())


# --- rollouts and mechanisms ----------------------------------------------------------------------


def make_actor(config: Any, engine: Engine, tokenizer: Tokenizer, chat: Chat | None) -> Actor:
    """Return what all rollouts of the run have in common."""
    c, inprocess = config, config.env.mode == "inprocess"
    limits = Limits(
        max_turns=c.rollout.max_turns,
        max_tokens=c.rollout.max_tokens,
        context=c.rollout.context,
        max_observation=c.template.max_observation,
        timeout=c.rollout.timeout,
        # Workers and services hold to env.timeout themselves. Here it would also count the time
        # that a call waits for another episode of its worker, and one that hangs would end them
        # all.
        env_timeout=c.env.timeout if inprocess else math.inf,
        must_end=c.rollout.must_end,
    )
    return Actor(
        engine,
        tokenizer,
        limits,
        context=plugged("template", c.template),
        chat=chat,
        show_tools=c.template.show_tools,
        parse_error=c.template.parse_error,
        cut_turn=c.template.cut_turn,
        threads=not inprocess,
    )


def make_pipeline(config: Any, judges: int) -> Pipeline | None:
    """Return the pipeline of rollouts that run during training, None with `rollout.async_depth`
    0."""
    c = config.rollout
    if not c.async_depth:
        return None
    bound = config.learner.max_staleness
    return Pipeline(depth=c.async_depth, bound=bound, concurrency=c.concurrency, judges=judges)


def make_tasks(
    config: Any,
    originals: list[Task],
    held_out: list[Task],
    given: list[Task],
    parts: Parts,
    progress: Progress,
) -> Tasks:
    """Build the task lists and, with self-questioning, the pool and its explorer. given:
    `questioning.tasks`."""
    c = config.questioning
    if not c.enabled:
        return Tasks(originals, held_out)
    synthetic = (task for task in given if task.origin == "synthetic")
    pool = TaskPool(originals, overlap=c.overlap, capacity=c.capacity, tasks=synthetic)
    unverified = [task.id for task in pool.tasks.values() if not is_verified(task)]
    judged = getattr(load("questioning.judge", c.judge.name), "replaces_outcome", True)
    if unverified and not judged:
        raise RunError(
            f"config.questioning.tasks={c.tasks}: {len(unverified)} of {len(pool.tasks)} tasks have no verifier"
            f" ({unverified[0]} is the first): set config.questioning.judge.name=reference"
        )
    explorer = None
    if not c.tasks or c.every:
        show = functools.partial(progress.phase, "exploring")
        explorer = plugged("questioning.explorer", c.explorer)(
            replace(parts, task_pool=pool, progress=show)
        )
    return Tasks(originals, held_out, pool, explorer, plugged("questioning.words", c.words)(parts))


def make_grader(config: Any, parts: Parts) -> Grader:
    """Build the judges of outcomes and turns."""
    q, a = config.questioning, config.attributing
    outcomes = turns = None
    if q.enabled and getattr(load("questioning.judge", q.judge.name), "replaces_outcome", True):
        outcomes = plugged("questioning.judge", q.judge)(parts)
    if a.enabled:
        turns = plugged("attributing.judge", a.judge)(parts)
    return Grader(outcomes, turns)


def make_navigating(config: Any, tasks: list[Task], parts: Parts) -> Navigating | None:
    """Build self-navigating, with the pool of `navigating.pool` if there is one. It learns from
    training tasks only, which have the splits of `tasks`."""
    c = config.navigating
    if not c.enabled:
        return None
    splits = tuple(sorted({"train", *(task.split for task in tasks)} - {config.eval.split}))
    parts = replace(parts, splits=splits)
    extractor = plugged("navigating.extractor", c.extractor)(parts)
    refiner = plugged("navigating.refine", c.refine)(parts)
    pool = ExperiencePool(plugged("navigating.embedder", c.embedder)(parts))
    if c.pool:
        pool.load(resolve(c.pool))
    return Navigating(
        pool, extractor, refiner, share=c.share, top_k=c.top_k, min_similarity=c.min_similarity
    )


def sampled(tasks: list[Task], count: int) -> list[Task]:
    """Return `count` tasks in order, drawn with a fixed seed; all of them for 0 or for more than
    there are.

    Taking every n-th task instead would miss a whole difficulty wherever a split cycles through the
    difficulties.
    """
    if not 0 < count < len(tasks):
        return tasks
    chosen = random.Random("held-out tasks").sample(range(len(tasks)), count)
    return [tasks[i] for i in sorted(chosen)]
