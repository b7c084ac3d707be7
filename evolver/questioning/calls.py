"""The calls that a world accepts, as operations with arguments, and episodes that record their
results.

An operation is a tool. A tool whose action is a text with slots (JSON Schema `examples` such as
"put OBJ in OBJ", see envs/act.py) gives one operation per example, a tool with a single choice
(`enum`) one per choice, and a world whose actions are code one per function (`World.functions`).
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envs import toolcalls
from envs.probed import MARKED, Cell, cells, phrases, possible_names
from envs.wording import alternatives
from envs.world import Observation, StepResult, Task, Tool, World, text_of
from evolver.replaying import leaves, renaming

_SLOT = re.compile(r"\b[A-Z]{2,}\b")
_BLOCK = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_PATH = re.compile(r"/\S*")  # of a folder, as far as its form tells
_NAME = re.compile(r"[^\s/]+")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
_LONGEST_SENTENCE = 240  # characters of an answer in which the call's values are looked for
_MOST_CHOICES = 24  # of an argument, so that each choice is an operation of its own

Key = tuple[str, str]  # a call: its operation and its arguments
Json = dict[str, Any]  # an object, such as the arguments of a call
CallText = Callable[[str, Json], str]  # (operation, arguments) -> the assistant's turn


@dataclass
class Operation:
    """A call that a world accepts. properties: {argument: JSON schema}. render: arguments -> the
    assistant's turn. form: of an action in words whose slots are the arguments, one group each."""

    name: str
    description: str
    properties: dict[str, Any]
    required: Sequence[str]
    render: Callable[[Json], str]
    form: re.Pattern[str] | None = None

    @functools.cached_property
    def listed(self) -> dict[str, list[str]]:
        """The words that a description offers each text: "Set the mode: grill, fan or bake"."""
        texts = {}
        for name, schema in self.properties.items():
            if schema.get("type") == "string" and "enum" not in schema:
                texts[name] = alternatives(str(schema.get("description") or self.description))
        return texts


@dataclass
class Event:
    """One call and its answer. changes: True if the operation is known to change the world and was
    not refused."""

    name: str
    arguments: Json
    action: str = ""
    result: str = ""
    ok: bool = False
    over: bool = False  # the episode ended
    changes: bool = False
    prose: bool = False  # the world answers in sentences, and its actions name things in them

    @functools.cached_property  # asked for many times
    def key(self) -> Key:
        """The call without its answer."""
        return key_of(self.name, self.arguments)

    @property
    def cells(self) -> Sequence[Cell]:
        """The values in the answer."""
        return cells(self.name, self.result)

    @property
    def usable(self) -> Sequence[Cell]:
        """The values in the answer that may be arguments of other calls."""
        if self.prose:
            return phrases(self.result)
        values = [cell for cell in self.cells if not cell.kinds[0].endswith(MARKED)]
        return [*values, *self._paths(), *possible_names(self.name, self.result)]

    def _paths(self) -> list[Cell]:
        """Return the paths of the names in the answer to a call about a folder: "/notes/todo.txt"
        where "/notes" is listed with "todo.txt"."""
        paths = []
        for folder, cell in itertools.product(filter(_PATH.fullmatch, self.values), self.cells):
            if _NAME.fullmatch(cell.value):
                kinds = tuple(f"{kind}/" for kind in cell.kinds)
                paths.append(Cell(cell.row, "", f"{folder.rstrip('/')}/{cell.value}", kinds))
        return paths

    @property
    def values(self) -> list[str]:
        """The values of all arguments, as text."""
        return [str(leaf) for leaf in leaves(self.arguments)]

    @functools.cached_property
    def sentences(self) -> list[str]:
        """The answer without the call's values, as in "There is no room called …": without all of
        them, without the last one alone, and without the first one alone, because a value may also
        be another word of the sentence."""
        named = sorted(filter(None, self.values), key=len, reverse=True)
        if not named or len(self.result) > _LONGEST_SENTENCE:
            return [self.result]
        either = "|".join(map(re.escape, named))
        parts = re.split(rf"(?i)((?<!\w)(?:{either})(?!\w))", self.result)
        if len(parts) == 1:
            return [self.result]
        last = "".join([*parts[:-2], "…", parts[-1]])
        first = "".join([parts[0], "…", *parts[2:]])
        return ["…".join(parts[::2]), last, first]

    @property
    def given(self) -> Json:
        """The arguments, for an operation that is one choice of a tool this choice."""
        calls = [] if self.arguments else toolcalls.parse(self.action).calls
        return calls[0].arguments if calls else self.arguments

    @property
    def accepted(self) -> bool:
        """True if the call was not refused and the episode goes on."""
        return self.ok and not self.over

    def shows(self, values: Collection[str]) -> bool:
        """Return True if the answer has one of the values."""
        return any(cell.value in values for cell in self.cells)


Events = Sequence[Event]
Operations = dict[str, Operation]


def values_of(events: Iterable[Event]) -> set[str]:
    """Return the values that calls take."""
    return set(itertools.chain.from_iterable(event.values for event in events))


