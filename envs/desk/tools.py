"""The tools of a world, and the state that they change during an episode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from envs import wording
from envs.desk.rules import Family, House
from envs.values import Json
from envs.world import Tool, tool_of


class Refused(Exception):
    """A refused call. The message is for the model."""


def tool(name: str, description: str, /, **arguments: str | Sequence[str]) -> Tool:
    """Return the schema of a tool whose arguments are texts, each with a description or the values
    that it may have."""
    properties = {
        key: {"type": "string", "description": about}
        if isinstance(about, str)
        else {"type": "string", "enum": list(about)}
        for key, about in arguments.items()
    }
    return tool_of(name, description, properties, list(arguments))


class Tools:
    """The tools of a world during one episode: a method `_NAME` for each tool, its state and its
    memory. A method returns the text for the model, or raises Refused.

    A subclass defines `schemas`, `family` and `find`. Its state is `state`, {id: value}, unless it
    overrides `changes`, `snapshot` and `restored`. A call takes well under a millisecond.
    """

    schemas: ClassVar[list[Tool]]
    family: ClassVar[Family]
    remembers: ClassVar[tuple[str, ...]] = ("desk",)
    summaries: ClassVar[dict[str, str]]  # {tool: its description in one sentence}
    desk_schemas: ClassVar[list[Tool]]
    start: Any  # the state before the episode
    state: dict[str, str]

    def __init_subclass__(cls) -> None:
        functions = [schema["function"] for schema in cls.schemas]
        cls.summaries = wording.summaries({f["name"]: f["description"] for f in functions})
        cls.desk_schemas = [
            tool(name, f"{name.capitalize()} {cls.family.subject}.", id=cls.family.id)
            for name in cls.family.desk
        ]

    def __init__(self, seed: int, house: House | None = None):
        """house: None = no house rules and no desk calls."""
        self.seed, self.house = seed, house
        self.memory: dict[str, set[str]] = {key: set() for key in self.remembers}
        self.required = required(self.offered(house))

    @classmethod
    def offered(cls, house: House | None) -> list[Tool]:
        """Return the schemas of the tools, which are the same in all houses."""
        return cls.schemas + cls.desk_schemas if house else cls.schemas

    def call(self, name: str, arguments: Json) -> tuple[str, bool]:
        """Run a tool. Return the text for the model, and False if the call was refused."""
        try:
            if name not in self.required:
                raise Refused(f"no such tool, there are {', '.join(self.required)}")
            self.check(name, arguments)
            if name not in self.family.desk:
                return self.run(name, arguments), True
            self.find(**arguments)
            self.memory["desk"].add(f"{name} {arguments['id']}")
            return "ok", True
        except Refused as error:
            return f"error: {error}", False

    def check(self, name: str, arguments: Json) -> None:
        """Raise Refused unless the arguments are those of the tool, and texts."""
        required = self.required[name]
        if sorted(arguments) != sorted(required):
            raise Refused(f"{name} takes {' and '.join(required) or 'nothing'}")
        for key in required:
            if not isinstance(arguments[key], str):
                raise Refused(f"{key} must be a string")

    def run(self, name: str, arguments: dict[str, str]) -> str:
        return getattr(self, f"_{name}")(**arguments)

    def find(self, id: str) -> Any:
        """Return what a desk call is made for. Raises Refused if there is no such id."""
        raise NotImplementedError

    def need_desk(self, tool: str, id: str) -> None:
        """Raise Refused unless the desk call that the house wants before the tool was made."""
        desk = self.house.desk(tool) if self.house else ""
        if desk and f"{desk} {id}" not in self.memory["desk"]:
            raise Refused(self.family.refusal)

    def changes(self) -> list[list[Any]]:
        """Return the changes since the start as sorted rows [id, before, after]."""
        return sorted(
            [id, self.start[id], value]
            for id, value in self.state.items()
            if value != self.start[id]
        )

    def snapshot(self) -> Json:
        return {
            "seed": self.seed,
            "state": dict(self.state),
            "cleared": sorted(self.memory["desk"]),
        }

    @classmethod
    def restored(cls, snapshot: Json, house: House | None) -> Tools:
        """Return the tools as they were when the snapshot was taken."""
        tools = cls(snapshot["seed"], house)
        tools.state, tools.memory["desk"] = dict(snapshot["state"]), set(snapshot["cleared"])
        return tools

    def close(self) -> None:
        pass


def names(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def ids_of(letters: Sequence[str], rng: random.Random) -> list[str]:
    """Return ids with these letters and different numbers."""
    numbers = rng.sample(range(10, 100), len(letters))
    return [f"{letter}{number}" for letter, number in zip(letters, numbers, strict=True)]


def required(tools: Sequence[Tool]) -> dict[str, list[str]]:
    """Return {name: required arguments} of tools."""
    return {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}
