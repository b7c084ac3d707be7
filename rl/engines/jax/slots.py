"""The slots of the KV cache: the tokens that each one holds and the session that owns it."""

from collections import Counter
from collections.abc import Container

import numpy as np


class Slots:
    """The contents of `count` slots of `context` positions, in `banks` groups of equal size.

    of_session: the slot of each session. filled: (count,) int32, the number of valid tokens in each
    slot. used: (count,) int64, the round of the scheduler in which each slot was last used.
    """

    def __init__(self, count: int, context: int, banks: int):
        self.count, self.context = count, context
        self.bank_size = -(-count // banks)
        self.clear()

    def clear(self) -> None:
        """Forget all sessions and tokens."""
        self.of_session: dict[str, int] = {}
        self._ids = np.full((self.count, self.context), -1, np.int32)
        self.filled = np.zeros(self.count, np.int32)
        self.used = np.zeros(self.count, np.int64)

    def bank(self, slot: int) -> int:
        """Return the bank of a slot."""
        return slot // self.bank_size

    def write(self, slot: int, start: int, tokens: np.ndarray | list[int]) -> None:
        """Note that the slot holds these tokens from position `start` on, and nothing after."""
        end = start + len(tokens)
        self._ids[slot, start:end] = tokens
        self.filled[slot] = end

    def own(self, session: str, slot: int) -> int:
        """Give the slot to a session; return the number of other sessions that lost it. Their
        tokens stay as a prefix for others until the slot is written."""
        lost = [
            other for other, held in self.of_session.items() if held == slot and other != session
        ]
        for other in lost:
            del self.of_session[other]
        self.of_session[session] = slot
        return len(lost)

    def longest_prefix(
        self, prompt: np.ndarray, own: int | None = None, bank: int | None = None
    ) -> tuple[int, int]:
        """Return (slot, tokens) of the longest prefix of the prompt that a slot holds.

        own: the session's slot; it is preferred, and only its bank is searched. bank: search only
        this one. The last prompt token is never taken from the cache: its logits are needed.
        """
        limit = len(prompt) - 1
        if own is not None:
            bank = self.bank(own)
            start = common_prefix(self._ids[own, : self.filled[own]], prompt[:limit])
            if 0 < start == self.filled[own]:  # the usual case: the turn extends its session
                return own, start
        lengths = np.zeros(self.count, int)
        if limit:
            differs = self._ids[:, :limit] != prompt[:limit]
            lengths = np.where(differs.any(1), differs.argmax(1), limit)
        lengths = np.minimum(lengths, self.filled)
        if bank is not None:
            lengths[np.arange(self.count) // self.bank_size != bank] = -1
        best = int(lengths.argmax())
        if own is not None and lengths[own] >= lengths[best]:
            best = own
        return best, int(lengths[best])

    def free(self, taken: Container[int], near: int | None, recent: int) -> int | None:
        """Return the least recently used slot without a session, else that of the session idle for
        longest, else None.

        taken: slots that are left alone, as are those of sessions used after round `recent`. The
        bank of slot `near`, which holds a prefix, is preferred, then the bank with the fewest
        sessions.
        """
        owned = set(self.of_session.values())
        sessions = Counter(self.bank(slot) for slot in owned)

        def order(slot: int) -> tuple[bool, bool, int, int, int]:
            bank = self.bank(slot)
            far = near is not None and bank != self.bank(near)
            return slot in owned, far, sessions[bank], self.used[slot], slot

        free = [
            slot
            for slot in range(self.count)
            if slot not in taken and (slot not in owned or self.used[slot] <= recent)
        ]
        return min(free, key=order, default=None)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
