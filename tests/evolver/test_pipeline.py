"""Rollouts started ahead: which groups a step trains on, how old they may be, and the whole program with them."""

import asyncio
import json

import pytest

import run
from evolver.pipeline import Pipeline
from evolver.workdir import Workdir
from rl.engines.jax.engine import JaxEngine
from tests.tiny import config_file, tiny_policy


def simulate(depth: int, bound: int, steps: int, seconds, groups: int = 2):
    """(step, groups trained in it as (step started for, number)) of a pipeline whose groups take `seconds` beats."""
    trained, graded = [], []

    async def play(jobs):
        (group,) = jobs
        await asyncio.sleep(0.02 * seconds(*group))
        return [group]

    async def iterate():
        pipeline = Pipeline(depth=depth, bound=bound)
        for step in range(1, steps + 1):
            for ahead in pipeline.ahead(step, steps):
                pipeline.launch(ahead, [[(ahead, n)] for n in range(groups)], play, graded.extend)
            found, late = await pipeline.collect(step, groups, lambda done, of: None)
            assert late == sum(started < step for started, _ in found)
            trained.append(found)
        assert not pipeline.busy and pipeline.figures()["async/groups"] == 0
        await pipeline.close()

    asyncio.run(iterate())
    assert sorted(graded) == sorted(group for found in trained for group in found)
    return trained


@pytest.mark.parametrize("depth,bound", [(1, 1), (1, 2), (2, 2), (1, 3), (2, 4)])
def test_every_group_trains_once_and_none_is_older_than_allowed(depth, bound):
    trained = simulate(depth, bound, 6, lambda step, n: (step * 7 + n * 5) % 9)
    assert sorted(group for found in trained for group in found) == [(s, n) for s in range(1, 7) for n in range(2)]
    for step, found in enumerate(trained, 1):
        assert len(found) == 2
        for started, _ in found:
            assert started - depth <= step <= started + bound - depth


def test_at_the_bound_groups_train_in_the_step_they_were_started_for():
    trained = simulate(1, 1, 4, lambda step, n: (step * 7 + n * 5) % 9)
    assert trained == [[(step, 0), (step, 1)] for step in range(1, 5)]


def test_a_slow_group_is_not_waited_for_until_it_is_due():
    trained = simulate(1, 2, 5, lambda step, n: 20 if (step, n) == (2, 0) else 1)
    assert (2, 0) not in trained[1] and (2, 0) in trained[2]


def test_what_a_group_raises_ends_the_step():
    async def scenario():
        async def play(jobs):
            raise OSError("no world")

        pipeline = Pipeline(depth=1, bound=1)
        pipeline.launch(1, [[0]], play, lambda trajectories: None)
        with pytest.raises(OSError, match="no world"):
            await pipeline.collect(1, 1, lambda done, of: None)
        await pipeline.close()

    asyncio.run(scenario())


# --- the whole program -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return config_file(folder, tiny_policy(folder / "policy"))


def command(tiny, workdir, *words):
    return ["run.py", f"--config={tiny}", f"--workdir={workdir}", "--config.eval.every=0", *words]


def test_a_run_with_rollouts_ahead_trains_on_every_step_and_knows_how_old_they_are(tiny, tmp_path, capsys):
    workdir = tmp_path / "run"
    words = ("--config.rollout.async_depth=1", "--config.steps=3")
    assert run.main(command(tiny, workdir, *words)) == 0
    lines = Workdir(workdir).metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["ledger/rollouts"] == line["rollout/count"] == 12 and line["ledger/stale"] == 0
        assert line.get("staleness/max", 0) <= 1 and line["alarm/weights"] == 0
    assert max(line.get("staleness/max", 0) for line in lines) == 1
    for step in (1, 2, 3):
        records = [
            json.loads(text) for text in (workdir / f"trajectories/step_{step:06d}.jsonl").read_text().splitlines()
        ]
        assert len({(record["task"], record["rollout"]) for record in records}) == 12
    # It goes on after its last step as any run does.
    assert run.main(command(tiny, workdir, "--config.rollout.async_depth=1", "--config.steps=4")) == 0
    assert [line["step"] for line in Workdir(workdir).metrics()] == [0, 1, 2, 3, 4]


def test_rollouts_that_would_be_too_old_are_refused(tiny, tmp_path, capsys):
    assert run.main(command(tiny, tmp_path / "run", "--config.rollout.async_depth=2")) == 2
    assert "config.learner.max_staleness=1 allows" in capsys.readouterr().err


def test_weights_that_were_not_loaded_raise_the_alarm_within_a_step(tiny, tmp_path, monkeypatch, capsys):
    load = JaxEngine.load

    async def forgetful(engine, params, version):
        if version == 1:
            engine.version = version  # it says so, and keeps the old weights
        else:
            await load(engine, params, version)

    monkeypatch.setattr(JaxEngine, "load", forgetful)
    assert run.main(command(tiny, tmp_path / "run", "--config.steps=3")) == 0
    lines = Workdir(tmp_path / "run").metrics()
    assert [line["alarm/weights"] for line in lines[1:]] == [0, 1, 0]
    assert "step 2: ALARM: engine and learner differ" in capsys.readouterr().out
