"""The sliding-window template: when the context is nearly full, the oldest turns leave it."""

from __future__ import annotations

from collections.abc import Sequence

from envs.world import Message, Tool
from rl.bounds import CountOrZero, Fraction
from rl.contexts import Opening
from rl.contexts.causal import Causal
from rl.trajectory import Completion


class SlidingWindow(Causal):
    """The opening, a note about what left, and the last turns (section 6.2 of the AgentEvolver
    paper).

    Nothing leaves while the prompt has at most `limit` tokens. Then the oldest turns leave at once
    until a share `keep` of the limit is used, so that the context is rewritten, and a new training
    sample starts, only once in a while.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        limit: CountOrZero = 0,
        keep: Fraction = 0.5,
    ):
        """limit: tokens of the longest prompt; 0 = those that leave room for a whole turn. keep:
        share of it that is filled after older turns left."""
        limits = opening.limits
        if not limit and limits is None:
            raise ValueError(
                "without the limits of the episode, `limit` must say how long a prompt may be"
            )
        self.limit = limit or max(1, limits.context - limits.max_tokens)
        self.keep, self.left = keep, 0  # left: number of turns that left
        super().__init__(opening)

    async def extend(
        self,
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.add(completion, messages, tools)
        self.show(self.turns)
        if len(self.prompt) > self.limit and len(self.turns) > 1:
            await self.forget(self.oldest())

    def oldest(self) -> int:
        """Return the number of turns that have to leave; the last one always stays."""
        room = self.keep * self.limit - (len(self.prompt) - sum(map(len, self.turns)))
        stay = 1
        while stay < len(self.turns) and sum(map(len, self.turns[-stay - 1 :])) <= room:
            stay += 1
        return len(self.turns) - stay

    async def forget(self, count: int) -> None:
        """Let the oldest `count` turns leave, and say so in the opening."""
        self.drop(count)
        self.remember(self.mark())
        self.show(self.turns)

    def drop(self, count: int) -> None:
        """Delete the oldest `count` turns."""
        self.turns = self.turns[count:]
        self.left += count

    def mark(self) -> str:
        """Return the note that tells the policy what it no longer sees."""
        return f"[{self.left} earlier turns are not shown]" if self.left else ""
