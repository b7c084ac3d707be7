"""What a run is made of, built from its config. With `loop.py` and `phases.py` the only readers of config objects."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs.process import Deadlines
from envs.source import Source
from envs.world import Task, WorldError
from evolver.attributing import ReplayJudge
from evolver.books import Progress, Sinks, Workdir, plain, read_tasks
from evolver.config import resolve
from evolver.navigating import HashedNgrams, Navigating, Pool
from evolver.questioning import Questioning
from evolver.stop import Stop
from models import hf, qwen
from models.mesh import make_mesh
from models.tokenizer import Tokenizer
from rl import learner, optim
from rl.checkpoint import Checkpoints
from rl.engines.jax_engine import JaxEngine
from rl.rollout import Limits, Worlds
from rl.seeds import seed_of


class RunError(Exception):
    """Something outside of this program is missing or broken; the message is for the user."""


@dataclass
class Run:
    """The parts of a run, and where it stands.

    `step` is the last one whose update is done (-1: not even the preparations); `unbooked` are the metrics of a step
    that was trained but not yet evaluated and written down. Everything a resumed run needs is in `state` (arrays)
    and `manifest()` (JSON).
    """

    config: Any
    workdir: Workdir
    stop: Stop
    progress: Progress
    source: Source
    worlds: Worlds
    shape: qwen.Config
    tokenizer: Tokenizer
    engine: JaxEngine
    state: dict[str, Any]
    reference: Any  # parameters of the initial policy, None unless the loss needs them
    update: Any
    logp: Any
    questioning: Questioning | None
    navigating: Navigating | None
    judge: ReplayJudge | None
    originals: list[Task]
    held_out: list[Task]
    checkpoints: Checkpoints | None = None
    sinks: Sinks | None = None
    step: int = -1
    unbooked: dict[str, Any] | None = None
    saved: dict[str, Any] = field(default_factory=dict)  # the manifest of the last complete step
    clock: float = 0.0  # seconds of earlier processes
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds of work, over all processes that took part."""
        return self.clock + time.monotonic() - self.began

    def complete(self, step: int, metrics: dict[str, Any]) -> None:
        """The update of `step` is done, and with it everything that later steps depend on; its books are still open."""
        self.step, self.unbooked = step, plain(metrics)
        self.saved = self.manifest()

    def booked(self) -> None:
        """The step is evaluated and written down."""
        self.unbooked = None
        self.saved = self.manifest()

    def manifest(self) -> dict[str, Any]:
        """Everything but arrays that the next steps depend on."""
        manifest = {
            "step": self.step,
            "unbooked": self.unbooked,
            "questioning": self.questioning.state() if self.questioning else None,
            "navigating": self.navigating.state() if self.navigating else None,
            "wandb": self.sinks.id if self.sinks else "",
            "clock": self.elapsed,
        }
        return plain(manifest)  # a copy: the mechanisms go on changing theirs

    def load_manifest(self, manifest: dict[str, Any]) -> None:
        """Stand where `manifest` was taken."""
        self.step, self.unbooked, self.clock = manifest["step"], manifest["unbooked"], manifest["clock"]
        self.began, self.saved = time.monotonic(), manifest
        if self.questioning:
            self.questioning.load_state(manifest["questioning"])
        if self.navigating:
            self.navigating.load_state(manifest["navigating"])


