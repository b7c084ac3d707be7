"""The environment interface: one task, one episode, plain Python.

A `World` may run in another process under another interpreter. Everything that crosses this
interface is therefore a dataclass of JSON values (`to_dict` / `from_dict`), and this module needs
the standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from envs import toolcalls
from envs.values import Json, json_value

Message = Json  # {"role": "system"|"user"|"assistant"|"tool", "content": str}
Tool = Json  # {"type": "function", "function": {"name", "description", "parameters"}}


_R = TypeVar("_R", bound="_Record")


@dataclass
class _Record:
    """Conversion of a dataclass to and from a dict of JSON values."""

    def to_dict(self) -> Json:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[_R], record: Json) -> _R:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known))}"
            )
        return cls(**record)


@dataclass
class Task(_Record):
    """A task for the agent. `id` is unique in a run: a synthetic task has an id of its own, not
    that of its seed."""

    id: str
    env: str
    query: str
    split: str = "train"
    origin: str = "original"  # "original" | "synthetic"
    seed: int = 0  # selects the initial state of the episode
    reference: list[str] = field(
        default_factory=list
    )  # assistant turns that solve the task; [] = unknown
    verifier: dict[str, Any] = field(
        default_factory=dict
    )  # what World.evaluate() checks; {} = the benchmark's own
    difficulty: int = 0  # tool calls in the shortest known solution; 0 = unknown
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, record: Json) -> Task:
        """Build a task, with its texts repaired (envs/values.py).

        Raises ValueError or TypeError for a field that is unknown, missing, of the wrong type or
        not JSON.
        """
        task = super().from_dict(json_value(record, "a task"))
        for f in dataclasses.fields(cls):
            expected = {"str": str, "int": int, "list": list, "dict": dict}[
                str(f.type).partition("[")[0]
            ]
            if not isinstance(getattr(task, f.name), expected):
                raise ValueError(
                    f"a task's {f.name} must be of type {f.type}, not {getattr(task, f.name)!r}"
                )
        return task


@dataclass
class Observation(_Record):
    """The messages and tools that the agent sees at the start of an episode."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)


@dataclass
class StepResult(_Record):
    """The environment's answer to one assistant turn. `tools` is None if the available tools did
    not change.

    `info` may hold "calls" (a list of the {"name", "arguments"} that ran), "errors" (the number of
    calls answered with an error), "parse_error" (True if the turn could not be parsed) and "answer"
    (what the turn that ended the episode answered, where that is not its text).
    """

    messages: list[Message]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    tools: list[Tool] | None = None
    info: Json = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.terminated or self.truncated


def nothing_done() -> StepResult:
    """Return the answer to a turn after the end of an episode."""
    return StepResult([], terminated=True, info={"calls": [], "errors": 0, "over": True})


@dataclass
class Evaluation(_Record):
    """The score of an episode so far. `score` is in [low, high], which is [0, 1] unless the world
    says otherwise; `success` is the benchmark's own pass/fail.

    `components` holds named values in [0, 1]. "progress", if an environment reports it, grows with
    every part of the goal that is reached and is 1.0 exactly when `success` is true.
    """

    score: float
    success: bool
    components: dict[str, float] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0


def repeated(tasks: Iterable[Task]) -> list[str]:
    """Return the ids that more than one of the tasks have, in order. Results are grouped by id."""
    counts = Counter(task.id for task in tasks)
    return [id for id, count in counts.items() if count > 1]


def first_of_worlds(tasks: Iterable[Task]) -> list[Task]:
    """Return the first task of each world."""
    found: dict[str, Task] = {}
    for task in tasks:
        found.setdefault(task.env, task)
    return list(found.values())


def text_of(messages: Iterable[Message]) -> str:
    """Return the contents of messages, joined by newlines."""
    return "\n".join(str(message.get("content") or "") for message in messages)


class WorldError(RuntimeError):
    """A failure of the environment, not of the policy: it raised, died or sent an unreadable
    answer."""


class WorldTimeout(WorldError, TimeoutError):
    """A missing answer: the environment exceeded its deadline."""


