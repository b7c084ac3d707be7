"""What a run is made of, built from its config. Below `evolver/` nothing sees a config object."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs.process import Deadlines
from envs.source import Source
from envs.world import Task, WorldError
from evolver import hosts
from evolver.attributing import ReplayJudge
from evolver.books import BrokenFile, Progress, Sinks, Workdir, plain, read_tasks
from evolver.engine_config import make_engine
from evolver.llm_config import make_chat
from evolver.navigating import HashedNgrams, Navigating, Pool
from evolver.paths import model_folder, resolve
from evolver.pipeline import Pipeline
from evolver.plan.room import shortage
from evolver.questioning import Questioning, TaskPool
from evolver.stop import Stop
from models import hf, qwen
from models import mesh as meshes
from models.lora import LoRA
from models.mesh import make_mesh
from models.tokenizer import Tokenizer
from rl import learner, optim
from rl.checkpoint import CheckpointError, Checkpoints
from rl.engines import Engine, EngineFault
from rl.mismatch import Alarm
from rl.rollout import Limits, Worlds
from rl.seeds import seed_of

FLOOR = {"float32": 1e-3, "bfloat16": 0.03}  # nats per token between engine and learner that rounding may cause


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
    engine: Engine
    state: dict[str, Any]
    layout: learner.Layout  # how that state is kept
    reference: Any  # parameters of the initial policy, None unless the loss needs them and the state lacks them
    update: Any
    logp: Any
    questioning: TaskPool | None
    outcome_judge: Any  # evolver.questioning.judge.OutcomeJudge, None where the world scores synthetic tasks
    navigating: Navigating | None
    judge: Any  # of steps: ReplayJudge or evolver.attributing.llm.LlmJudge, None without labels
    chat: Any  # evolver.llm.Chat, None where no part needs one
    originals: list[Task]
    held_out: list[Task]
    alarm: Alarm
    pipeline: Pipeline | None  # None = a step's rollouts end before its update begins
    checkpoints: Checkpoints | None = None
    sinks: Sinks | None = None
    step: int = -1
    unbooked: dict[str, Any] | None = None
    faults: set[str] = field(default_factory=set)  # kinds of the environment's that were shown
    saved: dict[str, Any] = field(default_factory=dict)  # the manifest of the last complete step
    clock: float = 0.0  # seconds of earlier processes
    began: float = field(default_factory=time.monotonic)

    @property
    def policy(self) -> Any:
        """The parameters as they stand, adapters merged."""
        return learner.merged(self.state, self.layout)

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
            "alarm": self.alarm.baseline,
            "wandb": self.sinks.id if self.sinks else "",
            "clock": self.elapsed,
        }
        return plain(manifest)  # a copy: the mechanisms go on changing theirs

    def load_manifest(self, manifest: dict[str, Any]) -> None:
        """Stand where `manifest` was taken."""
        self.step, self.unbooked, self.clock = manifest["step"], manifest["unbooked"], manifest["clock"]
        self.began, self.saved = time.monotonic(), manifest
        self.alarm.baseline = list(manifest["alarm"])
        if self.questioning:
            self.questioning.load_state(manifest["questioning"])
        if self.navigating:
            self.navigating.load_state(manifest["navigating"])


@contextlib.contextmanager
def open_run(config: Any, workdir: str | Path):
    """Build every part, and close what has to be closed, whatever ends the run. Raises RunError for what only shows
    here, and for what breaks while the run works: engines, checkpoints, files, the environment's processes."""
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(background=config.rollout.async_depth > 0))
        try:
            source = stack.enter_context(make_source(config))
            books = Workdir(workdir, writes=hosts.first())
            chat = open_chat(config, books, stop, stack)
            run = build(config, books, stop, source, chat)
        except EngineFault as error:
            raise RunError(str(error)) from error
        except (WorldError, ValueError, OSError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        if chat:
            chat.say, chat.ledger.step = run.progress.say, lambda: run.step + 1
            if run.questioning:
                run.questioning.progress = functools.partial(run.progress.phase, "exploring")
        stack.callback(lambda: stop.finish(run.engine.close()))
        stack.callback(run.worlds.close)
        if run.judge:
            stack.callback(run.judge.close)
        if run.pipeline:
            stack.callback(lambda: stop.finish(run.pipeline.close()))  # before the worlds that its rollouts are in
        try:
            yield run
        except (EngineFault, CheckpointError, BrokenFile, OSError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        finally:
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # who presses Ctrl-C twice does not want to wait
                close_books(run)


def close_books(run: Run) -> None:
    """Wait for the save that may be on its way, and end the logs. What goes wrong here is said and changes nothing."""
    for part in (run.checkpoints, run.sinks):
        try:
            if part:
                part.close()
        except Exception as error:
            run.progress.say(f"{type(part).__name__} could not be closed: {type(error).__name__}: {error}")


def make_source(config: Any) -> Source:
    """Where the config's worlds come from."""
    env = config.env
    deadlines = Deadlines(start=env.timeout, reset=env.timeout, step=env.timeout)
    pool = {"workers": env.workers, "python": env.python or None} if env.mode == "worker" else {}
    return Source(env.name, env.args.to_dict(), mode=env.mode, url=env.url, deadlines=deadlines, **pool)


def open_chat(config: Any, workdir: Workdir, stop: Stop, stack: contextlib.ExitStack) -> Any:
    """The client of the chat roles, None if no part needs one. Raises RunError naming every server that will not do."""
    chat = make_chat(config, workdir.path, resolve, check=stop.check)
    if chat:
        stack.callback(chat.close)
        problems = chat.problems()
        if problems:
            raise RunError("\n".join(problems))
    return chat


def build(config: Any, workdir: Workdir, stop: Stop, source: Source, chat: Any = None) -> Run:
    """The parts, before anything is resumed."""
    c, world = config, source.world()
    originals = read_tasks(resolve(c.env.tasks)) if c.env.tasks else world.tasks(c.env.split)
    held_out = sampled(world.tasks(c.eval.split), c.eval.tasks)
    world.close()
    mesh, layout = make_mesh(c.mesh.to_dict()), make_layout(c)
    if words := shortage(c):
        raise RunError(words)
    shape, params = initial_policy(c, mesh)
    optimizer = make_optimizer(c)
    update, logp = make_programs(c, shape, mesh, optimizer)
    make_world = source.world
    progress = Progress(c.steps, stream=sys.stdout if hosts.first() else io.StringIO())
    tokenizer = Tokenizer.load(model_folder(c.model.tokenizer or c.model.path))
    run = Run(
        config=c,
        workdir=workdir,
        stop=stop,
        progress=progress,
        source=source,
        worlds=Worlds(make_world),
        shape=shape,
        tokenizer=tokenizer,
        engine=make_engine(c, workdir.path, shape, params, tokenizer, mesh=mesh, stop=stop, say=progress.say),
        reference=make_reference(c, params),
        state=learner.init_state(shape, params, optimizer, mesh, layout, seed=seed_of(c.seed, "adapters") % 2**31),
        layout=layout,
        update=update,
        logp=logp,
        questioning=make_questioning(c, make_world, originals, chat) if c.questioning.enabled else None,
        outcome_judge=make_outcome_judge(c, chat),
        navigating=make_navigating(c, make_world, originals, chat) if c.navigating.enabled else None,
        judge=make_judge(c, make_world, chat) if c.attributing.enabled else None,
        chat=chat,
        originals=originals,
        held_out=held_out,
        alarm=Alarm(c.loss.mismatch_alarm, FLOOR[c.model.dtype]),
        pipeline=make_pipeline(c),
    )
    if c.engine.name == "vllm" and c.engine.vllm.transfer == "lora":
        run.engine.transfer.source = lambda: run.state["params"]
    return run


def initial_policy(config: Any, mesh: Any) -> tuple[qwen.Config, Any]:
    """(shape, parameters) of `model.path`, or random ones of `model.preset`, in the dtype they are kept in."""
    dtype = jnp.dtype(config.model.dtype if config.lora.rank else config.optim.master)
    if config.model.path:
        folder = model_folder(config.model.path, weights=True)
        check_memory(config, hf.config_of(folder), mesh)
        return hf.load(folder, mesh=mesh, dtype=dtype, rules=config.sharding.to_dict())
    shape = qwen.PRESETS[config.model.preset]
    check_memory(config, shape, mesh)
    params = qwen.init(shape, seed_of(config.seed, "init") % 2**31, dtype)
    return shape, meshes.put(params, meshes.shardings(shape, mesh, config.sharding.to_dict()))


def check_memory(config: Any, shape: qwen.Config, mesh: Any) -> None:
    """Raises RunError where the training state alone is more than a device has, before anything is loaded."""
    state = learner.state_shapes(
        shape, make_optimizer(config), mesh, make_layout(config), frozen_dtype=jnp.dtype(config.model.dtype)
    )
    needed = learner.bytes_per_device(state)["device"]
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit and needed > limit:
        raise RunError(
            f"the training state of {qwen.parameter_count(shape):,} parameters takes {needed / 1e9:.1f} GB on each of "
            f"{mesh.size} devices, which have {limit / 1e9:.1f} GB. More devices (config.mesh.fsdp), adapters "
            "(config.lora.rank) or moments on the host (config.optim.offload) need less; --mode=plan says how much"
        )


def make_layout(config: Any) -> learner.Layout:
    """How the training state is kept."""
    c = config.lora
    adapters = LoRA(c.rank, c.alpha, tuple(c.targets)) if c.rank else None
    return learner.Layout(config.sharding.to_dict(), config.optim.master, config.optim.offload, adapters)


def make_reference(config: Any, params: Any) -> Any:
    """The initial policy, where the loss needs it and the state does not hold it: with adapters that does."""
    if not config.loss.kl or config.lora.rank:
        return None
    if config.loss.reference == "host":
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), params)
    return jax.tree.map(jnp.copy, params)


