"""AppWorld: nine simulated apps, 457 APIs, an agent that writes Python. See `envs.appworld.world`."""

from envs.appworld.world import AppWorld, goal_completion

__all__ = ["AppWorld", "goal_completion"]
