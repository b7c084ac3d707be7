"""The sliding-window template: when the context is nearly full, the oldest turns leave it."""

from dataclasses import dataclass

from rl.bounds import CountOrZero, Fraction
from rl.contexts.causal import Causal


@dataclass(eq=False, kw_only=True)
class SlidingWindow(Causal):
    """The opening, a note about what left, and the last turns (section 6.2 of the AgentEvolver
    paper).

    Nothing leaves while the prompt has at most `limit` tokens. Then the oldest turns leave at once
    until a share `keep` of the limit is used, so that the context is rewritten, and a new training
    sample starts, only once in a while.

    limit: tokens of the longest prompt; 0 = those that leave room for a whole turn. keep: share of
    it that is filled after older turns left.
    """

    limit: CountOrZero = 0
    keep: Fraction = 0.5

    def __post_init__(self) -> None:
        limits = self.opening.limits
        if not self.limit:
            if limits is None:
                raise ValueError(
                    "without the limits of the episode, `limit` must say how long a prompt may be"
                )
            self.limit = max(1, limits.context - limits.max_tokens)
        self.left = 0  # number of turns that left
        super().__post_init__()

    def is_too_long(self) -> bool:
        """Return True if the prompt exceeds the limit and a turn can leave; the last one always
        stays."""
        return len(self.prompt) > self.limit and len(self.turns) > 1

    async def shorten(self) -> None:
        if self.is_too_long():
            self.evict()

    def oldest(self) -> int:
        """Return the number of turns that have to leave."""
        room = self.keep * self.limit - (len(self.prompt) - sum(map(len, self.turns)))
        stay = 1
        while stay < len(self.turns) and sum(map(len, self.turns[-stay - 1 :])) <= room:
            stay += 1
        return len(self.turns) - stay

    def evict(self) -> int:
        """Let the oldest turns leave, say so in the opening, and return their number."""
        count = self.oldest()
        self.turns = self.turns[count:]
        self.left += count
        self.set_note(self.mark())
        self.show(self.turns)
        return count

    def mark(self) -> str:
        """Return the note that tells the policy what it no longer sees."""
        return f"[{self.left} earlier turns are not shown]" if self.left else ""
