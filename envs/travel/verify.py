"""Success from the final database and the answer, whatever the path. The same check serves every task."""

from __future__ import annotations

import re
from typing import Any

from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, TIMES
from envs.world import Evaluation

_NUMBER = re.compile(r"[0-9]+")
_SEAT = re.compile(r"[0-9]+[a-c]")
_VOCABULARIES = [{word.lower() for word in words} for words in (CITIES, NAMES, DAYS, TIMES, FARES, CARDS)]


def verify(verifier: dict[str, Any], difference: list[list[Any]], answer: str | None) -> Evaluation:
    """Compare a difference (`Agency.difference`) and an answer (None = none given yet) with what a task expects.

    `verifier` is {"state": rows, "answer": text or None}. progress = (rows and answer reached - rows that should not be
    there) / (rows and answer expected), clipped to [0, 1]. The score is 1 for success and half the progress without:
    of two failures the one that did half of the order is the better one, and learning by reward needs to be told.
    """
    expected = {repr(row) for row in verifier["state"]}
    reached = {repr(row) for row in difference}
    asked = verifier["answer"] is not None
    state_right = expected == reached
    answer_right = not asked or (answer is not None and answers(answer, verifier["answer"]))
    total = len(expected) + asked
    gained = len(expected & reached) + (asked and answer_right) - len(reached - expected)
    progress = min(max(gained / total, 0.0), 1.0) if total else 0.0
    success = bool(total) and state_right and answer_right
    return Evaluation(
        score=1.0 if success else 0.5 * progress,
        success=success,
        components={"state": float(state_right), "answer": float(answer_right), "progress": progress},
    )


def answers(text: str, expected: str) -> bool:
    """Whether `text` answers `expected`: of the values of its sort (numbers, cities, days) it names this one alone.

    So "85", "It costs 85." and "85 euros" all answer "85", and a list of guesses answers nothing.
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
