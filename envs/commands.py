"""The command line of a function: its parameters are the words and the flags."""

import argparse
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from envs.values import Json


def parser_of(
    main: Callable[..., Any], skip: Sequence[str] = ("flags",), joint: str = "-", **options: Any
) -> argparse.ArgumentParser:
    """Return the parser of a function's parameters.

    The keyword-only ones are flags, the others words; without a default they have to be given. A
    tuple takes one word or more, a sequence any number, a bool none, and a dict an object in JSON.
    The help of each is a line of the docstring such as "repeats: rounds of each setting". joint:
    what stands between the words of a flag.
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
            name = f"--{name.rstrip('_').replace('_', joint)}"
        parser.add_argument(name, **rule)
    return parser


def called(main: Callable[..., Any], argv: Sequence[str] | None = None, joint: str = "-") -> Any:
    """Call a function with the words of a command line, by default those of this process, and
    return its result."""
    return main(**vars(parser_of(main, joint=joint).parse_args(argv)))


def _rule(kind: Any) -> Json:
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
        case origin if origin is dict:
            return {"type": json.loads}
    return {"type": kind}