def key_of(name: str, arguments: Json) -> Key:
    """Return a call as a key of sets and dictionaries."""
    return name, repr(sorted(arguments.items(), key=str))


class Episode:
    """An episode that records what is done in it.

    opening: what the agent sees before its first turn. renamed: {id of another episode: id of this
    one}. prose: True if the world is told in words what to do.
    """

    def __init__(
        self,
        world: World,
        task: Task,
        refuses: Callable[[Event], bool],
        operations: Operations | None = None,
    ):
        """refuses: returns True for an answer that means a refusal although the world does not mark
        it. operations: those of the world, None = ask it."""
        self.world = world
        self.task = task
        self.refuses = refuses
        self.opening = world.reset(task, task.seed)
        self.operations = operations or operations_of(world, self.opening)
        self.prose = in_prose(self.operations)
        self.events: list[Event] = []
        self.renamed: dict[str, str] = {}

    def call(self, name: str, arguments: Json) -> Event:
        """Make a call and return it with its answer."""
        return self._take(Event(name, arguments, self.operations[name].render(arguments)))

    def again(self, event: Event) -> Event:
        """Make a call once more and return it with its answer now."""
        return self.call(event.name, event.arguments)

    def repeat(self, event: Event) -> Event:
        """Make a call of another episode and return it with its answer here.

        The world may hand out other ids than there, because calls were left out. They are renamed.
        """
        now = self.call(event.name, _renamed(event.arguments, self.renamed))
        now.changes = now.ok and event.changes
        if now.ok and now.result != event.result:
            before = [c.value for c in event.cells]
            after = [c.value for c in now.cells]
            self.renamed |= renaming(before, after, _are_ids)
        return now

    def act(self, action: str) -> Event:
        """Take a turn as it was written, and return it with its answer. It has no name."""
        return self._take(Event("", {}, action))

    def _take(self, event: Event) -> Event:
        result = self.world.step(event.action)
        event.prose = self.prose
        event.result = text_of(result.messages)
        event.ok = succeeded(result) and not self.refuses(event)
        event.over = result.over
        self.events.append(event)
        if result.tools is not None:
            self._offer(result.tools)
        return event

    def _offer(self, tools: Sequence[Tool]) -> None:
        """Add the operations of tools that the opening did not have."""
        first = [tool["function"]["name"] for tool in self.opening.tools]
        for tool in tools:
            if tool["function"]["name"] not in first:
                for operation in _operations(tool["function"], toolcalls.call_text):
                    self.operations.setdefault(operation.name, operation)

    @property
    def over(self) -> bool:
        """True if the last turn ended the episode."""
        return bool(self.events and self.events[-1].over)

    @property
    def shown_first(self) -> Sequence[Cell]:
        """The values in the opening that describe the world: its instructions or, in prose, the
        place that it shows to the user."""
        if self.prose:
            return phrases(text_of(self.opening.messages[-1:]))
        rules = [m for m in self.opening.messages if m.get("role") == "system"]
        return cells("opening", text_of(rules))


def inner_values(value: Any, path: Sequence[str] = ()) -> list[tuple[Sequence[str], Any]]:
    """Return the values inside an argument, each after the names of its fields, "*" for a list."""
    if isinstance(value, dict):
        inner = [inner_values(part, [*path, name]) for name, part in value.items()]
    elif isinstance(value, list):
        inner = [inner_values(part, [*path, "*"]) for part in value]
    else:
        return [(path, leaf) for leaf in leaves(value)]
    return list(itertools.chain.from_iterable(inner))


def _are_ids(old: str, new: str) -> bool:
    return has_digit(old) and has_digit(new)


def _renamed(arguments: Any, renamed: dict[str, str]) -> Any:
    if isinstance(arguments, dict):
        return {name: _renamed(value, renamed) for name, value in arguments.items()}
    if isinstance(arguments, list):
        return [_renamed(value, renamed) for value in arguments]
    text = renamed.get(str(arguments))
    if text is None:
        return arguments
    # A number is an id only where its new name is one, too: 41 was not renamed to "39.99".
    with contextlib.suppress(ValueError):
        return type(arguments)(text)
    return arguments


def in_prose(operations: Operations) -> bool:
    """Return True if a world is told in words what to do, and answers in sentences."""
    return any(operation.form for operation in operations.values())


def operations_of(world: World, opening: Observation) -> Operations:
    """Return {name: operation} of everything that can be called at the start of an episode."""
    functions = world.functions()
    write = world.call_text if functions else toolcalls.call_text
    operations = {}
    for tool in functions or opening.tools:
        for operation in _operations(tool["function"], write):
            operations[operation.name] = operation
    return operations


def _operations(function: dict[str, Any], write: CallText) -> list[Operation]:
    name = function["name"]
    description = str(function.get("description") or "")
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = required_of(schema)
    render = functools.partial(write, name)
    if len(properties) == 1:
        ((parameter, inner),) = properties.items()
        examples = inner.get("examples") or []
        choices = inner.get("enum") or []
        if any(_SLOT.search(str(example)) for example in examples):
            return [_with_slots(name, parameter, str(example), write) for example in examples]
        if 0 < len(choices) <= _MOST_CHOICES:
            each = [_with_choice(name, description, parameter, choice, write) for choice in choices]
            without = Operation(name, description, {}, [], render)
            return each if parameter in required else [without, *each]
    return [Operation(name, description, properties, required, render)]


