"""Commands of this folder: a function is called with the words of the command line."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from envs.commands import parser_of
from evolver.processes.streams import open_streams

Words = tuple[str, ...]  # one or more, behind a flag or in front of all flags
Numbers = tuple[int, ...]


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
