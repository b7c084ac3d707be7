"""Worlds by name. A world is imported when it is made, so one that needs a package costs nothing to the others."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from envs.world import World

WORLDS = {
    "travel": "envs.travel:Travel",
    "bfcl": "envs.bfcl:Bfcl",
    "appworld": "envs.appworld:AppWorld",
    "scienceworld": "envs.scienceworld:ScienceWorld",
    "textworld": "envs.textworld:TextWorld",
    "reasoning": "envs.reasoning:Reasoning",
    "mcp": "envs.mcp:McpWorld",
    "gym": "envs.gym:GymWorld",
}


def make(name: str, **kwargs: Any) -> World:
    """A new world: a name above, or `my_module:MyEnv`; the arguments are those of its class. ValueError for a name or
    an argument that does not exist, ModuleNotFoundError for a module."""
    module, _, attribute = WORLDS.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"there is no world {name!r}; there are {', '.join(WORLDS)}, and my_module:MyEnv")
    world = getattr(importlib.import_module(module), attribute, None)
    if world is None:
        raise ValueError(f"module {module} has no {attribute}")
    try:
        inspect.signature(world).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"world {name}: {error}") from None
    return world(**kwargs)
