"""A grid: every run once, whatever interrupts it; failures stop no other run; one table and one
figure of all."""

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jax._src.lru_cache import LRUCache

from evolver.files.workdir import Workdir
from experiments import commands, compare, grid
from experiments.grid import Run, execute, product
from tests.experiments.results import scores_of

ROOT = Path(__file__).parents[2]
MODULE = "tests.experiments.counted_run"


def counted(row: str, seed: int = 0, after: tuple[str, ...] = (), **values) -> Run:
    return Run(row, seed, "none", {"steps": 3} | values, module=MODULE, after=after)


def quietly(runs, folder, **options) -> dict[str, str]:
    return execute(runs, folder, say=lambda _: None, **options)


def all_done(runs, folder) -> bool:
    return set(quietly(runs, folder).values()) == {"done"}


def starts(folder: Path, name: str) -> int:
    """Return the number of times that a run was started."""
    return steps(folder, name, "starts")


def steps(folder: Path, name: str, what: str = "steps") -> int:
    """Return the number of steps that a run has made."""
    path = folder / name / what
    return len(path.read_text()) if path.exists() else 0


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_every_combination_is_a_run_of_its_own_and_seeds_vary_slowest():
    runs = product(
        "c.py", rows=["q", "all"], sets={"optim.lr": [1, 2], "loss.args.clip": [3]}, seeds=[0, 1]
    )
    assert len({run.name for run in runs}) == len(runs) == 8
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert runs[1].row == "q,lr=2,clip=3" and runs[1].config == "c.py:q"
    words = "--config=c.py:q --workdir=grid/q,lr=2,clip=3-0 --config.optim.lr=2 --config.seed=0"
    assert set(words.split()) <= set(runs[1].command(Path("grid")))
    clashing = product("c.py", sets={"optim.eps": [1], "advantage.args.eps": [2]})
    assert clashing[0].row == "optim.eps=1,advantage.args.eps=2"


def test_values_with_commas_of_their_own():
    assert grid.split_values("1e-4,(1, 2),'a,b',[3,4]") == ["1e-4", "(1, 2)", "'a,b'", "[3,4]"]
    assert grid.sets_of(["config.optim.lr=1,2"]) == {"optim.lr": ["1", "2"]}
    for wrong in (["optim.lr"], ["optim.lr=1,,2"], ["a=1", "a=2"]):
        with pytest.raises(ValueError, match=r"--set"):
            grid.sets_of(wrong)


def test_what_failed_is_marked_and_stops_no_other(tmp_path):
    runs = [counted("bad", code=3), counted("good")]
    runs += [counted("child", after=("bad-0",)), counted("ok", after=("good-0",))]
    states = quietly(runs, tmp_path, jobs=2)
    assert list(states.values()) == ["exit code 3", "done", "waits for bad-0", "done"]
    notes = {row.name: row.notes for row in grid.gather(runs, tmp_path)}
    assert notes["bad"] == ["seed 0 failed (exit code 3)"]
    assert notes["child"] == ["seed 0 was not run"] and not notes["good"]


def test_finished_runs_are_kept_whatever_lines_are_damaged_and_changed_ones_run_again(tmp_path):
    runs = [counted("a"), counted("b")]
    assert all_done(runs, tmp_path)
    with open(tmp_path / "grid.jsonl", "a") as file:
        file.write('{"run": "a-0", "code": 1}\n{"run": 3}\n[]\nnull\n{"run": "b-0", "comma')
    assert all_done(runs, tmp_path)
    assert starts(tmp_path, "a-0") == starts(tmp_path, "b-0") == 1
    quietly([counted("a"), counted("b", steps=5)], tmp_path)
    assert starts(tmp_path, "a-0") == 1 and starts(tmp_path, "b-0") == 2
    assert steps(tmp_path, "b-0") == 5


