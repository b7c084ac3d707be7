"""The program itself, small: it learns the same thing twice, survives kill -9 and Ctrl-C, and its
records add up."""

import asyncio
import contextlib
import dataclasses
import inspect
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from envs.source import serving
from evolver import loop
from evolver.config import cli
from evolver.files.workdir import Workdir, read_tasks
from evolver.phases import evaluation, learning, rollouts
from evolver.processes.interrupt import Interrupted, Stop
from evolver.recipes import Recipe
from models import chat, hf
from models.tokenizer import Tokenizer
from rl.engines import EngineFault
from tests.evolver import runs
from tests.evolver.runs import command, rollouts_of
from tests.evolver.runs import figures as lines
from tests.faults.stage import FATES
from tests.tiny import Parity

ROOT = Path(__file__).parents[2]
RESUMED = "checkpoint.every=2"
RARELY = "checkpoint.every=10"


def go(tiny, workdir, *words) -> int:
    return runs.go(tiny, workdir, RESUMED, *words)


def same(first: Path, second: Path) -> None:
    """Every figure that no clock had a part in, and every rollout, bit for bit."""
    assert lines(first) == lines(second)
    for path in sorted((first / "trajectories").iterdir()):
        assert path.read_bytes() == (second / "trajectories" / path.name).read_bytes()


@pytest.fixture
def finish(finish):
    return lambda name, *words: finish(name, RESUMED, *words)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    assert go(tiny, workdir) == 0
    return workdir


def test_a_run_leaves_what_it_promises(straight):
    metrics = lines(straight)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert [("eval/avg@2" in line) for line in metrics] == [True, False, True, False, True]
    assert sum(line.get("updates", 0) for line in metrics) > 2
    assert all(abs(line["mismatch/max"]) < 1e-4 for line in metrics if line.get("updates"))
    left = ("config.json", "summary.md", "curve.png", "checkpoints", "policy/model.safetensors")
    for name in left:
        assert (straight / name).exists(), name
    shape, _ = hf.load(straight / "policy")
    assert shape.vocab >= Tokenizer.load(straight / "policy").vocab_size
    assert "time/tokens_per_s" in Workdir(straight).metrics()[1]
    assert chat.system_message(straight / "policy") == "", "its world has none"


class Ruled(Parity):
    """A world with a system message."""

    def reset(self, task, seed=0):
        opened = super().reset(task, seed)
        rules = {"role": "system", "content": f"Count. {'' if task.split == 'train' else 'Well.'}"}
        return dataclasses.replace(opened, messages=[rules, *opened.messages])


def test_a_policy_is_saved_with_the_system_message_of_its_training(finish):
    policy = finish("run", "env.name=tests.evolver.test_loop:Ruled steps=1") / "policy"
    assert chat.system_message(policy) == "Count. "
    assert chat.SYSTEM_FILE in (policy / "README.md").read_text()


def test_the_ledger_adds_up_and_names_the_fate_of_every_rollout(straight):
    for line in lines(straight)[1:]:
        assert line["ledger/rollouts"] == line["rollout/count"] == 12
        assert sum(line[f"ledger/{fate}"] for fate in FATES) == 12
        assert sum(value for key, value in line.items() if key.startswith("stop/")) == 12
        written = Counter(rollout["fate"] for rollout in rollouts_of(straight, line["step"]))
        assert written == Counter({fate: line[f"ledger/{fate}"] for fate in FATES})


@pytest.mark.parametrize("mode", ["worker", "http"])
def test_a_run_is_the_same_wherever_its_worlds_live(mode, straight, finish):
    words = [f"env.mode={mode}"]
    with contextlib.ExitStack() as stack:
        if mode == "http":
            pytest.importorskip("starlette", reason="pip install -r requirements/service.txt")
            words.append(f"env.url={stack.enter_context(serving('tests.tiny:Parity'))}")
        run = finish("run", *words)
    for ours, theirs in zip(lines(straight), lines(run), strict=True):
        # Turns meet others in the engine's batch when their worlds answer: that is in the last
        # digits of logprobs.
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    for step in range(1, 5):
        assert said(rollouts_of(straight, step)) == said(rollouts_of(run, step))


def said(rollouts: list[dict]) -> list:
    """What happened in each rollout, without what is computed of it."""
    ends = [(r["task"], r["rollout"], r["stop"], r["score"]) for r in rollouts]
    turns = [(turn["tokens"], turn["observation"]) for r in rollouts for turn in r["turns"]]
    return [ends, turns]


