"""Plugs: every idea that has variants is a callable that the config names, `{name, args}`.

`name` is a known name of the kind, or `module:attribute` of any module that Python finds, including
files beside the config and in the working directory. The signature of the callable is its whole
interface:

- keyword-only parameters are the config's `args`: names, defaults, types, choices (`Literal`) and
  bounds (`rl.bounds`) are declared there and nowhere else;
- the one positional parameter, if there is one, is what the run gives to a plug of its kind (see
  `KINDS`): a `Batch` to a reward and an estimator, `Tokens` to a loss, an `Opening` to a template,
  `Parts` to a mechanism.
"""

import functools
import importlib
import inspect
import itertools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evolver.config.values import hint, misfit

Args = Mapping[str, Any]  # arguments of a plug
Chosen = tuple[str, str, dict[str, Any]]  # key, name and arguments of a plug
Target = Callable[..., Any]  # what the name of a plug stands for


class PlugError(ValueError):
    """A plug that cannot be used; the message says what was given and what the callable takes."""


class Kind(NamedTuple):
    """A place of the config that takes a plug.

    known: "module:DICT", a registry {name: "module:attribute"}. protocol: the interface,
    "module:Protocol", whose methods a class needs; a subclass of the protocol inherits all but the
    first. given: the type of the positional argument.
    """

    known: str
    protocol: str
    given: str = "Parts"

    @property
    def called(self) -> bool:
        """True if the run calls the plug itself, with what it gives: a function, or an instance of
        a class, made once from the config's `args`."""
        return self.given in ("Batch", "Tokens")


# By the key of the group {name, args} in the config.
KINDS = {
    "recipe": Kind("evolver.recipes:RECIPES", "evolver.recipes:Recipe"),
    "sampler": Kind("evolver.sampling:SAMPLERS", "evolver.sampling:Sampler"),
    "reward": Kind("rl.rewards:REWARDS", "rl.rewards:Reward", "Batch"),
    "advantage": Kind("rl.advantages:ESTIMATORS", "rl.advantages:Estimator", "Batch"),
    "loss": Kind("rl.losses:LOSSES", "rl.losses:TokenLoss", "Tokens"),
    "template": Kind("evolver.llm.contexts:CONTEXTS", "rl.contexts:Context", "Opening"),
    "questioning.explorer": Kind("evolver.questioning:EXPLORERS", "evolver.questioning:Explorer"),
    "questioning.judge": Kind("evolver.questioning:JUDGES", "evolver.questioning:OutcomeJudge"),
    "questioning.words": Kind("evolver.questioning:WORDS", "evolver.questioning.words:Words"),
    "navigating.extractor": Kind("evolver.navigating:EXTRACTORS", "evolver.navigating:Extractor"),
    "navigating.embedder": Kind(
        "evolver.llm.embedders:EMBEDDERS", "evolver.llm.embedders:Embedder"
    ),
    "navigating.refine": Kind("evolver.navigating:REFINERS", "evolver.navigating:Refiner"),
    "attributing.judge": Kind("evolver.attributing:JUDGES", "evolver.attributing:TurnJudge"),
}


def kind_of(key: str) -> Kind:
    """Return the kind of the plug at a place of the config, such as "template.worlds.home"."""
    return KINDS[key.partition(".worlds.")[0]]


def plug(key: str, name: str, args: Args) -> Callable[[Any], Any]:
    """Return the callable that `name` means under `key`, bound to `args`; its argument is what the
    kind is given.

    Raises PlugError, with the signature, for an unknown name and for an unknown, missing or
    ill-typed argument.
    """
    if found := problems(key, name, args):
        raise PlugError("\n".join(found))
    target: Any = load(key, name)
    if inspect.isclass(target) and kind_of(key).called:
        made: Any = target(**args)
        return made
    bound = functools.partial(target, **args)
    return bound if positional(target) else lambda given: bound()


def known(key: str) -> dict[str, str]:
    """Return {name: "module:attribute"} of the plugs that ship with the project."""
    return attribute(kind_of(key).known)


def load(key: str, name: str) -> Target:
    """Return the callable that `name` means under `key`. Raises PlugError."""
    registry = known(key)
    said = f"config.{key}.name={name!r}"
    if name not in registry and ":" not in name:
        raise PlugError(
            f"{said} is not known{hint(name, registry)}. Known names: {', '.join(registry)}; "
            "or name your own as module:attribute"
        )
    try:
        target = attribute(registry.get(name, name))
    except Exception as error:  # importing somebody's file may raise anything
        file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        where = f" (in {file})" if file else ""
        raise PlugError(
            f"{said} cannot be loaded: {type(error).__name__}: {error}{where}"
        ) from error
    if not callable(target):
        raise PlugError(f"{said} is of type {type(target).__name__}; it must be callable")
    return target


def attribute(name: str) -> Any:
    """Return the object that "module:attribute" names. Raises whatever importing the module
    raises."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


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


def parameters(target: Target) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of a class's constructor. One without an annotation
    that can be evaluated has the type of its default."""
    try:
        found = inspect.signature(target, eval_str=True).parameters
    except NameError:  # an annotation that names something imported for type checkers only
        found = inspect.signature(target).parameters
    typed = {}
    for name, p in found.items():
        default = Any if p.default in (p.empty, None) else type(p.default)
        known = p.annotation is not p.empty and not isinstance(p.annotation, str)
        typed[name] = p.replace(annotation=p.annotation if known else default)
    return typed


