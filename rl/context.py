"""How an episode is written down for the policy: from messages to the ids of the next prompt."""

from __future__ import annotations

from collections.abc import Sequence

from envs.world import Message, Observation, Tool
from models import chat
from models.tokenizer import Tokenizer
from rl.trajectory import Completion


class Linear:
    """The whole conversation. What was generated or read is appended as ids, once, and never encoded again.

    `prompt` is the ids of the next generation; `messages` what opened the episode, experience included; `stripped`
    the first prompt without the experience, [] where there was none. `show_tools=False` leaves the tools out of the
    system message, for a policy that knows them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        observation: Observation,
        *,
        experience: Sequence[str] = (),
        show_tools: bool = True,
    ):
        self._tokenizer, self._show_tools = tokenizer, show_tools
        self._tools = observation.tools
        self._turns: list[int] = []  # the ids after the opening
        self.messages = inject(observation.messages, experience)
        self.prompt = self._opening(self.messages)
        self.stripped = self._opening(observation.messages) if experience else []

    def extend(self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> None:
        """Append a generation and its answer. Other `tools` rewrite the opening only, so a new prefix begins."""
        closed = completion.tokens[-1:] == [self._tokenizer.im_end]
        turn = completion.tokens + chat.observation(self._tokenizer, messages, closed=closed)
        self._turns += turn
        if tools is None or tools == self._tools or not self._show_tools:
            self.prompt = self.prompt + turn
        else:
            self._tools = tools
            self.prompt = self._opening(self.messages) + self._turns

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        return chat.opening(self._tokenizer, messages, self._tools if self._show_tools else ())


def inject(messages: Sequence[Message], experience: Sequence[str]) -> list[Message]:
    """Put experience in front of the first user message, as `<EXP>...</EXP>`.

    Raises ValueError where there is experience and no user message.
    """
    messages = [dict(message) for message in messages]
    if not experience:
        return messages
    for message in messages:
        if message["role"] == "user":
            message["content"] = "<EXP>" + "\n".join(experience) + "</EXP>\n" + message["content"]
            return messages
    raise ValueError("the opening has no user message to put experience in front of")


def cut(tokenizer: Tokenizer, messages: Sequence[Message], limit: int) -> list[Message]:
    """The same messages, their contents cut to `limit` tokens together; a mark says what is missing.

    Short messages stay whole: the long ones share what these leave.
    """
    if sum(len(message["content"].encode("utf-8", "replace")) for message in messages) <= limit:
        return list(messages)  # a token has at least one byte
    ids = [tokenizer.encode(message["content"]) for message in messages]
    result, left = list(messages), limit
    for rank, index in enumerate(sorted(range(len(ids)), key=lambda i: len(ids[i]))):
        share = left // (len(ids) - rank)
        shown = min(share, len(ids[index]))
        left -= shown
        if shown < len(ids[index]):
            text = tokenizer.decode(ids[index][:shown]).rstrip("\ufffd")  # the cut may split a character
            mark = f"\n[cut: the first {shown} of {len(ids[index])} tokens]"
            result[index] = {**messages[index], "content": text + mark}
    return result
