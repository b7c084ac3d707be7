"""Episodes: the policy and a world take turns until one of them, or a limit, ends it.

Every way in which an episode can end is a `StopReason` of its trajectory, failures of the environment included. Only a
fault of the engine is an exception: without it there is nothing to train on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.world import StepResult, Task, World, WorldTimeout
from models.tokenizer import Tokenizer
from rl.context import Linear, cut
from rl.engines import ContextFull, Engine
from rl.seeds import seed_of
from rl.trajectory import Completion, Sampling, Step, StopReason, Trajectory


@dataclass(frozen=True)
class Limits:
    """What an episode may use. Tokens are the policy's."""

    max_steps: int = 30  # turns of the policy
    max_turn_tokens: int = 512  # of one generation
    context_tokens: int = 4096  # of prompt and generation together; at most the engine's length
    observation_tokens: int = 1024  # of the answer to one turn; more is cut at a visible mark
    episode_seconds: float = 600.0  # set-up included; evaluation has `step_seconds` of its own
    step_seconds: float = 60.0  # of one call into the world


@dataclass(frozen=True)
class Retry:
    """The one thing that is tried again is a reset that failed, on a new world."""

    attempts: int = 2  # in all
    delay: float = 0.0  # seconds before the second attempt; doubles with each

    def __post_init__(self):
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; the first try counts, so it is at least 1")


@dataclass
class Job:
    """One rollout to make. `seed` decides everything that is sampled in it."""

    task: Task
    rollout: int  # index within the group
    seed: int
    sampling: Sampling
    experience: list[tuple[str, str]] = field(default_factory=list)  # (id, content) to inject


class Worlds:
    """World instances, each lent to one episode at a time, made when needed and kept for the next."""

    def __init__(self, make_world: Callable[[], World]):
        self._make, self._idle = make_world, []

    def take(self) -> World:
        return self._idle.pop() if self._idle else self._make()

    def give(self, world: World, *, broken: bool = False) -> None:
        """Take a world back. A broken one may still be busy with a call that hangs, so nobody waits for its close."""
        if broken:
            threading.Thread(target=_close, args=(world,), daemon=True).start()
        else:
            self._idle.append(world)

    def close(self) -> None:
        while self._idle:
            _close(self._idle.pop())


def _close(world: World) -> None:
    with contextlib.suppress(Exception):  # it is being thrown away; its errors were reported when they mattered
        world.close()


