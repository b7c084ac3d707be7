"""The command line of a function: its parameters are the words and the flags."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from evolver.processes.streams import open_streams


class Problems(Exception):
    """A request that cannot be met: one text for each thing that is wrong with it."""

    def __init__(self, found: Sequence[str]):
        super().__init__(*found)


def run(main: Callable[..., int | None], argv: Sequence[str] | None = None) -> int:
    """Call a function with the words of the command line and return the exit code: its own, or 2 if
    nothing was started.

    Words after `--` go to its parameter `flags`, if it has one.
    """
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    rest: dict[str, Any] = {}
    if "flags" in inspect.signature(main).parameters:
        place = words.index("--") if "--" in words else len(words)
        words, rest["flags"] = words[:place], words[place + 1 :]
    try:
        return main(**vars(parser_of(main).parse_args(words)), **rest) or 0
    except Problems as problems:
        found = problems.args
        print(
            f"{len(found)} problem{'s'[: len(found) > 1]}; nothing was started.\n", file=sys.stderr
        )
        print(*(f"  {n}. {text}" for n, text in enumerate(found, 1)), sep="\n", file=sys.stderr)
        return 2


def parser_of(
    main: Callable[..., Any], skip: Sequence[str] = ("flags",), **options: Any
) -> argparse.ArgumentParser:
    """Return the parser of a function's parameters.

    The keyword-only ones are flags, the others words; without a default they have to be given. A
    tuple takes one word or more, a sequence any number, a bool none. The help of each is a line of
    the docstring such as "repeats: rounds of each setting".
    """
    module = sys.modules[main.__module__]
    parser = argparse.ArgumentParser(
        prog=f"python -m {module.__spec__.name.removesuffix('.__main__')}"
        if module.__spec__
        else None,
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
        rule = _rule(kinds[name]) | {
            "help": " ".join(told.get(name, "").split()).replace("%", "%%")
        }
        needed = parameter.default is parameter.empty
        if parameter.kind is not parameter.KEYWORD_ONLY:
            parser.add_argument(name, **rule)
        else:
            flag = f"--{name.rstrip('_').replace('_', '-')}"
            parser.add_argument(flag, dest=name, required=needed, **rule)
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
