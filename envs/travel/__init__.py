"""A small simulated travel agency: twelve tools with undocumented preconditions over a seeded
SQLite database."""

from envs.travel.world import Travel

__all__ = ["Travel"]
