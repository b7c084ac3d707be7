"""ScienceWorld, TextWorld and reasoning-gym: the adapters with fake packages, and with the real
ones if installed."""

import dataclasses
import importlib.util
import itertools
import shutil
import sys
import types

import pytest

from envs import make
from envs.act import action_of
from envs.process import Deadlines
from envs.reasoning import answer_of
from envs.scienceworld import VARIATIONS, ScienceWorld, split_variations
from envs.toolcalls import call_text
from envs.world import Task
from evolver.parts import Parts
from evolver.questioning import TaskPool
from evolver.questioning.llm import LlmExplorer
from tests.envs.playing import assert_conforms, begin, told
from tests.envs.test_process import alone

PATIENT = Deadlines(start=300.0, reset=300.0, step=300.0)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def act(action: str) -> str:
    return call_text("act", {"action": action})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open door", ("open door", "user")),
        ("I should look.\n\n  open   door  \n", ("open   door", "user")),
        (act("open\ndoor"), ("open door", "tool")),
        ("Well.\n" + act("wait"), ("wait", "tool")),
    ],
)
def test_an_action_is_a_call_or_the_last_line(text, expected):
    assert action_of(text) == expected


DO = call_text("do", {"action": "x"})


@pytest.mark.parametrize(
    "text", ["", " \n", "<tool_call>", call_text("act", {}), act(" "), DO, 2 * act("x")]
)
def test_a_turn_without_an_action_is_an_error(text):
    with pytest.raises(ValueError):
        action_of(text)


# ------------------------------------------------------------------------------------------- ScienceWorld


SOLUTION = ["open door", "go out", "focus on X"]


class FakeScience:
    """A simulator with an experiment that three actions in order solve and another one fails."""

    made: list["FakeScience"]

    def __init__(self, task):
        self.server, self.loaded, self.closed = self, [], 0
        self.made.append(self)

    def load(self, kind, variation, simplify, gold):
        self._name, self._gold = f"{kind} {variation} {simplify}", gold
        self.loaded.append(variation)

    def reset(self):
        self._at, self._spoiled, self._moves = 0, False, 0

    def step(self, action):
        self._moves += 1
        self._spoiled |= action == "spoil"
        self._at += SOLUTION[self._at : self._at + 1] == [action]
        return f"{action!r}, {self._moves} moves"

    def getScore(self):
        return -1.0 if self._spoiled else self._at / 3

    def getCompleted(self):
        return self._at == 3

    def get_possible_actions(self):
        return ["look around", "use OBJ on OBJ", "focus on OBJ"]

    def get_task_description(self):
        return f"Do {self._name}."

    def get_gold_action_sequence(self):
        return SOLUTION if self._gold else ["ERROR"]

    def close(self):
        self.closed += 1


def replace_package(monkeypatch, name, **contents):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**contents))


@pytest.fixture
def science(monkeypatch):
    replace_package(monkeypatch, "scienceworld", ScienceWorldEnv=FakeScience)
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    monkeypatch.setattr(FakeScience, "made", [], raising=False)
    return FakeScience.made


def referenced(reference, name, **kwargs):
    """Return a function that makes a world whose tasks have this reference."""

    def make_world():
        world = make(name, **kwargs)
        listed = world.tasks
        world.tasks = lambda split: [
            dataclasses.replace(task, reference=reference) for task in listed(split)
        ]
        return world

    return make_world


def boiling(**kwargs):
    return make("scienceworld", kinds=["boil"], **kwargs)


def test_scienceworld_conforms(science):
    assert_conforms(referenced(SOLUTION, "scienceworld", kinds=["boil", "melt"]), limit=3)


