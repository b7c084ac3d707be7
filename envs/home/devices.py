"""The tools of a home, and what they do to its devices.

A device is changed only after the desk call that the house wants for devices of its kind was made
for it in the same episode (envs/desk/rules.py). No description says so, and an error does not name
the call.
"""

from envs.desk import Family, House, Refused, Tools, tool
from envs.home.data import LETTERS, VALUES, Device, data

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
_DEVICE = "device id, like L12, H12, S12, B12 or D12"
HOMES = Family(
    "home",
    {0.25: "wake pair", 0.1: "ping link arm", 0.03: "sync bind", 0.01: "prime greet"},
    {tool: kind for tool, (kind, *_) in CHANGES.items()},
    subject="a device",
    id=_DEVICE,
)
LOOKS = [
    tool("rooms", "List the rooms and who is in them."),
    tool("room", "Look a room up.", name="name of the room"),
    tool("person", "Find the room of a person.", name="first name"),
    tool("devices", "List the devices in a room.", room="room id, like R12"),
    tool("device", "Show a device.", id=_DEVICE),
]


class Home(Tools):
    """The devices of one home during an episode.

    A row of an answer has the word by which it is chosen right before its id, because a small
    policy copies an id most reliably from there.
    """

    schemas = LOOKS + [
        tool(
            name,
            description,
            device=f"{kind} id, like {LETTERS[kind]}12",
            **({} if word in VALUES[kind] else {word: VALUES[kind]}),
        )
        for name, (kind, description, word) in CHANGES.items()
    ]
    family = HOMES

    def __init__(self, seed: int, house: House | None = None):
        super().__init__(seed, house)
        self.data = data(seed)
        self.start, self.state = self.data.state, dict(self.data.state)

    def run(self, name: str, arguments: dict[str, str]) -> str:
        if name in CHANGES:
            return self._change(name, **arguments)
        return super().run(name, arguments)

    def find(self, id: str) -> Device:
        if id not in self.data.devices:
            raise Refused("no such device")
        return self.data.devices[id]

    def _rooms(self) -> str:
        rooms = self.data.rooms.items()
        return "\n".join(f"{self.data.person_in(id) or 'nobody'} {name}" for id, name in rooms)

    def _room(self, name: str) -> str:
        for id, room in self.data.rooms.items():
            if room == name:
                return f"{self.data.person_in(id) or 'nobody'} {name} {id}"
        raise Refused("no such room")

    def _person(self, name: str) -> str:
        if name not in self.data.people:
            raise Refused("nobody has that name")
        room = self.data.people[name]
        return f"{self.data.rooms[room]} {name} {room}"

    def _devices(self, room: str) -> str:
        if room not in self.data.rooms:
            raise Refused("no such room")
        return "\n".join(f"{self.state[d.id]} {d.kind} {d.id}" for d in self.data.devices_in(room))

    def _device(self, id: str) -> str:
        device = self.find(id)
        return f"{self.state[id]} {device.kind} {self.data.rooms[device.room]}"

    def _change(self, tool: str, device: str, **given: str) -> str:
        kind, _, word = CHANGES[tool]
        value = given.get(word, word)
        if self.find(device).kind != kind:
            raise Refused(f"that is no {kind}")
        if value not in VALUES[kind]:
            raise Refused(f"{word} is one of {', '.join(VALUES[kind])}")
        if self.state[device] == value:
            raise Refused(f"it is {value}")
        self.need_desk(tool, device)
        self.state[device] = value
        return f"{value} {kind} {device}"


def change(kind: str, value: str) -> tuple[str, dict[str, str]]:
    """Return the tool that sets devices of a kind to a value, and its arguments besides the
    device."""
    tools = {word: name for name, (of, _, word) in CHANGES.items() if of == kind}
    if value in tools:
        return tools[value], {}
    ((word, name),) = tools.items()
    return name, {word: value}
