"""The parser and renderer of tool calls in Qwen's format.

A call is `<tool_call>\\n{"name": "search", "arguments": {"to": "Rome"}}\\n</tool_call>`; a turn may contain
several, with text around them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs.values import MAX_DEPTH, TooDeep, json_value

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
ESCAPED_CLOSE = r"<\/tool_call>"


@dataclass
class Call:
    """A parsed call. Its name and arguments have not been checked against any tool."""

    name: str
    arguments: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass
class ParsedTurn:
    """A parsed assistant turn. `content` is the text outside the calls; `errors` are messages for
    the model."""

    content: str
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of one call, which `parse` reads back unchanged."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    # A closing tag inside a string would end the call. JSON lets a slash in a string be escaped.
    return f"{OPEN}\n{body.replace(CLOSE, ESCAPED_CLOSE)}\n{CLOSE}"


def tools_text(tools: list[dict[str, Any]]) -> str:
    """Return the section of the system message that lists the tools, identical to that of Qwen's
    chat template."""
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )


def parse(text: str) -> ParsedTurn:
    """Parse an assistant turn. Never raises: each parsing problem becomes an entry of `errors`."""
    turn = ParsedTurn(content="")
    outside: list[str] = []
    start = 0
    while True:
        # Positions in one text: cutting off what was read would copy the rest for each call.
        opened = text.find(OPEN, start)
        before = text[start:] if opened < 0 else text[start:opened]
        if CLOSE in before:
            turn.errors.append(f"{CLOSE} without {OPEN}")
            before = before.replace(CLOSE, "")
        outside.append(before.strip())
        if opened < 0:
            break
        opened += len(OPEN)
        closed = text.find(CLOSE, opened)
        if closed < 0:
            turn.errors.append(f"{OPEN} without {CLOSE}")
            break
        try:
            turn.calls.append(_parse_call(text[opened:closed]))
        except ValueError as error:
            turn.errors.append(str(error))
        start = closed + len(CLOSE)
    turn.content = "\n".join(part for part in outside if part)
    return turn


@functools.lru_cache(maxsize=4096)
def _check(body: str) -> None:
    """Raise if the text of a call is not JSON that is safe to compute with. Replays repeat the same
    texts."""
    record = json.loads(body)
    json_value(record)
    # A lone surrogate is not repaired: the model would be answered about another text than it
    # wrote.
    if "\\u" in body or not body.isascii():
        json.dumps(record, ensure_ascii=False).encode()


def _parse_call(body: str) -> Call:
    try:
        _check(body)
        record = json.loads(body)  # not kept: the world may change the arguments
    except json.JSONDecodeError as error:
        raise ValueError(f"tool call is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeError:
        raise ValueError("tool call is not valid text") from None
    except (RecursionError, TooDeep):
        raise ValueError(
            f"tool call is nested too deep: {MAX_DEPTH} levels are the limit"
        ) from None
    except ValueError:  # also of Python's parser, for thousands of digits
        raise ValueError("tool call has a number out of range") from None
    if not isinstance(record, dict):
        raise ValueError("tool call is not a JSON object")
    name, arguments = record.get("name"), record.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("tool call has no name")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return Call(name, arguments)


def run_calls(
    turn: ParsedTurn, call: Callable[[str, dict[str, Any]], tuple[str, bool]], most: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the first `most` calls of a turn. `call` takes a name and arguments, and returns a text
    and its success.

    Return the tool messages, which also say what was refused, and the info of the step: "calls",
    each with "result" and "ok" (False = error), the number of "errors", and "parse_error".
    """
    calls = []
    for one in turn.calls[:most]:
        text, ok = call(one.name, one.arguments)
        calls.append({**one.to_dict(), "result": text, "ok": ok})
    refused = [f"error: {error}" for error in turn.errors]
    if len(turn.calls) > most:
        refused.append(f"error: {most} calls a turn at most")
    messages = [
        {"role": "tool", "content": text}
        for text in [*(made["result"] for made in calls), *refused]
    ]
    failed = sum(not made["ok"] for made in calls)
    return messages, {
        "calls": calls,
        "errors": len(refused) + failed,
        "parse_error": bool(turn.errors),
    }