def test_a_scienceworld_episode(science):
    world = boiling(max_steps=4)
    (task,) = (task for task in world.tasks("dev") if task.meta["variation"] == 14)
    start = world.reset(task)
    assert start.messages[-1]["content"].startswith("Do boil 14 easy.\n\n")
    assert start.tools[0]["function"]["name"] == "act"
    third = pytest.approx(1 / 3)
    assert world.step("Let me see.\nopen door").reward == third
    assert world.evaluate().components["progress"] == third
    assert world.step("").info["parse_error"]
    assert world.step(act("go out")).messages[0]["role"] == "tool"
    result = world.step("spoil")
    assert result.terminated and not result.truncated and world.evaluate().score == 0.0
    world.reset(task)
    assert [world.step("wait").truncated for _ in range(4)] == [False, False, False, True]
    assert world.step("wait").terminated
    assert world.walkthrough(task.to_dict()) == SOLUTION
    with pytest.raises(RuntimeError, match="reset"):
        world.step("wait")
    with pytest.raises(ValueError, match="kind and variation"):
        world.reset(Task("x", "scienceworld", "?"))


def forms_of(start) -> list[str]:
    """The forms of actions that the schema of `act` lists."""
    return start.tools[0]["function"]["parameters"]["properties"]["action"]["examples"]


def steady_forms_of(world) -> list[str]:
    """The same, of a world that lists them alike in two episodes."""
    first, second = (world.reset(task) for task in world.tasks("train")[:2])
    assert first.tools == second.tools
    return forms_of(first)


def test_worlds_list_the_forms_of_their_actions(science, games, tmp_path):
    forms = steady_forms_of(make("scienceworld"))
    assert forms == ["focus on OBJ", "look around", "use OBJ on OBJ"]
    forms = steady_forms_of(make("textworld", cache=str(tmp_path)))
    assert forms == ["go north", "lock OBJ with OBJ", "open OBJ"]


def explorer_of(world) -> LlmExplorer:
    pool = TaskPool(world.tasks("train")[:1], overlap=0.8, capacity=8)
    return LlmExplorer(
        Parts(make_world=lambda: world, client=object(), max_chars=2000, task_pool=pool)
    )


def begin_invented(world) -> str:
    """Start a synthetic task in the world of another one, and return its first text."""
    task = dataclasses.replace(
        world.tasks("train")[0], id="syn/1", query="Find a spoon.", origin="synthetic"
    )
    return world.reset(task).messages[-1]["content"]


def test_a_synthetic_task_of_scienceworld_shows_its_query_and_has_no_score(science):
    world = boiling()
    start = begin_invented(world)
    assert start.startswith("Find a spoon.\n\n") and "Do boil" not in start
    assert told(world, "Task") == "Find a spoon."
    # Neither reaching nor failing the goal of the variation means anything.
    results = [world.step(action) for action in [*SOLUTION, "spoil", "wait"]]
    assert not any(result.reward or result.terminated for result in results)
    assert world.evaluate().score == 0.0 and not world.evaluate().success
    explorer_of(world)  # it can be explored


def test_scienceworld_loads_a_variation_once_however_often_it_is_reset(science):
    world = boiling()
    one, other = world.tasks("train")[:2]
    for task in (one, one, one, other, one):
        world.reset(task)
    assert science[0].loaded == [0, 1, 0]
    assert world.walkthrough(one.to_dict()) == SOLUTION  # loaded with its solution


def test_the_simulator_of_a_closed_scienceworld_serves_the_next(science):
    first, second, third = boiling(), boiling(), boiling()
    begin(first)
    first.step("open door")
    begin(second, 1)
    assert len(science) == 2  # both are in use
    for world in (first, second, second):
        world.close()
    assert sorted(simulator.closed for simulator in science) == [0, 1]  # one is enough
    begin(third)
    assert len(science) == 2 and third.evaluate().score == 0.0


@pytest.mark.parametrize("action", ["open b\u00fcro door", "drop\x00it", "\u00fc"])
def test_scienceworld_takes_no_action_that_it_would_read_as_another(science, action):
    world = boiling()
    begin(world)
    for written in (action, act(action)):
        result = world.step(written)
        assert result.messages[0]["content"].startswith("error: an action has at most")
        assert (result.info["errors"], result.info["calls"]) == (1, [])
    assert "2 moves" in told(world, "open door")  # the first one looked around


