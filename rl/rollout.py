"""Rollouts: the policy and a world take turns until one of them, or a limit, ends the episode.

Every end of an episode is a `StopReason` of its trajectory, including failures of the environment
or of the context
template. Only an engine fault is raised as an exception: without the engine there is nothing to
train on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs import boundary
from envs.world import StepResult, Task, World, WorldTimeout
from models.tokenizer import Tokenizer
from rl.contexts import Context, Limits, Opening, action_of, cut
from rl.contexts.causal import Causal
from rl.engines import ContextFull, Engine, EngineFault
from rl.seeds import seed_of
from rl.trajectory import LIMITED, Completion, EndsRun, Sampling, StopReason, Trajectory, Turn


@dataclass
class Job:
    """One rollout to play. `seed` determines everything that is sampled in it."""

    task: Task
    rollout: int  # index within the group
    seed: int
    sampling: Sampling
    experience: list[tuple[str, str]] = field(default_factory=list)  # (id, content) to inject
    draw: int = 0  # see Trajectory.draw


class Worlds:
    """A pool of world instances. Each is lent to one episode at a time, made when needed and
    reused."""

    def __init__(self, make_world: Callable[[], World]):
        self._make, self._idle = make_world, []

    def take(self) -> World:
        """Return an idle world, or a new one. Raises whatever making one raises."""
        return self._idle.pop() if self._idle else self._make()

    def give(self, world: World, *, broken: bool = False) -> None:
        """Take a world back. A broken one may hang in a call, so a daemon thread closes it."""
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
    with contextlib.suppress(
        Exception
    ):  # the world is discarded, and its earlier errors have been reported
        world.close()


async def rollouts(
    jobs: Sequence[Job],
    *,
    worlds: Worlds,
    concurrency: int | asyncio.Semaphore = 64,
    progress: Callable[[int, int, Trajectory], None] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Play every job, at most `concurrency` at a time, and return the trajectories in the order of
    the jobs.

    Args:
      concurrency: a number, or a semaphore that limits several calls together.
      progress: called with the number done, the total and the trajectory that just ended.
      settings: the same for all jobs: engine, tokenizer, limits and the other arguments of
      `rollout`.

    Raises EngineFault and EndsRun. After an exception or a cancellation nothing is left running.
    """
    places = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency
    done = 0

    async def play(job: Job) -> Trajectory:
        nonlocal done
        async with places:
            trajectory = await _play_job(job, worlds, settings)
            if _failed_to_start(trajectory):
                why, trajectory = trajectory.error, await _play_job(job, worlds, settings)
                trajectory.restarted = why
        trajectory.draw = job.draw
        done += 1
        if progress is not None:
            progress(done, len(jobs), trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(job)) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[
            0
        ] from None  # the others failed for the same reason, or were cancelled because of it
    return [task.result() for task in tasks]


async def _play_job(job: Job, worlds: Worlds, settings: dict[str, Any]) -> Trajectory:
    try:
        world = worlds.take()
    except Exception as error:
        trajectory = _blank(job.task, job.rollout, job.seed)
        trajectory.stop, trajectory.error = StopReason.ENV_ERROR, _describe("make_world", error)
        return trajectory
    broken = True
    try:
        trajectory = await rollout(
            job.task, rollout_index=job.rollout, seed=job.seed, sampling=job.sampling, experience=job.experience,
            world=world, **settings,
        )  # fmt: skip
        broken = trajectory.broken
    finally:
        worlds.give(world, broken=broken)
    return trajectory


def _failed_to_start(trajectory: Trajectory) -> bool:
    """Return True if a rollout failed before its first prompt: the only failure that is retried, in
    another world."""
    return not trajectory.messages and trajectory.stop in (
        StopReason.ENV_ERROR,
        StopReason.ENV_TIMEOUT,
    )


