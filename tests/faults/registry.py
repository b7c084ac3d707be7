"""The table that faults are entered into, and what they have in common."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.stage import Stage

KINDS = ("environment", "judge", "engine", "disk", "process", "surroundings", "text", "clock")
SYNC, ASYNC, BOTH = ("sync",), ("async",), ("sync", "async")
WORKERS = "env.mode=worker env.workers=2"
LONG = "steps=200"
SAVED = "The same command resumes from there."


@dataclass(frozen=True)
class Fault:
    kind: str
    name: str
    play: Callable[[Stage], object]
    modes: tuple[str, ...]


TABLE: list[Fault] = []


def fault(kind, modes=BOTH, name=""):
    """Enter a function into the table, under its own name unless another one is given."""

    def enter(play):
        TABLE.append(Fault(kind, name or play.__name__.replace("_", " "), play, modes))
        return play

    return enter


def replacing(owner, name, make):
    """Return a function, to be called in the process of a run, that replaces an attribute by what
    `make` makes of it."""
    return lambda: setattr(owner, name, make(getattr(owner, name)))


def failing(kind, name, owner, attribute, calls, error, said, modes=BOTH):
    """Enter a function that raises an error from one of its calls on. Without it the run goes on as
    if nothing had happened."""

    def make(function):
        count = itertools.count(1)

        def fails(*args, **kwargs):
            if next(count) >= calls:
                raise type(error)(*error.args)
            return function(*args, **kwargs)

        return fails

    @fault(kind, modes, name)
    def play(stage):
        inside = replacing(owner, attribute, make)
        stage.run(inside=inside, code=1, said=said).resumes(same=True)
