"""Structured answers: find the JSON value in a model's text that fits a schema."""

from __future__ import annotations

import functools
import json
import math
from typing import Any


def read_json(text: str, schema: dict[str, Any]) -> Any:
    """Return the first JSON value in `text` that fits `schema`. Raises ValueError with the reason if there is none.

    Models wrap JSON in fences and prose, so every position where a value could begin is tried. Text before
    `</think>` is ignored.
    """
    text = text.rpartition("</think>")[2]
    decoder, problem, start = json.JSONDecoder(), "there is no JSON in the answer", 0
    for _ in range(100):
        places = [place for place in (text.find("{", start), text.find("[", start)) if place >= 0]
        if not places:
            break
        start = min(places)
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start, problem = start + 1, "the JSON in the answer is broken or cut"
            continue
        problem = misfit(value, schema)
        if not problem:
            return value
        start = end
    raise ValueError(problem)


def misfit(value: Any, schema: dict[str, Any]) -> str:
    """Return why a JSON value does not fit a JSON schema, "" if it does.

    Not every server enforces schemas, so an `enum` ignores case and additional properties are allowed. Unlike the
    standard, numbers must be finite, and 1.0 is not an integer.
    """
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_validator()(schema).iter_errors(value))
    except RecursionError:
        return "the answer is nested too deeply"
    return f"{error.json_path.replace('$', 'the answer', 1)}: {error.message[:200]}" if error else ""


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
        return isinstance(value, int) and not isinstance(value, bool)

    def is_number(checker: Any, value: Any) -> bool:
        return is_integer(checker, value) or (isinstance(value, float) and math.isfinite(value))

    types = Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": is_integer, "number": is_number})
    rules = {"enum": enum, "additionalProperties": lambda *_: ()}
    return validators.extend(Draft202012Validator, rules, type_checker=types)