def required_of(schema: Json) -> list[str]:
    """Return the properties that an object must have. Many who mean all of them list none, so that
    without a list those without a default are meant."""
    if "required" in schema:
        return list(schema["required"])
    properties = schema.get("properties") or {}
    return [name for name, inner in properties.items() if "default" not in inner]


def _with_choice(
    name: str, description: str, parameter: str, choice: Any, write: CallText
) -> Operation:
    title = f"{name} {choice}"
    described = title
    if description and isinstance(choice, str):  # a number of an action says nothing
        end = _SENTENCE_END.search(description)
        described = f"{description[: end.start()] if end else description}: {choice}"
    return Operation(title, described, {}, [], lambda _: write(name, {parameter: choice}))


def _with_slots(name: str, parameter: str, example: str, write: CallText) -> Operation:
    """Return the operation of a text with slots. Its arguments are the slots, numbered if one
    occurs twice."""
    slots: list[str] = []
    for slot in _SLOT.findall(example):
        slot = slot.lower()
        slots.append(f"{slot} {len(slots) + 1}" if slot in slots else slot)

    def render(arguments: Json) -> str:
        values = iter(str(arguments[slot]) for slot in slots)
        return write(name, {parameter: _SLOT.sub(lambda _: next(values), example)})

    form = re.compile("(.+?)".join(map(re.escape, _SLOT.split(example))), re.IGNORECASE)
    properties = {slot: {"type": "string"} for slot in slots}
    return Operation(example, example, properties, slots, render, form)


def calls_of(action: str, operations: Operations) -> list[tuple[str, Json]]:
    """Return (operation, arguments) of what an assistant turn does, [] for a turn that does
    nothing.

    What is no known operation is added to them: a call of another tool with its arguments, and a
    turn in no known form, such as code, as a whole.
    """
    turn = toolcalls.parse(action)
    if turn.errors or not (turn.calls or turn.content.strip()):
        return []
    if not turn.calls:
        found = _in_words(turn.content.strip().splitlines()[-1], operations)
        if found:
            return [found]
        block = _BLOCK.search(turn.content)
        code = block[0] if block else turn.content
        operations[code] = Operation(code, code, {}, [], lambda _: code)
        return [(code, {})]
    made = []
    for call in turn.calls:
        name = call.name
        given = call.arguments
        text = toolcalls.call_text(name, given)
        found = (name, given) if name in operations else _in_words(text, operations)
        if not found:
            render = functools.partial(toolcalls.call_text, name)
            operations[name] = Operation(name, "", {key: {} for key in given}, [*given], render)
        made.append(found or (name, given))
    return made


def _in_words(action: str, operations: Operations) -> tuple[str, Json] | None:
    """Return the operation and the arguments of an action in words, None if it has the form of no
    operation."""
    said = _said(action)
    for name, operation in operations.items():
        if said and not operation.properties and said == _said(operation.render({})):
            return name, {}
    # The form with most words of its own comes first: "put X on Y" before "put X".
    for name in sorted(operations, key=lambda name: -len(_SLOT.sub("", name))):
        form = operations[name].form
        found = form.fullmatch(said) if form else None
        if found:
            return name, dict(zip(operations[name].properties, found.groups()))
    return None


def _said(action: str) -> str:
    """Return the text of an action in words: the argument of its call or, without a call, the
    action itself."""
    calls = toolcalls.parse(action).calls
    said = leaves(calls[0].arguments) if calls else [action]
    return " ".join(str(said[0]).split()) if said else ""


def succeeded(result: StepResult) -> bool:
    """Return False for a refused call: by the world's `info`, or by an answer that reads like an
    error."""
    text = text_of(result.messages)
    calls = result.info.get("calls") or [{}]
    told = _tells_of_failure(text)
    if "ok" in calls[0] or result.info.get("errors") or result.info.get("parse_error"):
        accepted = calls[0].get("ok", False) and not result.info.get("parse_error")
        return bool(accepted) and not told
    if told is not None:
        return not told
    start = text.lstrip(" \n\t{[\"'").lower()
    return not start.startswith(("error", "exception", "traceback"))


def _tells_of_failure(text: str) -> bool | None:
    """Return True for a JSON object that tells of a failure, which many tools answer instead of an
    error: {"error": "no such room"}, {"success": false}, {"status": "failed"}. None: it is no JSON
    object."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fields = {str(name).lower(): value for name, value in record.items()}
    return (
        any(fields.get(name) is False for name in ("success", "ok", "succeeded"))
        or any(bool(fields.get(name)) for name in ("error", "errors"))
        or str(fields.get("status")).lower() in ("error", "failed", "failure")
    )


def has_digit(text: str) -> bool:
    """Return True if a text has a digit, as most ids have."""
    return any(character.isdigit() for character in text)