@pytest.mark.parametrize(
    "answer",
    ["Ambiguous request: which?", "No known action matches that input.", "Unknown action."],
)
def test_what_scienceworld_did_not_take_is_an_error(science, monkeypatch, answer):
    world = boiling()
    begin(world)
    monkeypatch.setattr(FakeScience, "step", lambda self, action: answer)
    assert world.step("open the thing").info["errors"] == 1


def test_scienceworld_lists_the_tasks_of_the_benchmark():
    world = make("scienceworld")
    tasks = {split: world.tasks(split) for split in ("train", "dev", "test")}
    ids = [task.id for task in itertools.chain(*tasks.values())]
    assert len(ids) == len(set(ids)) == sum(VARIATIONS.values()) == 7207
    assert len(VARIATIONS) == 30
    assert [len(split_variations("boil", split)) for split in tasks] == [14, 7, 9]
    few = make("scienceworld", per_kind=2, kinds=["boil", "grow-fruit"])
    assert [task.meta["variation"] for task in few.tasks("train")] == [0, 7, 0, 31]


# ---------------------------------------------------------------------------------------------- TextWorld


class FakeGame:
    """A game that is won by 'take key' and then 'open box'."""

    def __init__(self, path, infos):
        self._path = path

    def reset(self):
        self._taken = self._open = False
        self._moves = 0
        return self._state("Here is a key.")

    def step(self, command):
        self._moves += 1
        self._taken |= command == "take key"
        self._open |= self._taken and command == "open box"
        return self._state(f"{command} {self._moves}"), 0, self._open

    def _state(self, feedback):
        return types.SimpleNamespace(
            feedback=feedback,
            objective=f"Open the box of {self._path.rsplit('-', 1)[1]}.",
            score=int(self._taken) + int(self._open),
            max_score=2,
            won=self._open,
            description="-= Attic =-",
            admissible_commands=["take key", "look"],
            command_templates=[
                "open {c}",
                "open {d}",
                "go north",
                "lock {c} with {k}",
                "lock {d} with {k}",
            ],
            policy_commands=["take key", "open box"][int(self._taken) :],
        )

    def close(self):
        pass


@pytest.fixture
def games(monkeypatch):
    """Install a fake package and return the list of the games that it made."""
    made = []

    def compiled(options):
        made.append((options.seeds, options.nb_rooms))
        for suffix in (".z8", ".json"):
            open(options.path.removesuffix(".z8") + suffix, "w").close()

    replace_package(
        monkeypatch, "textworld", EnvInfos=dict, GameOptions=types.SimpleNamespace, make=compiled,
        start=FakeGame,
    )  # fmt: skip
    return made


def test_textworld_conforms_and_compiles_a_game_once(games, tmp_path):
    assert_conforms(
        referenced(["take key", "open box"], "textworld", n_train=3, cache=str(tmp_path)), limit=3
    )
    assert sorted(games) == [(1, 3), (2, 3), (3, 3)]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3 + [".z8"] * 3


def test_a_textworld_episode(games, tmp_path):
    world = make("textworld", commands=True, options={"nb_rooms": 5}, cache=str(tmp_path))
    task = world.tasks("dev")[0]
    text = world.reset(task).messages[-1]["content"]
    assert text == (
        "Open the box of 100001.z8.\n\nHere is a key.\n\nPossible commands: look; take key"
    )
    assert world.walkthrough() == ["take key", "open box"]
    result = world.step("take key")
    assert result.reward == 0.5 and not result.terminated and world.walkthrough() == ["open box"]
    assert world.step("<tool_call>").info["parse_error"]
    for other in ("open box" + " " * 200 + "not", "\u00e9open box"):  # cut, this would win
        assert world.step(other).info["errors"] == 1
    result = world.step("open box")
    assert result.terminated and world.evaluate().score == 1.0 and games == [(100001, 5)]


