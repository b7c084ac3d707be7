"""The client's side of a world that runs elsewhere: in a worker of a pool, or behind a service."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

from envs.world import Observation, Task, Tool, World, WorldError


class HostedWorld(World):
    """A world whose episode is an instance elsewhere, under an id that is chosen here.

    An instance is released however its start ends: `close` may be called by another thread while
    `reset` waits for an answer, as it is when a rollout gives up, and whichever of the two comes
    last releases it.

    Subclasses implement `_create`, `_resume`, `_drop`, `_ask` and `_methods`.
    """

    def __init__(self, name: str):
        self.name = name
        self._id: str | None = None  # of the instance that has to be released
        self._started = False  # True if that instance has an episode
        self._closings = 0

    def reset(self, task: Task, seed: int = 0) -> Observation:
        return self._start(lambda id: self._create(id, task, seed))

    def restore(self, snapshot: Any) -> None:
        self._start(lambda id: self._resume(id, snapshot))

    def functions(self) -> list[Tool]:
        return self._query("functions")

    def call_text(self, name: str, arguments: dict[str, Any]) -> str:
        return self._query("call_text", name, arguments)

    def close(self) -> None:
        self._closings += 1
        self._release()

    def end_episode(self) -> None:
        """Release the instance if that needs no waiting. Otherwise the next `reset` does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods():
            raise AttributeError(f"{self.name} has no method '{name}'")
        return functools.partial(self._query, name)

    def _create(self, id: str, task: Task, seed: int) -> Observation:
        raise NotImplementedError

    def _resume(self, id: str, snapshot: Any) -> None:
        raise NotImplementedError

    def _drop(self, id: str) -> None:
        """Release an instance, which may not exist. Never raises."""
        raise NotImplementedError

    def _ask(self, id: str, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of the world besides those of an episode."""
        raise NotImplementedError

    def _methods(self) -> list[str]:
        """Return the names of the methods that the adapter adds to World."""
        raise NotImplementedError

    def _start(self, open_instance: Callable[[str], Any]) -> Any:
        closings = self._closings
        self._release()
        id = self._id = uuid.uuid4().hex
        try:
            answer = open_instance(id)
        finally:
            if self._closings != closings:
                self._drop(id)
        if self._closings != closings:
            raise WorldError(f"{self.name} was closed while an episode started")
        self._started = True
        return answer

    def _release(self) -> None:
        id, self._id, self._started = self._id, None, False
        if id is not None:
            self._drop(id)

    def _query(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self._episode(), method, list(args), kwargs)

    def _episode(self) -> str:
        if self._id is None or not self._started:
            raise WorldError(f"{self.name} has no episode: reset it first")
        return self._id
