"""The command line of a function: its parameters are the words and the flags."""

import argparse
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from evolver.processes.streams import open_streams


class Problems(Exception):
    """A request that cannot be met: its arguments are one text for each thing that is wrong."""


def run(main: Callable[..., int | None], argv: Sequence[str] | None = None) -> int:
    """Call a function with the words of the command line and return the exit code: its own, or 2 if
    nothing was started.

    Words after `--` go to its parameter `flags`, if it has one.
    """
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    rest: dict[str, Any] = {}
    if "flags" in inspect.signature(main).parameters and "--" in words:
        place = words.index("--")
        words, rest["flags"] = words[:place], words[place + 1 :]
    try:
        return main(**vars(parser_of(main).parse_args(words)), **rest) or 0
    except Problems as problems:
        from run import refused  # whose packages the interpreters of peers lack

        return refused(list(problems.args))


def program(main: Callable[..., int | None]) -> NoReturn:
    """Call a function with the words of the command line, and end the process with its exit
    code."""
    sys.exit(run(main))


def parser_of(
    main: Callable[..., Any], skip: Sequence[str] = ("flags",), **options: Any
) -> argparse.ArgumentParser:
    """Return the parser of a function's parameters.

    The keyword-only ones are flags, the others words; without a default they have to be given. A
    tuple takes one word or more, a sequence any number, a bool none. The help of each is a line of
    the docstring such as "repeats: rounds of each setting".
    """
    module = sys.modules[main.__module__]
    name = module.__spec__.name.removesuffix(".__main__") if module.__spec__ else module.__name__
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # defaults stand in the signature only
        **options,
    )
    docstring = inspect.cleandoc(main.__doc__ or "")
    told = dict(re.findall(r"^(\w+): (.+(?:\n .+)*)", docstring, re.MULTILINE))
    kinds = typing.get_type_hints(main)
    for name, parameter in inspect.signature(main).parameters.items():
        if name in skip:
            continue
        help = " ".join(told.get(name, "").split()).replace("%", "%%")
        rule = _rule(kinds[name]) | {"help": help}
        if parameter.kind is parameter.KEYWORD_ONLY:
            rule |= {"dest": name, "required": parameter.default is parameter.empty}
            name = f"--{name.rstrip('_').replace('_', '-')}"
        parser.add_argument(name, **rule)
    return parser


def _rule(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a type."""
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case types.UnionType:  # X | None
            return _rule(inner[0])
        case _ if kind is bool:
            return {"action": "store_true"}
        case origin if origin is Literal:
            return {"choices": inner}
        case origin if origin is tuple:
            return {"nargs": "+", "action": "extend", **_rule(inner[0])}
        case origin if origin is Sequence:
            return {"nargs": "*", "action": "extend", **_rule(inner[0])}
    return {"type": kind}
