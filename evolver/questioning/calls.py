"""The calls that a world accepts, as operations with arguments, and episodes that record their
results.

An operation is a tool. A tool whose action is a text with slots (JSON Schema `examples` such as
"put OBJ in OBJ", see envs/act.py) gives one operation per example, a tool with a single choice
(`enum`) one per choice, and a world whose actions are code one per function (`World.functions`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs import toolcalls
from envs.probed import Cell, cells, phrases
from envs.world import Observation, StepResult, Task, World
from evolver.replaying import leaves
from evolver.transcripts import text_of

_SLOT = re.compile(r"\b[A-Z]{2,}\b")
_BLOCK = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_MOST_CHOICES = 24


@dataclass
class Operation:
    """A call that a world accepts. properties: {argument: JSON schema}. render: arguments -> the
    assistant's turn."""

    name: str
    description: str
    properties: dict[str, Any]
    required: Sequence[str]
    render: Callable[[dict[str, Any]], str]
    slots: bool = False  # the action is a text whose slots are the arguments
    form: re.Pattern[str] | None = None  # of the action's text, with one group per slot
    raw: bool = False  # one whole turn as it was written, such as code, without arguments


@dataclass
class Event:
    """One call and its answer. changes: True if the operation is known to change the world and was
    not refused."""

    name: str
    arguments: dict[str, Any]
    action: str
    result: str = ""
    ok: bool = False
    over: bool = False  # the episode ended
    changes: bool = False
    prose: bool = False  # the world answers in sentences, and its actions name things in them

    @property
    def key(self) -> tuple[str, str]:
        return self.name, repr(sorted(self.arguments.items(), key=str))

    @property
    def cells(self) -> Sequence[Cell]:
        return cells(self.name, self.result)

    @property
    def shown(self) -> Sequence[Cell]:
        """The values in the answer that may be arguments of other calls."""
        return phrases(self.result) if self.prose else self.cells

    @property
    def values(self) -> list[str]:
        """The values of all arguments, as text."""
        return [str(leaf) for leaf in leaves(self.arguments)]


@dataclass
class Episode:
    """An episode in which calls are made. opening: what the agent sees before its first turn.

    refuses: returns True for an answer that means a refusal although the world does not mark it.
    """

    world: World
    task: Task
    refuses: Callable[[str], bool]
    steps: int = 0
    events: list[Event] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)  # {} = ask the world
    opening: Observation = field(init=False)
    prose: bool = field(init=False)

    def __post_init__(self):
        self.opening = self.world.reset(self.task, self.task.seed)
        self.operations = self.operations or operations_of(self.world, self.opening)
        self.prose = any(operation.slots for operation in self.operations.values())

    def call(self, name: str, arguments: dict[str, Any]) -> Event:
        """Make a call and return it with its answer."""
        event = Event(name, arguments, self.operations[name].render(arguments), prose=self.prose)
        result = self.world.step(event.action)
        self.steps += 1
        event.result = text_of(result.messages)
        event.ok = succeeded(result) and not self.refuses(event.result)
        event.over = result.terminated or result.truncated
        self.events.append(event)
        return event

    @property
    def over(self) -> bool:
        return bool(self.events and self.events[-1].over)


def operations_of(world: World, opening: Observation) -> dict[str, Operation]:
    """Return {name: operation} of everything that can be called at the start of an episode."""
    functions = world.functions() if hasattr(world, "functions") else []
    write = world.call_text if functions else toolcalls.call_text
    operations = (
        op for tool in functions or opening.tools for op in _operations(tool["function"], write)
    )
    return {operation.name: operation for operation in operations}


def _operations(
    function: dict[str, Any], write: Callable[[str, dict[str, Any]], str]
) -> list[Operation]:
    name, description = function["name"], str(function.get("description") or "")
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = list(schema.get("required", properties))
    if len(properties) == 1:
        ((only, inner),) = properties.items()
        examples, choices = inner.get("examples") or [], inner.get("enum") or []
        if any(_SLOT.search(str(example)) for example in examples):
            return [_template(name, only, str(example), write) for example in examples]
        if 0 < len(choices) <= _MOST_CHOICES:
            return [
                Operation(
                    f"{name} {choice}",
                    f"{name} {choice}",
                    {},
                    [],
                    _fixed(name, {only: choice}, write),
                )
                for choice in choices
            ]
    return [
        Operation(name, description, properties, required, lambda arguments: write(name, arguments))
    ]


