"""Plugs: every idea that has variants is a callable that the config names, `{name, args}`.

`name` is a known name of the kind, or `module:attribute` of any module that Python finds, including
files beside the config and in the working directory. The signature of the callable is its whole
interface:

- keyword-only parameters are the config's `args`: names, defaults, types, choices (`Literal`) and
  bounds (`rl.bounds`) are declared there and nowhere else;
- the one positional parameter, if there is one, is what the run gives to a plug of its kind (see
  `KINDS`): a `Batch` to an estimator, `Tokens` to a loss, an `Opening` to a template, `Parts` to a
  mechanism.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PlugError(ValueError):
    """A plug that cannot be used; the message says what was given and what the callable takes."""


@dataclass(frozen=True)
class Kind:
    """A place of the config that takes a plug.

    key: the group {name, args} in the config. known: "module:DICT", a registry {name:
    "module:attribute"}.
    protocol: the interface, "module:Protocol". given: the type of the positional argument. methods:
    those that a class needs; a subclass of the protocol inherits all but the first.
    """

    key: str
    known: str
    protocol: str
    given: str = "Parts"
    methods: tuple[str, ...] = ()


QUESTIONING, NAVIGATING = "evolver.questioning", "evolver.navigating"
KINDS = {
    kind.key: kind
    for kind in (
        Kind("advantage", "rl.advantages:ESTIMATORS", "rl.advantages:Estimator", "Batch"),
        Kind("loss", "rl.losses:LOSSES", "rl.losses:TokenLoss", "Tokens"),
        Kind(
            "template",
            "evolver.llm.contexts:CONTEXTS",
            "rl.contexts:Context",
            "Opening",
            ("extend", "action", "manage"),
        ),
        Kind(
            "questioning.explorer",
            f"{QUESTIONING}:EXPLORERS",
            f"{QUESTIONING}:Explorer",
            methods=("explore",),
        ),
        Kind(
            "questioning.judge",
            f"{QUESTIONING}:JUDGES",
            f"{QUESTIONING}:OutcomeJudge",
            methods=("score", "metrics"),
        ),
        Kind(
            "questioning.words",
            f"{QUESTIONING}:WORDS",
            f"{QUESTIONING}.words:Words",
            methods=("reword", "metrics"),
        ),
        Kind(
            "navigating.extractor",
            f"{NAVIGATING}:EXTRACTORS",
            f"{NAVIGATING}:Extractor",
            methods=("extract", "metrics"),
        ),
        Kind(
            "navigating.embedder",
            "evolver.llm.embedders:EMBEDDERS",
            "evolver.llm.embedders:Embedder",
            methods=("__call__",),
        ),
        Kind(
            "navigating.refine",
            f"{NAVIGATING}:REFINERS",
            f"{NAVIGATING}:Refiner",
            methods=("refine", "metrics"),
        ),
        Kind(
            "attributing.judge",
            "evolver.attributing:JUDGES",
            "evolver.attributing:TurnJudge",
            methods=("label", "metrics", "close"),
        ),
    )
}


def plug(key: str, name: str, args: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the callable that `name` means under `key`, bound to `args`; its argument is what the
    kind is given.

    Raises PlugError, with the signature, for an unknown name and for an unknown, missing or
    ill-typed argument.
    """
    if found := problems(key, name, args):
        raise PlugError("\n".join(found))
    target = load(key, name)
    bound = functools.partial(target, **args)
    return bound if positional(target) else lambda given: bound()


def known(key: str) -> dict[str, str]:
    """Return {name: "module:attribute"} of the plugs that ship with the project."""
    return attribute(KINDS[key].known)


def load(key: str, name: str) -> Callable[..., Any]:
    """Return the callable that `name` means under `key`. Raises PlugError."""
    registry = known(key)
    if name in registry:
        return attribute(registry[name])
    if ":" not in name:
        near = difflib.get_close_matches(name, registry, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise PlugError(
            f"config.{key}.name={name!r} is not known.{hint} Known names: {', '.join(registry)}; "
            "or name your own as module:attribute"
        )
    try:
        target = attribute(name)
    except Exception as error:  # importing somebody's file may raise anything
        file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        where = f" (in {file})" if file else ""
        raise PlugError(
            f"config.{key}.name={name!r} cannot be loaded: {type(error).__name__}: {error}{where}"
        ) from error
    if not callable(target):
        raise PlugError(
            f"config.{key}.name={name!r} is of type {type(target).__name__}; it must be callable"
        )
    return target


def attribute(name: str) -> Any:
    """Return the object that "module:attribute" names. Raises whatever importing the module
    raises."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def look_in(*folders: str | Path) -> None:
    """Append folders to the module search path of this process and its children, after everything
    installed."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
        if folder not in inherited:
            inherited.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, inherited))


