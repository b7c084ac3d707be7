"""Several worlds as one: each task is played by the world that it is of."""

import sys

import pytest

from envs import make, mixture
from envs.mixture import MixedSource, Mixture
from envs.source import Source
from envs.world import Task, WorldError, first_of_worlds
from tests.tiny import Parity

TWO = {"a": {"name": "tests.tiny:Parity"}, "b": {"name": "tests.tiny:Parity"}}


class Named(Parity):
    """Parity with other splits, that says which task it was given, and has a method of its own."""

    def __init__(self, mark: str = "!"):
        self.mark = mark

    def tasks(self, split):
        return super().tasks({"learn": "train", "test": "dev"}.get(split, split + "?"))[:2]

    def reset(self, task, seed=0):
        self.given = task
        return super().reset(task, seed)

    def functions(self):
        return [{"type": "function", "function": {"name": self.mark}}]

    def call_text(self, name, arguments):
        return f"{name}{self.mark}"


NAMED = "tests.envs.test_mixture:Named"
SPLITS = {"train": "learn", "dev": "test"}


def test_tasks_come_from_each_world_in_turn_and_are_played_by_it():
    world = make("mixture", worlds={"a": TWO["a"], "b": {"name": NAMED, "splits": SPLITS}})
    tasks = world.tasks("train")
    assert [t.id for t in tasks[:4]] == ["a/train/0", "b/train/0", "a/train/1", "b/train/1"]
    assert len(tasks) == 8 and {t.env for t in tasks} == {"a", "b"}
    assert {t.split for t in tasks} == {"train"}
    assert [t.id for t in first_of_worlds(tasks)] == ["a/train/0", "b/train/0"]
    assert world.reset(tasks[1], 3).messages[0]["content"] == tasks[1].query
    own = world.given  # what the mixture does not define is that of the world which plays
    assert (own.id, own.split) == ("train/0", "learn")
    invented = Task("syn/1", "b", "q", meta={"entry": "b/train/0"})
    world.reset(invented)
    assert (world.given.id, world.given.meta) == ("syn/1", {"entry": "train/0"})
    world.reset(tasks[1])
    assert world.call_text("x", {}) == "x!" and world.functions()[0]["function"]["name"] == "!"
    world.step("even")
    kept = world.snapshot()
    world.reset(tasks[0])
    assert world.functions() == [] and not hasattr(world, "given")
    with pytest.raises(ValueError, match="'c'; there are a, b"):
        world.reset(Task("x", "c", "q"))
    other = make("mixture", worlds={"a": TWO["a"], "b": {"name": NAMED, "args": {"mark": "?"}}})
    other.restore(kept)
    assert other.step("even").terminated and other.evaluate().success
    assert other.call_text("x", {}) == "x?"
    world.close()


def test_a_split_that_worlds_do_not_have_names_all_of_them_and_one_may_have_none():
    world = Mixture({"a": TWO["a"], "b": {"name": NAMED}})
    with pytest.raises(ValueError, match=r"a: parity has no split 'x'.*; b: .*'x\?'.*b.splits"):
        world.tasks("x")
    world = Mixture({"a": TWO["a"], "b": {"name": NAMED, "splits": {"dev": ""}}})
    assert {task.env for task in world.tasks("dev")} == {"a"}


def test_a_wrong_mixture_is_one_message_with_everything():
    worlds = {
        "a b": {"name": "travle"},
        "home": {"workers": -1, "python": 3, "recycle": float("nan"), "quota": 1},
        "mixture": {},
        "travel": ["rules"],
    }
    with pytest.raises(ValueError) as error:
        make("mixture", worlds=worlds)
    for words in (
        "'a b' must consist of letters",
        "there is no world 'travle' to mix",
        "worlds.home.workers=-1 does not fit",
        "worlds.home.python=3 does not fit",
        "worlds.home.recycle=nan does not fit",
        "worlds.home.quota=1 does not fit; a world has name (str), args (dict), splits (dict), pyth",
        "worlds.mixture: there is no world 'mixture' to mix",
        "worlds.travel=['rules'] must be a dict",
    ):
        assert words in str(error.value)
    for nothing in ({}, None, "travel"):
        assert "must name the worlds" in mixture.problems(nothing)[0]
    assert mixture.problems(TWO) == []
    assert mixture.lasting({"a": TWO["a"] | {"python": "p", "workers": 3}}) == {"a": TWO["a"]}


def test_each_world_has_workers_under_an_interpreter_of_its_own():
    here = sys._base_executable  # another one wherever tests run in a virtual environment
    pythons = {"a": None, "b": here}

    def open_source(name):
        return Source("tests.tiny:Parity", mode="worker", workers=1, python=pythons[name])

    with MixedSource(TWO, open_source) as source:
        world = source.world()
        tasks = world.tasks("train")
        for task in tasks[:2]:
            world.reset(task)
            for _ in range(2):
                result = world.step("even")
            assert result.terminated and world.evaluate().success
        world.end_episode()
        world.close()
        assert [s._pool.alive() for s in source._sources.values()] == [0, 0]

    def broken(name):
        raise ValueError(f"{name} is broken") if name else None

    with pytest.raises(WorldError, match="a: a is broken\nb: b is broken"):
        MixedSource(TWO, broken)