def test_a_synthetic_task_of_textworld_shows_its_query_and_has_no_score(games, tmp_path):
    world = make("textworld", cache=str(tmp_path))
    assert begin_invented(world) == "Find a spoon.\n\n-= Attic =-"
    assert told(world, "goal") == "Find a spoon."
    assert world.step("take key").reward == world.step("open box").reward == 0.0
    assert world.evaluate().score == 0.0 and not world.evaluate().success
    explorer_of(world)  # it can be explored


# -------------------------------------------------------------------------------------------- reasoning-gym


class FakeDataset(list):
    def __init__(self, name, size, seed, bias=0):
        entries = [(f"{name}: {seed + i} + 1?", str(seed + i + 1 + bias)) for i in range(size)]
        super().__init__({"question": q, "answer": a, "metadata": {}} for q, a in entries)

    def score_answer(self, answer, entry):
        # Raises if the answer is not a number.
        return 1.0 if int(answer) == int(entry["answer"]) else 0.1


@pytest.fixture
def gym_of_reasons(monkeypatch):
    replace_package(monkeypatch, "reasoning_gym", create_dataset=FakeDataset)


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("scienceworld", {"kinds": ["fly"]}, "no fly"),
        ("textworld", {"options": {"rooms": 5}}, "no option"),
        ("textworld", {"kind": "chess"}, "no 'chess'"),
        ("reasoning", {"datasets": ["sums"], "options": {"more": {}}}, "not among"),
        ("scienceworld", {}, "no split"),
        ("textworld", {}, "no split"),
        ("reasoning", {}, "no split"),
    ],
)
def test_wrong_arguments_and_splits_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(name, **kwargs).tasks("val")


def test_reasoning_conforms(gym_of_reasons):
    assert_conforms(lambda: make("reasoning", n_train=7), limit=3)


def test_a_reasoning_episode_is_one_turn(gym_of_reasons):
    biased = {"datasets": ["sums", "more"], "options": {"more": {"bias": 1}}}
    world = make("reasoning", n_train=3, n_dev=1, **biased)
    tasks = world.tasks("train")
    assert [task.meta["dataset"] for task in tasks] == ["sums", "sums", "more"]
    start = world.reset(tasks[0])
    assert start.messages[-1]["content"] == tasks[0].query == "sums: 0 + 1?" and start.tools == []
    result = world.step("I add.\n<answer>7</answer> or\n<answer> 1 </answer>.")
    assert result.terminated and result.reward == 1.0 and world.evaluate().success
    # Only the first turn counts.
    assert world.step("<answer>2</answer>").terminated and world.evaluate().success
    world.reset(tasks[0])
    world.step("3")
    assert world.evaluate().score == 0.0 and world.evaluate().components["progress"] == 0.1
    queries = [{task.query for task in world.tasks(split)} for split in ("train", "dev", "test")]
    assert not set.intersection(*queries)
    assert len(world.tasks("dev")) == 1 and make("reasoning", n_dev=0).tasks("dev") == []
    partial = make("reasoning", datasets=["sums"], partial=True)
    begin(partial)
    partial.step("3")
    assert partial.evaluate().score == 0.1 and not partial.evaluate().success
    with pytest.raises(ValueError, match="no question"):
        world.reset(Task("x", "reasoning", "?", seed=99, meta={"dataset": "sums"}))


def test_solved_questions_precede_a_question_of_reasoning(gym_of_reasons):
    world = make("reasoning", datasets=["sums", "more"], examples=2, n_train=4)
    task = world.tasks("train")[-1]
    roles, texts = zip(*((m["role"], m["content"]) for m in world.reset(task).messages))
    assert roles == ("system", "user", "assistant", "user", "assistant", "user")
    assert texts[1].startswith("more: ")
    assert texts[2] == f"<answer>{int(texts[1].split()[1]) + 1}</answer>"
    splits = map(world.tasks, ("train", "dev", "test"))
    everything = {task.query for task in itertools.chain(*splits)}
    assert task.query == texts[5] and not {texts[1], texts[3]} & everything and texts[1] != texts[3]
    world.step(texts[2])
    assert not world.evaluate().success
    with pytest.raises(ValueError, match="no split"):
        world.tasks("examples")


