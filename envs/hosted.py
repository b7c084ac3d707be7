"""The client's side of a world that runs elsewhere: in a worker of a pool, or behind a service."""

import functools
import uuid
from collections.abc import Callable
from typing import Any

from envs.values import Json
from envs.world import Evaluation, Observation, Proxy, StepResult, Task, WorldError


class HostedWorld(Proxy):
    """A world whose episode is an instance elsewhere, under an id that is chosen here.

    An instance is released however its start ends: `close` may be called by another thread while
    `reset` waits for an answer, as it is when a rollout gives up, and whichever of the two comes
    last releases it.

    host: an `envs.pool.Pool`, or what has the same methods, as `envs.remote.Client`.
    """

    def __init__(self, name: str, host: Any):
        self.name, self._host = name, host
        self._id: str | None = None  # of the instance that has to be released
        self._started = False  # True if that instance has an episode
        self._steps = 0  # that its episode has taken
        self._closings = 0

    def tasks(self, split: str) -> list[Task]:
        return [Task.from_dict(task) for task in self._wait(self._host.tasks(split))]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        _, first = self._start(lambda id: self._host.create(task.to_dict(), seed, id))
        return Observation.from_dict(first)

    def step(self, action: str) -> StepResult:
        result = self._wait(self._host.step(self._episode(), action, self._steps))
        self._steps += 1
        return StepResult.from_dict(result)

    def evaluate(self) -> Evaluation:
        return Evaluation.from_dict(self._ask("evaluate"))

    def snapshot(self) -> Any:
        return self._ask("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._start(lambda id: self._host.restore(snapshot, id))

    def profile(self) -> Json:
        return self._wait(self._host.profile())

    def close(self) -> None:
        self._closings += 1
        self._release()

    def end_episode(self) -> None:
        """Release the instance if that needs no waiting. Otherwise the next `reset` does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._host.methods:
            raise AttributeError(f"{self.name} has no method '{name}'")
        return functools.partial(self._call, name)

    def _wait(self, answer: Any) -> Any:
        """Return the answer of the host once it is there."""
        return answer

    def _start(self, open_instance: Callable[[str], Any]) -> Any:
        closings = self._closings
        self._release()
        id = self._id = uuid.uuid4().hex
        try:
            answer = self._wait(open_instance(id))
        finally:
            if self._closings != closings:
                self._host.release(id)
        if self._closings != closings:
            raise WorldError(f"{self.name} was closed while an episode started")
        self._started, self._steps = True, 0
        return answer

    def _release(self) -> None:
        id, self._id, self._started = self._id, None, False
        if id is not None:
            self._host.release(id)

    def _call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        return self._ask("query", method, list(arguments), named)

    def _ask(self, op: str, *args: Any) -> Any:
        return self._wait(self._host.ask(self._episode(), op, *args))

    def _episode(self) -> str:
        if self._id is None or not self._started:
            raise WorldError(f"{self.name} has no episode: reset it first")
        return self._id
