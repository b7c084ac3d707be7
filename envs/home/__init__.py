"""A small simulated smart home: ten tools and the desk calls of its house rules."""

from envs.home.world import SmartHome

__all__ = ["SmartHome"]