def make_optimizer(config: Any) -> Any:
    """AdamW with its schedule; total_steps counts updates."""
    c = config.optim
    updates = config.steps * config.learner.updates * config.learner.epochs
    rate = optim.schedule(learning_rate=c.lr, decay=c.schedule, warmup_steps=c.warmup, total_steps=updates)
    return optim.optimizer(
        learning_rate=rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, clip_norm=c.clip or None
    )


def capacity_rows(config: Any) -> int:
    """Rows of a mini-batch when nothing packs: with room for them from the start, one program does."""
    return math.ceil(config.rollout.tasks / config.learner.updates) * config.rollout.group


def make_programs(config: Any, shape: qwen.Config, mesh: Any, optimizer: Any) -> tuple[Any, Any]:
    """The learner's two programs, `update` and `logp`."""
    c = config
    rows = {
        "micro_rows": c.learner.micro,
        "capacity_rows": capacity_rows(c),
        "temperature": c.rollout.temperature or 1.0,
        "dtype": jnp.dtype(c.model.dtype),
        "attend": c.model.attention,
        "chunk": c.learner.chunk,
        "widths": c.learner.widths,
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
        "importance_level": c.loss.importance_level,
        "importance_band": (c.loss.importance_low, c.loss.importance_high or math.inf)
        if c.loss.importance_low or c.loss.importance_high
        else None,
    }
    update = learner.make_update(
        shape, mesh, optimizer=optimizer, aggregate=c.loss.aggregate, remat=c.model.remat, layout=make_layout(c),
        **rows, **loss,
    )  # fmt: skip
    return update, learner.make_logp(shape, mesh, **rows)


