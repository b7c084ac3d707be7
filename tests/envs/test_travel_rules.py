"""House rules: hidden preconditions that differ from house to house."""

import random
import re

import pytest

from envs import conformance
from envs.toolcalls import call_text
from envs.travel import Travel, plain
from envs.travel.agency import NOT_CLEARED, TOOLS, Agency
from envs.travel.demos import demonstrate
from envs.travel.rules import DESK, HOUSES, OPERATIONS, RARITIES, any_house, house


@pytest.mark.parametrize("rarity", RARITIES)
def test_references_succeed_in_their_house_and_fail_without_its_desk_calls(rarity):
    world, other = Travel(rules=0, rarity=rarity), Travel(rules=1, rarity=rarity)
    assert house(0, rarity) != house(1, rarity)
    plain_world = Travel()
    changed = 0
    for task, without in zip(world.tasks("dev"), plain_world.tasks("dev"), strict=True):
        assert (task.id, task.query, task.seed, task.difficulty) == (
            without.id,
            without.query,
            without.seed,
            without.difficulty,
        )
        assert _success(world, task, task.reference)
        desks = [
            action
            for action in task.reference
            if re.search(rf'"name": "({"|".join(DESK)})"', action)
        ]
        assert bool(desks) == bool(task.verifier["state"])
        if desks:
            changed += 1
            assert not _success(
                world, task, [action for action in task.reference if action not in desks]
            )
            assert _success(world, task, task.reference)
    assert changed > 30
    for task in world.tasks("dev"):
        swapped = any(
            house(0, rarity).desk(tool) != house(1, rarity).desk(tool)
            and f'"name": "{tool}"' in "".join(task.reference)
            for tool in ("book", "bag", "seat", "cancel", "refund")
        )
        assert _success(other, task, task.reference) == (not swapped)


def test_a_refusal_does_not_name_the_desk_call_and_no_description_mentions_it():
    for rarity in RARITIES:
        here = house(0, rarity)
        world = Travel(rules=0, rarity=rarity)
        task = next(t for t in world.tasks("train") if t.meta["template"] == "order.bag")
        observation = world.reset(task)
        names = [tool["function"]["name"] for tool in observation.tools]
        assert names == [tool["function"]["name"] for tool in TOOLS] + list(DESK)
        look, _, bag, _ = task.reference
        world.step(look)
        assert world.step(bag).messages[0]["content"] == f"error: {NOT_CLEARED}"
        for tool in TOOLS:
            assert not set(DESK) & set(tool["function"]["description"].lower().split())
        order = re.search(r"O\d\d", look)[0]
        for desk in DESK:
            world.step(call_text(desk, {"id": order}))
            refused = NOT_CLEARED in world.step(bag).messages[0]["content"]
            if desk == here.desk("bag"):
                assert not refused
                break
            assert refused


def test_a_house_is_part_of_a_snapshot_and_desk_calls_need_an_id_that_exists():
    agency = Agency(7, house(0, 0.1))
    order = next(iter(agency.start.orders))
    desk = agency.house.desk("bag")
    assert agency.call(desk, {"id": "O00"}) == ("error: no such order or flight", False)
    agency.call("order", {"id": order})
    assert agency.call(desk, {"id": order}) == ("ok", True)
    before = agency.snapshot()
    assert "ok" in agency.call(desk, {"id": order})
    other = Agency(7, house(0, 0.1))
    other.restore(before)
    if not agency.start.orders[order].bag:
        assert other.call("bag", {"order": order})[1]
    assert Agency(7).call(desk, {"id": order})[0].startswith("error: no such tool")


def test_houses_of_one_rarity_use_its_desk_calls_and_each_of_them():
    for rarity in RARITIES:
        desks = {desk for desk, share in DESK.items() if share == rarity}
        for rules in range(HOUSES):
            assert set(house(rules, rarity).wants) == desks
            assert len(house(rules, rarity).wants) == len(OPERATIONS)
            assert house(rules, rarity) == house(rules, rarity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": HOUSES}, "from 0 to 9"),
        ({"rules": -1}, "from 0 to 9"),
        ({"rules": True}, "from 0 to 9"),
        ({"rules": "0"}, "from 0 to 9"),
        ({"level": 7}, "one of 1, 2, 3, 4, 5, 6, or 0 for all, not 7"),
        ({"rules": 0, "rarity": 0.2}, "rarity must be one of 0.25, 0.1, 0.03, 0.01, not 0.2"),
    ],
)
def test_an_unknown_house_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Travel(**arguments)


def test_all_tasks_may_be_of_one_level():
    for split in ("train", "dev"):
        assert {
            task.difficulty for task in Travel(n_train=8, n_dev=8, rules=0, level=4).tasks(split)
        } == {4}


def test_demonstrations_show_other_houses_with_common_desk_calls_most_often():
    rng = random.Random(0)
    houses = [any_house(rng) for _ in range(4000)]
    reserved = {house(rules, rarity) for rules in range(HOUSES) for rarity in RARITIES}
    assert not reserved & set(houses)
    for desk, share in DESK.items():
        found = sum(here.wants.count(desk) for here in houses) / (len(houses) * len(OPERATIONS))
        assert found == pytest.approx(share, rel=0.35, abs=0.004)
    careful = [demonstrate(random.Random(n), care=1.0, hint=0.5, houses=True) for n in range(80)]
    careless = [demonstrate(random.Random(n), care=0.99, houses=True) for n in range(80)]
    assert all(episode["success"] for episode in careful)
    assert sum(episode["success"] for episode in careless) > 70

    def desk_calls(episodes):
        said = "".join(
            m["content"] for e in episodes for m in e["messages"] if m["role"] == "assistant"
        )
        return {desk for desk in DESK if f'"name": "{desk}"' in said}

    assert desk_calls(careless) >= {"check", "stamp", "scan"}
    assert desk_calls(e for e in careful if e["hinted"]) >= {"check", "stamp", "scan"}
    assert not desk_calls(
        e for e in careful if not e["hinted"]
    )  # nothing would tell which one comes next
    assert demonstrate(random.Random(4), houses=True) == demonstrate(random.Random(4), houses=True)
    assert any(episode["template"].startswith(plain.PREFIX) for episode in careful)
    with pytest.raises(ValueError, match="houses"):
        demonstrate(random.Random(0), houses=1)


def test_a_world_with_house_rules_is_sound():
    passed, problems = conformance.run(lambda: Travel(n_train=6, n_dev=6, rules=0))
    assert len(passed) > 5
    assert not problems


def _success(world, task, actions):
    world.reset(task)
    for action in actions:
        if world.step(action).terminated:
            break
    return world.evaluate().success
