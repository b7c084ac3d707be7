"""Held-out tasks: no run learns from the tasks that it is evaluated on."""

import json

import pytest

from evolver.llm.embedders import HashedNgrams
from evolver.navigating import new_experience
from evolver.navigating.experience_pool import ExperiencePool
from tests.evolver.runs import go

HELD_OUT = "config.eval.split=dev holds out for evaluation"
NAVIGATING = (
    "navigating.enabled=True navigating.rollouts=1 navigating.tasks=2 attributing.enabled=False"
)
QUESTIONING = "questioning.enabled=True env.name=travel rollout.context=256"


@pytest.fixture
def start(tiny, tmp_path, capsys):
    """Start a run in a folder; return its exit code and what it wrote to stderr."""

    def start(*words, workdir="run"):
        return go(tiny, tmp_path / workdir, "steps=1", *words), capsys.readouterr().err

    return start


def task_file(path, **task):
    given = [{"id": f"mine/{i}", "env": "parity", "query": f"Write {i}."} for i in range(3)]
    given[1] |= task
    path.write_text("".join(json.dumps(record) + "\n" for record in given))
    return path


def pool_folder(path, splits, source):
    pool = ExperiencePool(HashedNgrams())
    pool.add([new_experience("When asked to write 1.", "Write twice.", sources=[source])])
    pool.splits |= set(splits)
    pool.save(path)
    return path


@pytest.mark.parametrize("mode", ["train", "explore", "pool", "plan"])
def test_the_evaluated_split_is_no_split_to_train_on(start, mode):
    code, err = start("env.split=dev", f"--mode={mode}")
    said = f"config.env.split=dev trains on tasks such as dev/0 that {HELD_OUT}"
    assert code == 2 and said in err


@pytest.mark.parametrize("task", [{"id": "dev/4"}, {"split": "dev"}])
@pytest.mark.parametrize("key", ["env.tasks", "questioning.tasks"])
def test_a_file_of_held_out_tasks_is_refused(start, tmp_path, key, task):
    words = QUESTIONING if key == "questioning.tasks" else ""
    if "id" in task and words:
        task = {"id": "travel/dev/0001"}
    path = task_file(tmp_path / "tasks.jsonl", origin="synthetic", **task)
    code, err = start(words, f"{key}={path}")
    named = f"config.{key}={path} trains on tasks such as {task.get('id', 'mine/1')}"
    assert code == 2 and f"{named} that {HELD_OUT}" in err


def test_a_run_whose_tasks_are_known_late_is_refused_before_it_loads_a_policy(start, tmp_path):
    path = task_file(tmp_path / "tasks.jsonl", id="dev/4")
    code, err = start(f"env.mode=worker env.tasks={path}")
    assert code == 1 and f"trains on tasks such as dev/4 that {HELD_OUT}" in err


@pytest.mark.parametrize("mode", ["inprocess", "worker"])
@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_world_whose_tasks_share_an_id_is_refused(start, mode, split):
    words = f"env.name=tests.envs.faulty:Twins env.args.split={split} env.mode={mode}"
    code, err = start(words)
    assert code in (1, 2) and f"3 ids of the split '{split}'" in err and "Traceback" not in err


def test_an_invented_task_with_the_id_of_an_original_one_is_refused(start, tmp_path):
    path = task_file(tmp_path / "tasks.jsonl", id="train/1", origin="synthetic")
    code, err = start(QUESTIONING, f"env.name=tests.tiny:Parity questioning.tasks={path}")
    assert code == 2 and "have the id of a task of config.env.split, as 'train/1'" in err


@pytest.mark.parametrize("splits, source", [(["dev", "train"], "mine/1"), (["train"], "dev/1")])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_pool_from_held_out_tasks_is_refused_and_named(start, tmp_path, splits, source, mode):
    pool = pool_folder(tmp_path / "pool", splits, source)
    words = f"navigating.pool={pool} eval.experience=1"
    code, err = start(NAVIGATING, words, f"--mode={mode}")
    said = f"config.navigating.pool={pool} holds experience from tasks that {HELD_OUT}"
    assert code == 2 and said in err


def test_a_pool_that_does_not_name_its_splits_is_refused(start, tmp_path):
    pool = pool_folder(tmp_path / "pool", ["train"], "mine/1")
    words = f"{NAVIGATING} navigating.pool={pool} eval.every=0"
    path = pool / "experiences.jsonl"
    header, rest = path.read_text().split("\n", 1)
    assert json.loads(header)["splits"] == ["train"]
    without = {k: v for k, v in json.loads(header).items() if k != "splits"}
    path.write_text(json.dumps(without) + "\n" + rest)
    code, err = start(words)
    assert code == 2 and "line 1" in err and '"splits": ["train"] to its first line' in err
    path.write_text(header + "\n" + rest)
    assert start(words)[0] == 0


def test_a_pool_is_known_by_the_split_that_it_was_made_from(start, tmp_path):
    words = f"{NAVIGATING} env.split=dev eval.split=train"
    assert start(words, "--mode=pool", workdir="pooled")[0] == 0
    pool = tmp_path / "pooled/experience"
    assert json.loads((pool / "experiences.jsonl").read_text().splitlines()[0])["splits"] == ["dev"]
    code, err = start(NAVIGATING, f"navigating.pool={pool}")
    assert code == 2 and HELD_OUT in err


@pytest.mark.parametrize("split", ["dev", "none such", ""])
def test_an_evaluation_needs_no_training_tasks(start, split):
    code, err = start("--mode=eval", f"--config.env.split={split}", workdir="eval")
    assert code == 0, err


def test_worlds_of_one_split_stay_possible(start):
    assert start("eval.every=0 env.split=dev eval.split=")[0] == 0
    code, err = start("eval.split=", workdir="none")
    assert code == 2 and "config.eval.split=" in err
