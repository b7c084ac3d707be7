"""The gymnasium bridge in both directions."""

import collections
import itertools
import json
import re

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import envs
from envs.gym import GymEnv, GymWorld
from envs.toolcalls import call_text
from tests.envs.playing import begin, take_all, told


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("split", ["train", "dev"])
def test_travel_passes_the_checker(split):
    check_env(GymEnv(envs.make("travel"), split), skip_render_check=True)


def test_an_episode_through_gymnasium():
    world = envs.make("travel", n_train=6)
    env = GymEnv(world, render_mode="ansi")
    task = world.tasks("train")[5]
    observation, info = env.reset(options={"task": task.id})
    assert task.query in observation and info["task"] == task.id and len(info["tools"]) == 12
    for turn in task.reference:
        observation, reward, terminated, truncated, info = env.step(turn)
        assert env.observation_space.contains(observation)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert task.query in env.render() and task.reference[0] in env.render()
    with pytest.raises(ValueError, match="no task"):
        env.reset(options={"task": "nope"})


def test_the_seed_draws_the_task():
    env = GymEnv(envs.make("travel"))
    first = [env.reset(seed=seed)[1]["task"] for seed in range(20)]
    assert first == [env.reset(seed=seed)[1]["task"] for seed in range(20)]
    assert len(set(first)) > 5


