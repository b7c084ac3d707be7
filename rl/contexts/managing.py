"""The self-managing template: when the context is nearly full, the policy decides what stays in
it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.world import Message, Tool
from models import chat
from rl.bounds import Count, CountOrZero, Fraction
from rl.contexts import Opening, cut
from rl.contexts.window import SlidingWindow
from rl.trajectory import Completion

REQUEST = """Your context is nearly full: {used} of {limit} tokens. Decide what you no longer need. The turns so far:
{turns}
Answer with one JSON object and nothing else: {{"remove": [ids], "compress": [ids]}}. Removed turns are gone; of the \
answers to compressed ones you keep the first {compressed} tokens. Turns that you do not name stay."""
SHOWN = 60  # characters of an action in the request


@dataclass
class _Entry:
    """One turn of the episode in the context. id: its number, from 1."""

    id: int
    tokens: list[int]  # of the generation
    messages: Sequence[Message]  # that answered it


class SelfManaging(SlidingWindow):
    """The opening and the turns that the policy kept (section 6.2 of the AgentEvolver paper).

    When a prompt has more than `limit` tokens, the policy is asked what to remove and what to
    compress, by the numbers of the turns. Its answer is a turn of the trajectory, which trains. If
    it cannot be read, if the request itself does not fit, or if the context stays too long, the
    oldest turns leave as in a sliding window.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        limit: CountOrZero = 0,
        keep: Fraction = 0.5,
        compressed: Count = 64,
    ):
        """limit: tokens of a prompt at which the policy is asked; 0 = three quarters of those that
        leave room for a
        whole turn, because the request needs room, too. keep: as in a sliding window. compressed:
        tokens that stay of an answer."""
        super().__init__(opening, limit=limit, keep=keep)
        self.limit = limit or max(1, 3 * self.limit // 4)
        self.compressed, self.managing = compressed, False
        self.context = opening.limits.context if opening.limits is not None else sys.maxsize
        self._entries: list[_Entry] = []
        self._next = 1

    async def extend(
        self,
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.add(completion, messages, tools)
        self._entries.append(_Entry(self._next, list(completion.tokens), messages))
        self._next += 1
        self.show(self.turns)
        if len(self.prompt) > self.limit and len(self.turns) > 1:
            self._ask()
            if len(self.prompt) >= self.context:  # there is no room for an answer
                self.managing = False
                self.show(self.turns)
                self._slide()

    def _ask(self) -> None:
        """Set the prompt to the request, which follows the last answer of the world as a user
        message."""
        self.managing = True
        listed = "\n".join(self._described(entry) for entry in self._entries)
        text = REQUEST.format(
            used=len(self.prompt), limit=self.limit, turns=listed, compressed=self.compressed
        )
        last = self._entries[-1]
        asked = self._ids(last.tokens, [*last.messages, {"role": "user", "content": text}])
        self.show([*self.turns[:-1], asked])

    def manage(self, completion: Completion) -> dict[str, Any]:
        """Rewrite the context as the policy decided, and return what became of it, as the turn's
        `info`."""
        self.managing = False
        answer = self.action(self.tokenizer.decode(completion.tokens))
        remove, compress, readable = decision(answer, {entry.id for entry in self._entries})
        kept = [entry for entry in self._entries if entry.id not in remove]
        removed = [entry.id for entry in self._entries if entry.id in remove]
        for entry in kept:
            if entry.id in compress:
                entry.messages = cut(self.tokenizer, entry.messages, self.compressed)
        self._entries, self.left = kept, self.left + len(removed)
        self.turns = [self._ids(entry.tokens, entry.messages) for entry in kept]
        self.remember(self.mark())
        self.show(self.turns)
        return {
            "readable": readable,
            "removed": removed,
            "compressed": sorted(compress),
            "slid": self._slide(),
        }

    def _slide(self) -> int:
        """Let the oldest turns leave if the prompt is too long, and return their number."""
        slid = self.oldest() if len(self.prompt) > self.limit and len(self.turns) > 1 else 0
        if slid:
            self.drop(slid)
            self._entries = self._entries[slid:]
            self.remember(self.mark())
            self.show(self.turns)
        return slid

    def _ids(self, tokens: Sequence[int], messages: Sequence[Message]) -> list[int]:
        closed = list(tokens[-1:]) == [self.tokenizer.im_end]
        return list(tokens) + chat.observation(self.tokenizer, messages, closed=closed)

    def _described(self, entry: _Entry) -> str:
        text = " ".join(self.tokenizer.decode(entry.tokens).split())
        size = len(self._ids(entry.tokens, entry.messages))
        return f"{entry.id}. {size} tokens: {text[:SHOWN]}"


def decision(text: str, ids: set[int]) -> tuple[set[int], set[int], bool]:
    """Return (turns to remove, turns to compress, True if the answer could be read). Unknown ids
    are left out, and at least the newest turn stays."""
    try:
        answer = json.loads(text[text.index("{") : text.rindex("}") + 1])
        remove, compress = (set(map(int, answer.get(name, []))) for name in ("remove", "compress"))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return set(), set(), False
    remove = (remove & ids) - {max(ids)}
    return remove, (compress & ids) - remove, True
