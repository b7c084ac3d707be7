"""Answers: find the JSON value in a model's text that fits a schema, and refuse texts that prompts
must not hold."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from evolver.transcripts import COPIED, scripts, words

_OPENING, _LOOSE = re.compile(r"[{\[]"), re.compile(r"[\s\\]+")
UNFIT = ("empty", "long", "marked", "quoted", "foreign")  # reasons to refuse a text, see `unfit`
_LONGEST = 1200  # characters; a task or an experience has a few hundred
_FEW = 5  # words
_TAGS = re.compile(  # text that would end or imitate a part of a prompt
    r"</?(?:EXP|tools?|tool_call|tool_response|think)\b|<\||<<\s*[A-Z]|>>>|===|overall outcome:",
    re.IGNORECASE,
)
_LARGEST = 10**300  # of a whole number: a float must be able to hold it
_TRIES = 10_000  # most positions in an answer that are tried as the beginning of a value


class Unreadable(ValueError):
    """An answer that cannot be used. kind: "empty", "cut", "quoted" or "unreadable"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def read_json(text: str, schema: dict[str, Any], *, shown: str = "") -> Any:
    """Return the JSON value in a model's answer that fits the schema. Raises Unreadable if there is
    none.

    Models wrap their answer in fences and prose, think before it, and quote what they were shown.
    So thoughts are ignored, and so are values that also occur in `shown`, the text that others
    wrote. Of the remaining values, the last
    one with any property of the schema is the answer: if it does not fit, no earlier one takes its
    place. A text that ends inside a value was cut and has no answer.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        raise Unreadable("cut", "the answer ends inside a thought")
    if not text.strip():
        raise Unreadable("empty", "the answer is empty")
    own, shown, quotes, other = [], _squeezed(shown), False, "there is no JSON in the answer"
    for value, source in _values(text):
        if not _resembles(value, schema):
            other = misfit(value, schema) or other
        elif _squeezed(source) in shown:
            quotes = True
        else:
            own.append(value)
    if quotes and not own:
        raise Unreadable("quoted", "the answer only quotes what the model was shown")
    if problem := misfit(own[-1], schema) or _unwritable(own[-1]) if own else other:
        raise Unreadable("unreadable", problem)
    return own[-1]


def _unwritable(value: Any) -> str:
    """Return why a JSON value cannot be written to a file, "" if it can: JSON can express halves of
    characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        return f"the answer cannot be written: {error}"
    return ""


def _values(text: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON objects and arrays in a text that are not parts of one another, with their
    source text."""
    decoder, start = json.JSONDecoder(), 0
    for _ in range(_TRIES):
        match = _OPENING.search(text, start)
        if not match:
            return
        start = match.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                raise Unreadable("cut", "the JSON in the answer is cut") from None
            start += 1
        except RecursionError:
            raise Unreadable("unreadable", "the answer is nested too deeply") from None
        except ValueError:  # Python reads no number of more than 4,300 digits
            raise Unreadable("unreadable", "the answer holds a number that is too long") from None
        else:
            yield value, text[start:end]
            start = end


def _resembles(value: Any, schema: dict[str, Any]) -> bool:
    """Return True if a value may be an answer: an object with a property of the schema; anything if
    it has none."""
    properties = schema.get("properties")
    return not properties or (isinstance(value, dict) and not properties.keys().isdisjoint(value))


def _squeezed(text: str) -> str:
    """Return the text without whitespace and backslashes, which quoting may change."""
    return _LOOSE.sub("", text)


def misfit(value: Any, schema: dict[str, Any]) -> str:
    """Return why a JSON value does not fit a JSON schema, "" if it does.

    Not every server enforces schemas, so an `enum` ignores case, and additional properties, longer
    texts and longer lists are allowed. Unlike the standard, numbers must be finite, and 1.0 is not
    an integer.
    """
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_validator()(schema).iter_errors(value))
    except RecursionError:
        return "the answer is nested too deeply"
    return (
        f"{error.json_path.replace('$', 'the answer', 1)}: {error.message[:200]}" if error else ""
    )


def unfit(text: str, query: str = "", observations: Iterable[str] = ()) -> str:
    """Return why a model's text cannot become a task or experience beside tasks like `query`, one
    of UNFIT; "" if it can.

    Later prompts hold the text, so it must not contain their tags, nor marks that a model copied
    from an attempt, and it must not be a sentence that the environment wrote, which may be an
    instruction. A few words may occur anywhere. Its language is judged by its script only.
    """
    if _TAGS.search(text) or COPIED in text:  # first, because a caller may care for tags only
        return "marked"
    if not words(text).strip():  # nothing, or the dots of the answer's example
        return "empty"
    if len(text) > _LONGEST:
        return "long"
    if len(text.split()) > _FEW and any(
        words(text) in words(observation) for observation in observations
    ):
        return "quoted"
    common, own = scripts(text), scripts(query)
    return "foreign" if common and own and common[0] not in own else ""


@functools.cache
def _validator() -> Any:
    """Return the validator class for answers."""
    from jsonschema import Draft202012Validator, ValidationError, validators

    def folded(value: Any) -> Any:
        return value.casefold() if isinstance(value, str) else value

    def enum(_validator: Any, options: list[Any], value: Any, _schema: Any):
        if folded(value) not in map(folded, options):
            yield ValidationError(f"{value!r} is none of {', '.join(map(str, options))}")

    def is_integer(_checker: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST

    def is_number(checker: Any, value: Any) -> bool:
        return is_integer(checker, value) or (isinstance(value, float) and math.isfinite(value))

    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": is_integer, "number": is_number}
    )
    rules = {"enum": enum} | dict.fromkeys(
        ("additionalProperties", "maxItems", "maxLength"), lambda *_: ()
    )
    return validators.extend(Draft202012Validator, rules, type_checker=types)
