"""Qwen2.5's chat template, rendered to token ids that are only ever appended to.

A conversation grows as `opening + generation + observation + generation + ...`. Nothing is rendered twice, so the ids
of turn n are a prefix of the ids of turn n+1, whatever the model wrote. The list of tools is part of the opening: if it
changes, the opening is rendered again and everything after it is kept (rl/contexts/causal.py). For turns in canonical
form the ids equal those of the template that `transformers` applies to a whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from models.template import DEFAULT_SYSTEM, TOOLS_AFTER, TOOLS_BEFORE

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]


class ChatError(ValueError):
    """A message that the template cannot render."""


def opening(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """Return the ids of a conversation up to and including the header of the next assistant turn.

    messages: {"role": "system"|"user"|"assistant"|"tool", "content": str}; an assistant message may have `tool_calls`.
    If the first message is not a system message, Qwen's default one is used. Raises ChatError.
    """
    messages = list(messages)
    system = DEFAULT_SYSTEM
    if messages and messages[0].get("role") == "system":
        system = _content(messages.pop(0))
    ids = _block(tokenizer, "system\n" + system + _tools_text(tools))
    return ids + _turns(tokenizer, messages) + _header(tokenizer)


def observation(tokenizer: Tokenizer, messages: Sequence[Message], *, closed: bool) -> list[int]:
    """Return the ids to append after a generation: the end of its turn, `messages`, the next assistant header.

    closed: True if the generation itself ended with `<|im_end|>`. Raises ChatError.
    """
    end = [] if closed else [tokenizer.im_end]
    return end + tokenizer.encode("\n") + _turns(tokenizer, messages) + _header(tokenizer)


def reply(tokenizer: Tokenizer, message: Message | str) -> list[int]:
    """Return the ids that a model generates to say `message`: its text and `<|im_end|>`, without the header."""
    text = message if isinstance(message, str) else assistant_text(message)
    return [*tokenizer.encode(text), tokenizer.im_end]


def assistant_text(message: Message) -> str:
    """Return the text of an assistant turn: content, then each of `tool_calls` in Qwen's format."""
    parts = [_content(message)] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        call = call.get("function", call)
        arguments = call["arguments"]
        if not isinstance(arguments, dict):
            raise ChatError(f"the arguments of a tool call must be a JSON object, not {type(arguments).__name__}")
        parts.append(f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(arguments)}}}\n</tool_call>')
    return "\n".join(parts)


def _turns(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = []
    for role, text in _blocks(messages):
        if role == "assistant":
            # The header is encoded separately, as it is when the model itself writes the turn.
            ids += [*_header(tokenizer), *tokenizer.encode(text), tokenizer.im_end, *tokenizer.encode("\n")]
        else:
            ids += _block(tokenizer, role + "\n" + text)
    return ids


def _blocks(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of each block; consecutive tool messages share one user block."""
    responses: list[str] = []
    for message in messages:
        role = message.get("role")
        if role == "tool":
            responses.append(f"<tool_response>\n{_content(message)}\n</tool_response>")
            continue
        if responses:
            yield "user", "\n".join(responses)
            responses = []
        if role == "assistant":
            yield role, assistant_text(message)
        elif role in ("system", "user"):
            yield role, _content(message)
        else:
            raise ChatError(f"unknown role {role!r}; the template knows system, user, assistant and tool")
    if responses:
        yield "user", "\n".join(responses)


def _block(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode(text), tokenizer.im_end, *tokenizer.encode("\n")]


def _header(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode("assistant\n")]


def _tools_text(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    return TOOLS_BEFORE + "".join("\n" + _json(tool) for tool in tools) + TOOLS_AFTER


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ChatError(f"the content of a {message.get('role')} message must be text, not {type(content).__name__}")
    return content


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
