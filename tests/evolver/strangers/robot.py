"""A robot in a house, which answers in sentences and marks none of them as a refusal. The door of
the cellar is locked."""

import random

ROOMS = {
    "hall": ["kitchen", "office", "cellar"],
    "kitchen": ["hall"],
    "office": ["hall"],
    "cellar": ["hall"],
}
world: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    world.clear()
    world.update(room="hall", hands=[], locked=True, things={})
    for thing in rng.sample(["cup", "book", "lamp", "ball", "box", "coat"], 4):
        world["things"][thing] = rng.choice(["kitchen", "office", "hall", "cellar"])
    world["things"]["key"] = rng.choice(["kitchen", "office"])


def look() -> str:
    """Look around."""
    here = [thing for thing, room in world["things"].items() if room == world["room"]]
    return (
        f"You are in the {world['room']}. Things here: {', '.join(here) or 'nothing'}."
        f" Doors to: {', '.join(ROOMS[world['room']])}."
        f" You carry: {', '.join(world['hands']) or 'nothing'}."
    )


def go(room: str) -> str:
    """Go to a room next to this one."""
    if room not in ROOMS[world["room"]]:
        return "You cannot go there."
    if room == "cellar" and world["locked"]:
        return "The door is locked."
    world["room"] = room
    return look()


def take(thing: str) -> str:
    """Take a thing that is here."""
    if world["things"].get(thing) != world["room"]:
        return "That is not here."
    world["things"][thing] = "hands"
    world["hands"].append(thing)
    return f"You carry the {thing}."


def drop(thing: str) -> str:
    """Put down a thing that you carry."""
    if thing not in world["hands"]:
        return "You do not carry that."
    world["hands"].remove(thing)
    world["things"][thing] = world["room"]
    return f"The {thing} is in the {world['room']}."


def unlock_cellar() -> str:
    """Unlock the cellar, from the hall."""
    if world["room"] != "hall" or "key" not in world["hands"]:
        return "That does not work."
    world["locked"] = False
    return "The cellar is open."
