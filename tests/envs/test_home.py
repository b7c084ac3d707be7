"""The smart home: its tasks, tools, house rules and demonstrations."""

import json
import random
import re

import pytest
from gymnasium.utils.env_checker import check_env

import envs
from envs import conformance
from envs.gym import GymEnv
from envs.home import SmartHome, demos
from envs.home.data import data
from envs.home.devices import CHANGES, DESK, HOMES, NOT_READY, Home, tools_of
from envs.home.tasks import HELD_OUT, LEVELS, SUMMARIES, any_plan, task_of, templates
from envs.home.verify import answers
from envs.house_rules import HOUSES
from envs.toolcalls import call_text, parse


@pytest.fixture(scope="module")
def world():
    return SmartHome(rules=0)


@pytest.fixture(scope="module")
def dev(world):
    return world.tasks("dev")


def play(world, task, actions):
    world.reset(task)
    for action in actions:
        if world.step(action).terminated:
            break
    return world.evaluate()


def calls_of(task):
    return [call for action in task.reference for call in parse(action).calls]


def kinds_changed(task):
    return [CHANGES[call.name][0] for call in calls_of(task) if call.name in CHANGES]


# --- tasks ----------------------------------------------------------------------------------------


def test_references_succeed_in_their_house_and_fail_without_a_call(world, dev):
    other = SmartHome(rules=1)
    assert len(dev) == 40 and {task.difficulty for task in dev} == set(LEVELS)
    for task, without in zip(dev, SmartHome().tasks("dev"), strict=True):
        assert (task.id, task.query, task.seed, task.difficulty) == (
            without.id,
            without.query,
            without.seed,
            without.difficulty,
        )
        assert play(world, task, task.reference).success
        idle = play(world, task, ["done"])
        assert not idle.success and idle.score == 0
        for n, call in enumerate(calls_of(task)):
            if call.name in (*CHANGES, *DESK):
                assert not play(world, task, task.reference[:n] + task.reference[n + 1 :]).success
        same = all(
            world.house.desk(call.name) == other.house.desk(call.name) for call in calls_of(task)
        )
        assert play(other, task, task.reference).success == same
    assert sum(bool(task.verifier["changes"]) for task in dev) > 28


def test_splits_share_no_home_and_held_out_pairs_are_in_dev_only(dev):
    train, demonstrated = (
        SmartHome().tasks("train"),
        [any_plan("demonstrations", random.Random(0), "room.set")],
    )
    homes = [{task.seed for task in tasks} for tasks in (train, dev, SmartHome().tasks("test"))]
    homes.append({plan.world for plan in demonstrated})
    assert sum(map(len, homes)) == len(set.union(*homes))
    held_out = [set(pair) for pair in HELD_OUT]
    assert 5 <= sum(set(kinds_changed(task)) in held_out for task in dev) <= 20
    shown = [
        *train,
        *(
            task_of(any_plan("demonstrations", random.Random(n), "room.set+id.set"))
            for n in range(100)
        ),
    ]
    assert not [
        task
        for task in shown
        if len(kinds_changed(task)) == 2 and set(kinds_changed(task)) in held_out
    ]


def test_an_answer_names_one_value_of_its_type():
    assert (
        answers("It is Red.", "Red")
        and answers("21 degrees", "21")
        and answers("Anna is in the Hall", "Hall")
    )
    assert (
        not answers("Red or Blue", "Red")
        and not answers("21 or 22", "21")
        and not answers("Hall, Bath", "Hall")
    )
    assert answers("R12", "R12") and not answers("R12 R13", "R12") and not answers("", "Red")


# --- tools and house rules ------------------------------------------------------------------------


def test_a_change_wants_the_desk_call_of_its_kind_and_no_text_names_it():
    for rarity in HOMES.rarities:
        house = HOMES.house(0, rarity)
        descriptions = json.dumps(tools_of(None)).lower()
        assert not any(re.search(rf"\b{desk}\b", descriptions) for desk in DESK)
        for tool, (kind, _, _) in CHANGES.items():
            plan = next(
                plan
                for n in range(1000)
                if (
                    plan := any_plan("train", random.Random(n), "id.set", house, kinds=[kind])
                ).calls[-1][0]
                == tool
            )
            (desk, about, _), (_, arguments, _) = plan.calls
            assert desk == house.desk(tool) != ""
            for tried in DESK:
                home = Home(plan.world, house)
                assert home.call(tool, arguments) == (f"error: {NOT_READY}", False)
                assert home.call(tried, about) == ("ok", True)
                assert home.call(tool, arguments)[1] == (tried == desk)


