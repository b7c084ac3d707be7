"""The schema of configs: a class for each group of keys, with a field for each key.

    class Rollout(Group):
        tasks: Many = 32
        \"""Tasks per step.\"""

A field has the type, the default, the bounds and the meaning of its key. `new(Rollout)` is the
config with all defaults.
"""

import contextlib
import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Interval
from ml_collections import ConfigDict

Dtype = Literal["float32", "bfloat16"]
Tokens = Annotated[int, Interval(ge=1, le=2**24)]
# Whole numbers; a larger one can only be a slip of the keyboard.
Few = Annotated[int, Interval(ge=1, le=1000)]
Several = Annotated[int, Interval(ge=1, le=4096)]
Many = Annotated[int, Interval(ge=1, le=2**16)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]
Seconds = Annotated[float, Interval(ge=0.001, le=10**7)]  # of something that may be quick
Patience = Annotated[float, Interval(ge=1, le=10**7)]  # seconds, at least one
# 0 is greedy; lower or higher temperatures than these give no useful samples.
Temperature = Literal[0] | Annotated[float, Interval(ge=0.01, le=100)]


class Group(pydantic.BaseModel):
    """A group of keys."""

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)


class Plug(Group):
    """A callable by name, with arguments that its signature defines (docs/extending.md)."""

    name: str
    args: dict[str, Any] = {}
    """Its arguments."""


def new(schema: type[Group]) -> ConfigDict:
    """Return a config with all keys of a schema at their defaults. No key can be added to it,
    except to the arguments of a plug."""
    config = ConfigDict(schema().model_dump())
    config.lock()
    unlock_arguments(config)
    return config


def unlock_arguments(group: ConfigDict) -> None:
    """Let new keys be added to each `args` and `worlds` in a group."""
    for name, value in group.items():
        if name in ("args", "worlds"):
            value.unlock()
        elif isinstance(value, ConfigDict):
            unlock_arguments(value)


def use(group: ConfigDict, name: str, **args: Any) -> None:
    """Set a plug's name and arguments; the arguments of its previous callable are dropped."""
    group.name = name
    group.args = ConfigDict(args)
    group.args.unlock()


def change(config: ConfigDict, values: dict[str, Any]) -> ConfigDict:
    """Set keys of a config, such as {"rollout.tasks": 16}, and return it. Another plug gets no
    arguments of the one before; an argument may have any type."""
    for key, value in values.items():
        *groups, last = key.split(".")
        group = functools.reduce(operator.getitem, groups, config)
        if last == "name" and "args" in group:
            use(group, value)
        else:
            with group.ignore_type() if "args" in groups else contextlib.nullcontext():
                group[last] = value
    return config


def variant(other: ModuleType, values: dict[str, Any]) -> Callable[..., ConfigDict]:
    """Return the `get_config` of a file that changes keys of another file's config, and takes the
    same argument."""

    def get_config(arg: str | None = None) -> ConfigDict:
        return change(other.get_config(arg), values)

    return get_config
