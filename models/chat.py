"""Conversations as token ids that are only ever appended to, in the chat template of a checkpoint.

A conversation grows as `opening + generation + observation + generation + ...`. Nothing is rendered
twice, so the ids of turn n are a prefix of the ids of turn n+1, whatever the model wrote. The list
of tools is part of the opening: if it changes, the opening is rendered again and everything after
it is kept (rl/contexts/causal.py). For turns in canonical form the ids equal those of the template
that `transformers` applies to a whole conversation.

The tokenizer says which template it is. Qwen2.5's and Qwen3's are written here; any other is the
checkpoint's own Jinja (models/jinja.py). Some rewrite the past: Qwen3's forgets the thoughts of
turns before the last question, and the empty thoughts of a model that may not think. `opening`
follows it; what a model generated afterwards stays as it was, because tokens that train must be
those that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import jinja
from models.template import (
    CLOSE,
    DEFAULT_SYSTEM,
    NO_THOUGHT,
    OPEN,
    TOOLS_AFTER,
    TOOLS_BEFORE,
    ChatError,
)

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

SYSTEM_FILE = "system_message.txt"  # of a checkpoint: that with which its model was trained
Message = dict[str, Any]
Tool = dict[str, Any]


_TURN = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes.", "tool_calls": []}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "é <x>"]}}}
_SYSTEM = {"role": "system", "content": "Be brief."}
# Conversations on which a template that is Qwen2.5's or Qwen3's writes the same ids.
PROBES: tuple[list[Message], ...] = (
    *jinja.PROBES,
    [_SYSTEM, jinja.user("a<b"), jinja.said(1), jinja.answer("1"), jinja.said(), jinja.user("b")],
    [{**_SYSTEM, "content": ""}, jinja.user(""), {**_TURN, "tool_calls": [_CALL, _CALL]}],
    [jinja.user("a"), _TURN, jinja.answer("1"), {**_TURN, "content": ""}, jinja.answer("2")],
    [jinja.user("a"), {"role": "assistant", "content": "", "tool_calls": [_CALL]}, jinja.user("b")],
    [jinja.user("a"), {**_TURN, "reasoning_content": "Why?"}, jinja.answer("1")],
    [jinja.user("a"), _TURN, jinja.user("<tool_response>\n1\n</tool_response>"), _TURN],
    [jinja.user("a"), _SYSTEM, jinja.user("<|im_end|>")],
)


def opening(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[int]:
    """Return the ids of a conversation up to and including the header of the next assistant turn.

    messages: {"role": "system"|"user"|"assistant"|"tool", "content": str}; an assistant message may
    have `tool_calls`, and `reasoning_content` for Qwen3. If the first message is not a system
    message, Qwen2.5's default one is used in its template. Raises ChatError.
    """
    if tokenizer.template:
        text = tokenizer.template.opening(messages, tools, **tokenizer.switches)
        return tokenizer.encode_marked(text)
    messages, system = list(messages), None if tokenizer.thinking is not None else DEFAULT_SYSTEM
    if messages and messages[0].get("role") == "system":
        system = _content(messages.pop(0))
    text = _tools_text(tools).lstrip("\n") if system is None else system + _tools_text(tools)
    ids = _block(tokenizer, "system\n" + text) if text or system is not None else []
    return ids + _turns(tokenizer, messages) + _next(tokenizer)


def system_message(folder: str | Path) -> str:
    """Return the system message with which the model in a directory was trained, "" if none is
    known. Raises ChatError if its file cannot be read."""
    try:
        return (Path(folder) / SYSTEM_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"{folder}: {SYSTEM_FILE} cannot be read ({error})") from None


def observation(tokenizer: Tokenizer, messages: Sequence[Message], *, closed: bool) -> list[int]:
    """Return the ids to append after a generation: the end of its turn, `messages`, the next
    assistant header.

    closed: True if the generation itself ended with the first of these ids. Raises ChatError.
    """
    if tokenizer.template:
        text = tokenizer.template.following(messages, **tokenizer.switches)
        return tokenizer.encode_marked(text)[closed:]
    end = [] if closed else [tokenizer.im_end]
    return end + tokenizer.encode("\n") + _turns(tokenizer, messages) + _next(tokenizer)


def reply(tokenizer: Tokenizer, message: Message | str) -> list[int]:
    """Return the ids that a model generates to say `message`: its text and the end of the turn,
    without the header. Raises ChatError.

    A model that may think writes an empty thought in front of a message that has none.
    """
    if tokenizer.template and not isinstance(message, str):
        text = tokenizer.template.reply({"role": "assistant", **message}, **tokenizer.switches)
        return tokenizer.encode_marked(text)
    if isinstance(message, str):
        text = message
    elif tokenizer.thinking:
        text = _thoughtful(message, kept=True, last=True)
    else:
        text = assistant_text(message)
    return [*tokenizer.encode(text), tokenizer.stops[0]]


def assistant_text(message: Message) -> str:
    """Return the text of an assistant turn: content, then each of `tool_calls` in Qwen's format."""
    parts = [_content(message)] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        call = call.get("function", call)
        arguments = call["arguments"]
        if not isinstance(arguments, dict):
            raise ChatError(
                "the arguments of a tool call must be a JSON object, not"
                f" {type(arguments).__name__}"
            )
        text = f'{{"name": "{call["name"]}", "arguments": {_json(arguments)}}}'
        parts.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(parts)


