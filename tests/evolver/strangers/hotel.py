"""A hotel that answers in lines of text. Its guests have names of two words, and its modes stand in a
description alone. A room has to be cleaned before somebody is checked in; no description says so."""

import random

NAMES = ["Mr Bean", "Ms Fox", "Dr Hill", "Mrs Lake", "Mr Stone", "Ms Field"]
rooms: dict = {}
guests: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    rooms.clear()
    guests.clear()
    for number in rng.sample(range(100, 400), 5):
        rooms[number] = {"clean": rng.random() < 0.5, "guest": None, "heating": "off"}
    for name in rng.sample(NAMES, 3):
        guests[name] = {"room": None, "bill": 0}


def list_rooms() -> str:
    """List all rooms, their heating, and if they are free."""
    lines = []
    for number, room in rooms.items():
        taken = f"taken by {room['guest']}" if room["guest"] else "free"
        lines.append(f"Room {number}: heating {room['heating']}, {taken}")
    return "\n".join(lines)


def list_guests() -> str:
    """List all guests."""
    return "\n".join(
        f"{n}: room {g['room'] or '-'}, bill {g['bill']} EUR" for n, g in guests.items()
    )


def inspect_room(room: int) -> str:
    """Inspect a room."""
    return f"Room {room} is {'clean' if rooms[room]['clean'] else 'dirty'}."


def clean_room(room: int) -> str:
    """Send the staff to clean a room."""
    rooms[room]["clean"] = True
    return f"Room {room} has been cleaned."


def check_in(guest: str, room: int) -> str:
    """Check a guest into a room."""
    if guest not in guests:
        raise ValueError(f"There is no guest {guest}.")
    if rooms[room]["guest"] or guests[guest]["room"] or not rooms[room]["clean"]:
        raise ValueError("Check-in failed.")
    rooms[room]["guest"] = guest
    guests[guest]["room"] = room
    return f"{guest} has the key of room {room}."


def charge(guest: str, amount: float) -> str:
    """Add an amount in EUR to the bill of a guest."""
    if guest not in guests:
        raise ValueError(f"There is no guest {guest}.")
    if amount <= 0:
        raise ValueError("The amount must be positive.")
    guests[guest]["bill"] += amount
    return f"New bill of {guest}: {guests[guest]['bill']} EUR"


def set_heating(room: int, mode: str) -> str:
    """Set the heating of a room: off, eco or warm."""
    if mode not in ("off", "eco", "warm"):
        raise ValueError("That is no mode.")
    rooms[room]["heating"] = mode
    return f"Heating of room {room} set."
