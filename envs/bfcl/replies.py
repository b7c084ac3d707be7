"""The calls in a reply, by the rules of the benchmark's own Qwen handler.

They differ from `envs.toolcalls.parse` for odd texts. The tags stand on lines of their own; a body
that is not JSON is passed over; a call without name or arguments spoils the whole reply; arguments
may be the text of an object. The package then evaluates the call as Python, so numbers that Python
has no name for are errors of the call.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from envs.toolcalls import CLOSE, OPEN, Call
from envs.values import MAX_DEPTH, Json, Unsafe, json_value

BEGIN, END = OPEN + "\n", "\n" + CLOSE


def official_calls(text: str) -> list[Call]:
    """Return the calls that the package would run; [] ends the user's turn. Never raises."""
    records = []
    for body in _bodies(text.rpartition("</think>")[2]):
        try:
            records.append(json.loads(body))
        except (ValueError, RecursionError):
            continue
    try:
        return [_call(record) for record in records]
    except (ValueError, RecursionError):
        return []


def misread(text: str, calls: list[Call]) -> bool:
    """Return True if a reply was meant to make a call, and makes none."""
    return not calls and (OPEN in text or CLOSE in text)


def unusable(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return the package's error for an argument that Python cannot evaluate, "" if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"name '{'nan' if math.isnan(value) else 'inf'}' is not defined"
    if not isinstance(value, dict | list):
        return ""
    if depth == 0:
        return "too many nested parentheses"
    parts = value.values() if isinstance(value, dict) else value
    return next((problem for part in parts if (problem := unusable(part, depth - 1))), "")


def recorded(call: Call) -> Json:
    """Return a call for `info`, without arguments if they are no JSON values (NaN, a number of 400
    digits)."""
    try:
        return json_value(call.to_dict())
    except Unsafe:
        return {"name": json_value(call.name), "arguments": {}}


def _bodies(text: str) -> Iterator[str]:
    end = 0
    while (start := text.find(BEGIN, end)) >= 0:
        start += len(BEGIN)
        end = text.find(END, start)
        if end < 0:
            return
        yield text[start:end]
        end += len(END)


def _call(record: Any) -> Call:
    """Return one call. Raises ValueError for a record that is none."""
    if not isinstance(record, dict) or not {"name", "arguments"} <= set(record):
        raise ValueError("not a call")
    name, arguments = record["name"], record["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if isinstance(name, dict | list) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(str(name), arguments)