@contextlib.contextmanager
def open_run(config: Any, workdir: str | Path):
    """Build every part, and close what has to be closed. Raises RunError for what only shows here."""
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop())
        try:
            source = stack.enter_context(make_source(config))
            run = build(config, Workdir(workdir), stop, source)
        except (WorldError, ValueError, OSError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        stack.callback(run.worlds.close)
        if run.judge:
            stack.callback(run.judge.close)
        yield run
        for part in (run.checkpoints, run.sinks):
            if part:
                part.close()


def make_source(config: Any) -> Source:
    """Where the config's worlds come from."""
    env = config.env
    deadlines = Deadlines(start=env.timeout, reset=env.timeout, step=env.timeout)
    pool = {"workers": env.workers, "python": env.python or None} if env.mode == "worker" else {}
    return Source(env.name, env.args.to_dict(), mode=env.mode, url=env.url, deadlines=deadlines, **pool)


def build(config: Any, workdir: Workdir, stop: Stop, source: Source) -> Run:
    """The parts, before anything is resumed."""
    c, world = config, source.world()
    originals = read_tasks(resolve(c.env.tasks)) if c.env.tasks else world.tasks(c.env.split)
    held_out = spread(world.tasks(c.eval.split), c.eval.tasks)
    world.close()
    mesh = make_mesh(c.mesh.to_dict())
    shape, params = initial_policy(c, mesh)
    optimizer = make_optimizer(c)
    rows = {
        "micro_rows": c.learner.micro,
        "capacity_rows": math.ceil(c.rollout.tasks / c.learner.updates) * c.rollout.group,  # so one program does
        "temperature": c.rollout.temperature or 1.0,
        "dtype": jnp.dtype(c.model.dtype),
    }
    loss = {
        "objective": c.loss.name,
        "clip_low": c.loss.clip_low,
        "clip_high": c.loss.clip_high,
        "clip_high_guided": c.loss.clip_high_guided,
        "dual_clip": c.loss.dual_clip or None,
        "kl_coef": c.loss.kl,
        "kl": c.loss.kl_estimator,
        "entropy_coef": c.loss.entropy,
        "importance_cap": c.loss.importance_cap or None,
    }
    make_world = source.world
    return Run(
        config=c,
        workdir=workdir,
        stop=stop,
        progress=Progress(c.steps),
        source=source,
        worlds=Worlds(make_world),
        shape=shape,
        tokenizer=Tokenizer.load(resolve(c.model.tokenizer or c.model.path)),
        engine=make_engine(c, shape, params),
        reference=jax.tree.map(jnp.copy, params) if c.loss.kl else None,
        state=learner.init_state(shape, params, optimizer, mesh),
        update=learner.make_update(
            shape, mesh, optimizer=optimizer, aggregate=c.loss.aggregate, remat=c.model.remat, **rows, **loss
        ),
        logp=learner.make_logp(shape, mesh, **rows),
        questioning=make_questioning(c, make_world, originals) if c.questioning.enabled else None,
        navigating=make_navigating(c, make_world) if c.navigating.enabled else None,
        judge=ReplayJudge(make_world, skip_flat=c.attributing.skip_flat, max_replayed=c.attributing.max_replayed)
        if c.attributing.enabled
        else None,
        originals=originals,
        held_out=held_out,
    )


def initial_policy(config: Any, mesh: Any) -> tuple[qwen.Config, Any]:
    """(shape, float32 parameters) of `model.path`, or random ones of `model.preset`."""
    if config.model.path:
        return hf.load(resolve(config.model.path), mesh=mesh)
    shape = qwen.PRESETS[config.model.preset]
    return shape, qwen.init(shape, seed_of(config.seed, "init") % 2**31)


def make_optimizer(config: Any) -> Any:
    """AdamW with its schedule; total_steps counts updates."""
    c = config.optim
    updates = config.steps * config.learner.updates * config.learner.epochs
    rate = optim.schedule(learning_rate=c.lr, decay=c.schedule, warmup_steps=c.warmup, total_steps=updates)
    return optim.optimizer(
        learning_rate=rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, clip_norm=c.clip or None
    )


def make_engine(config: Any, shape: qwen.Config, params: Any) -> JaxEngine:
    """The engine in this process, holding the initial policy as version 0."""
    c = config.engine
    return JaxEngine(
        shape, params, slots=c.slots, length=config.rollout.context, decode_block=c.decode_block,
        prefill_tokens=c.prefill, dtype=jnp.dtype(config.model.dtype), cache_dtype=jnp.dtype(c.cache_dtype),
    )  # fmt: skip


def make_limits(config: Any) -> Limits:
    """What an episode may use."""
    return Limits(
        max_steps=config.rollout.max_steps,
        max_turn_tokens=config.rollout.max_tokens,
        context_tokens=config.rollout.context,
        observation_tokens=config.template.max_observation,
        episode_seconds=config.rollout.timeout,
        step_seconds=config.env.timeout,
    )


def make_questioning(config: Any, make_world: Any, originals: list[Task]) -> Questioning:
    """Self-questioning, with the tasks of `questioning.tasks` if there are any."""
    c = config.questioning
    questioning = Questioning(
        make_world, originals, breadth=c.breadth, depth=c.depth, overlap=c.overlap, capacity=c.capacity
    )
    if c.tasks:
        state = questioning.state()
        state["tasks"] = [task.to_dict() for task in read_tasks(resolve(c.tasks)) if task.origin == "synthetic"]
        questioning.load_state(state)
    return questioning


def make_navigating(config: Any, make_world: Any) -> Navigating:
    """Self-navigating, with the pool of `navigating.pool` if there is one."""
    c, wording = config.navigating, {}
    if c.wording == "travel":
        from envs.travel.demos import hint_text, when_text

        wording = {"render": lambda lesson: hint_text(lesson.path, when_text(lesson.query)), "when": when_text}
    pool = Pool(HashedNgrams())
    if c.pool:
        pool.load(resolve(c.pool))
    return Navigating(pool, eta=c.share, k=c.top_k, min_similarity=c.min_similarity, make_world=make_world, **wording)


def spread(tasks: list[Task], count: int) -> list[Task]:
    """`count` tasks at even distances, in order; all of them for 0 or more than there are."""
    if not 0 < count < len(tasks):
        return tasks
    return [tasks[i * len(tasks) // count] for i in range(count)]
