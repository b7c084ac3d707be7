"""What a run writes can be read back, survives a crash, and says the same thing twice."""

import contextlib
import io
import json
import os
import re
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from envs.world import Evaluation, Task
from evolver.files.progress import Progress
from evolver.files.report import main, report
from evolver.files.rollout_files import record_of
from evolver.files.sinks import Sinks
from evolver.files.workdir import Workdir, read_tasks
from evolver.llm.store import Ledger
from evolver.metrics import faults_of, rollout_metrics
from models.files import BrokenFile
from rl.evaluation import Scores
from rl.trajectory import Completion, StopReason, Trajectory, Turn


def said(prompt, tokens, action, observation, *info):
    completion = Completion(tokens, [-0.5] * len(tokens), "stop", 7)
    return Turn(prompt, completion, action, observation, *info)


def trajectory(rollout=0, *, success=True, stop=StopReason.DONE, experience=()):
    first = said([1, 2], [3, 4], "look", [{"role": "tool", "content": "é"}])
    second = said([1, 2, 3, 4, 5], [6], "book", [], {"parse_error": True})
    second.label = 1
    second.advantage = 0.25
    task = Task("t1", "toy", "Book it.")
    messages = [{"role": "user", "content": "Book it."}]
    evaluation = Evaluation(float(success), success)
    return Trajectory(
        task, rollout, 11, messages, [first, second], stop, evaluation, list(experience)
    )


def test_metrics_lines_are_sorted_exact_and_finite_and_have_any_names(tmp_path):
    workdir = Workdir(tmp_path)
    metrics = {"b": np.float32(0.1), "a": 1 / 3, "c": float("nan"), "d\ud800": np.int64(3)}
    workdir.log_metrics(4, metrics)
    line = (
        '{"step": 4, "a": 0.3333333333333333, "b": 0.10000000149011612, "c": null, "d\\ufffd": 3}\n'
    )
    assert (tmp_path / "metrics.jsonl").read_text() == line
    assert workdir.metrics()[0]["a"] == 1 / 3


def crash_in(path):
    with open(path, "a") as file:
        file.write('{"step": 9')


def test_a_line_that_a_crash_cut_short_costs_no_other(tmp_path):
    workdir = Workdir(tmp_path)
    for step in range(3):
        workdir.log_metrics(step, {})
        workdir.log_evaluation({"step": step})
        crash_in(tmp_path / "eval.jsonl")
    crash_in(tmp_path / "metrics.jsonl")  # what comes after it is rewound first
    for lines in (workdir.metrics(), workdir.evaluations()):
        assert [line["step"] for line in lines] == [0, 1, 2]
    ledger = Ledger(tmp_path / "llm.jsonl")
    ledger.add("call", "judge", "m", money=1.0)
    crash_in(tmp_path / "llm.jsonl")
    Ledger(tmp_path / "llm.jsonl").add("call", "judge", "m", money=2.0)
    assert Ledger(tmp_path / "llm.jsonl").money == 3.0


