"""The parts of a run, built from its config. Below `evolver/` nothing sees a config object."""

import asyncio
import contextlib
import functools
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from envs import boundary
from envs.probed import probed
from envs.world import Task, World, WorldError
from evolver import grading
from evolver.config.checks.world import evaluated, held_out_tasks, leaks, shared_ids
from evolver.config.derived import replaces_outcome
from evolver.config.keys import arguments
from evolver.config.paths import model_folder, resolve
from evolver.config.plugs import chosen, plug, templates_of_worlds
from evolver.engines import jax_engine, make_engine
from evolver.files.progress import Progress
from evolver.files.workdir import Workdir, WorkdirInUse, read_tasks
from evolver.learner import Learner, initial_policy, make_learner
from evolver.llm.client import Chat
from evolver.llm.policy import PolicyResponder
from evolver.llm.questions import CURRENT_POLICY, INITIAL_POLICY
from evolver.llm.roles import make_chat, policy_urls, question_context
from evolver.llm.served import serving
from evolver.navigating.experience_pool import ExperiencePool
from evolver.navigating.guidance import Navigating
from evolver.parts import Parts
from evolver.pipeline import Pipeline
from evolver.processes import hosts
from evolver.processes.interrupt import Stop
from evolver.questioning import Explorer, TaskPool, is_verified
from evolver.questioning.words import Words
from evolver.sampling import Sampler
from evolver.worlds import open_source
from models import hf, qwen
from models.files import BrokenFile
from models.mesh import make_mesh
from models.tokenizer import Tokenizer
from rl.advantages import Estimator
from rl.advantages.batch import unbound
from rl.checkpoint import CheckpointError
from rl.contexts import Context, Limits, Opening, Template
from rl.engines import Engine, EngineFault
from rl.engines.grammar import Grammars
from rl.engines.jax.engine import JaxEngine
from rl.rewards import Reward
from rl.rollout import Actor, Worlds, rollouts

T = TypeVar("T")


class RunError(Exception):
    """Something outside of this program is missing or broken; the message is for the user."""


@dataclass
class Tasks:
    """The tasks of a run. `pool` holds the synthetic ones; `explorer` makes them and `words` words
    them. All three are None without self-questioning, `explorer` also if nothing is explored."""

    originals: list[Task]
    held_out: list[Task]
    pool: TaskPool | None = None
    explorer: Explorer | None = None
    words: Words | None = None

    @functools.cached_property
    def worlds(self) -> list[str]:
        """The worlds that the original and held-out tasks are of, [] if all are of one."""
        names = sorted({task.env for task in [*self.originals, *self.held_out]})
        return names if len(names) > 1 else []


@dataclass
class Run:
    """The parts of a run. `step` is the last step whose update is done (0 = the preparations,
    -1 = none)."""

    config: Any
    workdir: Workdir
    stop: Stop
    progress: Progress
    make_world: Callable[[], World]
    parts: Parts  # for mechanisms
    actor: Actor
    worlds: Worlds
    pipeline: Pipeline | None  # None = the rollouts of a step end before its update begins
    learner: Learner
    tasks: Tasks
    sampler: Sampler
    reward: Reward
    estimator: Estimator
    grader: grading.Grader
    navigating: Navigating | None
    chat: Chat | None  # None if no part asks a language model
    # answers for language models with the current policy, if a role needs it
    responder: PolicyResponder | None
    recipe: Any  # what a step is, see evolver/recipes
    engines: list[Engine]  # of the policy and, if it plays a role, of the initial policy
    step: int = -1

    def on_first(self, part: Any, work: Callable[[], T]) -> T:
        """Call `hosts.on_first`; the questions of `work` go to the language models of all
        processes."""
        return hosts.on_first(part, work, self.chat.spread if self.chat else None)


