"""A Python module of plain typed functions as a world: each function is a tool, and the module's
globals are the state.

    python -m envs.check functions --kwargs '{"module": "my_module"}'
"""

import asyncio
import copy
import dataclasses
import datetime
import enum
import importlib
import inspect
import json
import os
import random
import re
import threading
import types
import typing
import uuid
import zlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Annotated, Any, Literal

from envs import profile
from envs.toolcalls import Call
from envs.toolworld import SYSTEM, ToolWorld
from envs.values import Json, json_value
from envs.world import Task, Tool, tool_of

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
# type -> (its format in JSON Schema, what reads it)
TEXTS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    datetime.datetime: ("date-time", datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.fromisoformat),
    uuid.UUID: ("uuid", uuid.UUID),
}
# the last two from Python 3.11 on
_WRAPPED = [
    getattr(typing, n) for n in ("Annotated", "Required", "NotRequired") if n in dir(typing)
]
_UNION = (typing.Union, types.UnionType)
STATE = "__evolver_state__"  # the global of a module that holds its state after the import
QUERY = "Find out what can be done with the tools."
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):?\s*$")
_PARAMETER = re.compile(r"^\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$")
_locks: dict[str, threading.RLock] = {}
_thread = threading.local()  # playing: True while it runs a function of a module


class Functions(ToolWorld):
    """The public functions of a module as tools. A turn without a call ends the episode.

    A tool's schema comes from the annotations (str, int, float, bool, None, list, tuple, set, dict,
    Decimal, UUID, Literal, Enum, dates and times, unions of these, and dataclasses, TypedDicts and
    pydantic models of them) and defaults, its description from the docstring, that of a parameter
    from there or from Annotated. Arguments that do not fit are errors, and so is an exception,
    whose message the agent reads. A coroutine function is run to its end. The state is every global
    of the module that is data and can be copied: an episode begins with a copy of what was there
    after the import, passed through the function `reset` if the module has one; `reset` may take a
    seed. The generator of the module `random` is a part of the state, and `os.urandom`, of which
    `uuid.uuid4` and `secrets` make ids, draws from it while a function runs. Worlds in one process
    share the module and not its state; what functions keep elsewhere (files, other modules, caches)
    is not reset.

    module: its name, as in an import. n_train: starts of the split "train", which differ if `reset`
    takes a seed; without that there is one. max_calls: calls allowed in one turn.

    The world has no tasks but those starts; verifiers are as in ToolWorld.
    """

    name = "functions"

    def __init__(self, module: str, *, system: str = SYSTEM, n_train: int = 64, max_calls: int = 8):
        """Raises ValueError for a module without functions, or for one whose schema is unclear."""
        super().__init__(system, max_calls)
        self._module = importlib.import_module(module)
        self._lock = _locks.setdefault(module, threading.RLock())
        found = vars(self._module)
        if STATE not in found:  # kept in the module: the next world begins with the same
            found[STATE] = _copied(found)
        public = getattr(self._module, "__all__", [n for n in found if not n.startswith("_")])
        self._functions = {
            name: found[name]
            for name in public
            if inspect.isfunction(found.get(name)) and found[name].__module__ == module
        }
        self._reset = self._functions.pop("reset", None)
        self._seeded = bool(self._reset and inspect.signature(self._reset).parameters)
        if not self._functions:
            raise ValueError(f"the module {module} has no public functions")
        self._hints = {name: _parameter_hints(f) for name, f in self._functions.items()}
        self._tools = [_tool(*named, self._hints[named[0]]) for named in self._functions.items()]
        os.urandom = _urandom
        vars(random)["_urandom"] = _urandom  # of the module `secrets`
        self._starts = n_train if self._seeded else 1
        self._state: dict[str, Any] = {}

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "dev", "test"):
            raise ValueError(
                f"functions has no split {split!r}; it has train, and dev, test, empty"
            )
        starts = range(self._starts if split == "train" else 0)
        where = f"functions/{self._module.__name__}"
        return [Task(f"{where}/{i:04d}", self.name, QUERY, seed=i) for i in starts]

    def profile(self) -> Json:
        """Return a profile with the module as its only entity and the functions as operations."""
        functions = [tool["function"] for tool in self._tools]
        entity = profile.entity(self._module.__name__, functions)
        return profile.profile_of(self.name, [entity])

    def snapshot(self) -> Json:
        """Return the calls that were made: the state itself may not be JSON."""
        task = self._require_episode().to_dict()
        return {"task": task, "seed": self._seed, "made": list(self._made), "over": self._over}

    def restore(self, snapshot: Json) -> None:
        self.reset(Task.from_dict(snapshot["task"]), snapshot["seed"])
        for name, arguments in snapshot["made"]:
            if self._call(name, arguments)[1]:
                self._succeeded.append(Call(name, arguments))
        self._over = snapshot["over"]

    def _open(self, task: Task, seed: int) -> list[Tool]:
        self._seed, start = seed, zlib.crc32(f"{task.seed} {seed}".encode())
        self._made: list[tuple[str, Json]] = []
        self._state = copy.deepcopy(vars(self._module)[STATE])
        self._random = random.Random(start).getstate()
        if self._reset:
            with self._playing():
                self._reset(*[start] if self._seeded else [])
        return copy.deepcopy(self._tools)

    def _call(self, name: str, arguments: Json) -> tuple[str, bool]:
        if name not in self._functions:
            known = ", ".join(self._functions)
            return f"error: there is no tool {name!r}; there are {known}", False
        self._made.append((name, copy.deepcopy(arguments)))
        function = self._functions[name]
        try:
            values = _fitting(function, self._hints[name], arguments)
            with self._playing():
                result = function(**values)
                text = _text(_awaited(result) if inspect.iscoroutine(result) else result)
        except (Exception, SystemExit) as error:
            return f"error: {str(error) or type(error).__name__}", False
        return text, not text.lower().startswith("error")

    @contextmanager
    def _playing(self) -> Iterator[None]:
        """Put the state of this world into the module, and take it out again."""
        module = vars(self._module)
        with self._lock:
            others, numbers = _state_of(module), random.getstate()
            fixed = {name: value for name, value in others.items() if name not in self._state}
            _exchange(module, others, fixed | self._state)
            random.setstate(self._random)
            _thread.playing = True
            try:
                yield
            finally:
                _thread.playing = False
                self._state, self._random = _state_of(module), random.getstate()
                _exchange(module, self._state, others)
                random.setstate(numbers)


