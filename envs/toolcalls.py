"""The reader of what a model writes, and the writer of tool calls, in Qwen's format.

A call is `<tool_call>\\n{"name": "search", "arguments": {"to": "Rome"}}\\n</tool_call>`; a turn may
contain several, with text around them. Worlds, the server and the judges read a turn by these
rules:

- A turn is its thought and then what it says. The thought ends after the last `</think>`. Calls in
  it are not calls. It begins with `<think>`, unless the prompt has written that.
- A `<think>` that nothing closes begins a thought too. What follows it is not read.
- A tag in a string of a call's JSON is text, not a tag.
- A call is an object with the key "name" and, unless it has no arguments, "arguments". Any other
  key, a key that occurs twice at any depth, a number that a float cannot hold and half of a
  surrogate pair are errors: a call that is not understood is never run as another one.

A policy that calls tools in another format is read by envs/call_formats.py, which writes its turns
in this one.
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envs import values
from envs.values import MAX_DEPTH, Json, NotJson, NotText, Repeated, TooDeep, Unsafe

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
ESCAPED_CLOSE = r"<\/tool_call>"
REFUSED = "\ufdd0"  # the key of a call that a reader refused; Unicode keeps it out of all texts
THINK, END_THINK = "<think>", "</think>"
LONG = 4000  # characters of a turn whose parts are not kept, as it hardly comes again

_TAG = re.compile("|".join((OPEN, THINK, END_THINK)))
# The beginning of an object, and a string with what follows it. Without backslashes between strings
# no two calls can find the same later tags in strings, so that many calls take linear time.
_OBJECT = re.compile(r'\s*\{[^"<\\]*')
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"[^"<\\]*')


@dataclass
class Call:
    """A parsed call. Its name and arguments have not been checked against any tool."""

    name: str
    arguments: Json
    id: str = field(default="", compare=False)  # that the model gave it, in some formats

    def to_dict(self) -> Json:
        return {"name": self.name, "arguments": self.arguments}


@dataclass
class ParsedTurn:
    """A parsed assistant turn. `content` is the text outside the thought and the calls; `errors`
    are messages for the model; `thought` is the text up to the last `</think>`, with its tags."""

    content: str
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    thought: str = ""


def call_text(name: str, arguments: Json) -> str:
    """Return the text of one call, which `parse` reads back unchanged."""
    return _tagged({"name": name, "arguments": arguments})


def refusal_text(error: str, text: str) -> str:
    """Return the text of a call that `parse` reads as an error. text: what could not be read."""
    return _tagged({REFUSED: error, "text": text})


def _tagged(record: Json) -> str:
    body = json.dumps(record, ensure_ascii=False)
    # A closing tag inside a string would end the call. JSON lets a slash in a string be escaped.
    return f"{OPEN}\n{body.replace(CLOSE, ESCAPED_CLOSE)}\n{CLOSE}"


def tools_text(tools: list[Json]) -> str:
    """Return the section of the system message that lists the tools, identical to that of Qwen's
    chat template."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"""\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{listed}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def spoken(text: str) -> str:
    """Return what a turn says after its thought: all of it if it has none, "" if it is a thought
    without an end. `parse` reads the same calls and content in it as in the whole turn."""
    start, end = _spoken(text)
    if end < len(text):
        said = text[start:end].lstrip()
        return said + THINK if said else ""
    return text[start:].lstrip() if start else text


def _spoken(text: str) -> tuple[int, int]:
    """Return the bounds of what a turn says: where its thought ends, and where a thought begins
    that nothing closes, or the length of the text."""
    start, end, position = 0, len(text), 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag[0] == OPEN:
            position = _past_strings(text, position)
        elif tag[0] == END_THINK:
            start, end = position, len(text)
        else:
            end = min(end, tag.start())
    return start, end


def _past_strings(text: str, position: int) -> int:
    """Return where to look for the tags behind a call's opening tag: past the object that begins
    there, as far as its strings are closed and no tag stands between them."""
    found = _OBJECT.match(text, position)
    while found:
        position = found.end()
        found = _STRING.match(text, position)
    return position