def test_the_record_alone_goes_on_elsewhere_and_repeats_only_what_an_unfinished_run_needs(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    runs = [counted("a"), counted("b", after=("a-0",)), counted("c")]
    quietly(runs, here)
    there.mkdir()
    shutil.copy(here / "grid.jsonl", there)
    assert str(tmp_path) not in (there / "grid.jsonl").read_text()
    assert all_done(runs, there)
    assert not (there / "a-0").exists()
    assert not any(row.notes for row in grid.gather(runs, there))
    more = [*runs, counted("late", after=("b-0",))]
    assert all_done(more, there)
    assert [starts(there, name) for name in ("a-0", "b-0", "c-0", "late-0")] == [1, 1, 0, 1]


def test_a_repetition_that_is_killed_does_not_look_finished(tmp_path):
    runs = [counted("a"), counted("late", after=("a-0",))]
    quietly(runs[:1], tmp_path)
    shutil.rmtree(tmp_path / "a-0")
    grid.Execution(runs, tmp_path, say=lambda _: None)._find_finished()  # and the process ends here
    (tmp_path / "a-0").mkdir()
    assert grid.gather(runs[:1], tmp_path)[0].notes == ["seed 0 is unfinished"]
    assert all_done(runs, tmp_path) and starts(tmp_path, "a-0") == 1


def test_runs_share_what_they_compile_unless_another_directory_is_given(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")  # would leave out the times of use
    environ = grid.Execution([], tmp_path).environ
    assert environ["JAX_COMPILATION_CACHE_DIR"].startswith(f"{tmp_path}/")
    assert environ.items() >= grid.COMPILED.items()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert grid.Execution([], tmp_path).environ == dict(os.environ)


def test_a_run_killed_while_it_wrote_a_program_does_not_stop_the_others_from_sharing(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    compiled = Path(grid.Execution([], tmp_path).environ["JAX_COMPILATION_CACHE_DIR"])
    cache = LRUCache(str(compiled), max_size=1 << 20)
    cache.put("whole", b"program")
    (compiled / "cut-cache").write_bytes(b"prog")  # and the process is killed before cut-atime
    with contextlib.suppress(FileNotFoundError):  # of jax before 0.12
        cache.put("next", b"program")
    quietly([counted("a")], tmp_path)
    cache.put("next", b"program")
    assert cache.get("whole") == cache.get("next") == b"program" and cache.get("cut") is None


def test_programs_of_a_cache_in_use_are_left_alone(tmp_path):
    cache = LRUCache(str(tmp_path), max_size=1 << 20)
    (tmp_path / "late-cache").write_bytes(b"program")
    with cache.lock:
        grid.remove_incomplete(tmp_path)
    assert (tmp_path / "late-cache").exists()
    grid.remove_incomplete(tmp_path)
    assert not (tmp_path / "late-cache").exists()


def start_grid(folder: Path, go: Path) -> subprocess.Popen:
    script = (
        "from tests.experiments.test_grid import counted\nfrom experiments.grid import execute\nimport sys\n"
        f"runs = [counted(row, wait={str(go)!r}) for row in 'abc']\n"
        f"states = execute(runs, {str(folder)!r}, jobs=2)\nprint(states)\nsys.exit(set(states.values()) != {{'done'}})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_grid_waits_for_the_runs_it_left_behind_and_repeats_none(tmp_path):
    folder, go = tmp_path / "grid", tmp_path / "go"
    for _ in range(2):  # the second grid finds both runs held by processes of the first
        first = start_grid(folder, go)
        until(lambda: steps(folder, "a-0") == steps(folder, "b-0") == 2)
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    last = start_grid(folder, go)
    until(lambda: steps(folder, "c-0") == 2)  # the free place is used meanwhile
    assert starts(folder, "a-0") == starts(folder, "b-0") == 1
    go.touch()
    out, _ = last.communicate(timeout=60)
    assert last.returncode == 0, out
    assert [steps(folder, name) for name in ("a-0", "b-0", "c-0")] == [3, 3, 3]


def test_an_interrupted_grid_ends_its_runs_and_the_same_command_goes_on(tmp_path):
    folder, go = tmp_path / "grid", tmp_path / "go"
    first = start_grid(folder, go)
    until(lambda: steps(folder, "a-0") == steps(folder, "b-0") == 2)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 1 and "'a-0': 'interrupted'" in out and starts(folder, "c-0") == 0
    go.touch()
    second = start_grid(folder, go)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0, out
    assert starts(folder, "a-0") == 2 and steps(folder, "a-0") == 3


def test_problems_are_found_before_anything_starts_each_once(tiny, tmp_path, stderr):
    words = [f"--config={tiny}", f"--workdir={tmp_path / 'grid'}"]
    words += ["--set", "rollout.temprature=1,2", "optim.lr=0", "--seeds", "0", "1"]
    assert commands.run(grid.main, words) == 2 and not (tmp_path / "grid").exists()
    err = stderr()
    assert err.count("did you mean rollout.temperature?") == 1 and err.count("must be above 0") == 1
    assert "and 1 more" in err and err.startswith("2 problems; nothing was started.")
    assert commands.run(grid.main, ["--config=configs/nothing.py", "--set", "steps=1,2"]) == 2
    assert "no such file" in stderr()


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    words = f"--config={tiny} --workdir={folder}/runs --set optim.lr=1e-2,1e-4 --jobs=2 --"
    flags = "--config.steps=1 --config.eval.every=1 --config.eval.greedy=False"
    assert commands.run(grid.main, [*words.split(), *flags.split()]) == 0
    return folder


def test_a_grid_of_real_runs_ends_in_a_table_and_a_figure(finished):
    folder = finished / "runs"
    text = (folder / "grid.md").read_text()
    assert "| lr=1e-4" in text and "minus lr=1e-2" in text and "before training" in text
    rows = list(csv.reader((folder / "grid.csv").open()))
    assert [row[0] for row in rows] == ["", "lr=1e-2", "lr=1e-4"]
    for name, success, *_ in rows[1:]:
        last = Workdir(folder / f"{name}-0").metrics()[-1]
        assert success == f"{100 * last['eval/avg@2']:.1f}"
    assert (folder / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "grid.svg").read_bytes()
    assert Workdir(folder / "lr=1e-2-0").config()["config"]["log"]["group"] == "runs"


def test_an_evaluation_may_follow_a_run_and_is_gathered_with_its_tasks(tiny, finished):
    folder, config = finished / "runs", str(tiny)
    policy = {"model.path": "{folder}/lr=1e-2-0/policy", "eval.seeds": 2}
    runs = [Run("again", 0, config, policy, mode="eval")]
    assert quietly(runs, folder) == {"again-0": "done"}
    (row,) = grid.gather(runs, folder)
    scores = row.curves[0][0]
    assert np.shape(scores.success_NR) == (3, 4)
    assert scores.tasks == compare.collect(folder / "lr=1e-2-0")[1].tasks


def row(name: str, *runs: list[list[int]], tasks: str = "ab", notes=()) -> compare.Row:
    curves = {seed: {0: scores_of(run, tasks)} for seed, run in enumerate(runs)}
    return compare.Row(name, curves, list(notes))


def test_differences_are_paired_by_seed_and_task_and_missing_runs_leave_gaps():
    first = row("one", [[0, 0], [0, 0]], [[1, 1], [0, 0]])
    rows = [first, row("two", [[0, 1], [0, 1]]), row("three", notes=["failed"])]
    _, one, two, three = compare.lines(rows, [0, 1])
    assert one[1:5] == ["0.0", "50.0", str(compare.estimate(first.final())), "35.4"]  # n - 1
    assert two[1:3] == ["50.0", ""]
    assert two[5].startswith("+50.0 [+50.0, +50.0] (over tasks")
    assert three == ["three", "", "", "", "", "", "failed"]
    assert not compare.difference(first, row("other", [[1, 1], [1, 1]], tasks="ac"))
    text = compare.markdown([["", "x"], ["a|b", "1"], ["c", ""]])
    assert text == "|      |   x |\n|------|----:|\n| a\\|b |   1 |\n| c    |     |\n"


def test_no_interval_reaches_what_cannot_be():
    high = compare.estimate({0: np.array([1.0, 1.0, 0.8]), 1: np.array([1.0, 1.0, 1.0])})
    assert high.mean < high.high == 100.0
    ones = {0: np.ones(3), 1: np.ones(3)}
    fall = compare.paired(ones, {0: np.zeros(3), 1: np.array([0.0, 0.1, 0.0])})
    assert fall.low == -100.0 < fall.mean and fall.runs == 2 and not compare.paired(ones, {})


def test_the_figure_of_a_row_alone_shows_its_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        compare, "save", lambda figure, path: drawn.append([a.get_xlabel() for a in figure.axes])
    )
    rows = [row("a", [[0, 1], [1, 1]]), row("b", [[1, 1], [1, 0]])]
    compare.draw(rows[:1], tmp_path / "one")
    compare.draw(rows, tmp_path / "two")
    assert drawn == [["final success, %", "step"], ["final success, %", "points above a"]]
