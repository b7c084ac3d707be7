"""Every random draw of a run has a seed that is a hash of what it is for, so a resume needs no generator state."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from what the draw is for, e.g. `seed_of(run_seed, step, "rollout", task.id, rollout, turn)`.

    Different parts give independent seeds; the types count (1 is not "1"). Parts are ints, strings, or tuples of
    them: anything whose `repr` is the same in every process.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
