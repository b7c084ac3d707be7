"""Rollouts: the policy and a world take turns until one of them, or a limit, ends the episode.

Every end of an episode is a `StopReason` of its trajectory, including failures of the environment
or of the context template. Only an engine fault is raised as an exception: without the engine there
is nothing to train on.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import math
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envs import boundary
from envs.call_formats import as_hermes
from envs.world import StepResult, Task, World, WorldTimeout
from models.tokenizer import Tokenizer
from rl import calls
from rl.calls import format_of
from rl.contexts import Context, Limits, Opening, Template, cut
from rl.contexts.causal import Causal
from rl.engines import ContextFull, Engine, EngineFault
from rl.seeds import seed_of
from rl.trajectory import LIMITED, Completion, EndsRun, Sampling, StopReason, Trajectory, Turn

# What a call into a world returned, or else what it raised.
Answer = tuple[Any, BaseException | None]


@dataclass
class Job:
    """One rollout to play. `seed` determines everything that is sampled in it."""

    task: Task
    rollout: int  # index within the group
    seed: int
    # max_tokens is capped by the limits, and each turn gets its own seed; without stop tokens, the
    # tokenizer's `stops` end a turn
    sampling: Sampling
    experience: list[tuple[str, str]] = field(default_factory=list)  # (id, content) to inject
    draw: int = 0  # see Trajectory.draw
    # Turns to begin with, see `branch`: their actions are played, and nothing is generated for them
    prefix: Sequence[Turn] = ()

    @property
    def group(self) -> tuple[str, int]:
        """As `Trajectory.group`."""
        return self.task.id, self.draw

    def trajectory(self) -> Trajectory:
        """Return the trajectory of this rollout before its first prompt."""
        return Trajectory(self.task, self.rollout, self.seed, [], draw=self.draw)


def jobs_of(
    tasks: Iterable[Task],
    count: int,
    sampling: Sampling,
    seed: int,
    *purpose: int | str,
    draw: int = 0,
) -> list[Job]:
    """Return `count` jobs of each task, one task after the other. Each has a seed of its own, which
    depends on `seed`, the purpose, the task's id and the index of the rollout."""
    return [
        Job(task, index, seed_of(seed, *purpose, task.id, index), sampling, draw=draw)
        for task, index in itertools.product(tasks, range(count))
    ]


def branch(trajectory: Trajectory, turns: int, job: Job) -> Job:
    """Return the job that begins with the first `turns` turns of a rollout of the same task, with
    their tokens and under the same experience, and goes on as the policy samples then.

    These turns are marked as `given`: they are part of the prompt and do not train. The world plays
    their actions from the start of the task, so that what it answers is what it answers now.
    """
    pairs = zip(trajectory.experience, trajectory.injected, strict=True)
    prefix, draw = trajectory.turns[:turns], trajectory.draw
    return dataclasses.replace(job, prefix=prefix, experience=list(pairs), draw=draw)


def turns_of(tokenizer: Tokenizer, actions: Sequence[str]) -> list[Turn]:
    """Return turns to begin a rollout with that say the given actions, in the policy's format of
    calls. Raises ChatError."""
    turns = []
    for action in actions:
        ids = calls.reply(tokenizer, {"role": "assistant", "content": action})
        turns.append(Turn([], Completion(ids, [0.0] * len(ids), "stop", -1), action, []))
    return turns


@dataclass(frozen=True)
class Actor:
    """The policy in its episodes: all that rollouts have in common.

    threads: call worlds in threads, so that other episodes go on and a call that hangs is abandoned
    at its deadline. A world called directly cannot be interrupted: a late answer is noticed when it
    returns. Coroutine methods are awaited.
    """

    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    context: Template = Causal  # the template, see `rl.contexts`
    chat: Any = None  # the client of language models, for templates that ask one
    show_tools: bool = True  # list the tools in the system message
    # after a turn that the world could not read
    parse_error: Literal["end", "continue"] = "continue"
    cut_turn: Literal["end", "continue"] = "end"  # after a turn cut by its token limit
    threads: bool = False