async def rollout(
    task: Task,
    *,
    rollout_index: int,
    seed: int,
    world: World,
    engine: Engine,
    tokenizer: Tokenizer,
    limits: Limits,
    sampling: Sampling,
    experience: Sequence[tuple[str, str]] = (),
    context: Callable[[Opening], Context] = Causal,
    show_tools: bool = True,
    chat: Any = None,
    parse_error: str = "continue",
    cut_turn: str = "end",
    threads: bool = False,
) -> Trajectory:
    """Play one episode of `task` in `world` and evaluate it, unless the world or the template
    failed.

    Failures are recorded in the trajectory.

    Args:
      rollout_index: index within the group.
      sampling: max_tokens is capped by the limits, and each turn gets its own seed. If it has no
        stop tokens, the tokenizer's `im_end` and `endoftext` are used.
      experience: (id, content) of each experience to inject into the prompt.
      context: the template, see `rl.contexts`.
      show_tools: list the tools in the system message.
      chat: the client of language models, for templates that ask one.
      parse_error: "end" or "continue" the episode after a turn that the world could not read.
      cut_turn: "end" the episode after a turn cut by its token limit, or "continue" with the text
      so far.
      threads: call the world in a thread, so that other episodes go on and a call that hangs is
        abandoned at its deadline. A world called directly cannot be interrupted: a late answer is
        noticed when it returns. Coroutine methods are awaited.

    Raises EngineFault.
    """
    if cut_turn not in ("end", "continue") or parse_error not in ("end", "continue"):
        raise ValueError(
            f'cut_turn and parse_error are "end" or "continue", not {cut_turn!r} and {parse_error!r}'
        )
    trajectory = _blank(task, rollout_index, seed)
    if not sampling.stop_tokens:
        sampling = dataclasses.replace(
            sampling, stop_tokens=(tokenizer.im_end, tokenizer.endoftext)
        )
    episode = _Episode(
        trajectory, world, engine, tokenizer, limits, sampling, cut_turn, parse_error, threads
    )
    try:
        await episode.play(context, experience, show_tools, chat)
        await episode.evaluate()
    except _Failure as failure:
        trajectory.stop, trajectory.error = failure.stop, failure.error
        if failure.stop is StopReason.CANCELLED and not episode.hanging:
            with contextlib.suppress(_Failure):
                await episode.evaluate()
    finally:
        await engine.release(episode.session)
    return trajectory


def _blank(task: Task, rollout_index: int, seed: int) -> Trajectory:
    return Trajectory(task=task, rollout=rollout_index, seed=seed, messages=[])


class _Failure(Exception):
    """A failure or a deadline ended the episode."""

    def __init__(self, stop: StopReason, error: str):
        super().__init__(error)
        self.stop, self.error = stop, error


