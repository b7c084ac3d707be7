"""A greenhouse that answers with objects: its zones are names of fields, and errors are texts. There
is no water before the pump runs; no description says so."""

import random
from typing import Literal

zones: dict = {}
pump = {"on": False}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    pump["on"] = False
    zones.clear()
    for name in rng.sample(["north", "south", "east", "west", "upper", "lower"], 4):
        zones[name] = {
            "plant": rng.choice(["tomatoes", "basil", "peppers", "ferns"]),
            "temperature": rng.randint(15, 30),
            "moisture": rng.randint(20, 80),
            "light": rng.choice(["off", "dim", "bright"]),
            "vent": "closed",
        }


def status() -> dict:
    """Show every zone with its plant, temperature, moisture, light and vent, and the pump."""
    return {"zones": zones, "pump": "on" if pump["on"] else "off"}


def set_temperature(zone: str, degrees: int) -> str:
    """Set the temperature of a zone in degrees Celsius, between 10 and 35."""
    if zone not in zones:
        return f"Error: unknown zone {zone}"
    if not 10 <= degrees <= 35:
        return "Error: out of range"
    zones[zone]["temperature"] = degrees
    return f"{zone} is now at {degrees} degrees"


def set_light(zone: str, level: Literal["off", "dim", "bright"]) -> str:
    """Set the light of a zone."""
    if zone not in zones:
        return f"Error: unknown zone {zone}"
    zones[zone]["light"] = level
    return f"light in {zone}: {level}"


def start_pump() -> str:
    """Start the water pump."""
    pump["on"] = True
    return "pump is on"


def stop_pump() -> str:
    """Stop the water pump."""
    pump["on"] = False
    return "pump is off"


def water(zone: str, minutes: int) -> str:
    """Water a zone for some minutes, which raises its moisture by 5 percent per minute."""
    if zone not in zones:
        return f"Error: unknown zone {zone}"
    if not pump["on"]:
        return "Error: no water"
    if not 1 <= minutes <= 10:
        return "Error: minutes must be 1 to 10"
    zones[zone]["moisture"] = min(100, zones[zone]["moisture"] + 5 * minutes)
    return f"moisture in {zone}: {zones[zone]['moisture']}%"


def open_vent(zone: str) -> str:
    """Open the vent of a zone."""
    if zone not in zones:
        return f"Error: unknown zone {zone}"
    zones[zone]["vent"] = "open"
    return "ok"
