"""The checks of what a world hands over, made once, where it enters.

Behind this boundary every text can be encoded and every value is JSON of bounded depth and size
(envs/values.py), so that nothing written, sent or computed later fails on it. Text is repaired.
Anything else is a failure of the world that
wrote it: its episode ends, and no other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from envs import values
from envs.values import Unsafe, json_value
from envs.world import Evaluation, Message, Observation, StepResult, Task, World, repeated


def task(value: Any) -> Task:
    """Return a task with JSON values and repaired texts. Raises Unsafe if it cannot be made
    safe."""
    if not isinstance(value, Task):
        raise Unsafe(f"a {type(value).__name__} instead of a Task")
    try:
        return Task.from_dict(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(Task)}
        )
    except ValueError as error:
        raise Unsafe(f"task {str(value.id)[:80]!r}: {error}") from None


def tasks(world: World, split: str) -> list[Task]:
    """Return the tasks of a split, made safe. Raises Unsafe, also for tasks that share an id, and
    what `World.tasks` raises."""
    listed = [task(each) for each in world.tasks(split)]
    if twice := repeated(listed):
        raise Unsafe(
            f"{len(twice)} ids of the split {split!r} belong to more than one task, as {twice[0]!r}"
            " does: give each task an id of its own, because results are grouped by id"
        )
    return listed


def observation(value: Any) -> Observation:
    """Return an observation, made safe. Raises Unsafe."""
    if not isinstance(value, Observation):
        raise Unsafe(f"a {type(value).__name__} instead of an Observation")
    return Observation(_messages(value.messages), _tools(value.tools))


def result(value: Any) -> StepResult:
    """Return the answer to a step, made safe. Raises Unsafe."""
    if not isinstance(value, StepResult):
        raise Unsafe(f"a {type(value).__name__} instead of a StepResult")
    if not isinstance(value.info, dict):
        raise Unsafe(f"info is of type {type(value.info).__name__}, not dict")
    return StepResult(
        messages=_messages(value.messages),
        reward=_real(value.reward, "the reward"),
        terminated=bool(value.terminated),
        truncated=bool(value.truncated),
        tools=None if value.tools is None else _tools(value.tools),
        info=json_value(value.info, "info"),
    )


def evaluation(value: Any) -> Evaluation:
    """Return an evaluation, made safe. Raises Unsafe, also for a score outside its range."""
    if not isinstance(value, Evaluation):
        raise Unsafe(f"a {type(value).__name__} instead of an Evaluation")
    score = _real(value.score, "the score")
    low, high = _real(value.low, "low"), _real(value.high, "high")
    if not low < high:
        raise Unsafe(f"the range of the score, [{low:.6g}, {high:.6g}], is empty")
    if not low <= score <= high:
        raise Unsafe(f"the score {score:.6g} is not in [{low:.6g}, {high:.6g}]")
    if not isinstance(value.success, bool):
        raise Unsafe(f"success is of type {type(value.success).__name__}, not bool")
    if not isinstance(value.components, dict):
        raise Unsafe(f"components are of type {type(value.components).__name__}, not dict")
    components = {
        values.key(k, "components"): _real(v, f"components.{k}")
        for k, v in value.components.items()
    }
    return Evaluation(score, value.success, components, low, high)


def _messages(messages: Any) -> list[Message]:
    for number, message in enumerate(_list(messages, "messages", check=False)):
        if not isinstance(message, dict):
            raise Unsafe(f"messages[{number}] is of type {type(message).__name__}, not dict")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise Unsafe(
                    f"messages[{number}].{key} is of type {type(message.get(key)).__name__}, not "
                    "str"
                )
    return json_value(messages, "messages")


def _tools(value: Any) -> list[Any]:
    tools = _list(value, "tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise Unsafe(f"more than one tool has the name {twice!r}: a call could mean each of them")
    return tools


def _list(value: Any, where: str, check: bool = True) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Unsafe(f"{where} are of type {type(value).__name__}, not list")
    return json_value(value, where) if check else list(value)


def _real(value: Any, where: str) -> float:
    if not isinstance(value, int | float):
        raise Unsafe(f"{where} is of type {type(value).__name__}, not a number")
    return float(values.number(value, where))