@dataclass
class _Episode:
    """One episode in progress. The fields are the arguments of `rollout`."""

    trajectory: Trajectory
    world: World
    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    sampling: Sampling
    cut_turn: str
    parse_error: str
    threads: bool

    def __post_init__(self):
        self.deadline = asyncio.get_running_loop().time() + self.limits.timeout
        self.max_tokens = min(self.sampling.max_tokens, self.limits.max_tokens)
        self.session = f"{self.trajectory.task.id}/{self.trajectory.rollout}/{self.trajectory.seed}"
        # True once a call into the world was abandoned, so that the world cannot be asked again
        self.hanging = False

    async def play(
        self,
        template: Callable[[Opening], Context],
        experience: Sequence[tuple[str, str]],
        show_tools: bool,
        chat: Any,
    ) -> None:
        """Take turns until the episode ends, and write them and the stop reason into the
        trajectory."""
        trajectory, task = self.trajectory, self.trajectory.task
        observation = await self.call(
            "reset", boundary.observation, self.world.reset, task, task.seed
        )
        ids, texts = [id for id, _ in experience], [text for _, text in experience]
        with _failures_of("template"):
            context = template(
                Opening(self.tokenizer, observation, texts, show_tools, self.limits, chat)
            )
            trajectory.messages, trajectory.experience, trajectory.injected = (
                list(context.messages),
                ids,
                texts,
            )
            trajectory.tools = list(observation.tools)
        for number in range(self.limits.max_turns):
            with _failures_of("template"):
                prompt, stripped = _prompts(context, guided=trajectory.guided)
            room = self.limits.context - len(prompt)
            completion = await self.generate(prompt, number, room) if room > 0 else None
            if completion is None:
                trajectory.stop = StopReason.CONTEXT_FULL
                return
            with _failures_of("template"):
                action = action_of(context, self.text_of(completion))
            turn = Turn(prompt, completion, action, [], stripped=stripped)
            trajectory.turns.append(turn)
            if getattr(context, "managing", False):
                with _failures_of("template"):
                    turn.info = {"managing": True, "calls": [], "errors": 0} | context.manage(
                        completion
                    )
                continue
            if completion.stop == "length":
                context_is_full = len(completion.tokens) < self.max_tokens
                if context_is_full or self.cut_turn == "end":
                    trajectory.stop = (
                        StopReason.CONTEXT_FULL if context_is_full else StopReason.LENGTH
                    )
                    return
            result = await self.call(
                f"step {number}", boundary.result, self.world.step, turn.action
            )
            with _failures_of(f"step {number}"):
                turn.info = result.info
                trajectory.tools += [
                    tool for tool in result.tools or () if tool not in trajectory.tools
                ]
                turn.observation = cut(self.tokenizer, result.messages, self.limits.max_observation)
                stop = self.stop_of(result)
            if stop is not None:
                trajectory.stop = stop
                return
            with _failures_of("template"):
                async with self.until_deadline():
                    await context.extend(completion, turn.observation, result.tools)
        trajectory.stop = StopReason.MAX_TURNS

    def stop_of(self, result: StepResult) -> StopReason | None:
        """Return the reason to stop after this answer of the world, or None to continue."""
        if result.terminated:
            return StopReason.DONE
        if result.truncated:
            return StopReason.MAX_TURNS
        if self.parse_error == "end" and result.info.get("parse_error"):
            return StopReason.PARSE_ERROR
        return None

    def text_of(self, completion: Completion) -> str:
        """Return the text of a generation, without its stop token."""
        tokens = completion.tokens[:-1] if completion.stop == "stop" else completion.tokens
        return self.tokenizer.decode(tokens)

    async def generate(self, prompt: list[int], number: int, room: int) -> Completion | None:
        """Generate turn `number`; return None if the engine has no room for it."""
        sampling = dataclasses.replace(
            self.sampling,
            max_tokens=min(self.max_tokens, room),
            seed=seed_of(self.trajectory.seed, "turn", number),
        )
        try:
            async with self.until_deadline():
                return await self.engine.generate(prompt, sampling, session=self.session)
        except ContextFull:
            return None

    @contextlib.asynccontextmanager
    async def until_deadline(self):
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

    async def answer_of(
        self, function: Callable[..., Any], *arguments: Any
    ) -> tuple[Any, BaseException | None]:
        """Return what the function returns or raises.

        An exception travels as a value: raised here, a StopIteration or CancelledError of the world
        would be taken for the event loop's own.
        """
        if self.threads and not inspect.iscoroutinefunction(function):
            return await _in_thread(function, *arguments)
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments), None
            return function(*arguments), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
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
    late = (
        isinstance(error, TimeoutError) and what != "template"
    )  # a template's is no call into the world
    stop = StopReason.ENV_TIMEOUT if late else StopReason.ENV_ERROR
    return _Failure(stop, _describe(what, error))


def _describe(what: str, error: BaseException) -> str:
    """Return "what: type: text". A fault of a template, which may be user code, also names its file
    and line."""
    frames = traceback.extract_tb(error.__traceback__) if what == "template" else ()
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what}: {type(error).__name__}: {error}{place}"


def _in_thread(
    function: Callable[..., Any], *arguments: Any
) -> Awaitable[tuple[Any, BaseException | None]]:
    """Return what a function returns or raises, run in a daemon thread of its own.

    Such a thread blocks neither a thread pool nor the interpreter's exit. A result that arrives
    after its future was cancelled is ignored.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        try:
            outcome = function(*arguments), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop may have been closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return future