def test_reasoning_refuses_synthetic_tasks(gym_of_reasons):
    with pytest.raises(ValueError, match=r"nothing to explore.*enabled=False"):
        explorer_of(make("reasoning", datasets=["sums"]))


def test_the_answer_is_the_last_one():
    assert answer_of("a <answer>1</answer> b <answer>2</answer> c") == "2"
    assert answer_of("<answer>open") == "open" and answer_of(" 5 ") == "5" and answer_of("") == ""
    thought = "<think>Is it <answer>5</answer>?</think>"
    assert answer_of(f"{thought} I do not know.") == "I do not know."
    assert answer_of(f"{thought}<answer>7</answer>") == "7" and answer_of(thought[:-9]) == ""


# ------------------------------------------------------------------------------------------ the packages


def played(world, task, actions):
    """Return the answers to the actions up to the end of the episode, which has to succeed."""
    seen = []
    world.reset(task)
    assert world.evaluate().score == 0.0
    for action in actions:
        seen.append(world.step(action))
        if seen[-1].terminated:
            break
    assert world.evaluate().score == 1.0 and seen[-1].terminated
    return seen


@pytest.mark.services
@pytest.mark.skipif(
    not installed("scienceworld") or shutil.which("java") is None,
    reason="needs ScienceWorld: pip install -r requirements/scienceworld.txt, and Java",
)
def test_real_scienceworld():
    """The simulator's solutions score 1, VARIATIONS is complete, and an episode is repeatable."""
    kwargs = {"kinds": ["find-plant", "lifespan-longest-lived"], "per_kind": 2}
    with alone("scienceworld", kwargs, deadlines=PATIENT) as world:
        assert {"look around", "open OBJ", "move OBJ to OBJ"} < set(steady_forms_of(world))
        for task in world.tasks("dev"):
            world.reset(task)
            solution = world.walkthrough(task.to_dict())  # may go on after the goal is reached
            first, second = (played(world, task, solution) for _ in range(2))
            assert first == second
            world.reset(task)
            assert "matches" in told(world, "sing a song") and not world.evaluate().success
    env = importlib.import_module("scienceworld").ScienceWorldEnv("")
    try:
        assert {kind: env.get_max_variations(kind) for kind in env.get_task_names()} == VARIATIONS
        for kind in ("boil", "grow-fruit", "identify-life-stages-1"):
            env.load(kind, 0, "", False)
            for split in ("train", "dev", "test"):
                found = getattr(env, f"get_variations_{split}")()
                assert found == list(split_variations(kind, split))
    finally:
        env.close()


@pytest.mark.services
@pytest.mark.skipif(
    not installed("textworld"), reason="needs TextWorld: pip install -r requirements/textworld.txt"
)
@pytest.mark.parametrize(
    "kind", ["custom", "tw-cooking", "tw-coin_collector", "tw-treasure_hunter", "tw-simple"]
)
def test_real_textworld(kind, tmp_path):
    """The generator's solutions win, and compiling a game again gives the same game."""
    seen = []
    for name in "ab":
        kwargs = {"kind": kind, "cache": str(tmp_path / name), "n_train": 2}
        with alone("textworld", kwargs, deadlines=PATIENT) as world:
            first = begin(world, 1)
            assert {"look", "go north", "take OBJ"} < set(forms_of(first))
            assert "{" not in str(forms_of(first))
            seen.append((first, played(world, world.tasks("train")[1], world.walkthrough())))
    assert seen[0] == seen[1]


@pytest.mark.services
@pytest.mark.skipif(
    not installed("reasoning_gym"),
    reason="needs reasoning-gym: pip install -r requirements/reasoning.txt",
)
def test_real_reasoning_gym():
    names = ["basic_arithmetic", "spell_backward", "prime_factorization", "countdown"]
    assert_conforms(lambda: make("reasoning", datasets=names, n_train=8), limit=3)
