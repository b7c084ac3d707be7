"""The registry of worlds. A world's module is imported only when the world is made, so its packages
stay optional."""

import importlib
import inspect
from typing import Any

from envs.world import World

WORLDS = {
    "travel": "envs.travel:Travel",
    "home": "envs.home:SmartHome",
    "bfcl": "envs.bfcl:Bfcl",
    "appworld": "envs.appworld:AppWorld",
    "scienceworld": "envs.scienceworld:ScienceWorld",
    "textworld": "envs.textworld:TextWorld",
    "reasoning": "envs.reasoning:Reasoning",
    "openspiel": "envs.openspiel:OpenSpiel",
    "mcp": "envs.mcp:McpWorld",
    "gym": "envs.gym:GymWorld",
    "functions": "envs.functions:Functions",
    "made_up": "envs.made_up:MadeUp",
    "mixture": "envs.mixture:Mixture",
}


def make(name: str, **kwargs: Any) -> World:
    """Return a new world by its name in WORLDS or as `my_module:MyEnv`; `kwargs` go to its class.

    Raises ValueError for an unknown name or argument and ModuleNotFoundError for an unknown module.
    """
    world = world_class(name)
    try:
        inspect.signature(world).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"world {name}: {error}") from None
    return world(**kwargs)


def world_class(name: str) -> type[World]:
    """Return the class of a world, or the function that makes it, by its name. Raises what `make`
    raises."""
    module, _, attribute = WORLDS.get(name, name).partition(":")
    if not attribute:
        raise ValueError(
            f"there is no world {name!r}; there are {', '.join(WORLDS)}, and my_module:MyEnv"
        )
    world = getattr(importlib.import_module(module), attribute, None)
    if world is None:
        raise ValueError(f"module {module} has no {attribute}")
    return world
