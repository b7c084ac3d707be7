"""House rules: which desk call a house wants before each operation. No tool description mentions
them.

All houses of a world offer the same desk calls, such as `stamp`. An operation without the desk call
that this house wants is refused with an error that does not name the call. A house is a draw from a
family in which some desk calls are common and others rare, so that a policy that has seen other
houses expects the common ones.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

HOUSES = 10  # of each rarity; no demonstration shows one of them


@dataclass(frozen=True)
class House:
    """The desk call that each operation of a family wants, "" for none."""

    wants: tuple[str, ...]
    family: Family = field(repr=False)

    def desk(self, tool: str) -> str:
        """Return the desk call that a tool wants first, "" for none."""
        operation = self.family.tools.get(tool)
        return self.wants[self.family.operations.index(operation)] if operation else ""


@dataclass(frozen=True, eq=False)
class Family:
    """The houses of a world.

    name: seeds its houses. shares: {share of the operations of all houses: the desk calls that so
    many want each}; the other operations want none. tools: {tool: its operation}; tools of one
    operation want the same desk call. subject, id: what a desk call is made for, and what its
    argument is, for the descriptions of the tools. refusal: the error of an operation without its
    desk call.
    """

    name: str
    shares: Mapping[float, str]
    tools: Mapping[str, str]
    subject: str
    id: str
    refusal: str = "not ready"

    @functools.cached_property
    def operations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.tools.values()))

    @functools.cached_property
    def desk(self) -> dict[str, float]:
        """The desk calls with their shares."""
        desk: dict[str, float] = {}
        for share, calls in self.shares.items():
            desk |= dict.fromkeys(calls.split(), share)
        return desk

    def house(self, rules: int, rarity: float) -> House:
        """Return the house number `rules`, whose operations want desk calls of one rarity: a share
        of `shares`.

        Each of these desk calls is wanted by about as many operations. Raises ValueError for a
        house that does not exist.
        """
        if not isinstance(rules, int) or isinstance(rules, bool) or not 0 <= rules < HOUSES:
            raise ValueError(
                f"rules must be a house from 0 to {HOUSES - 1}, or None for no house rules, not "
                f"{rules!r}"
            )
        if rarity not in self.shares:
            raise ValueError(
                f"rarity must be one of {', '.join(map(str, self.shares))}, not {rarity!r}"
            )
        rng = random.Random(f"{self.name} house {rules} {rarity}")
        desks = self.shares[rarity].split()
        drawn: list[str] = []
        while len(drawn) < len(self.operations):
            drawn += rng.sample(desks, len(desks))
        return House(tuple(drawn[: len(self.operations)]), self)

    def any_house(self, rng: random.Random) -> House:
        """Draw a house for a demonstration, in which common desk calls are common; never one of
        `house`."""
        none = 1 - sum(self.desk.values())
        while True:
            wants = tuple(
                rng.choices(["", *self.desk], [none, *self.desk.values()], k=len(self.operations))
            )
            if wants not in self._reserved:
                return House(wants, self)

    def any_desk(self, rng: random.Random) -> str:
        """Draw a desk call, a common one most often."""
        return rng.choices(list(self.desk), list(self.desk.values()))[0]

    @functools.cached_property
    def _reserved(self) -> frozenset[tuple[str, ...]]:
        numbers = itertools.product(range(HOUSES), self.shares)
        return frozenset(self.house(*number).wants for number in numbers)