def _turns(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = []
    for role, text in _blocks(messages, forgets=tokenizer.thinking is not None):
        if role == "assistant":
            # The header is encoded separately, as it is when the model itself writes the turn.
            ids += [
                *_header(tokenizer),
                *tokenizer.encode(text),
                tokenizer.im_end,
                *tokenizer.encode("\n"),
            ]
        else:
            ids += _block(tokenizer, role + "\n" + text)
    return ids


def _blocks(messages: Sequence[Message], forgets: bool) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of each block; consecutive tool messages share one user block.

    forgets: thoughts of turns before the last question are left out, as Qwen3's template does.
    """
    responses: list[str] = []
    asked = _last_question(messages)
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            responses.append(f"<tool_response>\n{_content(message)}\n</tool_response>")
            continue
        if responses:
            yield "user", "\n".join(responses)
            responses = []
        if role == "assistant" and forgets:
            yield role, _thoughtful(message, kept=index > asked, last=index == len(messages) - 1)
        elif role == "assistant":
            yield role, assistant_text(message)
        elif role in ("system", "user"):
            yield role, _content(message)
        else:
            raise ChatError(
                f"unknown role {role!r}; the template knows system, user, assistant and tool"
            )
    if responses:
        yield "user", "\n".join(responses)


def _last_question(messages: Sequence[Message]) -> int:
    """Return the index of the last user message that is no answer of a tool; without one, that of
    the last message."""
    for index in reversed(range(len(messages))):
        text = messages[index].get("content")
        if messages[index].get("role") == "user" and isinstance(text, str):
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return index
    return len(messages) - 1


def _thoughtful(message: Message, *, kept: bool, last: bool) -> str:
    """Return the text of an assistant turn in Qwen3's template.

    kept: its thought is written; last: even if it is empty.
    """
    thought, content = (
        message.get("reasoning_content"),
        _content(message) if message.get("content") else "",
    )
    if not isinstance(thought, str):
        before, closed, _ = content.partition(CLOSE)
        thought = before.rstrip("\n").rpartition(OPEN)[2].lstrip("\n") if closed else ""
        content = content.rpartition(CLOSE)[2].lstrip("\n") if closed else content
    if not kept or not (last or thought):
        return assistant_text({**message, "content": content})
    return f"{OPEN}\n{thought.strip(chr(10))}\n{CLOSE}\n\n" + assistant_text(
        {**message, "content": content.lstrip("\n")}
    )


def _block(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode(text), tokenizer.im_end, *tokenizer.encode("\n")]


def _header(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode("assistant\n")]


def _next(tokenizer: Tokenizer) -> list[int]:
    """Return the header of the turn to be generated."""
    return _header(tokenizer) + (
        tokenizer.encode(NO_THOUGHT) if tokenizer.thinking is False else []
    )


def _tools_text(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    return TOOLS_BEFORE + "".join("\n" + _json(tool) for tool in tools) + TOOLS_AFTER


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ChatError(
            f"the content of a {message.get('role')} message must be text, not"
            f" {type(content).__name__}"
        )
    return content


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
