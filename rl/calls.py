"""The format in which a policy calls tools (envs/call_formats.py), for rollouts, demonstrations and
the server alike.

It is that which the policy's chat template writes, if it is certain, and Hermes otherwise; the
config may name another one (`template.calls`), which is saved with the policy.
"""

import functools
import importlib
from collections.abc import Sequence

from envs.call_formats import FORMATS, CallFormat, written_in
from envs.toolcalls import Call, parse
from envs.world import Message
from models import chat, jinja
from models.tokenizer import Tokenizer

PROBE = Call(jinja.CALLED, {"at": jinja.SAID})  # the call of `ChatTemplate.call`


class UnknownFormat(ValueError):
    """A name of no format of calls; the message is for the user."""


def format_of(tokenizer: Tokenizer) -> CallFormat:
    """Return the format of the policy with this tokenizer. Raises UnknownFormat."""
    return named(tokenizer.calls or _written(tokenizer.template.call) or "hermes")


def said_of(tokenizer: Tokenizer) -> str:
    """Return which format it is and why, in words."""
    if tokenizer.calls:
        return f"calls in {tokenizer.calls}, as template.calls says"
    if is_unknown(tokenizer):
        return "calls in hermes, since the template writes them in no known format"
    written = _written(tokenizer.template.call)
    return f"calls in {written or 'hermes, since the template writes none'}"


def is_unknown(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes calls in no known format, and the config names
    none."""
    call = tokenizer.template.call
    return bool(call) and not tokenizer.calls and not _written(call)


@functools.lru_cache
def named(name: str) -> CallFormat:
    """Return the format with this name: a known one, or `module:attribute`. Raises
    UnknownFormat."""
    if name in FORMATS:
        return FORMATS[name]
    module, _, attribute = name.partition(":")
    try:
        if not attribute:
            raise ValueError(f"known formats are {', '.join(FORMATS)}")
        found = getattr(importlib.import_module(module), attribute)
        found = found() if isinstance(found, type) else found
        if not isinstance(found, CallFormat):
            raise TypeError(f"it is of type {type(found).__name__}")
        return found
    except Exception as error:  # importing somebody's file may raise anything
        raise UnknownFormat(
            f"{name!r} is no format of calls ({error}); your own is module:attribute, a subclass of"
            " envs.call_formats.CallFormat"
        ) from None


def reply(tokenizer: Tokenizer, message: Message) -> list[int]:
    """Return the ids that a policy generates to say a message whose calls are in the format of
    envs/toolcalls.py. Raises ChatError."""
    used, turn = format_of(tokenizer), parse(message.get("content") or "")
    if used is FORMATS["hermes"] or turn.errors or not turn.calls or message.get("tool_calls"):
        return chat.reply(tokenizer, message)
    said = turn.thought + turn.content
    if used is not FORMATS.get(_written(tokenizer.template.call)):
        return chat.reply(tokenizer, turn.thought + used.write(turn.content, turn.calls))
    calls = [{"function": call.to_dict()} for call in turn.calls]
    return chat.reply(tokenizer, message | {"content": said, "tool_calls": calls})


def observation(
    tokenizer: Tokenizer, tokens: Sequence[int], messages: Sequence[Message]
) -> list[int]:
    """Return the ids that follow those of a generation: the rest of its turn, `messages`, the next
    header. Raises ChatError."""
    calls = []
    if tokenizer.template.repeats_calls:
        said = tokens[:-1] if tokens[-1:] == [tokenizer.stops[0]] else tokens
        turn = format_of(tokenizer).read(tokenizer.decode(said))
        calls = [(call.name, call.id) for call in turn.calls]
    ids = chat.observation(tokenizer, messages, calls)
    return ids[list(tokens[-1:]) == ids[:1] :]


@functools.lru_cache
def _written(text: str) -> str:
    return written_in(text, PROBE) if text else ""