def started(tiny: Path, workdir: Path, until: str) -> subprocess.Popen:
    """Start a run in a process of its own, and return when it says `until`."""
    words = [sys.executable, *command(tiny, workdir, RESUMED)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, cwd=ROOT, **pipes)
    assert any(line.startswith(until) for line in process.stdout)
    return process


def test_killed_and_resumed_is_bit_for_bit_as_never_stopped(straight, tiny, tmp_path, capsys):
    workdir = tmp_path / "run"
    process = started(tiny, workdir, "step 3/4")
    process.kill()
    process.wait()
    assert len(lines(workdir)) >= 4
    assert go(tiny, workdir) == 0
    # Checkpoints are written while the run goes on, so the one of step 2 may have been cut short.
    assert re.search("resuming after step [02] of 4", capsys.readouterr().out)
    same(straight, workdir)


def test_ctrl_c_saves_the_last_step_and_says_how_to_go_on(straight, tiny, tmp_path):
    workdir = tmp_path / "run"
    process = started(tiny, workdir, "step 1/4")
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130 and "Traceback" not in rest
    assert "is saved. The same command resumes from there." in rest
    assert go(tiny, workdir) == 0
    same(straight, workdir)


@pytest.mark.parametrize(
    "phase,done", [("evaluation", 2), pytest.param("evaluation", 0, marks=pytest.mark.slow)]
)
def test_interrupted_anywhere_goes_on_as_if_never_stopped(
    straight, tiny, tmp_path, monkeypatch, phase, done, finish
):
    play = rollouts.gather_rollouts

    def interrupt(run, jobs, name):
        if name == phase and run.step == done:
            run.stop.asked = True
            raise Interrupted
        return play(run, jobs, name)

    for phase_module in (rollouts, evaluation):
        monkeypatch.setattr(phase_module, "gather_rollouts", interrupt)
    assert go(tiny, tmp_path / "run") == 130
    monkeypatch.undo()
    run = finish("run")
    same(straight, run)


def test_a_finished_run_says_so_and_shows_its_table(straight, tiny, capsys):
    before = lines(straight)
    assert go(tiny, straight) == 0
    out = capsys.readouterr().out
    assert "is finished: step 4 of 4" in out and "avg@2" in out and "curve.png" in out
    assert lines(straight) == before


def test_the_exported_policy_can_be_evaluated(straight, tiny, tmp_path, capsys):
    words = [f"model.path={straight}/policy", "--mode=eval"]
    assert go(tiny, tmp_path, *words) == 0
    assert "avg@2" in capsys.readouterr().out
    (record,) = Workdir(tmp_path).evaluations()
    kept = rollouts_of(tmp_path, "eval")
    sampled = [rollout["success"] for rollout in kept if rollout["fate"] == "sampled"]
    assert np.mean(sampled) == record["avg@2"]
    last = lines(straight)[-1]
    assert record["avg@2"] == last["eval/avg@2"] and record["score"] == last["eval/score"]
    assert go(tiny, tmp_path, *words, "eval.seeds=3") == 0
    assert "sd of 3 seeds" in capsys.readouterr().out
    record = Workdir(tmp_path).evaluations()[1]
    repeated = [rollouts_of(tmp_path, name) for name in ("eval", "eval_1", "eval_2")]
    seeds = [tuple(rollout["seed"] for rollout in found) for found in repeated]
    assert repeated[0] == kept and len(set(seeds)) == 3
    assert {rollout["fate"] for found in repeated[1:] for rollout in found} == {"sampled"}
    means = [np.mean([r["success"] for r in found if r["fate"] == "sampled"]) for found in repeated]
    assert record["avg@2"] == pytest.approx(np.mean(means)) and record["seeds"] == 3
    assert record["avg@2/sd"] == pytest.approx(np.std(means, ddof=1))


ALL = (
    "env.name=travel steps=2 rollout.context=256 learner.row=256 questioning.enabled=True",
    "questioning.budget=6 navigating.enabled=True navigating.rollouts=2 navigating.tasks=2",
    "navigating.every=1 attributing.enabled=True advantage.name=adca",
)