def test_rewinding_forgets_what_comes_after_a_step(tmp_path):
    workdir = Workdir(tmp_path)
    for step in range(5):
        workdir.log_metrics(step, {"x": step})
        workdir.log_trajectories(step, [record_of(trajectory(), fate="trained")])
        workdir.log_scores(step, Scores(["t"], [1], [[1.0]], [[1]]))
    for step in (2, 4):
        workdir.log_trajectories(f"held_out_{step:06d}", [record_of(trajectory(), fate="greedy")])
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]
    workdir.rewind(2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before
    kept = sorted(p.name for p in (tmp_path / "trajectories").glob("*.jsonl.gz"))
    names = ["held_out_000002", "step_000000", "step_000001", "step_000002"]
    assert kept == [f"{name}.jsonl.gz" for name in names]
    assert list(workdir.scores()) == [0, 1, 2]


def test_the_config_is_kept_with_its_origin(tmp_path):
    workdir = Workdir(tmp_path / "new")
    workdir.claim({"seed": 3, "x": (1, 2)})
    record = workdir.config()
    assert record["config"] == {"seed": 3, "x": [1, 2]} and record["seed"] == 3
    assert record["versions"]["jax"] and record["python"]
    workdir.claim({"seed": 3, "x": (1, 2)})
    assert "resumed" not in workdir.config()
    workdir.claim({"seed": 4}, "eval")  # of another mode, beside the run
    assert workdir.config()["seed"] == 3
    record = json.loads((tmp_path / "new/config.eval.json").read_text())
    assert record["config"] == {"seed": 4} and record["versions"]["jax"]


@pytest.mark.parametrize("text", ['{"model_type": "qwen2"}', "[]", "3", '{"config": 3}'])
def test_the_config_of_something_else_is_no_run(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert Workdir(tmp_path).config() is None


def test_what_a_process_left_half_written_does_not_stop_the_next_one(tmp_path):
    workdir = Workdir(tmp_path)
    for step in (1, 2):
        workdir.log_trajectories(step, [])
    for left in (
        "trajectories/step_000003.jsonl.gz.1a2b.tmp",
        "eval/step_000003.json.ff.tmp",
        "tasks.md.4f5bb3f6.tmp",
    ):
        (tmp_path / left).parent.mkdir(exist_ok=True)
        (tmp_path / left).write_text('{"ta')
    (tmp_path / "trajectories/step_notes.txt").write_text("mine")
    workdir.rewind(1)
    kept = sorted(p.name for p in (tmp_path / "trajectories").iterdir())
    assert kept == ["step_000001.index.json.gz", "step_000001.jsonl.gz", "step_notes.txt"]
    assert not list((tmp_path / "eval").iterdir()) and not list(tmp_path.glob("*.tmp"))


TASK = '{"id": "a", "env": "toy", "query": "q"'


@pytest.mark.parametrize(
    "line, told",
    [
        (TASK.replace('"a"', "3") + "}", "line 3: .*a task's id must be of type str, not 3"),
        (TASK.replace('"q"', '["q"]') + "}", "line 3: .*a task's query must be of type str"),
        (TASK + ', "seed": "1"}', "line 3: .*a task's seed must be of type int"),
        (TASK + ', "verifier": 4}', "line 3: .*a task's verifier must be of type dict"),
        (TASK + ', "split": "\udcff"}', "line 3: .*codec can't decode"),
        ('{"id": "a", "env": "toy"}', "line 3: .*query"),
        ("{oops", "line 3: "),
        ("[1]", "line 3: "),
        (TASK.replace('"a"', '"one"') + "}", "more than once"),
    ],
)
def test_task_files_come_back_and_a_broken_line_is_named(tmp_path, line, told):
    path = tmp_path / "tasks.jsonl"
    tasks = [Task("one", "toy", "One."), Task("two", "toy", "Two.", origin="synthetic")]
    Workdir(tmp_path).log_tasks(tasks)
    assert read_tasks(path) == tasks
    with open(path, "a", errors="surrogateescape") as file:
        file.write(line + "\n")
    with pytest.raises(BrokenFile, match=told):
        read_tasks(path)


def test_a_rollout_is_one_readable_line_with_each_token_once(tmp_path):
    rollout = trajectory(experience=["e1"])
    rollout.injected = ["Search first."]
    record = record_of(rollout, fate="no_signal")
    line = json.dumps(record, ensure_ascii=False)
    assert "é" in line
    first, second = record["turns"]
    tokens = first["prompt"] + first["tokens"] + second["prompt"] + second["tokens"]
    assert tokens == [1, 2, 3, 4, 5, 6] and second["continues"] and not first["continues"]
    assert second["label"] == 1 and second["advantage"] == 0.25 and second["logprobs"] == [-0.5]
    assert record["experience"] == [{"id": "e1", "content": "Search first."}]
    assert (record["fate"], record["stop"], record["success"]) == ("no_signal", "done", True)


def test_stop_reasons_are_one_hot():
    cut = trajectory(1, stop=StopReason.LENGTH, success=False)
    members = [trajectory(0), cut, trajectory(2, experience=["e"])]
    metrics = rollout_metrics(members)
    assert sum(v for k, v in metrics.items() if k.startswith("stop/")) == 3
    assert metrics["stop/length"] == 1 and metrics["rollout/success"] == pytest.approx(2 / 3)
    assert metrics["rollout/count/guided"] == 1 and metrics["rollout/count/synthetic"] == 0
    assert "rollout/success/synthetic" not in metrics
    assert metrics["rollout/tokens"] == 9 and metrics["rollout/parse_errors"] == 0.5
    cut.restarted = "reset: OSError: gone"
    assert (metrics["rollout/restarts"], rollout_metrics(members)["rollout/restarts"]) == (0, 1)


@pytest.mark.parametrize("asked_to_end", [False, True])
def test_an_output_that_nobody_reads_is_an_error_of_writing_unless_a_run_ends(asked_to_end):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        progress = Progress(3, stream=stream, leaving=lambda: asked_to_end)
        with (
            contextlib.nullcontext()
            if asked_to_end
            else pytest.raises(BrokenPipeError, match="nobody reads the output")
        ):
            progress.step(1, {})
        progress.step(2, {})  # at the end of the run, its parts may still have something to say
        progress.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_log_and_one_line_on_a_terminal():
    log = io.StringIO()
    terminal = Terminal()
    for stream in (log, terminal):
        progress = Progress(3, stream=stream)
        progress.phase("rollouts", 0, 16)
        progress.step(1, {}, success="25%")
        progress.phase("update")
        progress.step(2, {}, success="50%")
    assert log.getvalue().count("\n") == 2 and "rollouts" not in log.getvalue()
    assert log.getvalue().startswith("step 1/3 · success 25%\nstep 2/3 · success 50% · 0:00 left")
    assert "rollouts 0/16" in terminal.getvalue() and "\r" in terminal.getvalue()


def test_progress_counts_steps_only_while_there_are_some(monkeypatch):
    monkeypatch.setattr("evolver.files.progress.LOG_EVERY", 0.0)
    log = io.StringIO()
    terminal = Terminal()
    for stream in (log, terminal):
        progress = Progress(3, stream=stream)
        progress.phase("evaluation", 0, 6)  # --mode=eval
        progress.done = -1
        progress.phase("exploring", 0, 9)  # before the first step
        progress.done = 2
        progress.phase("rollouts", 0, 2)
        progress.close()
    assert log.getvalue().splitlines() == [
        "evaluation 0/6",
        "step 0/3 · exploring 0/9",
        "step 3/3 · rollouts 0/2",
    ]
    before, _, after = terminal.getvalue().partition("step 0/3")
    assert "evaluation 0/6" in before and "step" not in before and "step 3/3" in after


def test_faults_are_counted_in_the_line_of_their_step_and_summed_on_a_terminal():
    log = io.StringIO()
    terminal = Terminal()
    steps = [
        {"ledger/env_error": 2, "llm/judge/failures/timeout": 3, "skipped": 0.0},
        {"ledger/env_error": 1, "ledger/cancelled": 0},
        {},
    ]
    for stream in (log, terminal):
        progress = Progress(9, stream=stream)
        for number, metrics in enumerate(steps, 1):
            progress.step(number, faults_of(metrics), success=f"{number + 4}%")
        progress.phase("rollouts", 3, 16)
        progress.close()
    first, second, third = log.getvalue().splitlines()
    assert first == "step 1/9 · success 5% · faults: model calls 3, world 2"
    assert "faults: world 1" in second and "faults" not in third
    live = terminal.getvalue().split("step 3/9")[1]
    for words in ("faults: model calls 3, world 3", "rollouts 3/16", "step 4/9", "success 7%"):
        assert words in live
    assert "left" in live


def opened(folder, wandb, id=""):
    asked = {"wandb": wandb, "project": "p", "tensorboard": False, "group": "study"}
    config = ConfigDict({"seed": 1, "log": asked | {"tags": ("qa", "seed0")}})
    return Sinks(folder, config, id=id)


def test_wandb_and_tensorboard_are_not_imported_unless_asked_for(tmp_path):
    before = set(sys.modules)
    sinks = opened(tmp_path, "off")
    sinks.log(1, {"x": 1.0})
    sinks.close()
    assert sinks.id == "" and not {"wandb", "tensorboardX"} & (set(sys.modules) - before)


def rollout(id, action):
    turn = said([1], [2], action, [{"role": "tool", "content": "ok"}])
    return Trajectory(Task(id, "toy", "Do."), 0, 0, [], turns=[turn], stop=StopReason.DONE)


def test_wandb_writes_offline_and_goes_on_in_the_same_run(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    first = opened(tmp_path, "offline")
    first.log(1, {"x": 1.0, "none": None})
    picture = tmp_path / "curve.png"
    Image.new("RGB", (2, 2)).save(picture)
    first.rollouts(
        1, [rollout("a", "<EXP>"), rollout("b", "two")] * 20, ["trained", "no_signal"] * 20
    )
    first.picture("curve", picture)
    first.picture("missing", tmp_path / "missing.png")
    assert (first.run.group, first.run.tags) == ("study", ("qa", "seed0"))
    first.close()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(table.read_text())
    assert len(table["data"]) == 8 and table["columns"][:4] == ["step", "task", "origin", "query"]
    first_row = table["data"][0]
    assert (first_row[1], first_row[8]) == ("a", "trained") and "> <EXP>" in first_row[4]
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/curve*.png"))
    second = opened(tmp_path, "offline", first.id)
    assert second.id == first.id
    second.close()
    assert list(tmp_path.glob("wandb/offline-run-*"))


def fill(workdir, evaluations):
    groups = {name: {"enabled": True} for name in ("questioning", "navigating", "attributing")}
    groups |= {"model": {"path": "p"}, "advantage": {"name": "adca"}, "eval": {"split": "dev"}}
    workdir.claim({"env": {"name": "toy"}} | groups)
    for step in range(4):
        ledger = {"ledger/rollouts": 8, "ledger/trained": 6, "ledger/no_signal": 2}
        ledger["rollout/success/original"] = 0.5
        workdir.log_metrics(step, {"time/elapsed": 65.0} | (ledger if step else {}))
    for step in range(evaluations):
        success_NR = [[1] * step + [0] * (4 - step), [1, 1, 0, 0]]
        evaluated(workdir, step, success_NR, [0, 1])


def evaluated(workdir, step, success_NR, greedy_N=(0, 0), **sweep):
    """Log an evaluation of two tasks, a and b of difficulty 1 and 3."""
    scores = Scores(["a", "b"], [1, 3], success_NR, success_NR, list(greedy_N), sweep=sweep)
    workdir.log_scores(step, scores)


def test_the_report_says_how_much_of_a_gain_is_sharpening(tmp_path):
    workdir = Workdir(tmp_path)
    fill(workdir, 0)
    few = [[1, 0, 0, 0], [0, 0, 0, 0]]
    most = [[1, 1, 1, 1], [1, 1, 1, 0]]
    sweep = {"0.2": [[1, 1, 1, 0], [0, 0, 0, 0]], "0.6": [[1, 0, 0, 0], [0, 0, 0, 0]]}
    evaluated(workdir, 0, few, **sweep)
    text = report(tmp_path)
    assert "success by temperature: 37.5 at 0.2, 12.5 at 0.6, 12.5 at 1" in text
    evaluated(workdir, 3, most, [1, 1])
    text = report(tmp_path)
    assert "before, at T=0.2" in text
    row = next(line for line in text.splitlines() if line.startswith("avg@4"))
    assert "12.5 [" in row and "37.5 [" in row and "87.5 [" in row
    assert "Of the gain of +75.0 points at temperature 1, 25.0 are sharpening" in text
    assert "best temperature of 0.2) and 50.0 [" in text
    assert "sharpening" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("after", [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
def test_a_run_without_a_gain_is_not_split_into_parts_of_one(after, tmp_path):
    """Neither a change of 0 nor one that is less than sharpening alone has new parts."""
    workdir = Workdir(tmp_path)
    fill(workdir, 0)
    none = [0, 0, 0, 0]
    evaluated(workdir, 0, [[1, 0, 0, 0], none], **{"0.2": [[1, 1, 1, 0], none]})
    evaluated(workdir, 3, [after, none], [1, 1])
    text = report(tmp_path)
    gain = 12.5 * (sum(after) - 1)
    new = 12.5 * (sum(after) - 3)
    assert f"The change at temperature 1 is {gain:+.1f} points, and nothing of it is new" in text
    assert "gives +25.0 (the policy before, at its best temperature of 0.2)" in text
    assert f"the policy after is {new:+.1f} [" in text and "are new" not in text


def test_a_report_on_no_run_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == main([str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{tmp_path}/nowhere: nothing to report on")
    assert second.startswith(f"{tmp_path}: nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [{}, {"env": [], "model": {"path": None}, "eval": 5}])
def test_the_report_on_a_config_that_says_little_says_what_it_knows(tmp_path, config):
    workdir = Workdir(tmp_path)
    fill(workdir, 1)
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    workdir.log_metrics(9, {"ledger/rollouts": 4, "ledger/trained": 4})
    assert "held-out tasks" in report(tmp_path)
    summary = (tmp_path / "summary.md").read_text()
    assert "- environment: unknown\n" in summary and "- time: unknown\n" in summary


@pytest.mark.parametrize("evaluations", [0, 1, 3])
def test_the_report_needs_nothing_but_the_workdir(tmp_path, evaluations):
    fill(Workdir(tmp_path), evaluations)
    text = report(tmp_path)
    assert (tmp_path / "curve.png").stat().st_size > 10_000 and str(tmp_path / "curve.png") in text
    summary = (tmp_path / "summary.md").read_text()
    assert re.search(r"\| trained +\| +18 \| +75.0% \|", summary) and "curve.png" in summary
    assert "- rollouts: 24" in summary and "- time: 1:05" in summary
    if evaluations == 3:
        row = next(line for line in text.splitlines() if line.startswith("avg@4"))
        assert "25.0 [" in row and "50.0 [" in row and "+25.0 [+0.0, +50.0]" in row
        for words in ("difficulty 3 (1)", "pass@4", "best@4", "greedy"):
            assert words in text
