"""The verifier of every task: it checks the final state and the answer, not the path."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from envs.world import Evaluation


@dataclass(frozen=True)
class Answers:
    """A way to read the answers of a world. types: patterns of its types of values, in small
    letters. word: pattern of a word. whole: a value of no type must be all that an answer says,
    else one of its words."""

    types: tuple[str, ...]
    word: str = r"\w+"
    whole: bool = False

    def accept(self, text: str, expected: str) -> bool:
        """Return True if `expected` is the only value of its type that `text` names.

        "85", "It costs 85." and "85 euros" all answer "85", but a list of guesses never does.
        """
        words, value = re.findall(self.word, text.lower()), expected.lower()
        for type in self.types:
            if re.fullmatch(type, value):
                return {word for word in words if re.fullmatch(type, word)} == {value}
        return words == re.findall(self.word, value) if self.whole else value in words


def any_of(words: Iterable[str]) -> str:
    """Return the pattern of a type of values that are words."""
    return "|".join(words).lower()


def verify(
    expected: list[list[Any]],
    wanted: str | None,
    reached: list[list[Any]],
    answer: str | None,
    answers: Answers,
) -> Evaluation:
    """Compare changes and an answer (None = none yet) with those that a task demands.

    progress = (demanded changes and answer reached - other changes) / (demanded changes and
    answer), clipped to [0, 1]. The score is 1 for success and otherwise half the progress, so that
    the reward distinguishes partial failures.
    """
    demanded, made = set(map(repr, expected)), set(map(repr, reached))
    right = wanted is None or (answer is not None and answers.accept(answer, wanted))
    asked = wanted is not None
    total = len(demanded) + asked
    points = len(demanded & made) + (asked and right) - len(made - demanded)
    progress = min(max(points / total, 0.0), 1.0) if total else 0.0
    success = bool(total) and demanded == made and right
    return Evaluation(
        1.0 if success else 0.5 * progress,
        success,
        {"state": float(demanded == made), "answer": float(right), "progress": progress},
    )
