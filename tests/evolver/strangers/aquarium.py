"""An aquarium. Keepers have names of two words, a line each; a tank is found by its keeper. A tank is
measured in degrees, of which all tanks have similar ones; its light is a yes or no, and is mostly off.
The chart shows what was so when it was drawn."""

import random
from typing import Annotated

KEEPERS = ["Mia Old", "Jo De Vries", "Lou Tan", "Ann-Marie Holt", "Ed Stone"]

tanks: dict[str, dict] = {}
chart: list[str] = []


def reset(seed: int) -> None:
    rng = random.Random(seed)
    tanks.clear()
    for keeper, number in zip(rng.sample(KEEPERS, 3), rng.sample(range(10, 99), 3)):
        tanks[f"K{number}"] = {"keeper": keeper, "degrees": rng.randint(20, 24), "light": False}
    draw_chart()


def keepers() -> str:
    """List the keepers."""
    return "\n".join(tank["keeper"] for tank in tanks.values())


def tank_of(keeper: str) -> str:
    """Find the tank of a keeper."""
    return next((id for id, tank in tanks.items() if tank["keeper"] == keeper), "no tank")


def measure(tank: str) -> str:
    """Measure the temperature of a tank."""
    return f"{tanks[tank]['degrees']} degrees"


def heat(tank: str, degrees: Annotated[int, "from 18 to 30"]) -> str:
    """Set the temperature of a tank."""
    if not 18 <= degrees <= 30:
        raise ValueError("not for fish")
    tanks[tank]["degrees"] = degrees
    return "ok"


def switch_light(tank: str, on: bool) -> str:
    """Switch the light of a tank."""
    tanks[tank]["light"] = on
    return "ok"


def show_light(tank: str) -> str:
    """Show the light of a tank."""
    return "on" if tanks[tank]["light"] else "off"


def draw_chart() -> str:
    """Draw the chart anew."""
    chart[:] = [f"{tank['keeper']}: {tank['degrees']}" for tank in tanks.values()]
    return "ok"


def show_chart() -> str:
    """Show the chart."""
    return "\n".join(chart)
