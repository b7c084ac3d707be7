"""The checks of what a world hands over, made once, where it enters.

Behind this boundary every text can be encoded and every value is JSON of bounded depth and size
(envs/values.py), so that nothing written, sent or computed later fails on it. Text is repaired.
Anything else is a failure of the world that wrote it: its episode ends, and no other.
"""

from typing import Any, TypeVar

from envs import values
from envs.values import Unsafe, json_value
from envs.world import Evaluation, Message, Observation, StepResult, Task, Tool, World, repeated

T = TypeVar("T")


def task(value: Any) -> Task:
    """Return a task with JSON values and repaired texts. Raises Unsafe if it cannot be made
    safe."""
    _record(value, Task)
    try:
        return Task.from_dict({name: getattr(value, name) for name in Task.__dataclass_fields__})
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
    _record(value, Observation)
    return Observation(_messages(value.messages), _tools(value.tools))


def result(value: Any) -> StepResult:
    """Return the answer to a step, made safe. Raises Unsafe."""
    _record(value, StepResult)
    _typed(value.info, dict, "info is")
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
    _record(value, Evaluation)
    score = _real(value.score, "the score")
    low, high = _real(value.low, "low"), _real(value.high, "high")
    if not low < high:
        raise Unsafe(f"the range of the score, [{low:.6g}, {high:.6g}], is empty")
    if not low <= score <= high:
        raise Unsafe(f"the score {score:.6g} is not in [{low:.6g}, {high:.6g}]")
    success = _typed(value.success, bool, "success is")
    components = {
        values.key(name, "components"): _real(part, f"components.{name}")
        for name, part in _typed(value.components, dict, "components are").items()
    }
    return Evaluation(score, success, components, low, high)


def _record(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "EO" else "a"
        raise Unsafe(f"a {type(value).__name__} instead of {article} {kind.__name__}")


def _typed(value: Any, kind: type[T], what: str) -> T:
    """Return a value of a type, else raise Unsafe. what: its name, with "is" or "are"."""
    if not isinstance(value, kind):
        raise Unsafe(f"{what} of type {type(value).__name__}, not {kind.__name__}")
    return value


def _messages(messages: Any) -> list[Message]:
    for number, message in enumerate(_list(messages, "messages")):
        _typed(message, dict, f"messages[{number}] is")
        for key in ("role", "content"):
            _typed(message.get(key), str, f"messages[{number}].{key} is")
    return json_value(messages, "messages")


def _tools(value: Any) -> list[Tool]:
    tools = json_value(_list(value, "tools"), "tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise Unsafe(f"more than one tool has the name {twice!r}: a call could mean each of them")
    return tools


def _list(value: Any, where: str) -> list[Any]:
    return _typed(list(value) if isinstance(value, tuple) else value, list, f"{where} are")


def _real(value: Any, where: str) -> float:
    if not isinstance(value, int | float):
        raise Unsafe(f"{where} is of type {type(value).__name__}, not a number")
    return float(values.number(value, where))