def test_what_explore_and_pool_leave_can_be_trained_on(ends, finish):
    explored = finish("explored", *ALL, "--mode=explore")
    pooled = finish("pooled", *ALL, "--mode=pool")
    found = read_tasks(explored / "tasks.jsonl")
    assert found and all(task.origin == "synthetic" for task in found)
    given = f"questioning.tasks={explored}/tasks.jsonl navigating.pool={pooled}/experience"
    run = finish("trained", *ALL, "steps=1", given)
    first, second = lines(run)
    assert first["questioning/pool"] == len(found)
    assert second["rollout/count/synthetic"] > 0 and second["rollout/count/original"] > 0
    assert "attributing/good_rate" in second and "navigating/pool" in second
    kept = read_tasks(run / "tasks.jsonl")
    assert {task.id for task in found} <= {task.id for task in kept}
    assert (run / "experience/experiences.jsonl").exists()
    assert "needs config.questioning.enabled=True" in ends(1, "--mode=explore")


def test_adapters_train_against_the_weights_that_they_are_added_to(finish):
    words = "lora.rank=2 loss.kl_coef=0.1 steps=2 eval.every=0 checkpoint.minutes=0.001"
    run = finish("run", RARELY, words)
    assert {path.name for path in (run / "checkpoints").glob("[0-9]")} == {"1", "2"}
    metrics = lines(run)
    assert metrics[1]["updates"] and metrics[2]["updates"] and metrics[2]["kl_ref"] > 0
    assert (run / "adapter").is_dir()


BATCHES: list[int] = []  # the steps of the batches that `whitened` was given


def whitened(batch):
    """Standardise over the whole batch: no advantage is ever 0."""
    BATCHES.append(batch.step)
    return 1e-3 + (batch.outcome_N - batch.outcome_N.mean()) / (batch.outcome_N.std() + 1e-6)


WHITENED = "advantage.name=tests.evolver.test_loop:whitened"
UNASKED = (  # a recipe that asks no estimator
    "recipe.name=reinforce_pp learner.drop=('cancelled','env_error','stale','overlong')"
)


@pytest.mark.parametrize(
    "plug", ["advantage.name=grpo", UNASKED, pytest.param(WHITENED, marks=pytest.mark.slow)]
)
def test_groups_without_signal_are_replaced_by_other_tasks(plug, finish):
    words = f"rollout.group=2 eval.every=0 {plug}"
    BATCHES.clear()
    plain = finish("plain", words)
    refilled = finish("refilled", words, "rollout.refill=9")
    before, after = lines(plain)[1:], lines(refilled)[1:]
    if plug == UNASKED:
        assert all(line["ledger/trained"] == 6 for line in before)  # nothing is left out
    elif plug != WHITENED:
        trained = [sum(line["ledger/trained"] for line in steps) for steps in (before, after)]
        assert trained[0] < min(6 * len(before), trained[1])  # some tasks had no signal
    else:  # all rounds of a step are one batch
        assert sorted(BATCHES) == sorted(line["step"] for line in before + after)
    assert any(line["rollout/refills"] for line in after)
    for line in after:
        groups = {}
        for rollout in rollouts_of(refilled, line["step"]):
            groups.setdefault(rollout["task"], []).append(rollout["fate"])
        assert all(len(fates) == 2 for fates in groups.values())  # no task twice
        assert line["ledger/rollouts"] == 2 * len(groups)
        signal = sum(fates == ["trained"] * 2 for fates in groups.values())
        # a full step, or the world has no other task
        assert signal == 3 or (signal < 3 and len(groups) == 6)
        assert (len(groups) > 3) == (line["rollout/refills"] > 0)


def test_experience_is_made_of_the_tasks_that_train_whatever_their_split_is_called(
    tmp_path, finish
):
    task = {"env": "parity", "query": "Write.", "split": "mine"}
    tasks = [json.dumps(task | {"id": f"mine/{i}"}) + "\n" for i in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(tasks))
    words = "navigating.enabled=True navigating.rollouts=2 navigating.every=1 steps=1 eval.every=0"
    run = finish("run", words, f"env.tasks={tmp_path}/tasks.jsonl")
    assert {task.split for task in read_tasks(run / "tasks.jsonl")} == {"mine"}


def test_a_world_that_fails_in_every_rollout_ends_the_run_and_in_some_is_shown(
    monkeypatch, capsys, finish, ends
):
    def reset(self, task, seed=0):
        if broken(task):
            raise RuntimeError("the database is gone")
        return plain(self, task, seed)

    plain = Parity.reset
    monkeypatch.setattr(Parity, "reset", reset)
    broken = lambda task: task.id.endswith("/3")
    words = "steps=1 rollout.tasks=6 eval.every=0"
    (_, line), out = lines(finish("some", words)), capsys.readouterr().out
    assert out.count("the environment failed in 4 of 24 rollouts") == 1
    assert "the database is gone" in out
    assert line["ledger/env_error"] == line["rollout/restarts"] == 4
    assert out.count("4 of 24 rollouts were started again in another world") == 1
    broken = lambda task: True
    err = ends(3, words)
    for said in ("step 1: the environment failed in every rollout", "the database is gone"):
        assert said in err
    assert "Step 0 of 1 is saved" in err