def positional(target: Target) -> list[str]:
    """Return the names of the parameters before `*`, of which a run provides the first."""
    given = parameters(target).values()
    return [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def settable(target: Target) -> dict[str, inspect.Parameter]:
    """Return the parameters that the config's `args` may set: the keyword-only ones."""
    return {name: p for name, p in parameters(target).items() if p.kind is p.KEYWORD_ONLY}


def misfits(target: Target, args: Args) -> dict[str, str]:
    """Return {name: "must be ..."} for the arguments that fit neither their annotation nor equal
    their default."""
    found = {}
    for name, p in parameters(target).items():
        if name in args and args[name] != p.default and (rule := misfit(args[name], p.annotation)):
            found[name] = f"must be {rule}"
    return found


def problems(key: str, name: str, args: Args) -> list[str]:
    """Return [one message with everything that is wrong with a plug, and its signature]; [] if
    nothing is."""
    kind = kind_of(key)
    place = key.partition(".worlds.")[0]
    said = f"config.{key}.name={name!r}"
    try:
        target: Any = load(key, name)
        takes = settable(target)
        first = positional(target)
    except (PlugError, TypeError, ValueError) as error:
        return [str(error)]
    is_class = inspect.isclass(target)
    made = is_class and kind.called
    if is_class and (lacking := lacks(target, kind)):
        return [
            f"{said} lacks {', '.join(lacking)}: subclass"
            f" {kind.protocol.replace(':', '.')} and define what is missing"
        ]
    if hasattr(target, "load_state") and place in ("loss", "template"):
        return [
            f"{said} has load_state(), but a run cannot resume a {place}: a"
            " loss is compiled, and a template lasts one episode"
        ]
    found = [f"{n}={args[n]!r} {why}" for n, why in misfits(target, args).items() if n in takes]
    free = any(p.kind is p.VAR_KEYWORD for p in parameters(target).values())
    for argument in args:
        if argument in first:
            found.append(
                f"{argument} is positional: put it after `*` in the signature, so that the config"
                " may set it"
            )
        elif not free and argument not in takes:
            found.append(f"there is no argument {argument!r}{hint(argument, takes)}")
    for argument in [n for n, p in parameters(target).items() if p.default is p.empty]:
        if argument in takes and argument not in args:
            found.append(f"{argument} is missing")
        if made and argument in first:
            found.append(
                f"{argument} cannot be provided: an instance is made from the config's `args`, and"
                f" then its __call__ is given {kind.given}"
            )
        elif argument in first[1:]:
            found.append(
                f"{argument} cannot be provided: a plug has one positional argument, {kind.given},"
                " and what the config sets is keyword-only (after `*`)"
            )
    if kind.called and not (positional(target.__call__)[1:] if made else first):
        found.append(f"it takes no positional argument; the run gives it {kind.given}")
    call = f"The call is {signature(name, target)}"
    return [f"config.{key}.args: {'; '.join(found)}. {call}"] if found else []


def problems_in(config: Any) -> list[str]:
    """Return what is wrong with the plugs of a config, a message each."""
    return [*itertools.chain.from_iterable(itertools.starmap(problems, in_config(config)))]


def lacks(target: type, kind: Kind) -> list[str]:
    """Return the methods of its kind that a class neither defines nor inherits.

    The protocol has defaults for all but the first. `extend` of a template must be a coroutine
    function.
    """
    missing = []
    base = attribute(kind.protocol)
    methods: dict[str, Any] = {
        name: value
        for name, value in functools.reduce(operator.or_, map(vars, base.__mro__)).items()
        if isinstance(value, types.FunctionType | staticmethod)
        and (name == "__call__" or not name.startswith("_"))
    }
    abstract = next(iter(methods)) if Protocol in base.__bases__ else None
    if hasattr(target, "state") != hasattr(target, "load_state"):  # one alone cannot resume
        methods |= dict.fromkeys(("state", "load_state"))
    for method in methods:
        owner = next((cls for cls in target.__mro__ if method in vars(cls)), None)
        if owner is None or (method == abstract and owner is base):
            missing.append(f"{method}()")
        elif method == "extend" and not inspect.iscoroutinefunction(getattr(target, method)):
            missing.append("`async` before `def extend`")
    return missing


def signature(name: str, target: Target) -> str:
    """Return "name(argument=default, ...)" of what the config can set."""
    taken = settable(target).values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in taken]
    return f"{name}({', '.join(shown)})"


def values(key: str, name: str, args: Args) -> dict[str, Any]:
    """Return the arguments that a plug gets from a config, defaults included."""
    return {n: p.default for n, p in settable(load(key, name)).items()} | dict(args)


def resolved(key: str, name: str, args: Args) -> str:
    """Return the call that a config makes, defaults included: "grpo(std='sample', eps=1e-06)"."""
    return f"{name}({', '.join(f'{n}={value!r}' for n, value in values(key, name, args).items())})"


def chosen(config: Any, key: str) -> Chosen:
    """Return (key, name, args) of the plug of a config under `key`."""
    group = operator.attrgetter(key)(config)
    return key, group.name, group.args.to_dict()


def trait(config: Any, key: str, attribute: str, default: Any = False) -> Any:
    """Return what the plug of a config under `key` says of itself in an attribute, the default if
    it does not have it. Raises PlugError."""
    return getattr(load(*chosen(config, key)[:2]), attribute, default)


def in_config(config: Any) -> Iterator[Chosen]:
    """Yield (key, name, args) of every plug of a config."""
    yield from (chosen(config, key) for key in KINDS)
    yield from templates_of_worlds(config.template)


def templates_of_worlds(template: Any) -> Iterator[Chosen]:
    """Yield (key, name, args) of the templates of `template.worlds`. Where no name is given, it is
    that of the other worlds, with their arguments unless there are others."""
    for world, own in template.worlds.to_dict().items():
        given = {} if "name" in own else template.args.to_dict()
        name = own.get("name", template.name)
        yield f"template.worlds.{world}", name, own.get("args", given)