class Worlds:
    """A pool of world instances. Each is lent to one episode at a time, made when needed and
    reused."""

    def __init__(self, make_world: Callable[[], World]):
        self._make = make_world
        self._idle: list[World] = []
        self.lent = 0

    def take(self) -> World:
        """Return an idle world, or a new one. Raises whatever making one raises."""
        world = self._idle.pop() if self._idle else self._make()
        self.lent += 1
        return world

    def give(self, world: World, *, broken: bool) -> None:
        """Take a world back. A broken one may hang in a call, so a daemon thread closes it."""
        self.lent -= 1
        if broken:
            threading.Thread(target=_close, args=(world,), daemon=True).start()
            return
        if end_episode := getattr(world, "end_episode", None):
            end_episode()
        self._idle.append(world)

    def close(self) -> None:
        """Close the idle worlds."""
        while self._idle:
            _close(self._idle.pop())


def _close(world: World) -> None:
    # The world is discarded, and its earlier errors have been reported.
    with contextlib.suppress(Exception):
        world.close()


async def rollouts(
    jobs: Sequence[Job],
    actor: Actor,
    worlds: Worlds,
    *,
    concurrency: int | asyncio.Semaphore = 64,
    progress: Callable[[int, int, Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play every job, at most `concurrency` at a time, and return the trajectories in the order of
    the jobs.

    A rollout that failed before its first prompt is played once more, in another world.

    Args:
      concurrency: a number, or a semaphore that limits several calls together.
      progress: called with the number done, the total and the trajectory that just ended.

    Raises EngineFault and EndsRun. After an exception or a cancellation nothing is left running.
    """
    places = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency
    done = 0

    async def play(job: Job) -> Trajectory:
        nonlocal done
        async with places:
            trajectory = await _in_some_world(job, actor, worlds)
            if trajectory.failed and not trajectory.messages:
                why = trajectory.error
                trajectory = await _in_some_world(job, actor, worlds)
                trajectory.restarted = why
        done += 1
        if progress is not None:
            progress(done, len(jobs), trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(job)) for job in jobs]
    except BaseExceptionGroup as errors:
        # The others failed for the same reason, or were cancelled because of it.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _in_some_world(job: Job, actor: Actor, worlds: Worlds) -> Trajectory:
    try:
        world = worlds.take()
    except Exception as error:
        trajectory = job.trajectory()
        trajectory.stop, trajectory.error = StopReason.ENV_ERROR, _describe("make_world", error)
        return trajectory
    broken = True
    try:
        trajectory = await rollout(job, actor, world)
        broken = trajectory.broken
    finally:
        worlds.give(world, broken=broken)
    return trajectory


async def rollout(job: Job, actor: Actor, world: World) -> Trajectory:
    """Play one episode in `world` and evaluate it, unless the world or the template failed.

    Failures are recorded in the trajectory. Raises EngineFault and EndsRun.
    """
    episode = _Episode(job, actor, world)
    trajectory = episode.trajectory
    try:
        trajectory.stop = await episode.play()
        await episode.evaluate()
    except _Failure as failure:
        trajectory.stop, trajectory.error = failure.stop, failure.error
        if failure.stop is StopReason.CANCELLED and not episode.hanging:
            with contextlib.suppress(_Failure):
                await episode.evaluate()
    finally:
        await actor.engine.release(episode.session)
    return trajectory


class _Failure(Exception):
    """A failure or a deadline ended the episode."""

    def __init__(self, stop: StopReason, error: str):
        super().__init__(error)
        self.stop, self.error = stop, error


class _Episode:
    """One episode in progress."""

    def __init__(self, job: Job, actor: Actor, world: World):
        self.job, self.actor, self.world, self.limits = job, actor, world, actor.limits
        self.trajectory = job.trajectory()
        self.session = self.trajectory.name
        self.deadline = asyncio.get_running_loop().time() + self.limits.timeout
        self.max_tokens = min(job.sampling.max_tokens, self.limits.max_tokens)
        # True once a call into the world was abandoned, so that the world cannot be asked again
        self.hanging = False

    async def play(self) -> StopReason:
        """Take turns until the episode ends, and return why it did."""
        context = await self.open()
        for number in range(self.limits.max_turns):
            if stop := await self.take_turn(context, number):
                return stop
        return StopReason.MAX_TURNS

    async def open(self) -> Context:
        """Reset the world, and return the context that begins with its first observation."""
        trajectory, task, actor = self.trajectory, self.job.task, self.actor
        observation = await self.call(
            "reset", boundary.observation, self.world.reset, task, task.seed
        )
        texts = [text for _, text in self.job.experience]
        with _failures_of("template"):
            opened = actor.tokenizer, observation, texts, actor.show_tools, self.limits
            context = actor.context(Opening(*opened, actor.chat, task.env, trajectory.name))
            trajectory.messages = list(context.messages)
            trajectory.experience = [id for id, _ in self.job.experience]
            trajectory.injected = texts
            trajectory.tools = list(observation.tools)
        return context

    async def take_turn(self, context: Context, number: int) -> StopReason | None:
        """Generate a turn and let the world, or the template, answer it. Return the reason to stop,
        None to continue."""
        trajectory, tokenizer = self.trajectory, self.actor.tokenizer
        with _failures_of("template"):
            prompt, stripped = _prompts(context, guided=trajectory.guided)
        given = number < len(self.job.prefix)
        completion = (
            self.job.prefix[number].completion if given else await self.generate(prompt, number)
        )
        if completion is None:
            return StopReason.CONTEXT_FULL
        with _failures_of("template"):
            text = tokenizer.decode(completion.text_tokens)
            if not context.managing:
                text = as_hermes(text, format_of(tokenizer))
            action = context.action(text)
        turn = Turn(prompt, completion, action, [], stripped=stripped, given=given)
        trajectory.turns.append(turn)
        if context.managing:
            with _failures_of("template"):
                decided = context.manage(completion)
                turn.info = {"managing": True, "calls": [], "errors": 0} | decided
            return None
        if completion.stop == "length":
            if len(completion.tokens) < self.max_tokens:
                return StopReason.CONTEXT_FULL
            if self.actor.cut_turn == "end":
                return StopReason.LENGTH
        what = f"step {number}"
        result: StepResult = await self.call(what, boundary.result, self.world.step, action)
        with _failures_of(what):
            turn.info, turn.reward = result.info, result.reward
            added = [tool for tool in result.tools or () if tool not in trajectory.tools]
            trajectory.tools += added
            turn.observation = cut(tokenizer, result.messages, self.limits.max_observation)
        if result.terminated:
            return StopReason.DONE
        if result.truncated:
            return StopReason.MAX_TURNS
        if self.actor.parse_error == "end" and result.info.get("parse_error"):
            return StopReason.PARSE_ERROR
        with _failures_of("template"):
            async with self.until_deadline():
                await context.extend(completion, turn.observation, result.tools)
        return None

    async def generate(self, prompt: list[int], number: int) -> Completion | None:
        """Generate turn `number`; return None if the context or the engine has no room for it."""
        room = self.limits.context - len(prompt)
        if room <= 0:
            return None
        sampling, tokenizer = self.job.sampling, self.actor.tokenizer
        sampling = dataclasses.replace(
            sampling,
            max_tokens=min(self.max_tokens, room),
            stop_tokens=sampling.stop_tokens or tokenizer.stops,
            seed=seed_of(self.job.seed, "turn", number),
        )
        try:
            async with self.until_deadline():
                return await self.actor.engine.generate(prompt, sampling, session=self.session)
        except ContextFull:
            return None

    @contextlib.asynccontextmanager
    async def until_deadline(self) -> AsyncIterator[None]:
        """Cancel what is awaited in the block at the deadline of the episode, and end the
        episode."""
        try:
            async with asyncio.timeout_at(self.deadline) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self.overdue() from None

    def overdue(self, where: str = "") -> _Failure:
        """Return the failure of an episode whose deadline passed, wherever it did."""
        error = f"the episode took longer than {self.limits.timeout:g} s"
        return _Failure(StopReason.CANCELLED, f"{error}, in {where}" if where else error)

    async def evaluate(self) -> None:
        """Write the world's evaluation into the trajectory. Only the limit of a call applies.

        With `must_end`, an episode that a limit ended forfeits it.
        """
        self.deadline = math.inf
        self.trajectory.evaluation = await self.call(
            "evaluate", boundary.evaluation, self.world.evaluate
        )
        if self.limits.must_end and self.trajectory.stop in LIMITED:
            self.trajectory.forfeit()

    async def call(
        self, what: str, check: Callable[[Any], Any], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call into the world under the limits of the call and the episode. Return what `check`
        makes of the answer.

        Raises _Failure for any exception. A call that exceeds its own limit ends the episode as
        `env_timeout`; the deadline of the episode cancels it, as it does everywhere else.
        """
        time = asyncio.get_running_loop().time
        end = min(time() + self.limits.env_timeout, self.deadline)

        def late() -> Exception:
            if end == self.deadline:
                return self.overdue(what)
            return WorldTimeout(f"no answer within {self.limits.env_timeout:.3g} s")

        with _failures_of(what):
            if end <= time():
                raise late()
            try:
                async with asyncio.timeout_at(end if end < math.inf else None):
                    answer, error = await self.answer_of(function, *arguments)
            except TimeoutError:
                self.hanging = True
                raise late() from None
            if error is not None:
                raise _failure(what, error)
            if time() > end:
                raise late()
            return check(answer)

    async def answer_of(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """Return what the function returns or raises.

        An exception travels as a value: raised here, a StopIteration or CancelledError of the world
        would be taken for the event loop's own.
        """
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments), None
            if self.actor.threads:
                return await _in_thread(function, *arguments)
            return function(*arguments), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return None, error


def _prompts(context: Context, *, guided: bool) -> tuple[list[int], list[int]]:
    """Return copies of the next prompt and, if it differs, of the prompt without the injected
    experience."""
    prompt = list(context.prompt)
    stripped = list(context.stripped) if guided else []
    if guided and not stripped:
        raise ValueError("`stripped` is empty: training would see the injected experience")
    return prompt, [] if stripped == prompt else stripped


@contextlib.contextmanager
def _failures_of(what: str) -> Iterator[None]:
    """Turn an exception of the block into a _Failure that names what failed, unless it is not only
    the episode's."""
    try:
        yield
    except (_Failure, EndsRun, EngineFault):
        raise
    except (Exception, SystemExit) as error:
        raise _failure(what, error) from error


def _failure(what: str, error: BaseException) -> _Failure:
    # A TimeoutError of a template is no call into the world.
    late = isinstance(error, TimeoutError) and what != "template"
    stop = StopReason.ENV_TIMEOUT if late else StopReason.ENV_ERROR
    return _Failure(stop, _describe(what, error))


def _describe(what: str, error: BaseException) -> str:
    """Return "what: type: text". A fault of a template, which may be user code, also names its file
    and line."""
    frames = traceback.extract_tb(error.__traceback__) if what == "template" else ()
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what}: {type(error).__name__}: {error}{place}"


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Awaitable[Answer]:
    """Return what a function returns or raises, run in a daemon thread of its own.

    Such a thread blocks neither a thread pool nor the interpreter's exit. A result that arrives
    after nobody waits for it any more is ignored.
    """
    future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only abandoned

    def run() -> None:
        try:
            answer: Answer = function(*arguments), None
        except BaseException as error:
            answer = None, error
        future.set_result(answer)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)
