"""Several worlds as one: each task is played by the world that it is of.

    env.name = "mixture"
    env.args.worlds = {
        "travel": {},
        "home": {"args": {"rules": 1}},
        "bfcl": {"python": ".venv-bfcl/bin/python", "splits": {"dev": "val"}},
    }

A task of the mixture has the name of its world as `env` and in front of its id.
"""

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from envs import WORLDS, make
from envs.source import Source
from envs.values import Json
from envs.world import Observation, Proxy, Task, World, WorldError

# What is said of a world: {key: its type}. `name` is its own name where it differs from that in the
# mixture; `splits` is {split of the mixture: split of the world, "" = none}. PLACE is how its
# workers differ from those of the others.
KEYS: dict[str, type] = {"name": str, "args": dict, "splits": dict}
PLACE: dict[str, type] = {"python": str, "workers": int, "memory_mb": int, "recycle": int}


def problems(worlds: Any) -> list[str]:
    """Return everything that is wrong with the description of the worlds, [] if nothing is."""
    if not isinstance(worlds, dict) or not worlds:
        return [f'worlds={worlds!r} must name the worlds, such as {{"travel": {{}}, "home": {{}}}}']
    found, keys = [], KEYS | PLACE
    has = ", ".join(f"{key} ({kind.__name__})" for key, kind in keys.items())
    for name, given in worlds.items():
        if not re.fullmatch(r"[\w-]+", str(name)):
            found.append(f"worlds: {name!r} must consist of letters, digits, _ and -")
        if not isinstance(given, dict):
            found.append(f'worlds.{name}={given!r} must be a dict, such as {{"args": {{}}}}')
            continue
        for key, value in given.items():
            kind = type(value)
            if kind is not keys.get(key) or (kind is int and value < (key == "workers")):
                found.append(f"worlds.{name}.{key}={value!r} does not fit; a world has {has}")
        own = str(given.get("name", name))
        if own == Mixture.name or (own not in WORLDS and ":" not in own):
            found.append(
                f"worlds.{name}: there is no world {own!r} to mix; there are"
                f" {', '.join(n for n in WORLDS if n != Mixture.name)}, and my_module:MyEnv"
            )
    return found


def lasting(worlds: Any) -> Any:
    """Return the description of the worlds without what a resumed run may change."""
    if problems(worlds):
        return worlds
    kept = {}
    for name, given in worlds.items():
        kept[name] = {key: value for key, value in given.items() if key not in PLACE}
    return kept


class Mixture(Proxy):
    """Worlds under names. Each is made when it is first needed, and kept."""

    name = "mixture"

    def __init__(self, worlds: Json, make_world: Callable[[str], World] | None = None):
        """worlds: {name: {"name", "args", "splits"}}, see `KEYS`. make_world: makes the world of a
        name; None = in this process. Raises ValueError."""
        if wrong := problems(worlds):
            raise ValueError("; ".join(wrong))
        self._worlds, self._make = worlds, make_world or self._here
        self._made: dict[str, World] = {}
        self._name = ""  # of the world that plays

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._name:
            raise AttributeError(f"{self.name} has no attribute {name!r}")
        return getattr(self._playing(), name)

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of all worlds, one of each in turn. Raises ValueError, with the reasons
        of every world that has none to give."""
        listed, wrong = [], []
        for name, given in self._worlds.items():
            own = given.get("splits", {}).get(split, split)
            try:
                tasks = self._world(name).tasks(own) if own else []
                listed.append(
                    [replace(t, id=f"{name}/{t.id}", env=name, split=split) for t in tasks]
                )
            except (ValueError, WorldError) as error:
                wrong.append(f"{name}: {error} (worlds.{name}.splits may name another)")
        if wrong:
            raise ValueError("; ".join(wrong))
        in_turn = itertools.chain(*itertools.zip_longest(*listed))
        return [task for task in in_turn if task]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        name = task.env
        if name not in self._worlds:
            raise ValueError(
                f"task {task.id!r} is of the world {name!r}; there are {', '.join(self._worlds)}"
            )
        self._name = name
        split = self._worlds[name].get("splits", {}).get(task.split, task.split)
        own = replace(task, id=task.id.removeprefix(f"{name}/"), split=split)
        if "entry" in own.meta:  # the id of the task whose start this one has
            own.meta = own.meta | {"entry": own.meta["entry"].removeprefix(f"{name}/")}
        return self._playing().reset(own, seed)

    def snapshot(self) -> Any:
        return {"name": self._name, "world": self._playing().snapshot()}

    def restore(self, snapshot: Any) -> None:
        self._name = snapshot["name"]
        self._playing().restore(snapshot["world"])

    def profile(self) -> Json:
        return {}

    def close(self) -> None:
        for world in self._made.values():
            world.close()

    def _here(self, name: str) -> World:
        given = self._worlds[name]
        return make(given.get("name", name), **given.get("args", {}))

    def _world(self, name: str) -> World:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _playing(self) -> World:
        if not self._name:
            raise RuntimeError("no episode: reset the world first")
        return self._world(self._name)


class MixedSource(Source):
    """A source of mixtures, each of whose worlds comes from a source of its own."""

    def __init__(self, worlds: Json, open_source: Callable[[str], Source]):
        """open_source: makes the source of the world of a name. Raises WorldError, with the reasons
        of every world that cannot be had."""
        self._worlds = worlds
        self._sources: dict[str, Source] = {}
        wrong: list[str] = []
        with contextlib.ExitStack() as opened:
            for name in worlds:
                try:
                    self._sources[name] = opened.enter_context(open_source(name))
                except (WorldError, ValueError, OSError) as error:
                    wrong.append(f"{name}: {error}")
            if wrong:
                raise WorldError("\n".join(wrong))
            self._opened = opened.pop_all()

    def world(self) -> World:
        return Mixture(self._worlds, lambda name: self._sources[name].world())

    def close(self) -> None:
        self._opened.close()