def parse(text: str) -> ParsedTurn:
    """Parse an assistant turn. Never raises: each parsing problem becomes an entry of `errors`."""
    split = _split if len(text) < LONG else _split.__wrapped__
    thought, content, parts = split(text)
    turn = ParsedTurn(content, thought=thought)
    for part in parts:
        try:
            if part.error:
                raise ValueError(part.text)
            turn.calls.append(_call(part.text))
        except ValueError as error:
            turn.errors.append(str(error))
    return turn


class _Part(NamedTuple):
    """The text of a call, or what is wrong where one should be."""

    text: str
    error: bool = False


@functools.lru_cache(maxsize=4096)
def _split(text: str) -> tuple[str, str, tuple[_Part, ...]]:
    """Return the thought, the content and the calls of a turn. Worlds, checks and replays read the
    same turns."""
    start, end = _spoken(text)
    thought, parts = text[:start], []
    if end < len(text):
        parts.append(_Part(f"{THINK} without {END_THINK}", True))
    text, start = text[start:end], 0
    outside: list[str] = []
    while True:
        # Positions in one text: cutting off what was read would copy the rest for each call.
        opened = text.find(OPEN, start)
        before = text[start:] if opened < 0 else text[start:opened]
        if CLOSE in before:
            parts.append(_Part(f"{CLOSE} without {OPEN}", True))
            before = before.replace(CLOSE, "")
        outside.append(before.strip())
        if opened < 0:
            break
        opened += len(OPEN)
        closed = text.find(CLOSE, _past_strings(text, opened))
        if closed < 0:
            parts.append(_Part(f"{OPEN} without {CLOSE}", True))
            break
        parts.append(_Part(text[opened:closed]))
        start = closed + len(CLOSE)
    return thought, "\n".join(part for part in outside if part), tuple(parts)


def loads(body: str) -> Any:
    """Return the value of the JSON text of a call. Raises ValueError with a message for the model
    if it is not JSON that is safe to compute with."""
    _check(body)
    return json.loads(body)  # not kept: the world may change the arguments


@functools.lru_cache(maxsize=4096)
def _check(body: str) -> None:
    """Raise what `loads` does. Replays repeat the same texts."""
    try:
        values.loads(body, "tool call")
    except (NotJson, Repeated):
        raise
    except NotText:  # not repaired: the model would be answered about another text than it wrote
        raise ValueError("tool call is not valid text") from None
    except TooDeep:
        raise ValueError(
            f"tool call is nested too deep: {MAX_DEPTH} levels are the limit"
        ) from None
    except Unsafe:
        raise ValueError("tool call has a number out of range") from None


def call_of(record: Any, key: str = "arguments", *others: str) -> Call:
    """Return the call that a JSON value describes, whose arguments are under `key`. Raises
    ValueError with a message for the model. others: further keys that it may have."""
    if not isinstance(record, dict):
        raise ValueError("tool call is not a JSON object")
    record = dict(record)
    name, arguments = record.pop("name", None), record.pop(key, {})
    if unknown := [json.dumps(other)[:60] for other in record if other not in others][:5]:
        raise ValueError(f'tool call has the keys "name" and "{key}", and no {", ".join(unknown)}')
    if not isinstance(name, str) or not name:
        raise ValueError('tool call has no name: "name" is a text that is not empty')
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} must be a JSON object")
    return Call(name, arguments)


def _call(body: str) -> Call:
    """Return the call that a text describes. Raises ValueError with a message for the model."""
    record = loads(body)
    if isinstance(record, dict) and isinstance(record.get(REFUSED), str):
        raise ValueError(record[REFUSED])
    return call_of(record)


def run_calls(
    turn: ParsedTurn, call: Callable[[str, Json], tuple[str, bool]], most: int
) -> tuple[list[Json], Json]:
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
    texts = [made["result"] for made in calls] + refused
    errors = len(refused) + sum(not made["ok"] for made in calls)
    info = {"calls": calls, "errors": errors, "parse_error": bool(turn.errors)}
    return [{"role": "tool", "content": text} for text in texts], info
