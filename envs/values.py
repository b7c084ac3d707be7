"""Texts and JSON values that are safe to write, to send and to compute with. Standard library
only."""

import json
import math
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]  # an object

# levels of lists and objects; serialisers and deep copies recurse, and fail at some hundreds
MAX_DEPTH = 100
MAX_BITS = 1023  # of an integer; a longer one overflows in the first division


class Unsafe(ValueError):
    """A value that is not JSON, or is too deep or too large. The message says where it is."""


class TooDeep(Unsafe):
    """A value with more than MAX_DEPTH levels."""


class NotJson(Unsafe):
    """A text that is not JSON."""


class NotText(Unsafe):
    """A text with half of a surrogate pair, or bytes that are not UTF-8."""


class Repeated(Unsafe):
    """An object in which a key occurs twice, so that readers differ in what it means."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its members, as `object_pairs_hook` of `json.loads`. Raises Repeated
    for a key that occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Repeated(f"the key {json.dumps(name)[:60]} twice in one object")
            seen.add(name)
    return value


def loads(text: str | bytes, where: str = "it") -> Any:
    """Return the JSON value of a text from outside, in UTF-8. `where` names it in messages.

    Raises Unsafe for a text that is no JSON, for a value that `json_value` refuses, for an object
    with a key that occurs twice, and for half of a surrogate pair.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=without_repeats)
        if "\\u" in text or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise NotJson(f"{where} is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeError:
        raise NotText(f"{where} is not valid Unicode text") from None
    except RecursionError:
        raise TooDeep(f"{where} is nested deeper than {MAX_DEPTH} levels") from None
    except Repeated as error:
        raise Repeated(f"{where} has {error}") from None
    except ValueError:  # of Python's parser, for thousands of digits
        raise Unsafe(f"{where} has a number of more than 300 digits") from None
    return json_value(value, where)


def parsed(text: str | bytes, other: Any = None) -> Any:
    """Return the JSON value of a text, and another value if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return other


def text(value: str) -> str:
    """Return the text with surrogate pairs joined and each lone surrogate, which UTF-8 lacks,
    replaced by U+FFFD."""
    if value.isascii():  # nearly every text
        return value
    try:
        value.encode()
        return value
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Place = (
    str | tuple[Any, str, Any, str]
)  # a name, or (the place of the container, before, key, after)


def json_value(value: Any, where: Place = "it", *, depth: int = MAX_DEPTH) -> Any:
    """Return a copy of a JSON value with its texts repaired. Tuples become lists, and scalar keys
    texts, as in JSON.

    Raises Unsafe for other types, for numbers that are not finite or that a float cannot hold, for
    keys that would become one, and for more than `depth` levels. `where` names the value in the
    message.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int | float):
        return number(value, where)
    if not isinstance(value, dict | list | tuple):
        raise Unsafe(f"{_named(where)} is of type {type(value).__name__}, which JSON does not have")
    if depth == 0:
        raise TooDeep(f"{_short(where)} is nested deeper than {MAX_DEPTH} levels")
    # Places are tuples, not texts: a world's every answer passes through here, and formatting took
    # half of the time.
    if isinstance(value, dict):
        copied = {
            key(k, where): json_value(v, (where, ".", k, ""), depth=depth - 1)
            for k, v in value.items()
        }
        if len(copied) < len(value):
            raise Unsafe(f"{_short(where)} has different keys that are one key in JSON")
        return copied
    return [json_value(v, (where, "[", i, "]"), depth=depth - 1) for i, v in enumerate(value)]


def number(value: float, where: Place) -> float:
    """Return a number that is finite and that a float can hold, else raise Unsafe."""
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:  # the number itself may be too long to print
            raise Unsafe(f"{_short(where)} is a number of more than 300 digits")
    elif not math.isfinite(value):
        raise Unsafe(f"{_short(where)} is {value}")
    return value


def key(value: Any, where: Place) -> str:
    """Return the key of an object as JSON writes it. Raises Unsafe for one that it cannot write."""
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(number(value, f"a key of {_named(where)}"))
    raise Unsafe(f"a key of {_named(where)} is of type {type(value).__name__}, not str")


def _named(where: Place) -> str:
    """Return the name of a place: "it.a[3]"."""
    parts = []
    while isinstance(where, tuple):
        where, *words = where
        parts.append("".join(map(str, words)))
    return where + "".join(reversed(parts))


def _short(where: Place) -> str:
    name = _named(where)
    return name if len(name) <= 60 else name[:60] + "..."


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    return value
