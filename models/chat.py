"""Conversations as token ids that are only ever appended to, in the chat template of a checkpoint.

A conversation grows as `opening + generation + observation + generation + ...`. Nothing is rendered
twice, so the ids of turn n are a prefix of the ids of turn n+1, whatever the model wrote. The list
of tools is part of the opening: if it changes, the opening is rendered again and everything after
it is kept (rl/contexts/causal.py). For turns in canonical form the ids equal those of the template
that `transformers` applies to a whole conversation.

Some templates rewrite the past: Qwen3's forgets the thoughts of turns before the last question, and
the empty thoughts of a model that may not think. `opening` follows it; what a model generated
afterwards stays as it was, because tokens that train must be those that were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models.files import BrokenFile, read_text
from models.jinja import ChatError, Message, Tool
from models.tokenizer import Tokenizer

SHORT, MOST_KEPT = 2000, 4096  # characters of a text whose ids are kept, and how many texts
SYSTEM_FILE = "system_message.txt"  # of a checkpoint: that with which its model was trained


def opening(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[int]:
    """Return the ids of a conversation up to and including the header of the next assistant turn.

    messages: {"role": "system"|"user"|"assistant"|"tool", "content": str}; an assistant message may
    have `tool_calls` and `reasoning_content`. Raises ChatError.
    """
    return _ids(tokenizer, tokenizer.template.opening, messages, tools)


def system_message(folder: str | Path) -> str:
    """Return the system message with which the model in a directory was trained, "" if none is
    known. Raises ChatError if its file cannot be read."""
    try:
        return read_text(Path(folder) / SYSTEM_FILE)
    except FileNotFoundError:
        return ""
    except (OSError, BrokenFile) as error:
        raise ChatError(f"{folder}: {SYSTEM_FILE} cannot be read ({error})") from None


def observation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    calls: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the ids to append after a generation: the end of its turn, `messages`, the next
    assistant header.

    A generation may itself have ended with the first of these ids. calls: the name and the id, or
    "", of each call of the generation, for templates that repeat them before an answer. Raises
    ChatError.
    """
    return _ids(tokenizer, tokenizer.template.following, messages, calls)


def _ids(tokenizer: Tokenizer, write: Callable[..., str], *arguments: Any) -> list[int]:
    """Return the ids of what the template writes. Those of short texts are kept, because rollouts
    of one task are shown the same, and rendering it takes as long as a small model's turn."""
    key = f"{write.__name__}{arguments}{tokenizer.switches}"
    ids = tokenizer.kept.get(key)
    if ids is None:
        ids = tokenizer.encode_marked(write(*arguments, **tokenizer.switches))
        if len(key) < SHORT:
            if len(tokenizer.kept) >= MOST_KEPT:
                tokenizer.kept.clear()
            tokenizer.kept[key] = ids
    return list(ids)


def reply(tokenizer: Tokenizer, message: Message | str) -> list[int]:
    """Return the ids that a model generates to say `message`: its text and the end of the turn,
    without the header. Raises ChatError.

    A model that may think writes an empty thought in front of a message that has none.
    """
    if isinstance(message, str):
        return [*tokenizer.encode(message), tokenizer.stops[0]]
    text = tokenizer.template.reply({"role": "assistant", **message}, **tokenizer.switches)
    return tokenizer.encode_marked(text)