def _fixed(
    name: str, arguments: dict[str, Any], write: Callable[[str, dict[str, Any]], str]
) -> Callable:
    return lambda _: write(name, arguments)


def _template(
    name: str, parameter: str, example: str, write: Callable[[str, dict[str, Any]], str]
) -> Operation:
    """Return the operation of a text with slots. Its arguments are the slots, numbered if one
    occurs twice."""
    slots: list[str] = []
    for slot in _SLOT.findall(example):
        slots.append(
            slot.lower() if slot.lower() not in slots else f"{slot.lower()} {len(slots) + 1}"
        )

    def render(arguments: dict[str, Any]) -> str:
        values = iter(str(arguments[slot]) for slot in slots)
        return write(name, {parameter: _SLOT.sub(lambda _: next(values), example)})

    form = re.compile("(.+?)".join(map(re.escape, _SLOT.split(example))), re.IGNORECASE)
    properties = {slot: {"type": "string"} for slot in slots}
    return Operation(example, example, properties, slots, render, slots=True, form=form)


def calls_of(action: str, operations: dict[str, Operation]) -> list[tuple[str, dict[str, Any]]]:
    """Return (operation, arguments) of what an assistant turn does, [] for a turn that does
    nothing.

    What is no known operation is added to them: a call of another tool with its arguments, and a
    turn in no known form, such as code, as a whole.
    """
    turn = toolcalls.parse(action)
    if turn.errors or not (turn.calls or turn.content.strip()):
        return []
    if not turn.calls:
        if found := _in_words(turn.content.strip().splitlines()[-1], operations):
            return [found]
        block = _BLOCK.search(turn.content)
        raw = block[0] if block else turn.content
        operations[raw] = Operation(raw, raw, {}, [], lambda _: raw, raw=True)
        return [(raw, {})]
    made = []
    for call in turn.calls:
        text = toolcalls.call_text(call.name, call.arguments)
        found = None if call.name in operations else _in_words(text, operations)
        if not found and call.name not in operations:
            function = {
                "name": call.name,
                "parameters": {"properties": {key: {} for key in call.arguments}},
            }
            operations[call.name] = _operations(function, toolcalls.call_text)[0]
        made.append(found or (call.name, call.arguments))
    return made


def _in_words(action: str, operations: dict[str, Operation]) -> tuple[str, dict[str, Any]] | None:
    """Return the operation and the arguments of an action in words, None if it has the form of no
    operation."""
    said = _said(action)
    for name, operation in operations.items():
        if (
            not operation.properties
            and not operation.form
            and said
            and said == _said(operation.render({}))
        ):
            return name, {}
    forms = [operation for operation in operations.values() if operation.form]
    for operation in sorted(
        forms, key=lambda op: -len(_SLOT.sub("", op.name))
    ):  # "put X on Y" before "put X"
        if found := operation.form.fullmatch(said):
            return operation.name, dict(zip(operation.properties, found.groups(), strict=True))
    return None


def _said(action: str) -> str:
    """Return the text of an action in words: the argument of its call or, without a call, the
    action itself."""
    calls = toolcalls.parse(action).calls
    return " ".join(str([*leaves(calls[0].arguments), ""][0] if calls else action).split())


def succeeded(result: StepResult) -> bool:
    """Return False for a refused call: by the world's `info`, or by an answer that begins like an
    error."""
    calls = result.info.get("calls") or [{}]
    if "ok" in calls[0] or result.info.get("errors") or result.info.get("parse_error"):
        return bool(calls[0].get("ok", False)) and not result.info.get("parse_error")
    text = text_of(result.messages).lstrip(" \n\t{[\"'").lower()
    return not text.startswith(("error", "exception", "traceback"))


def tool_names(actions: Sequence[str]) -> list[str]:
    """Return the tools that the actions call, in order."""
    return [call.name for action in actions for call in toolcalls.parse(action).calls]
