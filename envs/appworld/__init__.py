"""AppWorld: nine simulated apps with 457 APIs, and an agent that writes Python. See
`envs.appworld.world`."""

from envs.appworld.world import AppWorld

__all__ = ["AppWorld"]