async def rollouts(
    jobs: Sequence[Job],
    *,
    worlds: Worlds,
    concurrency: int | asyncio.Semaphore = 64,
    retry: Retry = Retry(),
    progress: Callable[[int, int, Trajectory], None] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Play every job, at most `concurrency` at a time (a semaphore is shared with other calls); trajectories in the
    order of the jobs.

    settings: engine, tokenizer, limits and what else `rollout` takes, the same for all. progress: called with the
    number done, the total and the trajectory that just ended. Raises EngineFault; an exception or a cancellation
    leaves nothing running.
    """
    places = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency
    done = 0

    async def play(job: Job) -> Trajectory:
        nonlocal done
        async with places:
            trajectory = await _with_retries(job, worlds, retry, settings)
        done += 1
        if progress is not None:
            progress(done, len(jobs), trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(job)) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others failed for the same reason, or were cancelled for it
    return [task.result() for task in tasks]


async def _with_retries(job: Job, worlds: Worlds, retry: Retry, settings: dict[str, Any]) -> Trajectory:
    for attempt in range(retry.attempts):
        if attempt:
            await asyncio.sleep(retry.delay * 2 ** (attempt - 1))
        try:
            world = worlds.take()
        except Exception as error:
            trajectory = _blank(job.task, job.rollout, job.seed)
            trajectory.stop, trajectory.error = StopReason.ENV_ERROR, _describe("make_world", error)
        else:
            broken = True
            try:
                trajectory = await rollout(
                    job.task, rollout_index=job.rollout, seed=job.seed, sampling=job.sampling,
                    experience=job.experience, world=world, **settings,
                )  # fmt: skip
                broken = trajectory.stop in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)
            finally:
                worlds.give(world, broken=broken)
        trajectory.retries = attempt
        if trajectory.messages or trajectory.stop not in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
            break  # the episode began
    return trajectory


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
    length_stop: str = "end",
    parse_error: str = "continue",
    show_tools: bool = True,
    threads: bool = False,
) -> Trajectory:
    """Play one episode of `task` in `world` and evaluate it, finished or not.

    sampling: its max_tokens is capped by the limits, its seed replaced by one per turn; without stop tokens it gets
    the end of a turn. length_stop: what a turn cut by its token limit does, "end" the episode or "continue" with what
    it says so far. parse_error: the same for a turn that the world could not read.
    threads: call the world in a thread, so that other episodes go on and a call that hangs is abandoned at its
    deadline. A world called directly cannot be interrupted: its lateness is noticed when it returns. Methods that are
    coroutine functions are awaited. Raises EngineFault.
    """
    if length_stop not in ("end", "continue") or parse_error not in ("end", "continue"):
        raise ValueError(f'length_stop and parse_error are "end" or "continue", not {length_stop!r}, {parse_error!r}')
    trajectory = _blank(task, rollout_index, seed)
    if not sampling.stop_tokens:
        sampling = dataclasses.replace(sampling, stop_tokens=(tokenizer.im_end, tokenizer.endoftext))
    episode = _Episode(trajectory, world, engine, tokenizer, limits, sampling, length_stop, parse_error, threads)
    try:
        await episode.play(experience, show_tools)
        await episode.evaluate()
    except _Ended as end:
        trajectory.stop, trajectory.error = end.stop, end.error
        if end.stop is StopReason.CANCELLED:
            with contextlib.suppress(_Ended):
                await episode.evaluate()
    finally:
        await engine.release(episode.session)
    return trajectory


def _blank(task: Task, rollout_index: int, seed: int) -> Trajectory:
    return Trajectory(task=task, rollout=rollout_index, seed=seed, messages=[])


class _Ended(Exception):
    """The episode ended by a failure or a deadline."""

    def __init__(self, stop: StopReason, error: str):
        super().__init__(error)
        self.stop, self.error = stop, error


@dataclass
class _Episode:
    trajectory: Trajectory
    world: World
    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    sampling: Sampling
    length_stop: str
    parse_error: str
    threads: bool

    def __post_init__(self):
        self.ends = asyncio.get_running_loop().time() + self.limits.episode_seconds
        self.turn_tokens = min(self.sampling.max_tokens, self.limits.max_turn_tokens)
        self.session = f"{self.trajectory.task.id}/{self.trajectory.rollout}/{self.trajectory.seed}"

    async def play(self, experience: Sequence[tuple[str, str]], show_tools: bool) -> None:
        trajectory, task = self.trajectory, self.trajectory.task
        observation = await self.call("reset", self.world.reset, task, task.seed)
        with _blame_world("reset"):
            texts = [text for _, text in experience]
            context = Linear(self.tokenizer, observation, experience=texts, show_tools=show_tools)
        trajectory.messages, trajectory.stripped = context.messages, context.stripped
        trajectory.experience, trajectory.told = [id for id, _ in experience], [text for _, text in experience]
        for turn in range(self.limits.max_steps):
            room = self.limits.context_tokens - len(context.prompt)
            completion = await self.generate(context.prompt, turn, room) if room > 0 else None
            if completion is None:
                trajectory.stop = StopReason.CONTEXT_FULL
                return
            step = Step(context.prompt, completion, self.text_of(completion), [])
            trajectory.steps.append(step)
            if completion.stop == "length":
                limited = len(completion.tokens) < self.turn_tokens
                if limited or self.length_stop == "end":
                    trajectory.stop = StopReason.CONTEXT_FULL if limited else StopReason.LENGTH
                    return
            result = await self.call(f"step {turn}", self.world.step, step.action)
            with _blame_world(f"step {turn}"):
                step.info = result.info
                step.observation = cut(self.tokenizer, result.messages, self.limits.observation_tokens)
                stop = self.stop_of(result)
                if stop is None:
                    context.extend(completion, step.observation, result.tools)
            if stop is not None:
                trajectory.stop = stop
                return
        trajectory.stop = StopReason.MAX_STEPS

    def stop_of(self, result: StepResult) -> StopReason | None:
        if result.terminated:
            return StopReason.DONE
        if result.truncated:
            return StopReason.MAX_STEPS
        if self.parse_error == "end" and result.info.get("parse_error"):
            return StopReason.PARSE_ERROR
        return None

    def text_of(self, completion: Completion) -> str:
        tokens = completion.tokens[:-1] if completion.stop == "stop" else completion.tokens
        return self.tokenizer.decode(tokens)

    async def generate(self, prompt: list[int], turn: int, room: int) -> Completion | None:
        """One turn; None if the engine has no room for it."""
        sampling = dataclasses.replace(
            self.sampling,
            max_tokens=min(self.turn_tokens, room),
            seed=seed_of(self.trajectory.seed, "turn", turn),
        )
        try:
            async with asyncio.timeout_at(self.ends) as deadline:
                return await self.engine.generate(prompt, sampling, session=self.session)
        except ContextFull:
            return None
        except TimeoutError:
            if not deadline.expired():
                raise
            seconds = self.limits.episode_seconds
            raise _Ended(StopReason.CANCELLED, f"the episode took longer than {seconds:g} s") from None

    async def evaluate(self) -> None:
        self.ends = asyncio.get_running_loop().time() + self.limits.step_seconds
        evaluation = await self.call("evaluate", self.world.evaluate)
        with _blame_world("evaluate"):
            if not 0.0 <= evaluation.score <= 1.0:
                raise ValueError(f"the score {evaluation.score} is not in [0, 1]")
        self.trajectory.evaluation = evaluation

    async def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call into the world under both deadlines. Raises _Ended for whatever goes wrong there."""
        began = asyncio.get_running_loop().time()
        seconds = min(self.limits.step_seconds, self.ends - began)
        with _blame_world(what):
            if seconds <= 0:
                raise WorldTimeout(f"the episode took longer than {self.limits.episode_seconds:g} s")
            late = f"no answer within {seconds:.3g} s"
            try:
                async with asyncio.timeout(seconds):
                    if inspect.iscoroutinefunction(function):
                        return await function(*arguments)
                    if self.threads:
                        return await _in_thread(function, *arguments)
                    result = function(*arguments)
            except TimeoutError as error:
                raise WorldTimeout(str(error) or late) from None
            if asyncio.get_running_loop().time() - began > seconds:
                raise WorldTimeout(late)
            return result


@contextlib.contextmanager
def _blame_world(what: str):
    try:
        yield
    except TimeoutError as error:
        raise _Ended(StopReason.ENV_TIMEOUT, _describe(what, error)) from error
    except (Exception, SystemExit) as error:
        raise _Ended(StopReason.ENV_ERROR, _describe(what, error)) from error


def _describe(what: str, error: BaseException) -> str:
    return f"{what}: {type(error).__name__}: {error}"


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
    """Run in a daemon thread of its own: one that hangs holds up neither a pool of threads nor the interpreter's exit.

    A result that comes after its future was cancelled is ignored.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future