def test_refusals_say_what_is_wrong():
    home = Home(7)
    lamp, door = (
        next(d.id for d in data(7).devices.values() if d.kind == kind) for kind in ("lamp", "door")
    )
    said = {
        ("light", "Mauve", lamp): "colour is one of Red, Green, Blue, White, Amber",
        ("light", "Red", door): "that is no lamp",
        ("light", "Red", "L00"): "no such device",
        ("light", home.state[lamp], lamp): f"it is {home.state[lamp]}",
    }
    for (tool, colour, device), text in said.items():
        assert home.call(tool, {"device": device, "colour": colour}) == (f"error: {text}", False)
    assert home.call("rooms", {"room": "Bath"}) == ("error: rooms takes nothing", False)
    assert home.call("room", {}) == ("error: room takes name", False)
    assert home.call("room", {"name": 3}) == ("error: name must be a string", False)
    assert home.call("wake", {"id": lamp})[0].startswith(
        "error: no such tool, there are rooms, room"
    )


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"rules": HOUSES}, "from 0 to 9"),
        ({"rules": "0"}, "from 0 to 9"),
        ({"rules": True}, "from 0 to 9"),
        ({"rules": 0, "rarity": 0.2}, "rarity must be one of 0.25, 0.1, 0.03, 0.01, not 0.2"),
    ],
)
def test_an_unknown_house_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SmartHome(**arguments)


def test_it_is_a_sound_world_that_tells_an_explorer_nothing(world):
    passed, problems = conformance.run(lambda: SmartHome(n_train=6, n_dev=6, rules=0), limit=2)
    assert len(passed) == len(conformance.CHECKS) and not problems
    check_env(GymEnv(envs.make("home", rules=0)), skip_render_check=True)
    assert (
        world.profile() == {}
        and not hasattr(world, "difference")
        and not hasattr(world, "describe")
    )
    with pytest.raises(ValueError, match="home has no split 'val'; it has train, dev, test"):
        world.tasks("val")


def test_an_episode_continues_from_its_snapshot(dev):
    for task in dev[-6:]:
        for n in range(len(task.reference)):
            first, second = SmartHome(rules=0), SmartHome(rules=0)
            play(first, task, task.reference[:n])
            second.restore(json.loads(json.dumps(first.snapshot())))
            for action in task.reference[n:]:
                assert first.step(action) == second.step(action)
            assert second.evaluate().success


# --- exploring ------------------------------------------------------------------------------------


def test_a_plain_query_is_worded_as_the_explorer_words_it(world):
    """The calls of a plan, as events of a walk, get the same query from the explorer."""
    from evolver.questioning.calls import Event, operations_of
    from evolver.questioning.goals import Goal
    from evolver.questioning.phrasing import Option, Phrasing

    operations = operations_of(world, world.reset(world.tasks("train")[0]))
    phrasing = Phrasing(operations, {"R99", "L99", "H99", "S99", "B99", "D99"})
    assert phrasing.summaries.items() >= SUMMARIES.items()
    phrasing.question = lambda event, query, rng, fits: Option(plan.wanted, plan.answer, [])
    for n in range(120):
        rng = random.Random(n)
        plan = any_plan(
            "train", rng, rng.choice(templates(rng.choice(LEVELS), plain=True)), plain=True
        )
        home = Home(plan.world)
        events = [
            Event(tool, given, "", home.call(tool, given)[0], ok=True)
            for tool, given, _ in plan.calls
        ]
        targets = [n for n, (tool, _, _) in enumerate(plan.calls) if tool in CHANGES]
        goal = Goal(events, targets, len(events) - 1 if plan.answer else None)
        assert plan.query in {phrasing.query(goal, random.Random(seed))[0] for seed in range(8)}


