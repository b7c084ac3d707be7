"""The smart home as a World."""

from __future__ import annotations

import random

from envs.desk.rules import House
from envs.desk.verify import Answers, any_of
from envs.desk.world import LEVELS, DeskWorld
from envs.home.data import LETTERS, PEOPLE, ROOMS, VALUES
from envs.home.devices import Home
from envs.home.tasks import Errands, templates
from envs.world import Task

SYSTEM = "You run a smart home."


class SmartHome(DeskWorld):
    """A home with rooms, people and devices, simulated in memory. In dev and test, every other one
    of two changes is held out."""

    name = "home"
    system = SYSTEM
    tools = Home
    planner = Errands
    templates = staticmethod(templates)
    answers = Answers(
        (
            r"\d+",
            *(rf"{letter}\d+" for letter in ("r", *map(str.lower, LETTERS.values()))),
            *map(any_of, (ROOMS, (*PEOPLE, "nobody"), *VALUES.values())),
        )
    )

    def __init__(
        self,
        n_train: int = 64,
        n_dev: int = 40,
        n_test: int = 80,
        seed: int = 0,
        rules: int | None = None,
        rarity: float = 0.1,
    ):
        """See DeskWorld."""
        super().__init__(n_train, n_dev, n_test, seed, rules=rules, rarity=rarity)

    @classmethod
    def own_task(cls, split: str, index: int, level: int, seed: int, house: House | None) -> Task:
        rng = random.Random(f"home {split} task {index} {seed}")
        own = cls.templates(level)
        pairs = [template for template in own if template.count(".set") == 2]
        held_out = split != "train" and bool(pairs) and index // len(LEVELS) % 2 == 0
        template = rng.choice(pairs if held_out else own)
        plan = cls.planner.any_plan(split, rng, template, house, held_out=held_out)
        return cls.task_of(plan, split, house)
