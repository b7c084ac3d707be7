"""The explorer in worlds of a stranger: modules of plain functions, each with something that an
explorer may overlook, and with a rule that no description mentions."""

import pytest

from envs import make
from evolver.questioning.curiosity import Curiosity
from tests.evolver.explorers import Questioning, solves

# {module: (goals that have to be found, (a call, the later one that is refused without it))}. That
# an account is a transfer's source, nothing in the bank says: its rule stays unknown.
STRANGERS = {
    "garage": ({"book_car", "charge_car", "check_licence"}, ("check_licence", "book_car")),
    "garage_by_driver": ({"book_car", "charge_car"}, ("check_licence", "book_car")),
    "bank": ({"deposit", "?show_balance", "unfreeze"}, None),
    "tickets": (
        {"assign_ticket", "close_ticket", "set_priority"},
        ("assign_ticket", "close_ticket"),
    ),
}
BUDGET = 60


# The default run has the harder of the two garages.
SLOW = {"garage": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in STRANGERS]
)
def test_a_strangers_world_gives_tasks_and_its_hidden_rule(name):
    def make_world():
        return make("functions", module=f"tests.evolver.strangers.{name}")

    made = Questioning(Curiosity, make_world, make_world().tasks("train")[:16])
    tasks = made.explore(seed=0, budget=BUDGET)
    assert len(tasks) >= 0.7 * BUDGET
    wanted, rule = STRANGERS[name]
    goals = [set(task.meta["template"].split("+")) for task in tasks]
    assert wanted <= set().union(*goals)
    if rule is None:
        return
    first, later = rule
    hidden = [task for task in tasks if first in task.meta["prerequisites"]]
    assert len(hidden) >= 2
    for task in hidden:
        assert later in task.meta["template"]
        without = [action for action in task.reference if f'"{first}"' not in action]
        assert solves(make_world(), task, task.reference)
        assert not solves(make_world(), task, without)