def _exchange(module: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    for name in old:
        del module[name]
    module.update(new)


def _state_of(module: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module that are data."""
    return {
        name: value
        for name, value in module.items()
        if not (name.startswith("__") or callable(value) or isinstance(value, types.ModuleType))
        and type(value).__module__ not in ("typing", "__future__")
    }


def _copied(module: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a module, without what cannot be copied, such as a lock."""
    state = {}
    for name, value in _state_of(module).items():
        with suppress(Exception):  # of whatever class the value is
            copy.deepcopy(value)
            state[name] = value
    return copy.deepcopy(state)  # at once, so that globals which share a list go on to do so


def _urandom(size: int, real: Callable[[int], bytes] = os.urandom) -> bytes:
    """Return random bytes: of the state of a world, for the functions of its module."""
    return random.randbytes(size) if getattr(_thread, "playing", False) else real(size)


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, in a thread of its own: this one may have a loop."""
    with ThreadPoolExecutor(1, initializer=setattr, initargs=(_thread, "playing", True)) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _hints(kind: Any, names: dict[str, Any] | None = None) -> dict[str, Any]:
    return typing.get_type_hints(kind, names, include_extras=True)


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function but that of its result, which may be imported for type
    checkers only. Raises ValueError for a name that is not defined."""
    inner = inspect.unwrap(function)
    given = {name: hint for name, hint in inner.__annotations__.items() if name != "return"}
    try:
        return _hints(types.SimpleNamespace(__annotations__=given), inner.__globals__)
    except NameError as error:
        raise ValueError(f"in an annotation of {function.__name__}, {error}") from None


def _tool(name: str, function: Callable[..., Any], hints: dict[str, Any]) -> Tool:
    """Return the schema of a function. Raises ValueError for a parameter that no schema fits."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{name} is a generator, not a function that returns its result")
    description, described = _documented(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        where = f"the parameter {parameter.name} of {name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where} cannot be given by its name")
        try:
            schema = _schema(hints.get(parameter.name, Any), where)
        except RecursionError:
            raise ValueError(f"{where} has a type that contains itself") from None
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            schema["default"] = _plain(parameter.default)
        properties[parameter.name] = schema
    return tool_of(name, description, properties, required)


def _schema(kind: Any, where: str) -> Json:
    """Return the JSON Schema of an annotation."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    simple = kind if isinstance(kind, type) else None
    if kind is Any:
        return {}
    if origin in _WRAPPED:
        return _schema(inner[0], where) | _described(inner[1:])
    if simple in TYPES:
        return {"type": TYPES[simple]}
    if simple in TEXTS:
        return {"type": "string", "format": TEXTS[simple][0]}
    if simple is Decimal:
        return {"type": "number"}
    if (choices := _choices(kind)) is not None:
        return {"enum": [_plain(choice) for choice in choices]}
    if origin in _UNION:
        return {"anyOf": [_schema(part, where) for part in inner]}
    if (origin or kind) in (list, set, frozenset) or (origin is tuple and inner[1:] == (...,)):
        return {"type": "array"} | ({"items": _schema(inner[0], where)} if inner else {})
    if origin is tuple:
        parts = [_schema(part, where) for part in inner]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "items": False}
    if fields := _fields(kind):
        return {
            "type": "object",
            "properties": {name: _schema(part, where) for name, (part, _) in fields.items()},
            "required": [name for name, (_, required) in fields.items() if required],
        }
    if (origin or kind) is dict:
        more = {"additionalProperties": _schema(inner[1], where)} if inner else {}
        return {"type": "object"} | more
    raise ValueError(
        f"{where} has the type {kind}; it may have str, int, float, bool, list, tuple, set, dict,"
        " Decimal, UUID, Literal, Enum, date, time, datetime, unions of these, and dataclasses,"
        " TypedDicts and pydantic models of them"
    )


def _choices(kind: Any) -> tuple[Any, ...] | None:
    """Return what an Enum or a Literal may be, None for another type."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return tuple(kind) if isinstance(kind, enum.EnumMeta) else None


def _described(extras: tuple[Any, ...]) -> dict[str, str]:
    """Return the description among what Annotated says of a type: a text, or an object that has
    one, such as pydantic's Field."""
    for extra in extras:
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        text = text or getattr(extra, "documentation", None)
        if isinstance(text, str):
            return {"description": text}
    return {}


def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return {name: (type, True if it has to be given)} of a dataclass, a TypedDict or a pydantic
    model, and {} of anything else."""
    if not isinstance(kind, type):
        return {}
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        fields, hints = [f for f in dataclasses.fields(kind) if f.init], _hints(kind)
        return {
            f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
            for f in fields
        }
    if typing.is_typeddict(kind):
        required = typing.cast(Any, kind).__required_keys__
        return {name: (part, name in required) for name, part in _hints(kind).items()}
    if hasattr(kind, "model_validate"):
        fields = typing.cast(Any, kind).model_fields
        return {n: (Annotated[f.annotation, f], f.is_required()) for n, f in fields.items()}
    return {}


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of the function, and of each parameter (`name: text` in the
    section "Args:", or `:param name: text`)."""
    told, described, section = [], {}, ""
    for line in text.splitlines():
        heading, parameter = _SECTION.match(line), _PARAMETER.match(line)
        if heading:
            section = heading[1]
        elif parameter and (section[:3] in ("Arg", "Par") or ":param" in line):
            described[parameter[1]] = parameter[2].strip()
        elif not section and not line.startswith(":"):
            told.append(line)
    return " ".join(" ".join(told).split()), described


def _fitting(
    function: Callable[..., Any], hints: dict[str, Any], arguments: Json
) -> dict[str, Any]:
    """Return the arguments as the function takes them. Raises ValueError, for the agent, if they do
    not fit."""
    parameters = inspect.signature(function).parameters
    unknown = [name for name in arguments if name not in parameters]
    needed = [name for name, p in parameters.items() if p.default is p.empty]
    missing = [name for name in needed if name not in arguments]
    if unknown or missing:
        takes = ", ".join(parameters) or "no arguments"
        what = [f"it has no {name!r}" for name in unknown]
        what += [f"{name} is missing" for name in missing]
        raise ValueError(f"{function.__name__} takes {takes}: {'; '.join(what)}")
    return {name: _taken(value, hints.get(name, Any), name) for name, value in arguments.items()}


def _taken(value: Any, kind: Any, name: str) -> Any:
    """Return a JSON value as its annotation takes it. Raises ValueError if it does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    simple = kind if isinstance(kind, type) else None
    if kind is Any:
        return value
    if origin in _WRAPPED:
        return _taken(value, inner[0], name)
    if origin in _UNION:
        for part in inner:
            with suppress(ValueError):
                return _taken(value, part, name)
    elif simple in TYPES:
        if type(value) is kind or (kind is float and type(value) is int):
            return value
    elif (choices := _choices(kind)) is not None:
        for choice in choices:
            plain = _plain(choice)
            if plain == value and isinstance(plain, bool) == isinstance(value, bool):
                return value if origin is Literal else choice
    elif simple in TEXTS and isinstance(value, str):
        with suppress(ValueError):
            return TEXTS[simple][1](value)
    elif simple is Decimal and type(value) in (int, float):
        return Decimal(str(value))
    elif (origin or kind) in (list, tuple, set, frozenset) and isinstance(value, list):
        parts = inner or (Any, ...)
        if origin is not tuple or parts[1:] == (...,):
            parts = parts[:1] * len(value)
        if len(parts) == len(value):
            items = [_taken(v, part, f"an item of {name}") for v, part in zip(value, parts)]
            return (origin or kind)(items)
    elif (fields := _fields(kind)) and isinstance(value, dict):
        needed = {field for field, (_, required) in fields.items() if required}
        if needed <= value.keys() <= fields.keys():
            given = {key: _taken(v, fields[key][0], f"{name}.{key}") for key, v in value.items()}
            return kind(**given)
    elif (origin or kind) is dict and isinstance(value, dict):
        part = inner[1] if inner else Any
        return {key: _taken(item, part, f"{name}.{key}") for key, item in value.items()}
    wanted = json.dumps(_schema(kind, name), ensure_ascii=False)
    shown = json.dumps(value, ensure_ascii=False)
    raise ValueError(f"{name} is {shown[:100]}, which does not fit {wanted}")


def _text(result: Any) -> str:
    """Return what a function returned, as text: a text as it is, else JSON where that can be."""
    if isinstance(result, str):
        return result or "(no output)"
    return "done" if result is None else json.dumps(_plain(result), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return data as JSON values, and what is no data as its text."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "model_dump") and not isinstance(value, type):  # of pydantic
        return _plain(value.model_dump())
    if isinstance(value, dict):
        items = {str(_plain(key)): _plain(item) for key, item in value.items()}
        return items if len(items) == len(value) else list(map(_plain, value.items()))
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for whole in ("to_string", "tolist"):  # of pandas and NumPy, whose str() leaves out the middle
        if hasattr(value, whole):
            return _plain(getattr(value, whole)())
    try:
        return json_value(value)
    except ValueError:
        return str(value)
