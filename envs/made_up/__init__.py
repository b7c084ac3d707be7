"""Made-up worlds, in which a policy learns to read tools that it never saw."""

from envs.made_up.world import MadeUp

__all__ = ["MadeUp"]
