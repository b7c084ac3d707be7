"""Worlds by name. A world is imported when it is made, so one that needs a package costs nothing to the others."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from envs.world import World

WORLDS = {
    "travel": "envs.travel:Travel",
    "bfcl": "envs.bfcl:Bfcl",
    "gym": "envs.gym:GymWorld",
}


def make(name: str, **kwargs: Any) -> World:
    """A new world; the arguments are those of its class. ValueError for a name or an argument that does not exist."""
    if name not in WORLDS:
        raise ValueError(f"there is no world {name!r}; there are {', '.join(WORLDS)}")
    module, _, attribute = WORLDS[name].partition(":")
    world = getattr(importlib.import_module(module), attribute)
    try:
        inspect.signature(world).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"world {name}: {error}") from None
    return world(**kwargs)
