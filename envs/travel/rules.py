"""The house rules of travel agencies (envs/house_rules.py). A desk call takes the id of an order
or, before a booking, of a flight."""

from __future__ import annotations

from envs.house_rules import HOUSES, Family, House

__all__ = ["DESK", "HOUSES", "OPERATIONS", "RARITIES", "House", "any_house", "house"]

# Desk call -> the share of the operations of all houses that want it. The other operations want
# none.
DESK = {
    **dict.fromkeys(("check", "stamp"), 0.25),
    **dict.fromkeys(("scan", "sign", "tag"), 0.1),
    **dict.fromkeys(("weigh", "seal"), 0.03),
    **dict.fromkeys(("punch", "clip"), 0.01),
}
_TOOLS = {
    "book": "book",
    "bag": "bag",
    "seat": "seat",
    "cancel": "drop",
    "refund": "drop",
    "move": "move",
}
_AGENCIES = Family("travel", DESK, _TOOLS)
OPERATIONS, RARITIES = _AGENCIES.operations, _AGENCIES.rarities
house, any_house = _AGENCIES.house, _AGENCIES.any_house
