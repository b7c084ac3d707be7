"""The environment interface: one task, one episode, plain Python.

A `World` may run under another interpreter in another process, so everything that crosses this
interface is made of dataclasses of JSON values (`to_dict` / `from_dict`), and this module imports
the standard library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": "system"|"user"|"assistant"|"tool", "content": str}
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


class _Record:
    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]):
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**record)


@dataclass
class Task(_Record):
    """What to do. `id` is unique in a run: a synthetic task never shares the id of its seed."""

    id: str
    env: str
    query: str
    split: str = "train"
    origin: str = "original"  # "original" | "synthetic"
    seed: int = 0  # which world the episode starts in
    reference: list[str] = field(default_factory=list)  # assistant turns that solve it; [] = unknown
    verifier: dict[str, Any] = field(default_factory=dict)  # what World.evaluate() checks; {} = the benchmark's own
    difficulty: int = 0  # tool calls of the shortest known solution; 0 = unknown
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Task:
        """Raises ValueError or TypeError for a field unknown, missing, or of another type."""
        task = super().from_dict(record)
        for f in dataclasses.fields(cls):
            wanted = {"str": str, "int": int, "list": list, "dict": dict}[str(f.type).partition("[")[0]]
            if not isinstance(getattr(task, f.name), wanted):
                raise ValueError(f"the {f.name} of a task is of type {f.type}; it is {getattr(task, f.name)!r}")
        return task


@dataclass
class Observation(_Record):
    """What the agent sees at the start of an episode."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)


@dataclass
class StepResult(_Record):
    """The answer to one assistant turn. `tools` is None when the tools on offer did not change.

    `info` may hold: "calls" (list of {"name", "arguments"} that ran), "errors" (number of calls
    answered with an error), "parse_error" (the turn could not be read).
    """

    messages: list[Message]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    tools: list[Tool] | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evaluation(_Record):
    """The score of an episode so far. `score` is in [0, 1]; `success` is the benchmark's own pass/fail.

    `components` holds named parts in [0, 1]; "progress", where an environment has it, grows with
    every part of the goal that is reached and is 1.0 exactly when `success` is true.
    """

    score: float
    success: bool
    components: dict[str, float] = field(default_factory=dict)


class WorldError(RuntimeError):
    """The environment failed, not the policy: it raised, died, or answered what no one can read."""


class WorldTimeout(WorldError, TimeoutError):
    """The environment did not answer within its deadline."""


class World:
    """What an adapter implements. One instance plays one episode at a time.

    A world that runs in another process raises `WorldError` or `WorldTimeout` where that process
    fails; an adapter itself raises whatever its benchmark raises.
    """

    name: str = ""

    def tasks(self, split: str) -> list[Task]:
        raise NotImplementedError

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start `task`. The same task and seed give the same episode."""
        raise NotImplementedError

    def step(self, action: str) -> StepResult:
        """Take the assistant's raw text. Never raises on what a model may write."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """Score the episode so far. Pure and repeatable."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Optional. The state of the episode as a JSON value, to be given back to `restore` of any instance."""
        raise NotImplementedError(f"{type(self).__name__} has no snapshots")

    def restore(self, snapshot: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no snapshots")

    def profile(self) -> dict[str, Any]:
        """Optional. Entities, attributes, operations and task preference, for self-questioning."""
        return {}

    def close(self) -> None:
        pass
