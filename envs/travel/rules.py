"""House rules: which desk call an agency wants before each operation. No tool description mentions them.

All houses offer the same desk calls, such as `stamp`, each of which takes the id of an order or, before a booking, of a
flight. An operation without the desk call that this house wants is refused with an error that does not name the call.
A house is a draw from a family in which some desk calls are common and others rare (`DESK`), so that a policy that has
seen other houses expects the common ones.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

# Desk call -> the share of the operations of all houses that want it. The other operations want none.
DESK = {
    **dict.fromkeys(("check", "stamp"), 0.25),
    **dict.fromkeys(("scan", "sign", "tag"), 0.1),
    **dict.fromkeys(("weigh", "seal"), 0.03),
    **dict.fromkeys(("punch", "clip"), 0.01),
}
RARITIES = tuple(dict.fromkeys(DESK.values()))
OPERATIONS = ("book", "bag", "seat", "drop", "move")
HOUSES = 10  # of each rarity; no demonstration shows one of them

_OPERATION = {tool: tool for tool in OPERATIONS} | {"cancel": "drop", "refund": "drop"}


@dataclass(frozen=True)
class House:
    """The desk call that each of `OPERATIONS` wants, "" for none."""

    wants: tuple[str, ...]

    def desk(self, tool: str) -> str:
        """Return the desk call that a tool wants first, "" for none."""
        return self.wants[OPERATIONS.index(_OPERATION[tool])] if tool in _OPERATION else ""


def house(rules: int, rarity: float) -> House:
    """Return the house number `rules`, whose operations want desk calls of one rarity: a value of `DESK`.

    Each of these desk calls is wanted by about as many operations. Raises ValueError for a house that does not exist.
    """
    if not isinstance(rules, int) or isinstance(rules, bool) or not 0 <= rules < HOUSES:
        raise ValueError(f"rules must be a house from 0 to {HOUSES - 1}, or None for an agency without, not {rules!r}")
    if rarity not in RARITIES:
        raise ValueError(f"rarity must be one of {', '.join(map(str, RARITIES))}, not {rarity!r}")
    return _house(rules, rarity)


@functools.cache
def _house(rules: int, rarity: float) -> House:
    rng = random.Random(f"travel house {rules} {rarity}")
    desks = [desk for desk, share in DESK.items() if share == rarity]
    drawn: list[str] = []
    while len(drawn) < len(OPERATIONS):
        drawn += rng.sample(desks, len(desks))
    return House(tuple(drawn[: len(OPERATIONS)]))


def any_house(rng: random.Random) -> House:
    """Draw a house for a demonstration, in which common desk calls are common; never one of `house`."""
    none = 1 - sum(DESK.values())
    while True:
        drawn = House(tuple(rng.choices(["", *DESK], [none, *DESK.values()], k=len(OPERATIONS))))
        if drawn not in _reserved():
            return drawn


@functools.cache
def _reserved() -> frozenset[House]:
    return frozenset(house(rules, rarity) for rules in range(HOUSES) for rarity in RARITIES)
