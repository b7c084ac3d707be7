"""The verifier of every travel task: it checks the final database and the answer, not the path."""

from __future__ import annotations

import re
from typing import Any

from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, TIMES
from envs.world import Evaluation

_NUMBER = re.compile(r"[0-9]+")
_SEAT = re.compile(r"[0-9]+[a-c]")
_VOCABULARIES = [
    {word.lower() for word in words} for words in (CITIES, NAMES, DAYS, TIMES, FARES, CARDS)
]


def verify(verifier: dict[str, Any], difference: list[list[Any]], answer: str | None) -> Evaluation:
    """Compare a difference (`Agency.difference`) and an answer (None = none yet) with the
    expectation of a task.

    `verifier` is {"state": rows, "answer": text or None}. progress = (expected rows and answer
    reached - unexpected rows) / (expected rows and answer), clipped to [0, 1]. The score is 1 for
    success and otherwise half the progress, so that the reward distinguishes partial failures.
    """
    expected = {repr(row) for row in verifier["state"]}
    reached = {repr(row) for row in difference}
    asked = verifier["answer"] is not None
    state_right = expected == reached
    answer_right = not asked or (answer is not None and answers(answer, verifier["answer"]))
    total = len(expected) + asked
    points = len(expected & reached) + (asked and answer_right) - len(reached - expected)
    progress = min(max(points / total, 0.0), 1.0) if total else 0.0
    success = bool(total) and state_right and answer_right
    return Evaluation(
        score=1.0 if success else 0.5 * progress,
        success=success,
        components={
            "state": float(state_right),
            "answer": float(answer_right),
            "progress": progress,
        },
    )


def answers(text: str, expected: str) -> bool:
    """Return True if `expected` is the only value of its type (number, seat, city, day, ...) that
    `text` mentions.

    "85", "It costs 85." and "85 euros" all answer "85", but a list of guesses is never an answer.
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    value = expected.lower()
    if _NUMBER.fullmatch(value):
        return {word for word in words if _NUMBER.fullmatch(word)} == {value}
    if _SEAT.fullmatch(value):
        return {word for word in words if _SEAT.fullmatch(word)} == {value}
    for vocabulary in _VOCABULARIES:
        if value in vocabulary:
            return vocabulary.intersection(words) == {value}
    return " ".join(words) == " ".join(re.findall(r"[a-z0-9]+", value))
