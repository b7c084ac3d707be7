"""The table of an ablation: the last evaluation of each row and seed, and their comparison."""

import pytest

from evolver.workdir import Workdir
from experiments import ablation
from rl.evaluation import Scores


def run(folder, name, *evaluations):
    for step, success_NR in enumerate(evaluations):
        workdir = Workdir(folder / name)
        scores = Scores(["a", "b"], [1, 2], success_NR, success_NR)
        workdir.log_scores(step * 10, scores)


def test_the_last_evaluation_of_each_run_counts_and_what_is_missing_stays_empty(tmp_path):
    run(tmp_path, "grpo-0", [[0, 0], [0, 1]], [[1, 1], [1, 0]])
    run(tmp_path, "grpo-1", [[0, 0], [0, 1]], [[1, 1], [1, 1]])
    run(tmp_path, "q-1", [[0, 0], [0, 1]], [[0, 0], [0, 0]])
    lines = ablation.table(tmp_path, ["grpo", "q", "all"], [0, 1]).splitlines()
    assert lines[0] == "before: 25.0" and lines[1].endswith("minus grpo, paired")
    assert lines[3].split() == ["grpo", "75.0", "100.0", "87.5", "[75.0,", "100.0]", "17.7"]  # sd with n - 1
    assert lines[4].split()[:3] == ["q", "0.0", "0.0"]
    assert lines[4].endswith("-100.0 [-100.0, -100.0]")  # against seed 1 only, and without a deviation
    assert lines[5].split() == ["all"]
    ablation.draw(tmp_path, ["grpo", "q", "all"], [0, 1], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_differences_to_the_first_row_are_paired_by_task(tmp_path):
    run(tmp_path, "grpo-0", [[0, 0], [1, 1]])
    run(tmp_path, "q-0", [[0, 1], [1, 1]])
    assert ablation.table(tmp_path, ["grpo", "q"], [0]).splitlines()[-1].endswith("+25.0 [+0.0, +50.0]")


def test_two_at_a_time_and_what_fails_is_named(tmp_path, monkeypatch, capsys):
    flags = ["--jobs=2", "--rows", "grpo", "q", "--seeds", "0", f"--workdir={tmp_path}", "--", "--config.stepz=1"]
    monkeypatch.setattr("sys.argv", ["ablation", *flags])
    with pytest.raises(SystemExit, match="failed: grpo-0, q-0"):
        ablation.main()
    assert "config.stepz: there is no such key" in (tmp_path / "q-0.log").read_text()
    assert "q-0: exit code 2" in capsys.readouterr().out
