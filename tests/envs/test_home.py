"""The smart home: its tasks, tools and answers. What it shares with other worlds is in test_desk.py."""

import random

import pytest

from envs.desk.tools import Refused
from envs.home import SmartHome
from envs.home.data import VALUES, data
from envs.home.devices import CHANGES, Home
from envs.home.tasks import HELD_OUT, Errand
from tests.envs.playing import calls_of


def kinds_changed(task):
    return [CHANGES[call.name][0] for call in calls_of(task) if call.name in CHANGES]


def test_held_out_pairs_are_changed_in_dev_only():
    dev, held_out = SmartHome().tasks("dev"), [set(pair) for pair in HELD_OUT]
    assert len(dev) == 40
    assert 5 <= sum(set(kinds_changed(task)) in held_out for task in dev) <= 20
    plans = [
        Errand.any_plan("demonstrations", random.Random(n), "room.set+id.set") for n in range(100)
    ]
    assert min(plan.seed for plan in plans) >= 3_000_000  # no split has their homes
    shown = [*SmartHome().tasks("train"), *map(SmartHome.desk.task_of, plans)]
    pairs = [kinds_changed(task) for task in shown]
    assert not [pair for pair in pairs if len(pair) == 2 and set(pair) in held_out]


def test_an_answer_names_one_value_of_its_type():
    accept = SmartHome.desk.answers.accept
    assert accept("It is Red.", "Red") and accept("21 degrees", "21")
    assert accept("Anna is in the Hall", "Hall") and accept("R12", "R12")
    assert not accept("Red or Blue", "Red") and not accept("21 or 22", "21")
    assert not accept("Hall, Bath", "Hall") and not accept("R12 R13", "R12")
    assert not accept("", "Red")


def test_refusals_say_what_is_wrong():
    home = Home(7)
    lamp, door = (
        next(d.id for d in data(7).devices.values() if d.kind == kind) for kind in ("lamp", "door")
    )
    is_now = home.state[lamp]
    for tool, arguments, text in (
        ("light", {"device": lamp, "colour": "Mauve"}, "colour is one of Red, Green, Blue, White, Amber"),
        ("light", {"device": door, "colour": "Red"}, "that is no lamp"),
        ("light", {"device": "L00", "colour": "Red"}, "no such device"),
        ("light", {"device": lamp, "colour": is_now}, f"it is {is_now}"),
        ("rooms", {"room": "Bath"}, "rooms takes nothing"),
        ("room", {}, "room takes name"),
        ("room", {"name": 3}, "name must be a string"),
    ):  # fmt: skip
        assert home.call(tool, arguments) == (f"error: {text}", False)
    assert home.call("wake", {"id": lamp})[0].startswith(
        "error: no such tool, there are rooms, room"
    )
    with pytest.raises(Refused, match="no such device"):
        home.find("L00")


def test_it_tells_an_explorer_nothing():
    world = SmartHome(rules=0)
    assert world.profile() == {}
    assert not hasattr(world, "difference") and not hasattr(world, "describe")


def test_a_retried_call_keeps_the_values_that_its_schema_lists():
    """Nothing that the world shows replaces one of the choices of an argument."""
    from evolver.questioning.tasks import probe_of
    from evolver.questioning.values import SeenValues
    from evolver.questioning.walks import Walker

    world = SmartHome(rules=0)
    walker, made = Walker(breadth=6, depth=18, branches=2), []
    for n, task in enumerate(world.tasks("train")[:16]):
        for walk in walker.walks(world, probe_of(task), random.Random(n), SeenValues()):
            made += [event for event in walk if event.name == "light"]
    assert len(made) > 20 and {e.arguments["colour"] for e in made} <= set(VALUES["lamp"])
