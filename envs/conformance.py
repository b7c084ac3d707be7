"""The World contract as a suite of checks (envs/contract.py); `python -m envs.check` runs it in
processes of its own."""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from envs.contract import (
    CHECKS,
    OF_ALL_TASKS,
    OF_TWO_TASKS,
    Make,
    actions_of,
    as_json,
    difference,
    play,
    raised,
    short,
)
from envs.world import Proxy, Task, World


@dataclass
class Problem:
    """One violation of the contract: the check, the finding and the check's docstring."""

    check: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what}\n    {self.why}"


class Escape(Exception):
    """An exception of a world that ends more than a call, such as SystemExit, as an ordinary
    one."""


class Watched(Proxy):
    """A world that reports each call before it is made, so that a call that ends the process can be
    named."""

    def __init__(self, world: World, journal: Callable[[str], None]):
        self._world, self._journal = world, journal
        self.name = world.name

    def _call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        shown = ", ".join(short(getattr(value, "id", value)) for value in arguments)
        self._journal(f"{method}({shown})")
        try:
            return getattr(self._world, method)(*arguments, **named)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise Escape(f"{type(error).__name__}({error})") from None


def why(check: Callable[..., Any]) -> str:
    """Return the requirement that a check makes, and its reason."""
    return " ".join(str(check.__doc__).split())


def run(
    make: Make,
    *,
    split: str = "train",
    limit: int = 5,
    skip: Collection[str] = (),
    journal: Callable[[str, Any], None] = lambda kind, what: None,
) -> tuple[list[str], list[Problem]]:
    """Run every check but those in `skip` on up to `limit` tasks of `split`.

    Return the names of the checks and the problems. `journal` is called with ("check", its name),
    ("call", the call about to be made) and ("problem", the Problem) as they come. A world that
    hangs or ends the process does so here too; envs/check.py runs this in another process.
    """
    tasks: list[Task] = []
    problems: list[Problem] = []
    made: list[World] = []
    calls = [""]

    def call(text: str) -> None:
        calls[0] = text
        journal("call", text)

    def new() -> World:
        call("the constructor")
        made.append(Watched(make(), call))
        return made[-1]

    def close() -> None:
        while made:
            made.pop().close()

    def found(check: str, reason: str, findings: Iterator[str]) -> None:
        journal("check", check)
        for what in with_the_error(findings):
            problems.append(Problem(check, what, reason))
            journal("problem", problems[-1])

    def with_the_error(findings: Iterator[str]) -> Iterator[str]:
        try:
            yield from findings
            close()
        except Exception as error:
            yield f"{calls[0]} {raised(error)}"
            with contextlib.suppress(Exception):
                close()

    def listed() -> Iterator[str]:
        tasks.extend(new().tasks(split))
        yield from ()

    found("tasks", f"An environment lists the tasks of its split '{split}'.", listed())
    if problems:
        return ["tasks"], problems
    sample = _sample(tasks, limit)
    for check in CHECKS:
        if check.__name__ not in skip:
            some = sample[:2] if check in OF_TWO_TASKS else sample
            findings = check(new, tasks if check in OF_ALL_TASKS else some)
            found(check.__name__, why(check), findings)
    return [check.__name__ for check in CHECKS], problems


def episodes(make: Make, *, split: str = "train", limit: int = 5) -> list[Any]:
    """Return JSON values of the tasks of a split and of an episode in some, to be compared between
    processes.

    `info` is left out: it may hold facts of a process."""
    world = make()
    tasks = world.tasks(split)
    played = [play(world, task, actions_of(task)) for task in _sample(tasks, limit)]
    world.close()
    for episode in played:
        for step in episode["steps"]:
            step["info"] = None
    return [[as_json(task.to_dict()) for task in tasks], *played]


def first_difference(a: list[Any], b: list[Any]) -> str:
    """Return where two results of `episodes` differ, "" if they do not."""
    if a[0] != b[0]:
        return "the tasks of the split differ"
    for task, x, y in zip(_sample(a[0], len(a) - 1), a[1:], b[1:]):
        if x != y:
            return f"task {task['id']}: {difference(x, y)}"
    return ""


def _sample(tasks: list[Any], limit: int) -> list[Any]:
    return random.Random(0).sample(tasks, min(limit, len(tasks)))