def make_pipeline(config: Any) -> Pipeline | None:
    """What keeps rollouts going while the learner works, where the config wants that."""
    c = config.rollout
    if not c.async_depth:
        return None
    judges = 1 if config.attributing.judge == "replay" else 8  # a replay has one world
    return Pipeline(
        depth=c.async_depth, bound=config.learner.max_staleness, concurrency=c.concurrency, judges=judges
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


def make_questioning(config: Any, make_world: Any, originals: list[Task], chat: Any) -> TaskPool:
    """Self-questioning, with the tasks of `questioning.tasks` if there are any."""
    c = config.questioning
    options = {"breadth": c.breadth, "depth": c.depth, "overlap": c.overlap, "capacity": c.capacity}
    if c.explorer == "llm" and chat and "explorer" in chat.roles:
        from evolver.questioning.llm import LlmQuestioning

        questioning: TaskPool = LlmQuestioning(chat, make_world, originals, shown=config.llm.shown, **options)
        if c.judge == "verifier" and not questioning.checked:
            raise RunError(
                f"{config.env.name} cannot check synthetic tasks itself: set config.questioning.judge=reference"
            )
    elif c.explorer == "llm":  # the tasks are given
        questioning = TaskPool(originals, overlap=c.overlap, capacity=c.capacity)
    else:
        questioning = Questioning(make_world, originals, **options)
    if c.tasks:
        state = questioning.state()
        state["tasks"] = [task.to_dict() for task in read_tasks(resolve(c.tasks)) if task.origin == "synthetic"]
        questioning.load_state(state)
    return questioning


def make_outcome_judge(config: Any, chat: Any) -> Any:
    """The judge of synthetic tasks' outcomes, None where the world's own evaluation counts."""
    if not config.questioning.enabled or config.questioning.judge == "verifier":
        return None
    from evolver.questioning.judge import OutcomeJudge

    return OutcomeJudge(chat, config.questioning.judge, shown=config.llm.shown)


def make_judge(config: Any, make_world: Any, chat: Any) -> Any:
    """The judge of steps."""
    c = config.attributing
    if c.judge == "replay":
        return ReplayJudge(make_world, skip_flat=c.skip_flat, max_replayed=c.max_replayed)
    from evolver.attributing.llm import LlmJudge

    return LlmJudge(chat, skip_flat=c.skip_flat, shown=config.llm.shown)


def make_navigating(config: Any, make_world: Any, originals: list[Task], chat: Any) -> Navigating:
    """Self-navigating, with the pool of `navigating.pool` if there is one. It learns from the tasks that train only."""
    c = config.navigating
    splits = tuple(sorted({"train", *(task.split for task in originals)}))
    options: dict[str, Any] = {"eta": c.share, "k": c.top_k, "min_similarity": c.min_similarity, "splits": splits}
    if c.extractor == "llm":
        from evolver.navigating.llm import LlmExtractor

        options["extract"] = LlmExtractor(chat, valid=c.valid, shown=config.llm.shown, splits=splits)
    else:
        options["make_world"] = make_world
        if c.wording == "travel":
            from envs.travel.demos import hint_text, when_text

            options["render"] = lambda lesson: hint_text(lesson.path, when_text(lesson.query))
            options["when"] = when_text
    pool = Pool(make_embedder(config, chat))
    if c.pool:
        pool.load(resolve(c.pool))
    if c.refine == "none":
        return Navigating(pool, **options)
    from evolver.navigating.llm import LlmNavigating

    return LlmNavigating(pool, chat=chat, rewrite=c.refine == "rewrite", **options)


def make_embedder(config: Any, chat: Any) -> Any:
    """What experience is searched by."""
    if config.navigating.embedder == "ngrams":
        return HashedNgrams()
    from evolver.navigating.endpoint import EndpointEmbedder

    return EndpointEmbedder(chat)


def sampled(tasks: list[Task], count: int) -> list[Task]:
    """`count` tasks drawn once and for all, in order; all of them for 0 or more than there are.

    Every n-th task would miss a whole difficulty wherever a split goes through them in turn.
    """
    if not 0 < count < len(tasks):
        return tasks
    chosen = random.Random("held-out tasks").sample(range(len(tasks)), count)
    return [tasks[i] for i in sorted(chosen)]
