"""Checks of a task that a language model proposed, against what execution showed.

- The answer is a value that a step of the reference showed.
- The query names every value that the verifier demands, directly or through a record that it
  singles out.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from envs.toolcalls import parse
from evolver.questioning.calls import Event, Events
from evolver.replaying import values_used
from evolver.transcripts import words

_COUNTS = re.compile(r"\b(how many|number of|count)\b", re.IGNORECASE)
_SELECTS = re.compile(  # words that choose a record by comparing all of them
    r"\b(?!request|interest|suggest|forest|harvest|invest|protest)"
    r"(\w{3,}est|first|last|all|every|each|both|only|most|least|more|less|than|before|after|next"
    r"|under|over)\b",
    re.IGNORECASE,
)
_EDGE = r"[\n\t|,;:\"'`()\[\]{}<>=]"  # what surrounds a value of several words
_LONGEST = 8  # words of a value
_TELLING = 3  # characters of a word by which records are told apart
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "a", "an")
_DIGITS = dict(zip(_NUMBERS, "12345678911"))


def shown_answer(query: str, answer: str, event: Event) -> str:
    """Return the answer in the spelling in which a call showed it, "" if it did not.

    An answer is one value: a word or number, or several words that stand alone in a line, a cell or
    a JSON string, not words from the middle of a sentence. A question that counts may also be
    answered by the number of records that the call showed.
    """
    core = answer.strip(" \n\"'`.,;:!?")
    parts = [re.escape(part) for part in core.split()]
    if not parts or len(parts) > _LONGEST:
        return ""
    if len(parts) == 1:  # not a part of a longer word, number, time or date
        pattern = rf"(?<!\w)(?<!\d[.,:-])({parts[0]})(?!\w|[.,:-]\d)"
    else:
        pattern = rf"(?:(?<={_EDGE})|^)\s*({r'[ ]+'.join(parts)})[.!]?\s*(?={_EDGE}|$)"
    found = re.search(pattern, event.result, re.IGNORECASE | re.MULTILINE)
    if found:
        return found[1]
    counted = _COUNTS.search(query) and core == str(len(_records(event.result)))
    return core if counted else ""


def unnamed_value(query: str, events: Events, opening: str, demanded: Any) -> str:
    """Return an argument of the calls that an agent cannot know from the query, "" if there is
    none. opening: the `opening_words` of the episode.

    A value is known if the query or the opening contains it, or if an earlier call showed it in a
    record that the words of the query single out. If the arguments of that call are known too, the
    record may also be the only one, or one of a list from which the query selects by comparison
    ("cheapest"). If they are not, one of the words must come from the query alone: the opening,
    which includes the tool descriptions, must not contain it.

    demanded: a JSON value; only arguments that occur in it are checked.
    """
    asked = words(query)
    counts = words(" ".join(digit for word, digit in _DIGITS.items() if f" {word} " in asked))
    used = [values_used(event.action) if parse(event.action).calls else [] for event in events]

    def known(value: str, before: int) -> bool:
        if value in asked or value in counts or value in opening:
            return True
        showing = [n for n in range(before) if value in words(events[n].result)]
        return any(singled_out(value, n) for n in showing)

    def singled_out(value: str, n: int) -> bool:
        records = [words(record) for record in _records(events[n].result)]
        others = [record.split() for record in records if value not in record]
        reached = all(known(argument, n) for argument in used[n])
        if reached and (not others or _SELECTS.search(query)):
            return True
        for record in records:
            if value not in record:
                continue
            own = record.split()
            matching = {word for word in asked.split() if _like_one_of(word, own)}
            unique = matching and not any(
                all(_like_one_of(word, other) for word in matching) for other in others
            )
            if unique and (reached or any(names(word) for word in matching)):
                return True
        return False

    def names(word: str) -> bool:
        return f" {word} " not in opening and len(word) >= _TELLING

    checked = words(json.dumps(demanded, ensure_ascii=False))
    for n, values in enumerate(used):
        for value in values:
            if value in checked and not known(value, n):
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
    if elements is None:
        return [text]
    return [json.dumps(element, ensure_ascii=False) for element in elements]


def _first_list(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    for inner in value.values() if isinstance(value, dict) else ():
        found = _first_list(inner)
        if found is not None:
            return found
    return None


def _like_one_of(word: str, others: Sequence[str]) -> bool:
    """Return True if `word` equals one of `others`, or if one is a prefix of the other, like "Mon"
    and "Monday"."""
    for other in others:
        shorter, longer = sorted((word, other), key=len)
        if word == other or (len(shorter) >= _TELLING and longer.startswith(shorter)):
            return True
    return False
