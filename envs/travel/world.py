"""The travel agency as a World."""

from __future__ import annotations

import random
from typing import Any

from envs.desk.plans import Unfit
from envs.desk.rules import House
from envs.desk.verify import Answers, any_of
from envs.desk.world import LEVELS, DeskWorld
from envs.travel.agency import Agency
from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, TIMES
from envs.travel.profile import PROFILE
from envs.travel.tasks import HELD_OUT, TEMPLATES, plan, world_of
from envs.world import Task

SYSTEM = "You are a travel agent."


class Travel(DeskWorld):
    """A small travel agency over SQLite. In dev and test a third of the tasks above level 1 have
    held-out templates."""

    name = "travel"
    system = SYSTEM
    tools = Agency
    rows = "state"
    answers = Answers(
        ("[0-9]+", "[0-9]+[a-c]", *map(any_of, (CITIES, NAMES, DAYS, TIMES, FARES, CARDS))),
        word="[a-z0-9]+",
        whole=True,
    )

    @classmethod
    def own_task(cls, split: str, index: int, level: int, seed: int, house: House | None) -> Task:
        rng = random.Random(f"{split} task {index} {seed}")
        held_out = split != "train" and level > 1 and (index // len(LEVELS) + level) % 3 == 0
        template = rng.choice((HELD_OUT if held_out else TEMPLATES)[level])
        for attempt in range(1000):
            world = world_of(split, index * 1000 + attempt, seed)
            try:
                return cls.task_of(plan(world, rng, house, template=template), split, house)
            except Unfit:
                continue
        raise RuntimeError(f"no world fits template {template}")

    def difference(self) -> list[list[Any]]:
        """Return the changes since the start as rows [table, key, column, before, after]; see
        `Agency.changes`."""
        return self._open().changes()

    def profile(self) -> dict[str, Any]:
        return PROFILE
