"""The engine of small worlds with hidden rules, in the travel agency, the smart home, and the library of
docs/environments.md."""

import importlib
import itertools
import json
import random
import re
import runpy
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from envs.desk import agent
from envs.desk.plans import LEVELS, WORLDS
from envs.desk.rules import HOUSES
from envs.desk.tools import required
from envs.gym import GymEnv
from envs.hints import hint_text, when_text
from envs.home import SmartHome
from envs.toolcalls import call_text, parse
from envs.travel import Travel, plain
from envs.world import Task
from tests.envs.playing import assert_conforms, calls_in, calls_of, plain_plans, play, without

PAGE = Path(__file__).parents[2] / "docs/environments.md"
LIBRARY = re.search(r"```python\n(# library.py\n.*?)```", PAGE.read_text(), re.DOTALL)[1]


def library(folder: Path) -> dict:
    (folder / "library.py").write_text(LIBRARY)
    return runpy.run_path(str(folder / "library.py"))


@pytest.fixture(scope="module", params=["travel", "home", "library"])
def kind(request, tmp_path_factory):
    """The class of a world, and its `demonstrate`."""
    if request.param == "library":
        made = library(tmp_path_factory.mktemp("library"))
        return made["LibraryWorld"], made["demonstrate"]
    demos = importlib.import_module(f"envs.{request.param}.demos")
    return {"travel": Travel, "home": SmartHome}[request.param], demos.demonstrate


@pytest.fixture(scope="module")
def world(kind):
    return kind[0]


@pytest.fixture(scope="module")
def demonstrate(kind):
    return lambda n, **arguments: [kind[1](random.Random(i), **arguments) for i in range(n)]


def tools_called(demo):
    return [call.name for call in calls_in(m["content"] for m in demo["messages"][2:])]


def family(world):
    return world.desk.tools.family


# --- worlds ---------------------------------------------------------------------------------------


def test_a_world_of_the_page_is_a_module_of_data():
    assert len(LIBRARY.splitlines()) < 150


def test_it_is_a_sound_world(world):
    assert_conforms(lambda: world(n_train=6, n_dev=6, rules=0), limit=2)
    check_env(GymEnv(world(rules=0)), skip_render_check=True)


def test_references_succeed_in_their_house_and_fail_without_a_change_or_its_desk_call(world):
    for rarity in family(world).shares:
        here, other, bare = world(rules=0, rarity=rarity), world(rules=1, rarity=rarity), world()
        assert here.house != other.house
        dev = here.tasks("dev")
        assert {task.difficulty for task in dev} == set(LEVELS)
        for task, ruleless in zip(dev, bare.tasks("dev"), strict=True):
            for name in ("id", "query", "seed", "difficulty"):
                assert getattr(task, name) == getattr(ruleless, name)
            assert play(here, task, task.reference).success
            assert play(here, task, ["done"]).score == play(here, task, []).score == 0
            names = [call.name for call in calls_of(task)]
            for n, name in enumerate(names):
                if name in (*family(world).desk, *family(world).tools):
                    assert not play(here, task, without(task.reference, n)).success
            agree = list(map(here.house.desk, names)) == list(map(other.house.desk, names))
            assert play(other, task, task.reference).success == agree
        assert sum(bool(task.verifier[world.desk.rows]) for task in dev) > len(dev) / 2


def test_no_text_names_the_desk_call_that_a_change_wants(world):
    here = world(rules=0)
    changing = (t for t in here.tasks("train") if calls_of(t)[-1].name in family(world).tools)
    task = next(changing)
    *looks, _, change, _ = task.reference
    schemas = world.desk.tools.schemas
    for tried in family(world).desk:
        assert not re.search(rf"\b{tried}\b", json.dumps(schemas).lower())
        opening = here.reset(task)
        assert list(required(opening.tools)) == [*required(schemas), *family(world).desk]
        for look in looks:
            here.step(look)
        assert here.step(change).messages[0]["content"] == f"error: {family(world).refusal}"
        *_, desk, changed = calls_of(task)
        assert here.step(call_text(tried, desk.arguments)).messages[0]["content"] == "ok"
        refused = here.step(change).info["errors"]
        assert bool(refused) == (tried != here.house.desk(changed.name))


def test_splits_share_no_world_and_a_smaller_split_is_a_prefix(world):
    tasks = {split: world().tasks(split) for split in ("train", "dev", "test")}
    seeds = [{task.seed for task in found} for found in tasks.values()]
    assert sum(map(len, seeds)) == len(set.union(*seeds))
    assert max(seeds[0]) < WORLDS <= min(seeds[1]) and max(seeds[1]) < 2 * WORLDS <= min(seeds[2])
    assert tasks["train"][3].id == f"{world.desk.name}/train/0003"
    assert world(n_train=10).tasks("train") == tasks["train"][:10]
    assert world(seed=1).tasks("train") != tasks["train"]
    with pytest.raises(
        ValueError, match=f"{world.desk.name} has no split 'val'; it has train, dev, test"
    ):
        world().tasks("val")


