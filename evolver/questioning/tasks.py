"""Synthetic tasks: how explorers make them, and how the pool decides which to keep."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from envs.probed import answered, is_probed
from envs.world import Task, Tool, World, text_of
from evolver.questioning.calls import has_digit
from evolver.replaying import replay

CLOSING = "done"  # ends an episode that needs no answer
_CONSTANTS = ("yes", "no", "none", "true", "false", "unknown", "0", "1")
MASK = "Look around and find out what can be done here."  # replaces the query while exploring
GUESSABLE = "guessable"  # the reason for rejecting a task that an answer solves without a call
SAME_WORDS = "same words"  # the reason for rejecting a task whose query is nearly a known one
_PROBE = "probe/"  # begins the ids of probes


class Rejected(Exception):
    """Raised for a proposal that gives no task. The message is the reason, by which it is counted
    in the metrics."""


def probe_of(task: Task) -> Task:
    """Return a task that starts in the world of `task` and asks for nothing: its query is masked.

    It keeps the verifier, which the world may need to start, and the id of `task` as
    `meta["entry"]`.
    """
    return replace(
        task,
        id=f"{_PROBE}{task.id}",
        query=MASK,
        origin="synthetic",
        reference=[],
        difficulty=0,
        meta=task.meta | {"entry": task.meta.get("entry", task.id)},
    )


def source_of(start: Task) -> str:
    """Return the id of an original task, given the task or its probe."""
    return start.id.removeprefix(_PROBE)


class NotExplorable(ValueError):
    """A world that cannot be explored: it does not start, or shows its own tasks only."""


def check_probe(world: World, start: Task) -> None:
    """Raise NotExplorable unless the world shows the query of the probe of `start` instead of its
    own."""
    problem = ""
    try:
        opening = text_of(world.reset(probe_of(start), start.seed).messages)
        world.evaluate()
    except Exception as error:  # an adapter may raise anything for a task that it does not know
        problem = f"it fails with {type(error).__name__}: {error}"
        if _fails(world, start):
            raise NotExplorable(f"world '{world.name}' cannot be explored: {problem}") from error
    else:
        if MASK not in opening:
            problem = "it does not show that query"
        elif start.query.strip() and start.query in opening:
            problem = "it still shows the old query"
    if problem:
        raise NotExplorable(
            f"world '{world.name}' cannot be explored: it was reset with task {start.id} under"
            f" another query, and {problem}. Its reset() has to show task.query wherever"
            " task.origin is 'synthetic'; if it cannot, set config.questioning.enabled=False"
        )


def _fails(world: World, task: Task) -> bool:
    try:
        world.reset(task, task.seed)
    except Exception:  # an adapter may raise anything
        return True
    return False


def synthetic_task(
    start: Task, query: str, *, identity: Any, meta: dict[str, Any] | None = None, **fields: Any
) -> Task:
    """Return a synthetic task in the world of `start`, an original task or its probe, whose id
    becomes meta["source"].

    Its id is a digest of the start and `identity`, a JSON value. fields: reference (assistant turns
    that solve it), verifier, difficulty (calls of the reference).
    """
    source = source_of(start)
    whole = json.dumps([source, start.seed, identity], sort_keys=True)
    id = f"syn/{hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()}"
    meta = (meta or {}) | {"source": source}
    return Task(id, start.env, query, start.split, "synthetic", start.seed, meta=meta, **fields)


def is_verified(task: Task) -> bool:
    """Return True if the world can check the task. A task that only carries its seed's verifier,
    which its world needs to start, is marked as `unverified` in its meta: an outcome judge has to
    score it."""
    return bool(task.verifier) and not task.meta.get("unverified")


def infeasibility(world: World, task: Task) -> str:
    """Return why a task is unusable, or "": its reference must solve it, and an idle agent must
    not."""
    if not task.reference:
        return "no reference"
    replay(world, task, task.reference)
    solved = world.evaluate()
    if not solved.success or solved.score != solved.high:
        return "reference fails"
    replay(world, task, [CLOSING])
    idle = world.evaluate()
    return "solved by doing nothing" if idle.success or idle.score > idle.low else ""


def constants(tools: Iterable[Tool]) -> list[str]:
    """Return answers that an agent may give without looking: common words, and the choices that
    the schemas of tools list."""
    return [*_CONSTANTS, *dict.fromkeys(_choices([tool["function"] for tool in tools]))]


def _choices(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return list(itertools.chain.from_iterable(map(_choices, schema)))
    if not isinstance(schema, dict):
        return []
    listed = schema.get("enum")
    own = [str(choice) for choice in listed] if isinstance(listed, list) else []
    return own + _choices([inner for name, inner in schema.items() if name != "enum"])


def is_guessable(world: World, task: Task, guesses: Iterable[str]) -> bool:
    """Return True if one of the answers solves a task without a call."""
    if is_probed(task):
        answer = task.verifier["answer"]
        changed = any("after" in probe for probe in task.verifier["probes"])
        return bool(answer) and not changed and any(answered(g, answer) for g in guesses)
    for guess in guesses:
        replay(world, task, [guess])
        if world.evaluate().success:
            return True
    return False


def answer_of(task: Task) -> str | None:
    """Return the answer of a task that asks for one and is checked by probes, else None."""
    answer = task.verifier["answer"] if is_probed(task) else None
    return answer["value"] if answer else None


def answer_kind(task: Task) -> str:
    """Return the kind of the answer of a task: number, id (with digits) or words; "none" if there
    is none."""
    answer = answer_of(task)
    if answer is None:
        return "none"
    if not has_digit(answer):
        return "words"
    return "id" if any(map(str.isalpha, answer)) else "number"


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Return the size of the intersection over the size of the union; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


class Duplicates:
    """Detects tasks that repeat a known one: same start, and the same goal or nearly the same
    words.

    The same words, or the same goal, from two starts are two tasks: the entities differ in ids and
    preconditions. A start is a seed and the original task whose world it is, because a world may
    give all its tasks one seed.
    """

    def __init__(self, overlap: float, tasks: Iterable[Task] = ()):
        """overlap: least Jaccard similarity of two queries that counts as a repetition."""
        self.overlap = overlap
        self._ids: set[str] = set()
        self._goals: set[str] = set()
        self._words: dict[tuple[int, str], list[frozenset[str]]] = {}
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        """Remember a task."""
        if is_verified(task):
            self._goals.add(_goal(task))
        self._words.setdefault(_start(task), []).append(_words(task))
        self._ids.add(task.id)

    def repeats(self, task: Task, overlap: float | None = None) -> str:
        """Return why a task is not new, "" if it is. overlap: in place of that of all tasks."""
        if task.id in self._ids or (is_verified(task) and _goal(task) in self._goals):
            return "same goal"
        words = _words(task)
        known = self._words.get(_start(task), ())
        least = self.overlap if overlap is None else overlap
        return SAME_WORDS if any(jaccard(words, own) >= least for own in known) else ""


def _start(task: Task) -> tuple[int, str]:
    """Return the seed of a task, and the original task in whose world it starts, which may be
    itself."""
    source = task.meta.get("source", "") if task.origin == "synthetic" else task.id
    return task.seed, str(task.meta.get("entry", source))


def _goal(task: Task) -> str:
    """Return the start of a task and what its verifier demands, without what must not change, as
    JSON."""
    demanded: Any = task.verifier
    if is_probed(task):
        changed = [[p["action"], p["after"]] for p in task.verifier["probes"] if "after" in p]
        demanded = [changed, task.verifier["answer"], "" if changed else task.query]
    return json.dumps([_start(task), demanded], sort_keys=True)


def _words(task: Task) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.query.lower()))
