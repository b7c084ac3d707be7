"""Synthetic tasks: how explorers make them, and how the pool decides which to keep."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from envs.world import Task, World
from evolver.traces import play

CLOSING = "done"  # ends an episode that needs no answer


class Unfit(Exception):
    """Raised for a proposal that gives no task. The message is the reason, by which it is counted in the metrics."""


def probe_of(task: Task) -> Task:
    """Return a task that starts in the world of `task` and asks for nothing: its query is masked."""
    verifier = {"state": [], "answer": None}
    return Task(f"probe/{task.id}", task.env, "", task.split, seed=task.seed, verifier=verifier, meta=task.meta)


def synthetic_task(start: Task, query: str, *, identity: list[Any], **fields: Any) -> Task:
    """Return a synthetic task in the world of `start`. Its id is a digest of `identity`, a JSON value.

    fields: reference (assistant turns that solve it), verifier, difficulty (calls of the reference), meta.
    """
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
    return Task(f"syn/{digest}", start.env, query, start.split, "synthetic", start.seed, **fields)


def verifier_kind(world: World) -> str:
    """Return how a world checks synthetic tasks: "state" (by `difference()`), "calls" (by its profile), "" if not."""
    if hasattr(world, "difference"):
        return "state"
    return "calls" if world.profile().get("verifier") == "calls" else ""


def is_verified(task: Task) -> bool:
    """Return True if the world can check the task. A task that only carries its seed's verifier, which its world needs
    to start, is marked as `unverified` in its meta: an outcome judge has to score it."""
    return bool(task.verifier) and not task.meta.get("unverified")


def unfeasible(world: World, task: Task) -> str:
    """Return why a task is unusable, or "": its reference must solve it, and an idle agent must not."""
    if not task.reference:
        return "no reference"
    play(world, task, task.reference)
    solved = world.evaluate()
    if not solved.success or solved.score != 1.0:
        return "reference fails"
    play(world, task, [CLOSING])
    idle = world.evaluate()
    return "solved by doing nothing" if idle.success or idle.score > 0.0 else ""


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Return the size of the intersection over the size of the union; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


class Duplicates:
    """Detects tasks that repeat a known one: same world, and the same goal or nearly the same words.

    The same words in two worlds make two tasks, because the entities that they name differ in ids and preconditions.
    """

    def __init__(self, overlap: float, tasks: Iterable[Task] = ()):
        """overlap: least Jaccard similarity of two queries that counts as a repetition."""
        self.overlap = overlap
        self._goals: set[tuple[int, str]] = set()
        self._words: dict[int, list[frozenset[str]]] = {}
        self._ids: set[str] = set()
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        if is_verified(task):
            self._goals.add(_goal(task))
        self._words.setdefault(task.seed, []).append(_words(task))
        self._ids.add(task.id)

    def repeats(self, task: Task) -> str:
        """Return why a task is not new, "" if it is."""
        if task.id in self._ids or (is_verified(task) and _goal(task) in self._goals):
            return "same goal"
        words = _words(task)
        if any(jaccard(words, other) >= self.overlap for other in self._words.get(task.seed, ())):
            return "same words"
        return ""


def _goal(task: Task) -> tuple[int, str]:
    return task.seed, json.dumps(task.verifier, sort_keys=True)


def _words(task: Task) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.query.lower()))
