"""How the tests of this folder play a world."""

from envs.toolcalls import call_text
from envs.world import Observation, World, text_of


def begin(world: World, number: int = 0, split: str = "train", seed: int = 0) -> Observation:
    """Start the episode of a task of the world."""
    return world.reset(world.tasks(split)[number], seed)


def told(world: World, action: str) -> str:
    """Return the text that answers an action."""
    return text_of(world.step(action).messages)


def used(world: World, tool: str, **arguments) -> str:
    """Return the text that answers a call."""
    return told(world, call_text(tool, arguments))


def take_all(world: World, actions) -> list[str]:
    """Return the texts that answer some actions."""
    return [told(world, action) for action in actions]


def solve(world: World) -> float:
    """Return the score of the reference of the first task."""
    begin(world)
    take_all(world, world.tasks("train")[0].reference)
    return world.evaluate().score