def test_a_deadline_that_passes_in_every_rollout_ends_the_run(ends):
    said = "rollout.timeout was exceeded in every rollout: the episode took longer than 0.001 s"
    assert f"step 1: {said}" in ends(3, "eval.every=0 rollout.timeout=0.001")


def test_workers_with_fewer_tasks_than_a_step_takes(ends):
    said = ends(1, "env.mode=worker rollout.tasks=9")
    assert "needs 9 different original tasks, and there are 6" in said


def test_the_policy_before_training_is_evaluated_at_every_temperature(capsys, finish):
    run = finish("run", "steps=2 eval.temperatures=(0.01,1.0,2.0)")
    before, after = Workdir(run).scores().values()
    # 1.0 is that of the evaluation itself
    assert list(before.sweep) == ["0.01", "2"] and after.sweep == {}
    assert np.shape(before.sweep["2"]) == np.shape(before.success_NR)
    first = Workdir(run).metrics()[0]
    assert first["eval/temperature/2"] == np.mean(before.sweep["2"])
    shown = capsys.readouterr().out
    assert "before, at T=" in shown and "sharpening" in shown
    words = f"model.path={run}/policy eval.temperatures=(0.5,)"
    evaluated = finish("eval", words, "--mode=eval")
    assert "success by temperature: " in capsys.readouterr().out
    (record,) = Workdir(evaluated).evaluations()
    assert list(record["scores"][0]["sweep"]) == ["0.5"]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_file_in_the_way_is_one_message(tiny, tmp_path, capsys, mode):
    workdir = tmp_path / "run"
    words = command(tiny, workdir, "steps=1")
    Workdir(workdir).claim(cli.parse(words).config.to_dict())
    (workdir / "trajectories").write_text("")
    assert runs.go(tiny, workdir, "steps=1", f"--mode={mode}") == 1
    err = capsys.readouterr().err
    assert "trajectories" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "module,name,step,saved,error",
    [
        pytest.param(rollouts, "roll_out", 4, 3, EngineFault, marks=pytest.mark.slow),
        (learning, "sync", 3, 3, EngineFault),
        pytest.param(Recipe, "remember", 3, 2, TypeError, marks=pytest.mark.slow),
    ],
)
def test_whatever_ends_a_run_its_complete_steps_are_saved(
    module, name, step, saved, error, straight, tiny, tmp_path, monkeypatch, capsys, finish
):
    def broken(*args, **kwargs):
        calls.append(name)
        if len(calls) > step:
            raise error("it is lost")
        return function(*args, **kwargs)

    function, calls = getattr(module, name), [name]
    monkeypatch.setattr(module, name, staticmethod(broken))
    if error is EngineFault:
        assert go(tiny, tmp_path / "run", RARELY) == 1
        told = capsys.readouterr().err
    else:
        with pytest.raises(TypeError) as caught:
            go(tiny, tmp_path / "run", RARELY)
        told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"it is lost\nStep {saved} of 4 is saved. The same command resumes from there." in told
    monkeypatch.undo()
    run = finish("run")
    assert f"resuming after step {saved} of 4" in capsys.readouterr().out
    same(straight, run)


def test_an_update_that_is_cut_short_says_which_step_comes_back(
    straight, tiny, tmp_path, monkeypatch, capsys, finish
):
    def broken(*args):
        if len(noted) == 4:
            raise EngineFault("it is lost")
        noted.append(args)
        return note(*args)

    note, noted = learning.note_tokens, []
    monkeypatch.setattr(learning, "note_tokens", broken)
    assert go(tiny, tmp_path / "run", RARELY) == 1
    assert "Step 2 of 4 could not be saved: it has been updated since." in capsys.readouterr().err
    monkeypatch.undo()
    run = finish("run")
    assert "resuming after step" not in capsys.readouterr().out.replace("step 0", "")
    same(straight, run)


def test_the_loop_fits_on_one_screen():
    source = inspect.getsource(loop.train) + inspect.getsource(loop.iterate)
    assert source.count("\n") < 50


def test_a_second_ctrl_c_ends_at_once():
    async def forever():
        signal.raise_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        with pytest.raises(Interrupted):
            stop.run(forever())
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
