"""Lamps, of which every report has the same unit."""

import json
import random

lamps: dict[str, dict] = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    lamps.clear()
    for name in ("attic", "cellar", "garden", "porch"):
        lamps[name] = {
            "colour": rng.choice(["red", "white", "amber"]),
            "hours": rng.randint(1, 99),
        }


def rooms() -> list:
    """The rooms with a lamp."""
    return list(lamps)


def report(room: str) -> str:
    """Report on a lamp."""
    return json.dumps(
        {"unit": "hours", "on": lamps[room]["hours"], "colour": lamps[room]["colour"]}
    )


def paint(room: str, colour: str) -> None:
    """Give a lamp another colour."""
    lamps[room]["colour"] = colour
