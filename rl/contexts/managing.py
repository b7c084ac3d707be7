"""The self-managing template: when the context is nearly full, the policy decides what stays in
it."""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.world import Message, Tool
from rl.bounds import Count
from rl.contexts import cut
from rl.contexts.window import SlidingWindow
from rl.trajectory import Completion

REQUEST = """\
Your context is nearly full: {used} of {limit} tokens. Decide what you no longer need. \
The turns so far:
{turns}
Answer with one JSON object and nothing else: {{"remove": [ids], "compress": [ids]}}. \
Removed turns are gone; of the answers to compressed ones you keep the first {compressed} tokens. \
Turns that you do not name stay."""
MAX_ACTION_CHARS = 60  # characters of an action in the request


@dataclass
class _Entry:
    """One turn of the episode in the context. id: its number, from 1."""

    id: int
    tokens: list[int]  # those of the generation
    messages: Sequence[Message]  # those that answered it


@dataclass(eq=False, kw_only=True)
class SelfManaging(SlidingWindow):
    """The opening and the turns that the policy kept (section 6.2 of the AgentEvolver paper).

    When a prompt has more than `limit` tokens, the policy is asked what to remove and what to
    compress, by the numbers of the turns. Its answer is a turn of the trajectory, which trains. If
    it cannot be read, if the request itself does not fit, or if the context stays too long, the
    oldest turns leave as in a sliding window.

    limit: tokens of a prompt at which the policy is asked; 0 = three quarters of those that leave
    room for a whole turn, because the request needs room, too. keep: as in a sliding window.
    compressed: tokens that stay of an answer.
    """

    compressed: Count = 64

    def __post_init__(self) -> None:
        given, limits = self.limit, self.opening.limits
        super().__post_init__()
        self.limit = given or max(1, 3 * self.limit // 4)
        self.context = sys.maxsize if limits is None else limits.context
        self._entries: list[_Entry] = []
        self._numbers = itertools.count(1)

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        super().add(completion, messages, tools)
        self._entries.append(_Entry(next(self._numbers), completion.tokens, messages))

    async def shorten(self) -> None:
        """Ask the policy what may leave: the request follows the last answer of the world."""
        if not self.is_too_long():
            return
        self.managing = True
        last = self._entries[-1]
        request = {"role": "user", "content": self._request()}
        asked = self.turn_ids(last.tokens, [*last.messages, request])
        self.show([*self.turns[:-1], asked])
        if len(self.prompt) >= self.context:  # there is no room for an answer
            self.managing = False
            self.show(self.turns)
            self.evict()

    def _request(self) -> str:
        lines = []
        for entry, turn in zip(self._entries, self.turns):
            text = " ".join(self.tokenizer.decode(entry.tokens).split())
            lines.append(f"{entry.id}. {len(turn)} tokens: {text[:MAX_ACTION_CHARS]}")
        turns, used = "\n".join(lines), len(self.prompt)
        return REQUEST.format(used=used, limit=self.limit, turns=turns, compressed=self.compressed)

    def manage(self, completion: Completion) -> dict[str, Any]:
        """Rewrite the context as the policy decided, and return what became of it, as the turn's
        `info`."""
        self.managing = False
        answer = self.action(self.tokenizer.decode(completion.tokens))
        remove, compress, readable = decision(answer, {entry.id for entry in self._entries})
        removed = [entry.id for entry in self._entries if entry.id in remove]
        self._entries = [entry for entry in self._entries if entry.id not in remove]
        for entry in self._entries:
            if entry.id in compress:
                entry.messages = cut(self.tokenizer, entry.messages, self.compressed)
        self.turns = [self.turn_ids(entry.tokens, entry.messages) for entry in self._entries]
        self.left += len(removed)
        self.set_note(self.mark())
        self.show(self.turns)
        return {
            "readable": readable,
            "removed": removed,
            "compressed": sorted(compress),
            "slid": self.evict() if self.is_too_long() else 0,
        }

    def evict(self) -> int:
        count = super().evict()
        self._entries = self._entries[count:]
        return count


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
