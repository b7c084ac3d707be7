"""Demonstrations in smart homes (envs/desk/agent.py)."""

from __future__ import annotations

import itertools
import random

from envs.desk.agent import MAX_CALLS, Careless, Demonstrations
from envs.desk.plans import Plan
from envs.desk.rules import House
from envs.desk.world import LEVELS
from envs.home.data import KINDS, PEOPLE, ROOMS, VALUES
from envs.home.devices import CHANGES, DESK, LOOKS
from envs.home.tasks import any_plan, templates
from envs.home.world import SYSTEM, SmartHome
from envs.world import Task

SPLIT = "demonstrations"

# Words that are copied from observations get one token each, so that copying takes one token for
# every kind of id. So do the letters of ids: behind a space, "H" would be another token than behind
# a quotation mark.
TOKENS = (
    SYSTEM,
    *"RDLHSB",
    *(str(number) for number in range(10, 100)),
    *ROOMS,
    *PEOPLE,
    *KINDS,
    *(value for value in itertools.chain(*VALUES.values()) if not value.isdigit()),
    *DESK,
    *CHANGES,
    *(tool["function"]["name"] for tool in LOOKS),
)
ORIGIN = "The demonstrations come from homes of their own; none of them is the home of a task."


class Agent(Careless):
    """A careless resident."""

    def next(self) -> tuple[str, dict[str, str]] | None:
        if self.refused and self.made == MAX_CALLS:
            self.slip("insist")  # a draw of earlier versions, which decides what comes after it
        return super().next()


class Homes(Demonstrations):
    """Tasks of homes that no split has."""

    world, agent = SmartHome, Agent

    def plan(self, rng: random.Random, plain: bool, house: House | None) -> tuple[Plan, Task]:
        template = rng.choice(templates(rng.choice(LEVELS), plain=plain))
        plan = any_plan(SPLIT, rng, template, house, plain=plain)
        return plan, SmartHome.task_of(plan, house=house)

    def similar(self, plan: Plan, rng: random.Random, house: House | None) -> list[Plan]:
        kinds, plain = plan.drawn
        plans = [any_plan(SPLIT, rng, plan.template, house, kinds=kinds, plain=plain)]
        if rng.random() < 0.2:
            other = rng.choice(templates(rng.choice(LEVELS), plain=plain))
            place = rng.randrange(2)
            plans.insert(place, any_plan(SPLIT, rng, other, house, plain=plain))
        return plans


demonstrate = Homes().demonstrate
