"""BFCL v3 multi-turn: conversations over eight simulated APIs with official scoring. See
`envs.bfcl.world`."""

from envs.bfcl.data import CATEGORIES, DOMAINS, Entry, entries, read_call, split_indices
from envs.bfcl.world import Bfcl, reference_turns

__all__ = [
    "CATEGORIES",
    "DOMAINS",
    "Bfcl",
    "Entry",
    "entries",
    "read_call",
    "reference_turns",
    "split_indices",
]
