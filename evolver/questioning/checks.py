"""Checks of a task that a language model proposed, against what execution showed.

- The answer is a value that a step of the reference showed.
- The query names every value that the verifier demands, directly or through a record that it
  singles out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from envs.toolcalls import parse
from evolver.replaying import values_used
from evolver.transcripts import words

_COUNTS = re.compile(r"\b(how many|number of|count)\b", re.IGNORECASE)
_SELECTS = re.compile(  # words that choose a record by comparing all of them
    r"\b(?!request|interest|suggest|forest|harvest|invest|protest)"
    r"(\w{3,}est|first|last|all|every|each|both|only|most|least|more|less|than|before|after|next|under|over)\b",
    re.IGNORECASE,
)
_EDGE = r"[\n\t|,;:\"'`()\[\]{}<>=]"  # what surrounds a value of several words
_LONGEST = 8  # words of a value
_DIGITS = dict(zip("one two three four five six seven eight nine a an".split(), "12345678911"))  # noqa: SIM905


@dataclass
class Played:
    """Actions that were executed. opening: its `opening_words`. shown: the environment's answer to
    each action."""

    actions: list[str]
    opening: str
    shown: list[str]


def shown_answer(query: str, answer: str, played: Played) -> str:
    """Return the answer in the spelling in which a step showed it, "" if no step did.

    An answer is one value: a word or number, or several words that stand alone in a line, a cell or
    a JSON string, not words from the middle of a sentence. A question that counts may also be
    answered by the number of records that the last step showed.
    """
    core = answer.strip(" \n\"'`.,;:!?")
    parts = [re.escape(part) for part in core.split()]
    if not parts or len(parts) > _LONGEST:
        return ""
    if len(parts) == 1:  # not a part of a longer word, number, time or date
        pattern = rf"(?<!\w)(?<!\d[.,:-]){parts[0]}(?!\w|[.,:-]\d)"
    else:
        pattern = rf"(?:(?<={_EDGE})|^)\s*({r'[ ]+'.join(parts)})[.!]?\s*(?={_EDGE}|$)"
    for text in played.shown:
        if match := re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            return match[match.lastindex or 0]
    counted = (
        _COUNTS.search(query) and played.shown and core == str(len(_records(played.shown[-1])))
    )
    return core if counted else ""


def unnamed_value(query: str, played: Played, demanded: Any = None) -> str:
    """Return an argument of the reference that an agent cannot know from the query, "" if there is
    none.

    A value is known if the query or the opening contains it, or if an earlier step showed it in a
    record that the words of the query single out. If the arguments of that step are known too, the
    record may also be the only one, or one of a list from which the query selects by comparison
    ("cheapest"). If they are not, one of the words must come
    from the query alone: the opening, which includes the tool descriptions, must not contain it.

    demanded: a JSON value; only arguments that occur in it are checked. None: all of them.
    """
    asked = words(query)
    counts = words(" ".join(digit for word, digit in _DIGITS.items() if f" {word} " in asked))
    checked = None if demanded is None else words(json.dumps(demanded, ensure_ascii=False))
    used = [values_used(action) if parse(action).calls else [] for action in played.actions]

    def known(value: str, before: int) -> bool:
        if value in asked or value in counts or value in played.opening:
            return True
        return any(value in words(played.shown[k]) and singled_out(value, k) for k in range(before))

    def singled_out(value: str, step: int) -> bool:
        records = [words(record) for record in _records(played.shown[step])]
        others = [set(record.split()) for record in records if value not in record]
        reached = all(known(argument, step) for argument in used[step])
        if reached and (not others or _SELECTS.search(query)):
            return True
        for own in (set(record.split()) for record in records if value in record):
            matching = {word for word in asked.split() if _like_one_of(word, own)}
            names = {
                word for word in matching if f" {word} " not in played.opening and len(word) > 2
            }
            unique = matching and not any(
                all(_like_one_of(word, other) for word in matching) for other in others
            )
            if unique and (reached or names):
                return True
        return False

    for k, values in enumerate(used):
        for value in values:
            if (checked is None or value in checked) and not known(value, k):
                return value.strip()
    return ""


def _records(text: str) -> list[str]:
    """Return the elements of the first list in a JSON answer, or the answer itself if it has none;
    else its lines."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [line for line in text.splitlines() if line.strip()]
    elements = _first_list(value)
    return (
        [text] if elements is None else [json.dumps(item, ensure_ascii=False) for item in elements]
    )


def _first_list(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    inner = value.values() if isinstance(value, dict) else ()
    return next((found for item in inner if (found := _first_list(item)) is not None), None)


def _like_one_of(word: str, others: set[str]) -> bool:
    """Return True if `word` equals one of `others`, or if one is a prefix of the other, like "Mon"
    and "Monday"."""
    return word in others or any(
        min(len(word), len(other)) >= 3 and (word.startswith(other) or other.startswith(word))
        for other in others
    )
