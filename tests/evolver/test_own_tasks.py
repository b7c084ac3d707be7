"""Worlds in which an explorer invents nothing, and whose own tasks walks solve by chance."""

import json
import random
from pathlib import Path

import pytest

from configs import evolve as evolve_config
from envs import make
from envs.probed import probed
from evolver import evolve, modes
from evolver.build import RunError
from evolver.files.workdir import Workdir, read_tasks
from evolver.questioning.own_tasks import solved_by_walks
from evolver.questioning.tasks import infeasibility, is_verified, synthetic_task
from tests.evolver.explorers import curious

DRY = {"is_slippery": False}
ICE = {}
SMALL = {"desc": ["SF", "FG"], "is_slippery": False}


def lake(options):
    return make("gym", env="FrozenLake-v1", options=options, n_train=16)


@pytest.mark.parametrize("options", [DRY, ICE])
def test_walks_solve_tasks_of_a_game(options):
    world = lake(options)
    tasks = list(solved_by_walks(world, world.tasks("train"), random.Random(0)))
    assert len({task.id for task in tasks}) == len(tasks) >= 3
    own = {task.id: task for task in world.tasks("train")}
    for task in tasks:
        assert task.query == own[task.meta["source"]].query
        assert task.seed == own[task.meta["source"]].seed
        assert is_verified(task) and task.origin == "synthetic"
        assert infeasibility(world, task) == ""
        if options == DRY:  # the fewest calls: six moves lead to the goal, and none can be left out
            assert task.difficulty == len(task.reference)
            for n in range(len(task.reference)):
                task.reference, whole = task.reference[:n] + task.reference[n + 1 :], task.reference
                assert infeasibility(world, task) == "reference fails"
                task.reference = whole
    assert min(task.difficulty for task in tasks) == 6 or options == ICE


def test_tasks_that_no_walk_solves_are_left_out():
    world = lake({"map_name": "8x8"})
    assert list(solved_by_walks(world, world.tasks("train")[:1], random.Random(0))) == []


@pytest.mark.parametrize("found", ["nothing", "poor tasks", "tasks"])
@pytest.mark.parametrize("n_train", [16, 2])
def test_where_nothing_with_words_is_invented_own_tasks_train(
    tmp_path, capsys, monkeypatch, n_train, found
):
    config = evolve_config.get_config("gym")
    config.env.args = {"env": "FrozenLake-v1", "options": SMALL, "n_train": n_train}
    world = make("gym", **config.env.args.to_dict())
    invented = [
        synthetic_task(task, "Act 2.", identity=n, meta={"undescribed": found == "poor tasks"})
        for n, task in enumerate(world.tasks("train")[:1] * evolve.FEWEST)
    ]

    def explore(config, workdir):
        if found == "nothing":
            raise RunError("exploring found no more")
        Workdir(workdir).log_tasks(invented)

    monkeypatch.setattr(modes, "explore", explore)
    with Workdir(tmp_path).locked():
        if n_train < evolve.FEWEST and found == "nothing":
            with pytest.raises(RunError, match="found no more"):
                evolve.explored(config, tmp_path, world)
            return
        evolve.explored(config, tmp_path, world)
    training, held_out = (read_tasks(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    assert held_out == world.tasks("dev")
    own = n_train >= evolve.FEWEST and found != "tasks"
    assert {task.query for task in training} == (
        {world.tasks("train")[0].query} if own else {"Act 2."}
    )
    assert len(training) >= evolve.FEWEST
    said = capsys.readouterr().out
    assert ("poorly worded ('Act 2.')" in said) == (found == "poor tasks")
    assert (f"own {n_train} training tasks" in said) == (found != "tasks")


@pytest.mark.parametrize("actions", [None, ["left", "down", "right", "up"]])
def test_what_asks_for_the_number_of_an_action_says_nothing(actions):
    def game():
        return probed(make("gym", env="FrozenLake-v1", options=SMALL, actions=actions, n_train=4))

    tasks = curious(game, rehearsals=2).explore(0, 2)
    assert tasks
    assert all(task.meta["undescribed"] == (actions is None) for task in tasks)


def test_own_tasks_are_those_that_the_config_names(tmp_path):
    config = evolve_config.get_config("gym")
    world = lake(SMALL)
    named = world.tasks("train")[4:]
    config.env.tasks = str(tmp_path / "some.jsonl")
    Path(config.env.tasks).write_text("".join(json.dumps(t.to_dict()) + "\n" for t in named))
    own = evolve.own_tasks(config, world, "nothing was invented")
    assert len(own) >= evolve.FEWEST
    assert {task.meta["source"] for task in own} <= {task.id for task in named}