class Echo(gymnasium.Env):
    """An environment in which the right action repeats the observed word."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        return self.word, {}

    def step(self, action):
        right = action == self.word
        return "right" if right else "wrong", float(right), right, False, {}


def test_a_text_environment_as_a_world():
    check_env(Echo(), skip_render_check=True)
    world = GymWorld(Echo(), n_train=3)
    assert len(world.tasks("train")) == 3
    splits = map(world.tasks, ("train", "dev", "test"))
    seeds = [task.seed for task in itertools.chain(*splits)]
    assert len(set(seeds)) == len(seeds)
    start = begin(world, seed=1)
    assert start == begin(world, seed=1)
    word = start.messages[-1]["content"].split("\n")[-1]
    assert world.step("ab").messages == [{"role": "user", "content": "wrong"}]
    assert told(world, "not alphanumeric!").startswith("error: ")
    assert world.step("<tool_call>").info["parse_error"]
    assert world.step(call_text("other", {})).info["errors"] == 1
    assert not world.evaluate().success
    result = world.step(call_text("act", {"action": word}))
    assert result.messages == [{"role": "tool", "content": "right"}] and result.terminated
    assert world.evaluate().success and world.evaluate().components["progress"] == 1.0
    with pytest.raises(RuntimeError, match="over"):
        world.step("abc")


class Listing(Echo):
    """An environment with forms. Commands: look, take <thing> or put <thing> on [place]."""


class Telling(Echo):
    def reset(self, *, seed=None, options=None):
        return "A hall.\nActions that you may take: north, south.", {}


@pytest.mark.parametrize(
    ("env", "actions", "schema"),
    [
        (Echo(), None, {}),
        (Listing(), None, {"examples": ["look", "put OBJ on OBJ", "take OBJ"]}),
        (Listing(), ["go PLACE"], {"examples": ["go OBJ"]}),
        (Telling(), None, {"enum": ["north", "south"]}),
    ],
)
def test_the_forms_of_text_actions_are_those_that_are_given_or_that_the_environment_lists(
    env, actions, schema
):
    world = GymWorld(env, actions=actions)
    start = begin(world)
    (tool,) = start.tools
    action = tool["function"]["parameters"]["properties"]["action"]
    assert action == {"type": "string", **schema}
    assert ("\nActions: " in start.messages[0]["content"]) is bool(schema)


def test_an_environment_takes_the_characters_of_the_forms_that_it_lists():
    world = GymWorld(Listing())
    begin(world)
    assert told(world, "take ab") == "wrong"
    assert "characters" in told(world, "take a-b")
    assert "characters" in told(world, "a" * 21)


def test_a_discrete_environment_as_a_world():
    options = {"render_mode": "ansi", "is_slippery": False}
    world = GymWorld("FrozenLake-v1", actions=["left", "down", "right", "up"], options=options)
    text = begin(world, 0, "test").messages[0]["content"]
    assert "[S]FFF" in text and "left, down, right, up" in text
    assert "left" in told(world, "jump")
    take_all(world, ["down", "down", "right", "right", "down"])
    result = world.step("right")
    assert result.terminated and world.evaluate().success and "[G]" in result.messages[0]["content"]
    assert result.info["calls"] == [{"name": "act", "arguments": {"action": "right"}}]


class Shows(gymnasium.Env):
    """An environment that shows what it is given."""

    action_space = spaces.Text(20, charset="ab \n")

    def __init__(self, shown):
        self.observation_space, self.shown, self.taken = spaces.Discrete(1), shown, []

    def reset(self, *, seed=None, options=None):
        return self.shown, {}

    def step(self, action):
        self.taken.append(action)
        return self.shown, 0.0, False, False, {}


def shown(observation):
    world = GymWorld(Shows(observation))
    opening = begin(world).messages[-1]["content"]
    assert told(world, "a") in opening
    return opening.split("\n", 1)[1]


def test_arrays_are_shown_whole():
    row, grid = np.arange(2000.0), np.arange(1600).reshape(40, 40)
    for observation in (row, grid, {"grid": grid, "n": 3}, (row, [grid]), {"a": {"b": row}}):
        text = shown(observation)
        assert "..." not in text and "cut" not in text
    words = [word.strip("[]") for word in shown(row).split()]
    assert [float(word) for word in words if word] == row.tolist()
    for exact in ([123456789.25, 1e-9], [0.1, 1 / 3]):
        assert json.loads(re.sub(r"\s+", ",", shown(np.array(exact)))) == exact
    assert shown({"a": jnp.arange(2000)}) == shown({"a": np.arange(2000, dtype=np.int32)})
    small = {"a": np.zeros((2, 2)), "b": (1, "x"), "c": np.float32(0.5)}
    assert shown(small) == str(small)  # as Python prints it


def test_what_is_cut_of_a_large_array_is_said():
    Pair = collections.namedtuple("Pair", "image mask")
    text = shown({"pair": Pair(np.full((300, 400), 7), np.ones(5000, bool)), "n": 3})
    assert "..." not in text and text.count("7") > 9_000 and "'n': 3" in text
    assert "has the shape (300, 400); the first 10,000 of its 120,000 numbers are shown" in text
    assert "the observation['pair'][1] has the shape (5000,); the first 0 of" in text
    assert len(text) < 100_000


@pytest.mark.parametrize("action", [" a", "a ", " a\n\n b ", "\n", "  "])
def test_the_space_around_a_text_action_is_kept(action):
    world = GymWorld(Shows("x"))
    begin(world)
    for written in (action, call_text("act", {"action": action})):
        assert world.step(written).info["errors"] == 0
    assert world._env.taken == [action, action]
    for wrong in (3, None, ["a"]):
        assert world.step(call_text("act", {"action": wrong})).info["errors"] == 1
    assert world._env.taken == [action, action]


def test_an_id_is_enough():
    world = envs.make("gym", env="FrozenLake-v1")
    assert "[S]FFF" in begin(world).messages[0]["content"]


def test_unsupported_environments_are_refused():
    for name, options, message in (
        ("gym", {"env": "Pendulum-v1"}, "Text or Discrete"),
        ("gym", {"env": "FrozenLake-v1", "actions": ["left"]}, "4 actions, but 1 names"),
        ("gym", {"env": "FrozenLake-v1", "actions": [*"ldlu"]}, "the same name"),
        ("nowhere", {}, "no world 'nowhere'"),
        ("travel", {"n_trian": 3}, "n_trian"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.make(name, **options)
