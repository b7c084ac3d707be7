"""Exploring among tools that say nothing about the world, and in a mixture of unequal worlds."""

import random
from collections import Counter

import pytest

from envs import make
from envs.bfcl import Bfcl
from envs.probed import probed
from envs.toolcalls import parse, run_calls
from envs.world import StepResult
from evolver.questioning.attention import attended, subjects
from evolver.questioning.calls import Operation
from evolver.questioning.operation_stats import OperationStats
from tests.evolver.crowd import ANSWERS, Crowded, Huge
from tests.evolver.explorers import curious, learnt

BUDGET = 15


def crowded(answer, extra, *, steps, world="travel", rounds=4, **options):
    """Return the questioning of a world with extra tools after at most so many steps, and its
    tasks."""

    def make_world():
        return Crowded(make(world, **options), ANSWERS[answer], extra)

    made = curious(lambda: probed(make_world()), rounds=rounds, most=8)
    made.pool.is_over = lambda: made.pool.counted("env_steps") > steps
    return made, made.explore(0, BUDGET)


@pytest.mark.parametrize(
    "answer, extra",
    [
        ("echo", 5),
        ("record", 5),
        ("constant", 30),
        ("refuse", 30),
        ("constant", 200),
        ("refuse", 200),
    ],
)
def test_tools_that_say_nothing_do_not_hide_those_that_do(answer, extra):
    _, tasks = crowded(answer, extra, steps=60_000, rules=0)
    assert len(tasks) >= 0.8 * BUDGET
    names = [task.meta["template"] for task in tasks]
    assert not any("_" in name for name in names)


def operations(**texts):
    """Return operations without arguments. texts: {name: description}."""
    return {name: Operation(name, text, {}, [], lambda given: "") for name, text in texts.items()}


APPS = {f"{word}_{n}": f"Part of the {word} app." for word in ("mail", "bank") for n in range(60)}


def test_a_visit_attends_to_tools_of_one_subject():
    stats = OperationStats()
    rng = random.Random(0)
    for _ in range(40):
        visit = attended(operations(**APPS), stats, rng, ())
        apps = Counter(name.split("_")[0] for name in visit)
        assert len(visit) == 32 and max(apps.values()) >= 28
    assert all(stats.roles[name].visits for name in APPS)


def test_first_visits_meet_all_tools_even_if_they_read_alike():
    alike = operations(**{f"t_{n}": "Report." for n in range(200)})
    stats = OperationStats()
    rng = random.Random(0)
    assert subjects(alike) == 7
    met = set().union(*(attended(alike, stats, rng, ()) for _ in range(7)))
    assert met == set(alike)


def test_a_visit_has_the_tools_that_it_begins_with_and_few_tools_are_all_met():
    stats = OperationStats()
    rng = random.Random(0)
    assert {"mail_7", "bank_7"} <= attended(
        operations(**APPS), stats, rng, ["mail_7", "bank_7"]
    ).keys()
    few = operations(**dict(list(APPS.items())[:100]))
    assert attended(few, stats, rng, ()) is few


def test_one_tool_with_something_to_say_outweighs_hundreds_that_answer_alike():
    stats = OperationStats()
    rng = random.Random(0)
    for name in APPS:
        answer = "no such thing" if name != "bank_7" else "no account is open yet"
        learnt(stats, name, {"key": "x"}, answer, ok=False)
        stats.roles[name].visits = 1
    apps = Counter[str]()
    for _ in range(100):
        apps.update(name.split("_")[0] for name in attended(operations(**APPS), stats, rng, ()))
    assert apps["bank"] > 1.5 * apps["mail"]


def test_a_small_world_beside_a_huge_one_is_explored_as_a_small_one():
    def make_world(extra=0):
        return Crowded(make("travel"), ANSWERS["constant"], extra)

    starts = make_world().tasks("train")
    explorer = curious(make_world).explorer
    for extra, crowded in ((0, False), (200, True), (0, False)):
        next(explorer._walks(make_world(extra), starts[0], random.Random(0)))
        assert explorer.walker.stats.crowded == crowded


def test_an_exploration_without_tasks_names_what_was_tried():
    made, tasks = crowded("refuse", 5, steps=200, rules=0)
    said = made.pool.rejections()
    assert not tasks and "none" not in said
    assert "walks, 0 tasks kept, no other was proposed; of 25 operations" in said
    assert "were always refused (aaa_0" in said


def test_an_answer_that_only_repeats_the_arguments_says_nothing():
    def told(*answers):
        stats = OperationStats()
        for key, answer in answers:
            event = learnt(stats, "look", {"key": key}, answer)
        return stats.says_nothing(event), stats.roles["look"].forms

    # "nothing" and "of" are arguments and words of the answer, too.
    echoed = ("nothing", "look of nothing: nothing"), ("of", "look of of: nothing")
    assert told(*echoed) == (True, ["look of \0: nothing"])
    assert told(("x", "x"), ("red ball", "red ball"))[0]
    assert not told(("x", "x 1"), ("y", "y 2"))[0]
    assert not told(("x", "x"))[0]  # it may be about anything


def test_a_tool_that_refuses_what_it_does_not_know_confirms_what_it_repeats():
    stats = OperationStats()
    for key in "xyz":
        learnt(stats, "look", {"key": key}, f"{key} is here", ok=key != "z")
    assert not stats.roles["look"].repeats


MIXED = {"travel": {"args": {"rules": 0}}, "home": {"args": {"rules": 1}}}


@pytest.mark.parametrize("seed", range(2))
def test_unequal_worlds_give_an_even_share_of_a_small_budget(seed):
    def make_world():
        return make("mixture", worlds=MIXED)

    made = curious(make_world, most=8)
    given = Counter(task.env for task in made.explore(seed, BUDGET))
    assert set(given.values()) == {7, 8} and len(made.pool.seeds) > BUDGET


def test_one_world_fills_the_budget_where_the_other_gives_nothing():
    class Silent(Crowded):
        """A mixture of which one world refuses everything."""

        def reset(self, task, seed=0):
            self.mute = task.env == "travel"
            return self.world.reset(task, seed)

        def step(self, action):
            if self.mute:
                return StepResult(*run_calls(parse(action), self.answer, 1)[:1], info={"errors": 1})
            return self.world.step(action)

    def make_world():
        return Silent(make("mixture", worlds=MIXED), ANSWERS["refuse"], 0)

    made = curious(make_world, make_world().tasks("train")[40:88], most=8)
    assert [task.env for task in made.explore(0, BUDGET)] == ["home"] * BUDGET


@pytest.mark.slow
def test_the_union_of_all_apis_and_five_hundred_tools_gives_as_many_tasks():
    def tasks_of(make_world):
        made = curious(make_world, make_world().tasks("train")[:64], most=6)
        made.pool.is_over = lambda: made.pool.counted("env_steps") > 150_000
        return made.explore(0, 40)

    assert len(Huge().reset(Huge().tasks("train")[0]).tools) == 628
    assert len(tasks_of(Huge)) >= 0.8 * len(tasks_of(Bfcl)) > 0
