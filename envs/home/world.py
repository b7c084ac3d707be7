"""The smart home as a World."""

from envs.desk.verify import Answers, any_of
from envs.desk.world import Desk, DeskWorld
from envs.home.data import LETTERS, PEOPLE, ROOMS, VALUES
from envs.home.devices import Home
from envs.home.tasks import Errand


class SmartHome(DeskWorld):
    """A home with rooms, people and devices, simulated in memory. In dev and test, every other one
    of two changes is held out."""

    desk = Desk(
        "home",
        "You run a smart home.",
        Home,
        Errand,
        Answers(
            (
                r"\d+",
                *(rf"{letter}\d+" for letter in ("r", *map(str.lower, LETTERS.values()))),
                *map(any_of, (ROOMS, (*PEOPLE, "nobody"), *VALUES.values())),
            )
        ),
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
