"""BFCL v3 multi-turn: conversations over eight simulated APIs with official scoring. See
`envs.bfcl.world`."""

from envs.bfcl.world import Bfcl

__all__ = ["Bfcl"]