def test_an_episode_continues_from_its_snapshot_in_any_instance(world):
    tasks = world(rules=0).tasks("dev")
    for task in tasks[-6:]:
        for n in range(len(task.reference)):
            one, other = world(rules=0), world(rules=0)
            play(one, task, task.reference[:n])
            saved = json.loads(json.dumps(one.snapshot()))
            for _ in range(2):
                other.restore(saved)
                assert other.evaluate() == one.evaluate() and other.snapshot() == one.snapshot()
                rest = [other.step(action) for action in task.reference[n:]]
                assert other.evaluate().success
            assert [one.step(action) for action in task.reference[n:]] == rest
        finished = one.snapshot()
        one.reset(tasks[0])
        one.restore(finished)
        assert one.evaluate().success
        with pytest.raises(RuntimeError, match="over"):
            one.step("more")


def test_a_snapshot_depends_on_its_episode_only(world):
    used = world()
    for task in used.tasks("train")[:16]:
        fresh = world()
        assert play(used, task, task.reference) == play(fresh, task, task.reference)
        assert used.snapshot() == fresh.snapshot()


def test_a_world_must_be_reset_first(world):
    fresh, desk = world(), world.desk
    for use in (fresh.evaluate, fresh.snapshot, lambda: fresh.step("done")):
        with pytest.raises(RuntimeError, match="reset"):
            use()
    with pytest.raises(ValueError, match=f"a verifier of {desk.name} has the keys {desk.rows} and"):
        fresh.reset(Task("t", desk.name, "q"))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"rules": HOUSES}, "from 0 to 9"),
        ({"rules": -1}, "from 0 to 9"),
        ({"rules": "0"}, "from 0 to 9"),
        ({"rules": True}, "from 0 to 9"),
        ({"rules": 0, "rarity": 0.2}, "rarity must be one of 0.25, 0.1"),
    ],
)
def test_an_unknown_house_is_refused(world, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        world(**arguments)


# --- house rules ----------------------------------------------------------------------------------


def test_houses_of_one_rarity_use_its_desk_calls_and_each_of_them(world):
    kind = family(world)
    for rarity in kind.shares:
        desks = {desk for desk, share in kind.desk.items() if share == rarity}
        for rules in range(HOUSES):
            house = kind.house(rules, rarity)
            assert house == kind.house(rules, rarity)
            assert len(house.wants) == len(kind.operations)
            assert set(house.wants) <= desks
            assert len(set(house.wants)) == min(len(desks), len(house.wants))


def test_demonstrated_houses_are_others_and_have_common_desk_calls_most_often(world):
    kind, rng = family(world), random.Random(0)
    houses = [kind.any_house(rng) for _ in range(4000)]
    numbers = itertools.product(range(HOUSES), kind.shares)
    reserved = {kind.house(*number) for number in numbers}
    assert reserved.isdisjoint(houses)
    if len(kind.operations) < 4:
        return  # so few houses that those left out change the shares
    for desk, share in kind.desk.items():
        found = sum(house.wants.count(desk) for house in houses) / 4000 / len(kind.operations)
        assert found == pytest.approx(share, rel=0.35, abs=0.004)


# --- plain queries --------------------------------------------------------------------------------


def test_a_plain_query_names_what_its_calls_need_and_nothing_that_they_have_to_find(world):
    ids = (plain._Errand if world is Travel else world.desk.planner).ids
    for plan in plain_plans(world, 150):
        task = world.desk.task_of(plan)
        assert play(world(), task, task.reference).success, plan
        tools, known = world.desk.tools(plan.seed), set(ids.findall(plan.query))
        for call in plan.calls:
            used = {value for value in call.arguments.values() if ids.fullmatch(value)}
            assert used <= known, plan
            known |= set(ids.findall(tools.call(call.tool, call.arguments)[0]))
        assert plan.answer is None or not re.search(rf"\b{plan.answer}\b", plan.query)
        assert world.desk.tools.summaries[plan.tools[-1]].lower() in plan.query.lower()


def test_a_plain_query_is_worded_as_the_explorer_words_it(world):
    """The calls of a plan, as events of a walk, get the same query from the explorer."""
    from evolver.questioning.calls import Event, operations_of
    from evolver.questioning.goals import Goal
    from evolver.questioning.phrasing import Option, Phrasing

    ids = {"R99", "L99", "H99", "S99", "B99", "D99", "F99", "P99", "O99", "9A", "9B", "9C"}
    made = world()
    phrasing = Phrasing(operations_of(made, made.reset(made.tasks("train")[0])), ids)
    assert phrasing.summaries.items() >= world.desk.tools.summaries.items()
    phrasing.question = lambda event, query, rng, fits: Option(plan.wanted, plan.answer, [])
    for plan in plain_plans(world, 100):
        tools = world.desk.tools(plan.seed)
        events = [
            Event(call.tool, call.arguments, "", tools.call(call.tool, call.arguments)[0], ok=True)
            for call in plan.calls
        ]
        targets = [n for n, tool in enumerate(plan.tools) if tool in family(world).tools]
        goal = Goal(events, targets, len(events) - 1 if plan.answer else None)
        assert plan.query in {phrasing.query(goal, random.Random(n))[0] for n in range(8)}, plan


# --- demonstrations -------------------------------------------------------------------------------


def test_demonstrations_are_well_formed_and_as_careful_as_asked(world, demonstrate):
    careful, careless, heeding = (
        demonstrate(150, care=care, hint=hint, houses=True)
        for care, hint in ((1.0, 0.5), (0.3, 0.0), (0.3, 1.0))
    )
    assert all(demo["success"] for demo in careful)
    assert {demo["difficulty"] for demo in careful} == set(LEVELS)
    rates = [sum(demo["success"] for demo in found) / 150 for found in (careless, heeding)]
    assert 0.3 < rates[0] < 0.8 and rates[0] + 0.1 < rates[1]
    arguments = required(world.desk.tools.offered(family(world).house(0, 0.1)))
    for demo in careless + heeding:
        roles = [message["role"] for message in demo["messages"]]
        assert roles[:2] == ["system", "user"] and set(roles[3::2]) <= {"tool"}
        assert set(roles[2::2]) == {"assistant"} and roles[-1] == "assistant"
        assert demo["hinted"] == demo["messages"][1]["content"].startswith("<EXP>When asked ")
        *acts, final = [m["content"] for m in demo["messages"] if m["role"] == "assistant"]
        for act in acts:
            (call,) = parse(act).calls
            assert act == call_text(call.name, call.arguments)
            assert list(call.arguments) == arguments[call.name]
        assert not parse(final).calls and not parse(final).errors
    assert demonstrate(1, care=0.3, hint=1.0, houses=True) == heeding[:1]


def test_careful_demonstrations_show_houses_only_below_an_experience(world, demonstrate):
    def said(found):
        return set(itertools.chain(*map(tools_called, found)))

    common = [desk for desk, share in family(world).desk.items() if share == 0.25]
    assert not said(demonstrate(60, care=1.0, houses=True)) & set(family(world).desk)
    for arguments in ({"care": 0.7}, {"care": 1.0, "hint": 1.0}):
        assert said(demonstrate(60, houses=True, **arguments)) >= set(common)
    for wrong in ({"plain": 2}, {"houses": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            demonstrate(1, **wrong)


def test_an_agent_without_the_desk_call_recovers_by_making_it(world, demonstrate):
    found = [demo for demo in demonstrate(200, care=0.6, houses=True) if demo["success"]]
    refusal = f"error: {family(world).refusal}"
    assert sum(refusal in [m["content"] for m in demo["messages"]] for demo in found) > 10


def test_a_share_of_the_queries_is_plain(world, demonstrate):
    texts = {text.lower() for text in world.desk.tools.summaries.values()}

    def share(**arguments):
        queries = [demo["messages"][1]["content"].lower() for demo in demonstrate(100, **arguments)]
        return sum(any(text + ":" in query for text in texts) for query in queries) / 100

    assert share(plain=0.0) == 0 and 0.35 < share() < 0.65 and share(plain=1.0) == 1


def test_an_experience_names_the_calls_of_the_same_goals_and_no_values(world, demonstrate):
    named = 0
    for demo in demonstrate(60, care=1.0, hint=1.0, houses=True):
        block = demo["messages"][1]["content"].partition("</EXP>\n")[0]
        made = tools_called(demo)
        paths = [line.rpartition(": ")[2].rstrip(".").split(", ") for line in block.split("\n")]
        named += len(made) in map(len, paths)
        assert not re.search(r"\b([A-Z]\d\d|Red|Jazz|Kitchen|Anna|Rome|Ann|Dune|Abel)\b", block)
    assert named > 50


def test_slips_are_scaled_and_heed_an_experience():
    for kind in (agent.Careless, importlib.import_module("envs.travel.demos").Agent):
        odds = agent.odds(kind, 0.15, False)
        assert set(odds) == set(kind.slips) and all(0 < p < 1 for p in odds.values())
        assert all(p < odds[name] for name, p in agent.odds(kind, 0.15, True).items())
        assert not any(agent.odds(kind, 1.0, False).values())


def test_experience_text():
    assert when_text("Add a bag to order O12.") == "When asked to add a bag to order X"
    assert (
        when_text("Who travels on Ann's trip to Rome?") == "When asked who travels on X's trip to X"
    )
    described = "Take a seat for an order: order Ann Rome. Then get a quote for a flight: flight Oslo noon. Reply with it."
    assert when_text(described) == (
        "When asked to take a seat for an order order X X then get a quote for a flight flight X noon reply with it"
    )
    assert (
        hint_text(["order", "bag"], "When asked to add a bag")
        == "When asked to add a bag: order, bag."
    )