def test_a_retried_call_keeps_the_values_that_its_schema_lists(world):
    """Nothing that the world shows replaces one of the choices of an argument."""
    from evolver.questioning.tasks import probe_of
    from evolver.questioning.values import SeenValues
    from evolver.questioning.walks import Walker

    walker, made = Walker(breadth=6, depth=18, branches=2), []
    for n, task in enumerate(world.tasks("train")[:16]):
        for walk in walker.walks(world, probe_of(task), random.Random(n), SeenValues()):
            made += [event for event in walk if event.name == "light"]
    assert len(made) > 20 and {e.arguments["colour"] for e in made} <= {
        "Red",
        "Green",
        "Blue",
        "White",
        "Amber",
    }


# --- demonstrations -------------------------------------------------------------------------------


def shown(n, **arguments):
    return [demos.demonstrate(random.Random(seed), **arguments) for seed in range(n)]


def test_demonstrations_are_well_formed_and_as_careful_as_asked():
    careful, careless, heeding = (
        shown(150, care=care, hint=hint, houses=True)
        for care, hint in ((1.0, 0.5), (0.3, 0.0), (0.3, 1.0))
    )
    assert all(demo["success"] for demo in careful) and {
        demo["difficulty"] for demo in careful
    } == set(LEVELS)
    rates = [sum(demo["success"] for demo in found) / 150 for found in (careless, heeding)]
    assert 0.35 < rates[0] < 0.75 and rates[0] + 0.1 < rates[1]
    assert 0.35 < sum(demo["plain"] for demo in careful) / 150 < 0.65
    properties = {
        t["function"]["name"]: t["function"]["parameters"]["required"]
        for t in tools_of(HOMES.house(0, 0.1))
    }
    for demo in careless + heeding:
        roles = [message["role"] for message in demo["messages"]]
        assert roles[:2] == ["system", "user"] and roles[2::2] == ["assistant"] * len(roles[2::2])
        assert set(roles[3::2]) <= {"tool"} and roles[-1] == "assistant"
        assert demo["hinted"] == demo["messages"][1]["content"].startswith("<EXP>When asked ")
        *acts, final = [
            message["content"] for message in demo["messages"] if message["role"] == "assistant"
        ]
        for act in acts:
            (call,) = parse(act).calls
            assert (
                act == call_text(call.name, call.arguments)
                and list(call.arguments) == properties[call.name]
            )
        assert not parse(final).calls and not parse(final).errors
    assert shown(1, care=0.3, hint=0.5, houses=True) == shown(1, care=0.3, hint=0.5, houses=True)


def test_demonstrations_show_other_houses_and_careful_ones_only_below_an_experience():
    rng = random.Random(0)
    houses = {HOMES.any_house(rng) for _ in range(2000)}
    assert not houses & {
        HOMES.house(rules, rarity) for rules in range(HOUSES) for rarity in HOMES.rarities
    }

    def said(**arguments):
        turns = [
            m["content"]
            for demo in shown(60, houses=True, **arguments)
            for m in demo["messages"][2:]
        ]
        return {call.name for turn in turns for call in parse(turn).calls}

    assert not said(care=1.0) & set(DESK)
    assert {"wake", "pair"} <= said(care=0.7) & said(care=1.0, hint=1.0)
    for wrong in ({"plain": 2}, {"houses": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            demos.demonstrate(random.Random(0), **wrong)


def test_an_agent_without_the_desk_call_recovers_by_making_it():
    found = [demo for demo in shown(200, care=0.6, houses=True) if demo["success"]]
    recovered = 0
    for demo in found:
        texts = [message["content"] for message in demo["messages"]]
        recovered += any(NOT_READY in text for text in texts)
    assert recovered > 10


def test_an_experience_names_the_calls_of_the_same_goals_and_no_values():
    named = 0
    for demo in shown(60, care=1.0, hint=1.0, houses=True):
        block = demo["messages"][1]["content"].partition("</EXP>\n")[0]
        made = [call.name for m in demo["messages"][2:] for call in parse(m["content"]).calls]
        paths = [line.rpartition(": ")[2].rstrip(".").split(", ") for line in block.split("\n")]
        named += [name.replace("un", "") for name in made] in [
            [name.replace("un", "") for name in p] for p in paths
        ]
        assert not re.search(r"\b([A-Z]\d\d|Red|Jazz|Kitchen|Anna)\b", block)
    assert named == 60