# --- signatures -----------------------------------------------------------------------------------


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of a class's constructor, with their annotations
    evaluated.

    A parameter without an annotation has the type of its default.
    """
    found = dict(inspect.signature(target).parameters)
    try:
        owner = target.__init__ if inspect.isclass(target) else target
        hints = typing.get_type_hints(inspect.unwrap(owner), include_extras=True)
    except Exception:  # an annotation that names something imported for type checkers only
        hints = {}
    known = {
        name: type(p.default) for name, p in found.items() if p.default not in (p.empty, None)
    } | hints
    return {
        name: p.replace(annotation=known.get(name, Any))
        for name, p in found.items()
        if name not in ("self", "cls")
    }


def positional(target: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a plug."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in parameters(target).items() if p.kind in kinds)


def settable(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that the config's `args` may set: the keyword-only ones."""
    return {n: p for n, p in parameters(target).items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def problems(key: str, name: str, args: Mapping[str, Any]) -> list[str]:
    """Return [one message with everything that is wrong with a plug, and its signature]; [] if
    nothing is."""
    try:
        target = load(key, name)
        takes = settable(target)
    except (PlugError, TypeError, ValueError) as error:
        return [str(error)]
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters(target).values())
    found = []
    for argument, value in args.items():
        if argument in positional(target)[1:]:
            found.append(
                f"{argument} is positional: put it after `*` in the signature, so that the config may set it"
            )
        elif argument not in takes:
            near = difflib.get_close_matches(argument, takes, n=1, cutoff=0.6)
            if not free:
                found.append(
                    f"there is no argument {argument!r}"
                    + (f" (did you mean {near[0]}?)" if near else "")
                )
        elif why := misfit(value, takes[argument].annotation):
            found.append(f"{argument}={value!r} {why}")
    found += [f"{n} is missing" for n, p in takes.items() if p.default is p.empty and n not in args]
    kind = KINDS[key]
    if inspect.isclass(target) and (lacking := lacks(target, kind)):
        return [
            f"config.{key}.name={name!r} lacks {', '.join(lacking)}: subclass {kind.protocol.replace(':', '.')} and"
            " define what is missing"
        ]
    if not kind.methods and not positional(target):
        found.append(f"it takes no positional argument; the run gives it {kind.given}")
    needed = [
        n
        for n in positional(target)[1:]
        if parameters(target)[n].default is inspect.Parameter.empty
    ]
    if needed:
        found.append(
            f"{', '.join(needed)} cannot be provided: a plug has one positional argument, {kind.given}, and what the "
            "config sets is keyword-only (after `*`)"
        )
    return (
        [f"config.{key}.args: {'; '.join(found)}. The call is {signature(name, target)}"]
        if found
        else []
    )


def lacks(target: type, kind: Kind) -> list[str]:
    """Return the methods of its kind that a class neither defines nor inherits.

    The protocol has defaults for all but the first. `extend` of a template must be a coroutine
    function.
    """
    protocol, missing = attribute(kind.protocol), []
    for number, method in enumerate(kind.methods):
        owner = next((cls for cls in target.__mro__ if method in vars(cls)), None)
        if owner is None or (owner is protocol and number == 0):
            missing.append(f"{method}()")
        elif method == "extend" and not inspect.iscoroutinefunction(getattr(target, method)):
            missing.append("`async` before `def extend`")
    return missing


def signature(name: str, target: Callable[..., Any]) -> str:
    """Return "name(argument=default, ...)" of what the config can set."""
    shown = [
        n if p.default is p.empty else f"{n}={p.default!r}" for n, p in settable(target).items()
    ]
    return f"{name}({', '.join(shown)})"


def values(key: str, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a plug gets from a config, defaults included."""
    return {n: args.get(n, p.default) for n, p in settable(load(key, name)).items()} | dict(args)


def resolved(key: str, name: str, args: Mapping[str, Any]) -> str:
    """Return the call that a config makes, defaults included: "grpo(std='sample', eps=1e-06)"."""
    return f"{name}({', '.join(f'{n}={value!r}' for n, value in values(key, name, args).items())})"


def in_config(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (key, name, args) of every plug of a config."""
    for key in KINDS:
        group = functools.reduce(getattr, key.split("."), config)
        yield key, group.name, group.args.to_dict()


def misfit(value: Any, annotation: Any) -> str:
    """Return why a value does not fit an annotation, "" if it does or if nothing is known to
    check."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return misfit(value, inner[0]) or next(
            (why for bound in inner[1:] if (why := outside(value, bound))), ""
        )
    if origin is typing.Literal:
        return "" if value in inner else f"must be one of {', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        reasons = [misfit(value, one) for one in inner]
        return "" if "" in reasons else " or ".join(dict.fromkeys(reasons))
    wanted = origin or annotation
    if annotation is None or annotation is type(None):
        return "" if value is None else "must be None"
    if not isinstance(wanted, type) or wanted not in (bool, int, float, str, tuple, list, dict):
        return ""
    fits = isinstance(
        value,
        (int, float) if wanted is float else (list, tuple) if wanted in (list, tuple) else wanted,
    )
    if not fits or (isinstance(value, bool) and wanted in (int, float)):
        return f"must be of type {wanted.__name__}"
    return ""


def misfits(target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: why} for the arguments that fit neither their annotation nor equal their
    default."""
    taken = {
        name: p
        for name, p in parameters(target).items()
        if name in values and values[name] != p.default
    }
    return {name: why for name, p in taken.items() if (why := misfit(values[name], p.annotation))}


def outside(value: Any, bound: Any) -> str:
    """Return why a number is outside a bound of `annotated_types`, "" if it is not."""
    rules = {"ge": (">=", lambda b: value >= b), "gt": (">", lambda b: value > b)}
    rules |= {"le": ("<=", lambda b: value <= b), "lt": ("<", lambda b: value < b)}
    for name, (sign, holds) in rules.items():
        limit = getattr(bound, name, None)
        if limit is not None and not holds(limit):
            return f"must be {sign} {limit}"
    return ""
