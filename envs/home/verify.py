"""The verifier of every task of the home: it checks the final state and the answer, not the
path."""

from __future__ import annotations

import re
from typing import Any

from envs.home.data import PEOPLE, ROOMS, VALUES
from envs.world import Evaluation


def verify(verifier: dict[str, Any], changes: list[list[str]], answer: str | None) -> Evaluation:
    """Compare changes (`Home.changes`) and an answer (None = none yet) with those that a task
    demands.

    progress = (demanded changes and answer reached - other changes) / (demanded changes and
    answer), clipped to [0, 1]. The score is 1 for success and otherwise half the progress, so that
    the reward distinguishes partial failures.
    """
    expected, reached = ({tuple(row) for row in rows} for rows in (verifier["changes"], changes))
    asked = verifier["answer"] is not None
    answer_right = not asked or (answer is not None and answers(answer, verifier["answer"]))
    total, points = (
        len(expected) + asked,
        len(expected & reached) + (asked and answer_right) - len(reached - expected),
    )
    progress = min(max(points / total, 0.0), 1.0) if total else 0.0
    success = bool(total) and expected == reached and answer_right
    components = {
        "state": float(expected == reached),
        "answer": float(answer_right),
        "progress": progress,
    }
    return Evaluation(1.0 if success else 0.5 * progress, success, components)


def answers(text: str, expected: str) -> bool:
    """Return True if `expected` is the only value of its type (room, person, number, colour ...)
    that `text` names."""
    named = {
        word for word in re.findall(r"\w+", text.lower()) if _type(word) == _type(expected.lower())
    }
    return named == {expected.lower()}


def _type(word: str) -> str:
    if any(c.isdigit() for c in word):
        return re.sub(r"\d+", "9", word)  # a number or an id
    types = {"room": ROOMS, "person": (*PEOPLE, "nobody")} | VALUES
    return next(
        (name for name, words in types.items() if word in {other.lower() for other in words}), word
    )
