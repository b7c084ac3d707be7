"""Seeds by purpose: each random draw has a seed that hashes its purpose, so a resume needs no
generator state."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed for a draw, e.g. `seed_of(run_seed, step, "rollout", task.id, rollout,
    turn)`.

    Different parts give independent seeds, and their types matter (1 is not "1"). Parts are ints,
    strings, or tuples of them: their `repr` is the same in every process.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
