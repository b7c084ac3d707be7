"""The tools of a home, and what they do to its devices.

A device is changed only after the desk call that the house wants for devices of its kind was made
for it in the same episode (envs/house_rules.py). No description says so, and an error does not name
the call.
"""

from __future__ import annotations

from typing import Any

from envs.home.data import LETTERS, VALUES, data
from envs.house_rules import Family, House

# Desk call -> the share of the kinds of devices of all houses that want it. The other kinds want
# none.
DESK = {
    **dict.fromkeys(("wake", "pair"), 0.25),
    **dict.fromkeys(("ping", "link", "arm"), 0.1),
    **dict.fromkeys(("sync", "bind"), 0.03),
    **dict.fromkeys(("prime", "greet"), 0.01),
}
# Tool -> the kind of devices that it changes, its description, and its argument besides the device,
# or what it sets.
CHANGES = {
    "light": ("lamp", "Set the colour of a lamp.", "colour"),
    "heat": ("heater", "Set the degrees of a heater.", "degrees"),
    "play": ("speaker", "Play music on a speaker.", "music"),
    "shade": ("blind", "Move a blind.", "to"),
    "lock": ("door", "Lock a door.", "Locked"),
    "unlock": ("door", "Unlock a door.", "Open"),
}
HOMES = Family("home", DESK, {tool: kind for tool, (kind, _, _) in CHANGES.items()})
NOT_READY = "not ready"  # the error of a change without the desk call that the house wants
_DEVICE = "device id, like L12, H12, S12, B12 or D12"


class ToolError(Exception):
    """A refused call. The message is for the model."""


def _tool(name: str, description: str, /, **arguments: str | tuple[str, ...]) -> dict[str, Any]:
    """Return a tool whose arguments are texts, each with a description or the values that it may
    have."""
    properties = {
        key: {
            "type": "string",
            **({"description": about} if isinstance(about, str) else {"enum": list(about)}),
        }
        for key, about in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


LOOKS = [
    _tool("rooms", "List the rooms and who is in them."),
    _tool("room", "Look a room up.", name="name of the room"),
    _tool("person", "Find the room of a person.", name="first name"),
    _tool("devices", "List the devices in a room.", room="room id, like R12"),
    _tool("device", "Show a device.", id=_DEVICE),
]
TOOLS = LOOKS + [
    _tool(
        tool,
        description,
        device=f"{kind} id, like {LETTERS[kind]}12",
        **({} if word in VALUES[kind] else {word: VALUES[kind]}),
    )
    for tool, (kind, description, word) in CHANGES.items()
]
DESK_TOOLS = [_tool(name, f"{name.capitalize()} a device.", id=_DEVICE) for name in DESK]


def tools_of(house: House | None) -> list[dict[str, Any]]:
    """Return the tools of a home: the same in all houses, without desk calls where there are no
    house rules."""
    return TOOLS + DESK_TOOLS if house else TOOLS


def change(kind: str, device: str, value: str) -> tuple[str, dict[str, str]]:
    """Return the tool and the arguments that set a device of a kind to a value."""
    tools = {word: tool for tool, (of, _, word) in CHANGES.items() if of == kind}
    if value in tools:
        return tools[value], {"device": device}
    ((word, tool),) = tools.items()
    return tool, {"device": device, word: value}


class Home:
    """The devices of one home during an episode. A call takes well under a millisecond."""

    def __init__(self, seed: int, house: House | None = None):
        self.seed, self.house, self.data = seed, house, data(seed)
        self.state = dict(self.data.state)
        self.cleared: set[str] = set()  # "desk call device"
        functions = [tool["function"] for tool in tools_of(house)]
        self._arguments = {
            function["name"]: function["parameters"]["required"] for function in functions
        }

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Run a tool. Return the text for the model, and False if the call was refused."""
        try:
            return self._run(name, arguments), True
        except ToolError as error:
            return f"error: {error}", False

    def changes(self) -> list[list[str]]:
        """Return the changes since the start as sorted rows [device, before, after]."""
        start = self.data.state
        return sorted(
            [id, start[id], value] for id, value in self.state.items() if value != start[id]
        )

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._arguments:
            raise ToolError(f"no such tool, there are {', '.join(self._arguments)}")
        required = self._arguments[name]
        if sorted(arguments) != sorted(required):
            raise ToolError(f"{name} takes {' and '.join(required) or 'nothing'}")
        given = [arguments[key] for key in required]
        for key, value in zip(required, given, strict=True):
            if not isinstance(value, str):
                raise ToolError(f"{key} must be a string")
        if name in CHANGES:
            return self._change(name, *given)
        if name in DESK:
            self._device(name=given[0])
            self.cleared.add(f"{name} {given[0]}")
            return "ok"
        return getattr(self, f"_{name}")(*given)

    # The tools. A row of an answer has the word by which it is chosen right before its id, because
    # a small policy copies an id most reliably from there.

    def _rooms(self) -> str:
        return "\n".join(
            f"{self.data.person_in(id) or 'nobody'} {name}" for id, name in self.data.rooms.items()
        )

    def _room(self, name: str) -> str:
        room = self.data.room_named(name)
        if not room:
            raise ToolError("no such room")
        return " ".join([self.data.person_in(room) or "nobody", name, room])

    def _person(self, name: str) -> str:
        if name not in self.data.people:
            raise ToolError("nobody has that name")
        room = self.data.people[name]
        return f"{self.data.rooms[room]} {name} {room}"

    def _devices(self, room: str) -> str:
        if room not in self.data.rooms:
            raise ToolError("no such room")
        return "\n".join(f"{self.state[d.id]} {d.kind} {d.id}" for d in self.data.devices_in(room))

    def _device(self, name: str) -> str:
        if name not in self.data.devices:
            raise ToolError("no such device")
        device = self.data.devices[name]
        return f"{self.state[name]} {device.kind} {self.data.rooms[device.room]}"

    def _change(self, tool: str, id: str, value: str = "") -> str:
        kind, _, word = CHANGES[tool]
        self._device(id)
        device, value = self.data.devices[id], value or word
        if device.kind != kind:
            raise ToolError(f"that is no {kind}")
        if value not in VALUES[kind]:
            raise ToolError(f"{word} is one of {', '.join(VALUES[kind])}")
        if self.state[id] == value:
            raise ToolError(f"it is {value}")
        desk = self.house.desk(tool) if self.house else ""
        if desk and f"{desk} {id}" not in self.cleared:
            raise ToolError(NOT_READY)
        self.state[id] = value
        return f"{value} {kind} {id}"
