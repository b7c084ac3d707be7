"""Which synthetic tasks are kept: new ones, that their reference solves and doing nothing does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from envs.world import Evaluation, Task, World
from evolver.questioning.write import CLOSING


def unfeasible(world: World, task: Task) -> str:
    """Why a task is no use, found by playing it from the start; "" if it is fine."""
    if not task.reference:
        return "no reference"
    solved = _play(world, task, task.reference)
    if not solved.success or solved.score != 1.0:
        return "reference fails"
    idle = _play(world, task, [CLOSING])
    return "solved by doing nothing" if idle.success or idle.score > 0.0 else ""


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Size of the intersection over size of the union; two empty sets are equal."""
    return len(a & b) / len(a | b) if a or b else 1.0


class Duplicates:
    """Knows the tasks there are. A task repeats one in the same world with the same goal or nearly the same words.

    Equal words in two worlds are two tasks: what they name has other ids and other preconditions there.
    """

    def __init__(self, threshold: float = 0.8, tasks: Iterable[Task] = ()):
        self.threshold = threshold
        self._goals: set[tuple[int, str]] = set()
        self._words: dict[int, list[frozenset[str]]] = {}
        self._ids: set[str] = set()
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        if task.verifier:
            self._goals.add(_goal(task))
        self._words.setdefault(task.seed, []).append(_words(task))
        self._ids.add(task.id)

    def repeats(self, task: Task) -> str:
        """Why a task is not new; "" if it is."""
        if task.id in self._ids or (task.verifier and _goal(task) in self._goals):
            return "same goal"
        words = _words(task)
        if any(jaccard(words, other) >= self.threshold for other in self._words.get(task.seed, ())):
            return "same words"
        return ""


def _goal(task: Task) -> tuple[int, str]:
    return task.seed, json.dumps(task.verifier, sort_keys=True)


def _words(task: Task) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.query.lower()))


def _play(world: World, task: Task, actions: list[str]) -> Evaluation:
    world.reset(task, task.seed)
    for action in actions:
        result = world.step(action)
        if result.terminated or result.truncated:
            break
    return world.evaluate()
