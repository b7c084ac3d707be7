"""The seeded data of one home: its rooms, the people in them, and their devices."""

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

from envs.desk.tools import ids_of, names

ROOMS = names(
    "Kitchen Bath Hall Attic Study Cellar Garage Porch Nursery Library Pantry Lounge Office Sauna "
    "Studio Gym"
)
PEOPLE = names(
    "Anna Bruno Cleo Dario Edith Fred Greta Hans Ines Joel Karin Lars Marta Nils Olga Piet Quinn "
    "Ruth Stella Theo Ulla Viktor Wanda Yusuf"
)
VALUES = {
    "lamp": ("Red", "Green", "Blue", "White", "Amber"),
    "heater": tuple(str(degrees) for degrees in range(15, 30)),
    "speaker": ("Jazz", "Rock", "Soul", "Opera", "News"),
    "blind": ("Up", "Half", "Down"),
    "door": ("Locked", "Open"),
}
KINDS = tuple(VALUES)
LETTERS = dict(zip(KINDS, "LHSBD", strict=True))  # of the ids of each kind
N_ROOMS, N_PEOPLE = 5, 3


class Device(NamedTuple):
    """A device. A room has at most one of each kind."""

    id: str
    kind: str
    room: str  # its id


@dataclass(frozen=True)
class Data:
    """A home at the start of an episode. rooms: {id: name}. people: {name: id of the room}, at most
    one in each room. state: {device: value}."""

    rooms: dict[str, str]
    people: dict[str, str]
    devices: dict[str, Device]
    state: dict[str, str]

    def devices_in(self, room: str) -> list[Device]:
        return [device for device in self.devices.values() if device.room == room]

    def person_in(self, room: str) -> str:
        """Return who is in a room, "" for nobody."""
        return next((name for name, where in self.people.items() if where == room), "")


@functools.lru_cache(maxsize=1024)
def data(seed: int) -> Data:
    """Return the home of a world seed. The same seed gives the same home on every machine."""
    rng = random.Random(f"home world {seed}")
    rooms = dict(zip(ids_of("R" * N_ROOMS, rng), rng.sample(ROOMS, N_ROOMS), strict=True))
    people = dict(zip(rng.sample(PEOPLE, N_PEOPLE), rng.sample(list(rooms), N_PEOPLE), strict=True))
    placed: list[tuple[str, str]] = []
    for room in rooms:
        placed += [(kind, room) for kind in rng.sample(KINDS, rng.choice((3, 4)))]
    ids = ids_of([LETTERS[kind] for kind, _ in placed], rng)
    devices = {id: Device(id, kind, room) for id, (kind, room) in zip(ids, placed, strict=True)}
    state = {device.id: rng.choice(VALUES[device.kind]) for device in devices.values()}
    return Data(rooms, people, devices, state)
