"""The causal template with the tools as a line each, for small models and short contexts."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.world import Message, Tool
from models import chat
from rl.bounds import CountOrZero
from rl.calls import format_of
from rl.contexts import noted
from rl.contexts.causal import Causal

_SENTENCE = re.compile(r"(?<=[.!?])\s+")  # what lies between two
CALLS = "A call is {} and these are the tools:"


@dataclass(eq=False, kw_only=True)
class Brief(Causal):
    """The conversation of `Causal`. The system message lists each tool as its name, its parameters
    and what is said about both, which takes a third of the tokens of its JSON schema.

    most: characters of a tool's line; 0 = all of them. Of a longer one the first sentence of the
    description is kept, and the end is cut.
    """

    most: CountOrZero = 0

    def _opening_ids(self, messages: Sequence[Message]) -> list[int]:
        messages = noted(messages, self.note)
        if not (self.show_tools and self._tools):
            return chat.opening(self.tokenizer, messages)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        example = format_of(self.tokenizer).example
        lines = [line_of(tool, self.most) for tool in self._tools]
        text = "\n".join([*filter(None, [system]), CALLS.format(example), *lines])
        return chat.opening(self.tokenizer, [{"role": "system", "content": text}, *messages])


def line_of(tool: Tool, most: int = 0) -> str:
    """Return a tool as a line: "lend(book, member): Lend a book. book: The id of a book.".

    most: see Brief. The first sentence says what a tool is for, and what follows it is less needed
    than what is said about the parameters.
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    described = str(function.get("description") or "").strip()
    said = [f"{name}: {about}" for name, schema in properties.items() if (about := _about(schema))]
    head = f"{function['name']}({', '.join(properties)})"
    line = _line(head, described, said)
    if most and len(line) > most:
        line = _line(head, _SENTENCE.split(described, maxsplit=1)[0], said)
    return line[: most or None]


def _line(head: str, described: str, said: Sequence[str]) -> str:
    text = " ".join(filter(None, [described, *said])).replace("\n", " ")
    return f"{head}{': ' * bool(text)}{text}"


def _about(schema: Any) -> str:
    """Return what a schema says about its values, "" if only that they are text."""
    if not isinstance(schema, dict):
        return ""
    kind = schema.get("type", "string")
    choices = schema.get("enum") or schema.get("examples")
    parts = [str(schema.get("description") or "").strip()]
    parts += [f"one of {json.dumps(choices, ensure_ascii=False)}"] * bool(choices)
    parts += [f"({kind})"] * (kind != "string")
    return " ".join(filter(None, parts))