@contextlib.contextmanager
def open_run(config: Any, workdir: str | Path, *, alone: bool = True) -> Iterator[Run]:
    """Build every part, and close them again however the run ends.

    alone: keep other processes from writing to the workdir. Raises RunError for problems that only
    show here, and for failures of engines, checkpoints and files during the run.
    """
    # Questions that the policy answers come from any thread, at any time.
    background = config.rollout.async_depth > 0 or bool(policy_urls(config))
    files = Workdir(workdir, writes=hosts.first())
    with contextlib.ExitStack() as closing:
        stop = closing.enter_context(Stop(background=background))
        stream = sys.stdout if hosts.first() else io.StringIO()
        progress = Progress(config.steps, stream=stream, leaving=lambda: stop.asked)
        closing.callback(progress.close)
        try:
            if alone:
                closing.enter_context(files.locked())
            run = build(config, files, stop, progress, closing)
        except (EngineFault, WorkdirInUse) as error:
            raise RunError(str(error)) from error
        except (WorldError, ValueError, OSError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        try:
            yield run
        except (EngineFault, CheckpointError, BrokenFile, WorldError, OSError) as error:
            notes = getattr(error, "__notes__", ())
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            raise RunError(files.gone() or text) from error


def build(
    config: Any,
    workdir: Workdir,
    stop: Stop,
    progress: Progress,
    closing: contextlib.ExitStack,
) -> Run:
    """Build the parts of a run, before anything is resumed. `closing` closes them, also if a later
    part fails."""
    c = config
    check_memory(c, workdir.path)  # before worlds and servers take theirs
    opened = open_source(
        c, workdir.path, say=progress.say, check=stop.check, progress=lambda: progress.done
    )
    source = closing.enter_context(opened)

    def make_world() -> World:
        return probed(source.world())

    chat = open_chat(c, workdir, stop, progress, closing)
    originals, held_out, given = read_all_tasks(c, make_world)
    mesh = make_mesh(c.mesh.to_dict())
    shape, params = initial_policy(c, mesh)
    tokenizer = load_tokenizer(c)
    shape = hf.for_tokenizer(shape, tokenizer)
    engine = make_engine(
        c, shape, params, tokenizer, mesh=mesh, workdir=workdir.path, stop=stop, say=progress.say,
        closing=closing,
    )  # fmt: skip
    responder, initial = make_responders(c, chat, engine, tokenizer, shape, params)
    if initial:
        closing.callback(lambda: stop.finish(initial.close()))
    parts = Parts(make_world, chat, c.llm.shown, c.model.path)
    judged = c.questioning.enabled and replaces_outcome(c)
    grader = grading.Grader(
        outcomes=plugged(c, "questioning.judge")(parts) if judged else None,
        turns=plugged(c, "attributing.judge")(parts) if c.attributing.enabled else None,
    )
    recipe = make_recipe(c, parts)
    tasks = make_tasks(c, originals, held_out, given, parts)
    actor, worlds = make_actor(c, engine, tokenizer, chat), Worlds(make_world)
    run = Run(
        config=c,
        workdir=workdir,
        stop=stop,
        progress=progress,
        make_world=make_world,
        parts=parts,
        actor=actor,
        worlds=worlds,
        pipeline=make_pipeline(c, actor, worlds, grader, recipe.judge),
        learner=make_learner(c, shape, params, mesh),
        tasks=tasks,
        sampler=plugged(c, "sampler")(replace(parts, task_pool=tasks.pool)),
        reward=plugged(c, "reward"),
        estimator=plugged(c, "advantage"),
        grader=grader,
        navigating=make_navigating(c, [*originals, *given], parts),
        chat=chat,
        responder=responder,
        recipe=recipe,
        engines=[engine, initial] if initial else [engine],
    )
    connect(run, closing)
    return run


def connect(run: Run, closing: contextlib.ExitStack) -> None:
    """Give the parts of a run what they read of others. `closing` closes them: each before those
    that it uses."""
    c, chat = run.config, run.chat
    if c.engine.name == "vllm" and c.engine.vllm.transfer == "lora":
        engine = cast(Any, run.actor.engine)
        engine.transfer.source = lambda: hosts.local(run.learner.state["params"])
    if chat:
        chat.say, chat.ledger.step = run.progress.say, lambda: run.step + 1
        closing.callback(chat.close)  # before the engines that it asks are closed
    closing.callback(run.worlds.close)
    closing.callback(run.grader.close)
    if pipeline := run.pipeline:  # closed before the worlds that its rollouts are in
        closing.callback(lambda: run.stop.finish(pipeline.close()))


def open_chat(
    config: Any, workdir: Workdir, stop: Stop, progress: Progress, closing: contextlib.ExitStack
) -> Chat | None:
    """Return the client of the language models, None if no part asks one, and start the server of
    `llm.serve`. Raises RunError for a server that cannot be used."""
    served = ""
    if config.llm.serve.path:
        opened = serving(
            config, workdir.path, say=progress.say, check=stop.check,
            progress=lambda: progress.done,
        )  # fmt: skip
        served = closing.enter_context(opened)
    chat = make_chat(config, workdir.path, check=stop.check, served=served, loop=stop.loop)
    if chat:
        closing.callback(chat.close)
        if problems := chat.server_problems():
            raise RunError("\n".join(problems))
    return chat


def remembering(run: Run) -> dict[str, Any]:
    """Return {key: plug} of the plugs that have `state` and `load_state`, so that what they
    remember is saved and restored with the run."""
    made: dict[str, Any] = {
        "recipe": run.recipe,
        "sampler": run.sampler,
        "reward": unbound(run.reward),
        "advantage": unbound(run.estimator),
        "questioning.explorer": run.tasks.explorer,
        "questioning.words": run.tasks.words,
        "questioning.judge": run.grader.outcomes,
        "attributing.judge": run.grader.turns,
    }
    if run.navigating:
        made |= {
            "navigating.extractor": run.navigating.extractor,
            "navigating.embedder": run.navigating.pool.embedder,
            "navigating.refine": run.navigating.refiner,
        }
    return {key: plug for key, plug in made.items() if hasattr(plug, "load_state")}


def make_recipe(config: Any, parts: Parts) -> Any:
    """Return the recipe. Raises RunError for one that was not set up."""
    recipe: Any = plugged(config, "recipe")(parts)
    if not hasattr(recipe, "figures"):
        name = type(recipe).__name__
        raise RunError(
            f"config.recipe.name={config.recipe.name}: {name}.__init__ has to call"
            " super().__init__(parts)"
        )
    return recipe


def plugged(config: Any, key: str) -> Callable[[Any], Any]:
    """Return the plug that the config names under `key`, bound to its arguments."""
    return plug(*chosen(config, key))


def read_all_tasks(
    config: Any, make_world: Callable[[], World]
) -> tuple[list[Task], list[Task], list[Task]]:
    """Return the original tasks, the held-out ones that are evaluated, and those of
    `questioning.tasks`. Raises RunError if a held-out task is among the others, or if two
    tasks share an id."""
    c, given, originals = config, list[Task](), list[Task]()
    if c.questioning.enabled and c.questioning.tasks:
        given = read_tasks(resolve(c.questioning.tasks))
    with contextlib.closing(make_world()) as world:
        held_out = held_out_tasks(world, c.eval.split)
        if c.env.tasks:
            originals = read_tasks(resolve(c.env.tasks))
        elif c.env.split:
            originals = boundary.tasks(world, c.env.split)
    known = {"env.tasks" if c.env.tasks else "env.split": originals, "questioning.tasks": given}
    if problems := [*leaks(c, known, held_out), *shared_ids(known)]:
        raise RunError("\n".join(problems))
    return originals, evaluated(held_out, c.eval), given


def check_memory(config: Any, workdir: Path) -> None:
    """Raise RunError with everything that this machine lacks, before anything is loaded: memory of
    devices and host, shared memory, disk."""
    from evolver.plan.preflight import shortages

    if lacking := shortages(config, workdir):
        raise RunError("\n".join(lacking))


def foretell(run: Run) -> None:
    """Say what the models that may cost money are expected to take in this run."""
    from evolver.plan.calls import forecast

    if run.chat and (
        said := forecast(run.config, len(run.tasks.originals), len(run.tasks.held_out))
    ):
        run.progress.say(said)


def load_tokenizer(config: Any) -> Tokenizer:
    """Return the policy's tokenizer, with chat template, format of calls and thinking switch as the
    config says. Raises TokenizerError."""
    c, thinking = config.template, config.template.thinking
    folder = model_folder(config.model.tokenizer or config.model.path)
    tokenizer = Tokenizer.load(folder, c.render, c.calls)
    return tokenizer if thinking == "auto" else tokenizer.with_thinking(thinking == "on")


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
    responder = initial = None
    if chat is None:
        return responder, initial
    servers = {role.server for role in chat.roles.values()}
    own = {CURRENT_POLICY, *(_address(url) for url in getattr(engine, "urls", ()))}
    current = [server for server in servers if _address(server) in own]

    def responder_with(engine: Engine) -> PolicyResponder:
        grammars: Any
        if isinstance(engine, JaxEngine):
            grammars = Grammars(tokenizer, shape.vocab)
        else:
            from rl.engines.vllm.client import Schemas

            grammars = Schemas()
        context = question_context(config)
        temperature = config.rollout.temperature or 1.0
        return PolicyResponder(
            engine, tokenizer, context, params, grammars=grammars, temperature=temperature
        )

    if current:
        responder = responder_with(engine)
        chat.responders |= dict.fromkeys(current, responder)
    if INITIAL_POLICY in servers:
        slots = min(config.engine.slots, config.llm.concurrency)
        initial = jax_engine(config, shape, params, slots)
        chat.responders[INITIAL_POLICY] = responder_with(initial)
    return responder, initial


def _address(url: str) -> str:
    """Return the part of a server's URL that tells whether it is one of the run's own."""
    return url.rstrip("/").removesuffix("/v1").replace("//localhost:", "//127.0.0.1:")


def make_actor(config: Any, engine: Engine, tokenizer: Tokenizer, chat: Chat | None) -> Actor:
    """Return what all rollouts of the run have in common."""
    c, inprocess = config, config.env.mode == "inprocess"
    limits = Limits(
        **arguments(Limits, c.rollout),
        max_observation=c.template.max_observation,
        # Workers and services hold to env.timeout themselves. Here it would also count the time
        # that a call waits for another episode of its worker, and one that hangs would end them
        # all.
        env_timeout=c.env.timeout if inprocess else math.inf,
    )
    return Actor(
        engine,
        tokenizer,
        limits,
        context=make_template(c),
        chat=chat,
        **arguments(Actor, c.template),
        threads=not inprocess,
    )


def make_template(config: Any) -> Template:
    """Return what makes the context of an episode: the template of its world."""
    common, worlds = plugged(config, "template"), config.template.worlds.to_dict()
    own = {given[0]: plug(*given) for given in templates_of_worlds(config.template)}

    def context(opening: Opening) -> Context:
        shown = worlds.get(opening.world, {}).get("show_tools", opening.show_tools)
        template = own.get(f"template.worlds.{opening.world}", common)
        return template(replace(opening, show_tools=shown))

    return context if worlds else common


def make_pipeline(
    config: Any, actor: Actor, worlds: Worlds, grader: grading.Grader, judge: grading.Judge
) -> Pipeline | None:
    """Return the pipeline of rollouts that run during training, None with `rollout.async_depth`
    0."""
    c = config.rollout
    if not c.async_depth:
        return None
    places = asyncio.Semaphore(c.concurrency)
    return Pipeline(
        functools.partial(rollouts, actor=actor, worlds=worlds, concurrency=places),
        functools.partial(judge, grader),
        depth=c.async_depth,
        bound=config.learner.max_staleness,
        judges=grader.concurrency,
    )


def make_tasks(
    config: Any,
    originals: list[Task],
    held_out: list[Task],
    given: Sequence[Task],
    parts: Parts,
) -> Tasks:
    """Build the task lists and, with self-questioning, the pool and its explorer. given:
    `questioning.tasks`."""
    c = config.questioning
    if not c.enabled:
        return Tasks(originals, held_out)
    synthetic = [task for task in given if task.origin == "synthetic"]
    pool = TaskPool(originals, overlap=c.overlap, capacity=c.capacity, tasks=synthetic)
    unverified = [task.id for task in pool.tasks.values() if not is_verified(task)]
    if unverified and not replaces_outcome(config):
        raise RunError(
            f"config.questioning.tasks={c.tasks}: {len(unverified)} of {len(pool.tasks)} tasks have"
            f" no verifier ({unverified[0]} is the first): set"
            " config.questioning.judge.name=reference"
        )
    explorer = None
    if not c.tasks or c.every:
        explorer = plugged(config, "questioning.explorer")(replace(parts, task_pool=pool))
    return Tasks(originals, held_out, pool, explorer, plugged(config, "questioning.words")(parts))


def make_navigating(config: Any, tasks: Sequence[Task], parts: Parts) -> Navigating | None:
    """Build self-navigating, with the pool of `navigating.pool` if there is one. It learns from
    training tasks only, which have the splits of `tasks`."""
    c = config.navigating
    if not c.enabled:
        return None
    splits = {"train", *(task.split for task in tasks)} - {config.eval.split}
    parts = replace(parts, splits=tuple(sorted(splits)))
    pool = ExperiencePool(plugged(config, "navigating.embedder")(parts))
    if c.pool:
        pool.load(resolve(c.pool))
    return Navigating(
        pool,
        plugged(config, "navigating.extractor")(parts),
        plugged(config, "navigating.refine")(parts),
        share=c.share,
        top_k=c.top_k,
        min_similarity=c.min_similarity,
    )
