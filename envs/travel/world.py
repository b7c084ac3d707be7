"""The travel agency as a World."""

from typing import Any

from envs.desk.verify import Answers, any_of
from envs.desk.world import Desk, DeskWorld
from envs.travel.agency import Agency
from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, TIMES
from envs.travel.profile import PROFILE
from envs.travel.tasks import Errand
from envs.values import Json


class Travel(DeskWorld):
    """A small travel agency. In dev and test a third of the tasks above level 1 have
    held-out templates."""

    desk = Desk(
        "travel",
        "You are a travel agent.",
        Agency,
        Errand,
        Answers(
            ("[0-9]+", "[0-9]+[a-c]", *map(any_of, (CITIES, NAMES, DAYS, TIMES, FARES, CARDS))),
            word="[a-z0-9]+",
            whole=True,
        ),
        rows="state",
    )

    def difference(self) -> list[list[Any]]:
        """Return the changes since the start as rows [table, key, column, before, after]; see
        `Agency.changes`."""
        return self._open().changes()

    def profile(self) -> Json:
        return PROFILE
