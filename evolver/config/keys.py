"""The keys of a config, told from a schema such as that of configs/base.py, and what is wrong with
them.

A schema is a pydantic model, whose fields are keys or groups of keys.
"""

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from pydantic import BaseModel

from envs.values import Json
from evolver.config.values import hint, misfit, nearest


class Key(NamedTuple):
    """A key of a schema: its default, the values that it may have, and its meaning."""

    default: Any
    annotation: Any
    meaning: str


@functools.cache
def keys_of(schema: type[BaseModel]) -> dict[str, Key]:
    """Return {"rollout.tasks": key, ...} of all keys of a schema."""
    return dict(keys_in(schema()))


def keys_in(group: BaseModel, prefix: str = "", about: str = "") -> Iterator[tuple[str, Key]]:
    """Yield the keys of a group; one without a meaning of its own has that of the group."""
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        meaning = " ".join((field.description or about).split())
        if isinstance(value, BaseModel):
            yield from keys_in(value, f"{prefix}{name}.", meaning)
        else:
            yield f"{prefix}{name}", Key(value, field.rebuild_annotation(), meaning)


def flat(config: Any, prefix: str = "") -> Json:
    """Return {"rollout.tasks": 32, ...} of a ConfigDict or a dict of dicts; a group `args` or
    `worlds` is one value, a dict."""
    values: Json = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            value = value.to_dict()
        if isinstance(value, dict) and name not in ("args", "worlds"):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def assign(config: ConfigDict, key: str, value: Any) -> None:
    """Set a key such as "rollout.tasks" of a config."""
    *groups, last = key.split(".")
    functools.reduce(operator.getitem, groups, config)[last] = value


def arguments(target: Callable[..., Any], group: ConfigDict) -> Json:
    """Return the arguments of a callable that a group of the config sets: those with the names of
    its keys."""
    return {name: group[name] for name in inspect.signature(target).parameters if name in group}


def key_problems(config: ConfigDict, schema: type[BaseModel]) -> dict[str, str]:
    """Return {key: a sentence} for each key that does not exist, is missing, or has a value that
    its annotation does not allow."""
    keys = keys_of(schema)
    values = flat(config)
    found = {name: unknown_key(name, keys) for name in values if name not in keys}
    for name, key in keys.items():
        if name not in values:
            found[name] = (
                f"the config lacks {name}; a variant starts from configs/base.py, which has every"
                " key"
            )
        elif rule := misfit(values[name], key.annotation):
            choices = [text for text in typing.get_args(key.annotation) if isinstance(text, str)]
            near = hint(str(values[name]), choices)
            found[name] = f"config.{name} must be {rule}; it is {values[name]!r}{near}"
    return found


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return the message for a key that does not exist: the nearest key, or the keys of its
    group."""
    group, _, end = name.rpartition(".")
    ends = {key.rpartition(".")[2]: key for key in known}
    near = nearest(name, known) or ends.get(nearest(end, ends))
    if near:
        return f"config.{name}: there is no such key (did you mean {near}?)"
    inside = [key.removeprefix(f"{group}.") for key in known if key.startswith(f"{group}.")]
    names = dict.fromkeys(key.partition(".")[0] for key in inside or known)
    where = f"config.{group}" if inside else "config"
    return f"config.{name}: there is no such key; {where} has {', '.join(names)}"


def fitted(config: ConfigDict, schema: type[BaseModel]) -> ConfigDict:
    """Return the config with the default of each key that is missing or whose value is not
    allowed, and without unknown keys."""
    values = flat(config)
    wrong = key_problems(config, schema)
    result = ConfigDict(schema().model_dump())
    for name in keys_of(schema):
        if name not in wrong:
            assign(result, name, values[name])
    return result