def message(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def opening(system: str, query: str) -> list[Message]:
    """Return the messages at the start of an episode."""
    return [message("system", system), message("user", query)]


def check_split(world: str, split: str, splits: Iterable[str]) -> None:
    """Raise ValueError for a split that is none of those of a world."""
    if split not in splits:
        raise ValueError(f"{world} has no split {split!r}; it has {', '.join(splits)}")


class World:
    """The interface that an adapter implements. One instance plays one episode at a time.

    A world that runs in another process raises `WorldError` or `WorldTimeout` if that process
    fails; an adapter itself raises whatever its benchmark raises.
    """

    name: str = ""

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of a split. Raises ValueError for an unknown split."""
        raise NotImplementedError

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start `task`. The same task and seed give the same episode."""
        raise NotImplementedError

    def step(self, action: str) -> StepResult:
        """Process the assistant's text, whose calls are written as envs/toolcalls.py says. Never
        raises, whatever the model wrote."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """Score the episode so far without changing it; repeated calls give the same result."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return the state of the episode as a JSON value that `restore` of any instance accepts.
        Optional."""
        raise NotImplementedError(f"{type(self).__name__} has no snapshots")

    def restore(self, snapshot: Any) -> None:
        """Continue the episode from a snapshot. Optional."""
        raise NotImplementedError(f"{type(self).__name__} has no snapshots")

    def functions(self) -> list[Tool]:
        """Return the schemas of what the code of this episode can call, for a world whose actions
        are code. Optional.

        [] means that the actions are calls of the tools in the observation."""
        return []

    def call_text(self, name: str, arguments: Json) -> str:
        """Return the action that calls one function, or one tool if there are no functions, and
        shows its result.

        Optional; a world with functions overrides it, and raises ValueError for a name that it did
        not list."""
        return toolcalls.call_text(name, arguments)

    def profile(self) -> Json:
        """Return entities, attributes, operations and task preference for self-questioning.
        Optional."""
        return {}

    def close(self) -> None:
        pass


class Proxy(World):
    """A world that makes every call of the interface by `_call`: in the world that `_playing`
    returns, unless a subclass makes it in another way."""

    def _playing(self) -> World:
        raise NotImplementedError

    def _call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        return getattr(self._playing(), method)(*arguments, **named)


def _called(self: Proxy, method: str, /, *arguments: Any, **named: Any) -> Any:
    return self._call(method, *arguments, **named)


for _name in vars(World):
    if not _name.startswith("_") and _name != "name":
        setattr(Proxy, _name, functools.partialmethod(_called, _name))


def snapshot_of(world: World) -> Any:
    """Return a snapshot of the episode, None if the world has no snapshots."""
    try:
        return world.snapshot()
    except NotImplementedError:
        return None


def tool_of(name: str, description: str, properties: Json, required: list[str]) -> Tool:
    """Return the schema of a tool, whose parameters are {name: JSON schema}."""
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class TaskWorld(World):
    """A world whose episode has a task, as `_task`."""

    _task: Task | None = None

    def _require_episode(self) -> Task:
        if self._task is None:
            raise RuntimeError("no episode: reset the world first")
        return self._task


class ReplayWorld(TaskWorld):
    """A world whose snapshots are its actions, which `restore` replays. Subclasses implement
    `reset`, which calls `_begin`, and `_take`."""

    _seed: int
    _actions: list[str]
    _over: bool

    def step(self, action: str) -> StepResult:
        """Take an action. After the end of an episode it has no effect."""
        self._require_episode()
        if self._over:
            return nothing_done()
        self._actions.append(action)
        return self._take(action)

    def snapshot(self) -> Json:
        task = self._require_episode().to_dict()
        return {"task": task, "seed": self._seed, "actions": list(self._actions)}

    def restore(self, snapshot: Json) -> None:
        self.reset(Task.from_dict(snapshot["task"]), snapshot["seed"])
        for action in snapshot["actions"]:
            self.step(action)

    def _begin(self, task: Task, seed: int = 0) -> None:
        self._task, self._seed, self._actions, self._over = task, seed, [], False

    def _take(self, action: str) -> StepResult:
        """Process the assistant's text, and set `_over` if it ends the episode."""
        raise NotImplementedError
