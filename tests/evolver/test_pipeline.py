"""Rollouts started ahead: which groups a step trains on, how old they may be, and the whole program
with them."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from configs import base
from envs.world import Evaluation, Task
from evolver import grading
from evolver.attributing import reasons_to_skip
from evolver.parts import Parts
from evolver.phases import evaluation, learning, tasks
from evolver.pipeline import Pipeline
from evolver.processes.interrupt import RunEnds
from evolver.questioning.pool import TaskPool
from evolver.recipes import Recipe
from rl.advantages.estimators import adca, dr_grpo, grpo, loop, rloo
from rl.engines.jax.engine import JaxEngine
from rl.evaluation import scores_of
from tests.evolver.runs import figures, go, rollouts_of
from tests.rl.test_samples import trajectory, turn


def simulate(depth, bound, steps, seconds):
    """Return the groups that each step of a pipeline trains on, two of each step, as (step that it
    was started for, number). seconds: the beats that a group takes."""
    trained, graded = [], []

    async def play(jobs):
        (group,) = jobs
        await asyncio.sleep(0.02 * seconds(*group))
        return [group]

    async def iterate():
        pipeline = Pipeline(play, graded.extend, depth=depth, bound=bound)
        for step in range(1, steps + 1):
            for ahead in pipeline.ahead(step, steps):
                pipeline.launch(ahead, [[(ahead, n)] for n in range(2)])
            found, metrics = await pipeline.collect(step, 2, lambda done, of: None)
            assert metrics["async/late"] == sum(started < step for started, _ in found)
            trained.append(found)
        assert not pipeline.busy and metrics["async/groups"] == 0
        await pipeline.close()

    asyncio.run(iterate())
    assert sorted(graded) == sorted(group for found in trained for group in found)
    return trained


def graded_of(work, rollouts, threads=1):
    """Return what `grading.Grading` gives for rollouts, an async function of its `add`."""
    sizes = {("slow", 0): 2, ("quick", 0): 2}
    graded = grading.Grading(work, sizes, threads)
    return asyncio.run(asyncio.wait_for(graded.until_graded(rollouts(graded.add)), 60))


def rollout_of(task, number):
    return replace(trajectory(turn([1], [2]), task=task), rollout=number)


def test_a_group_is_judged_as_it_finishes_while_others_go_on():
    calls, judged = [], threading.Event()

    def work(members):
        calls.append([(t.task.id, t.rollout) for t in members])
        judged.set()

    async def rollouts(add):
        add(rollout_of("slow", 1))
        for number in (1, 0):
            add(rollout_of("quick", number))
        await asyncio.to_thread(judged.wait, 60)  # the slow group ends after the other's judgement
        add(rollout_of("slow", 0))
        return "played"

    assert graded_of(work, rollouts) == "played"
    assert calls == [[("quick", 0), ("quick", 1)], [("slow", 0), ("slow", 1)]]


def test_what_a_judge_raises_ends_the_rollouts():
    ended = []

    def work(members):
        raise RunEnds("the budget is spent")

    async def rollouts(add):
        for number in range(2):
            add(rollout_of("quick", number))
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(RunEnds, match="the budget is spent"):
        graded_of(work, rollouts)
    assert ended == [True]


@pytest.mark.parametrize("depth,bound", [(1, 1), (1, 2), (2, 2), (1, 3), (2, 4)])
def test_every_group_trains_once_and_none_is_older_than_allowed(depth, bound):
    trained = simulate(depth, bound, 6, lambda step, n: (step * 7 + n * 5) % 9)
    assert sorted(group for found in trained for group in found) == [
        (s, n) for s in range(1, 7) for n in range(2)
    ]
    for step, (one, other) in enumerate(trained, 1):
        for started, _ in (one, other):
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

        pipeline = Pipeline(play, lambda trajectories: None, depth=1, bound=1)
        pipeline.launch(1, [[0]])
        with pytest.raises(OSError, match="no world"):
            await pipeline.collect(1, 1, lambda done, of: None)
        await pipeline.close()

    asyncio.run(scenario())


def test_a_late_group_shares_no_baseline_with_the_next_steps_group_of_its_task():
    """A step trains on two groups of one task: one that an older policy played, with successes and
    failures, and one of the present policy, all of whose rollouts failed. A common baseline would
    punish the latter."""
    config = base.get_config()
    trajectories = [trajectory(turn([1], [2], version=draw - 1)) for draw in (1, 1, 2, 2)]
    for t, score in zip(trajectories, (1.0, 0.5, 0.0, 0.0)):
        t.draw, t.evaluation = t.turns[0].completion.version + 1, Evaluation(score, score == 1)
    for estimator in (grpo, dr_grpo, rloo, loop, partial(adca, alpha=0.0)):
        grading.assign(config, estimator, trajectories, 2)
        first, second, *others = (t.turns[0].advantage for t in trajectories)
        assert first == pytest.approx(-second) and first > 0 and others == [0, 0]
    assert [t.turns[0].outcome_advantage for t in trajectories] == [first, second, 0, 0]  # adca's
    skipped = reasons_to_skip(trajectories, skip_flat=True)
    assert skipped[1:3] == ["", "the group's outcomes are equal"]
    actor = SimpleNamespace(engine=SimpleNamespace(version=1))
    run = SimpleNamespace(config=config, actor=actor, recipe=Recipe(Parts()))
    batches, reasons, _ = learning.select(run, trajectories, [], 2)
    assert reasons == [None, None, "no_signal", "no_signal"] and len(batches) == 1
    scores_NR = scores_of(trajectories, [], temperature=1.0, sweep={}).score_NR
    assert scores_NR == [[1.0, 0.5], [0.0, 0.0]]


def test_a_refresh_that_was_done_ahead_of_a_checkpoint_is_not_repeated(monkeypatch):
    seeds, refreshed = [Task("a", "toy", "Do it.")], []
    monkeypatch.setattr(tasks, "explore", lambda run, step: refreshed.append(step) or {})
    monkeypatch.setattr(tasks, "draw", lambda run, *place: [])

    def begin(after: int, pool: TaskPool) -> SimpleNamespace:
        pipeline = Pipeline(None, None, depth=1, bound=1)
        pipeline.launched = after
        config = base.get_config()
        config.questioning.every, config.steps = 2, 6
        tasks = SimpleNamespace(pool=pool)
        return SimpleNamespace(config=config, pipeline=pipeline, tasks=tasks)

    def advance(run, steps) -> None:
        for step in steps:
            chosen, _ = tasks.choose(run, step)
            run.pipeline.launched = max(chosen, default=run.pipeline.launched)

    first = TaskPool(seeds, overlap=0.9, capacity=9)
    advance(begin(0, first), (1, 2))
    assert refreshed == [3]  # for step 3, at step 2
    again = TaskPool(seeds, overlap=0.9, capacity=9)
    again.load_state(first.state())
    advance(begin(2, again), (3, 4, 5, 6))
    assert refreshed == [3, 5]


# --- the whole program ----------------------------------------------------------------------------


@pytest.fixture
def finish(finish):
    return lambda name, *words: finish(name, "eval.every=0", *words)


def test_a_run_with_rollouts_ahead_trains_on_every_step_and_knows_how_old_they_are(finish):
    run = finish("run", "rollout.async_depth=1 steps=3")
    lines = figures(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["ledger/rollouts"] == line["rollout/count"] == 12 and line["ledger/stale"] == 0
        assert line.get("staleness/max", 0) <= 1 and line["alarm/weights"] == 0
    assert max(line.get("staleness/max", 0) for line in lines) == 1
    for step in (1, 2, 3):
        records = rollouts_of(run, step)
        assert len({(record["task"], record["rollout"]) for record in records}) == 12
        assert {record["draw"] for record in records} == {step}
    # It goes on after its last step as any run does.
    finish("run", "rollout.async_depth=1 steps=4")
    assert [line["step"] for line in figures(run)] == [0, 1, 2, 3, 4]


EVALUATED = "rollout.async_depth=1 steps=2 eval.every=1"


def assert_evaluated(run):
    """Assert that a run has ended, and was evaluated after each step."""
    lines = figures(run)
    assert [line["step"] for line in lines] == [0, 1, 2] and all("eval/avg@2" in x for x in lines)


def test_the_next_step_goes_on_during_an_evaluation(tiny, tmp_path, monkeypatch):
    ahead, events, begun = {}, [], evaluation.begun_rollouts
    play = evaluation.gather_rollouts

    def gather_rollouts(run, jobs, phase):
        ahead[run.step] = run.pipeline.counts()[1]
        return play(run, jobs, phase)

    def begun_rollouts(run, jobs, phase, beside):
        step, ahead[run.step] = run.step, run.pipeline.counts()[1]
        result = begun(run, jobs, phase, beside)
        events.append(f"evaluation {step} begins")
        return lambda: events.append(f"evaluation {step} ends") or result()

    def noted(work, event):
        return lambda *given: events.append(f"{event} {given[-1]}") or work(*given)

    monkeypatch.setattr(evaluation, "begun_rollouts", begun_rollouts)
    monkeypatch.setattr(evaluation, "gather_rollouts", gather_rollouts)
    monkeypatch.setattr(Recipe, "roll_out", noted(Recipe.roll_out, "rollouts"))
    monkeypatch.setattr(Recipe, "learn", staticmethod(noted(Recipe.learn, "update")))
    assert go(tiny, tmp_path / "run", EVALUATED) == 0
    assert ahead[1] > 0 and ahead[2] == 0, "groups of step 2 while step 1 is evaluated"
    assert events == [
        "evaluation 0 begins", "rollouts 1", "evaluation 0 ends", "update 1",
        "evaluation 1 begins", "rollouts 2", "evaluation 1 ends", "update 2",
    ]  # fmt: skip
    assert_evaluated(tmp_path / "run")


def test_a_run_that_ends_during_an_evaluation_evaluates_again(tiny, tmp_path, monkeypatch):
    def lose(*_):
        raise RunEnds("the budget is spent")

    with monkeypatch.context() as broken:
        broken.setattr(Recipe, "credit", lose)
        assert go(tiny, tmp_path / "run", EVALUATED) == 3
    assert figures(tmp_path / "run") == []
    assert go(tiny, tmp_path / "run", EVALUATED) == 0
    assert_evaluated(tmp_path / "run")


def test_weights_that_were_not_loaded_raise_the_alarm_within_a_step(monkeypatch, capsys, finish):
    load = JaxEngine.load

    async def forgetful(engine, params, version):
        if version == 1:
            engine.version = version  # it says so, and keeps the old weights
        else:
            await load(engine, params, version)

    monkeypatch.setattr(JaxEngine, "load", forgetful)
    run = finish("run", "steps=3")
    lines = figures(run)
    assert [line["alarm/weights"] for line in lines[1:]] == [0, 1, 0]
    assert "step 2: ALARM: engine and learner differ" in capsys.readouterr().out
