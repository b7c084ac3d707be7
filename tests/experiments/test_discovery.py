"""Tasks out of reach, and those that training brings within reach."""

import dataclasses

import pytest

from evolver.files.workdir import Workdir
from experiments import commands, discovery
from rl.evaluation import Scores

TASKS = ["a", "b", "c", "d"]


def base(solved: list[int]) -> Scores:
    """Return 256 attempts of each task, of which the first `solved` succeed."""
    rows = [[1] * n + [0] * (256 - n) for n in solved]
    parts = [[row[i : i + 64] for row in rows] for i in range(0, 256, 64)]
    sweep = dict(zip(("0.2", "0.4", "0.7"), parts[1:], strict=True))
    return Scores(TASKS, [1, 2, 3, 4], parts[0], parts[0], [], sweep=sweep)


def trained(greedy: list[int]) -> Scores:
    success_NR = [[value] * 8 for value in greedy]
    return Scores(TASKS, [1, 2, 3, 4], success_NR, success_NR, greedy)


def test_the_table_splits_the_tasks_and_averages_the_runs():
    text = discovery.table(
        base([0, 2, 3, 200]), {"x": trained([1, 0, 1, 1]), "y": trained([1, 1, 0, 1])}
    )
    assert text.startswith("2 of 4 tasks are solved in fewer than 1% of 256 attempts")
    cells = {line.split()[0]: line for line in text.splitlines() if line}
    assert "50.0 [" in cells["x"] and "100.0 [" in cells["x"]
    assert "100.0 [" in cells["y"] and "50.0 [" in cells["y"]
    assert cells["mean"].count("75.0 [") == 2
    assert discovery.table(base([9, 9, 9, 9]), {"x": trained([1, 1, 1, 1])}).startswith("0 of 4")


def test_a_base_that_is_there_is_not_evaluated_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        discovery.subprocess, "run", lambda *args, **kwargs: pytest.fail("evaluated again")
    )
    Workdir(tmp_path / "base").log_evaluation(
        {"scores": [dataclasses.asdict(base([0, 0, 3, 200]))]}
    )
    Workdir(tmp_path / "run").log_scores(7, trained([1, 0, 1, 1]))

    def main(run: str) -> int:
        words = f"{tmp_path}/{run} --config=configs/quickstart.py --base {tmp_path}/base"
        return commands.run(discovery.main, f"{words} --out {tmp_path}/out.md".split())

    assert main("run") == 0
    assert "50.0 [" in capsys.readouterr().out
    assert (tmp_path / "out.md").read_text().startswith("2 of 4")
    assert main("nothing") == 2
    assert "no greedy evaluation" in capsys.readouterr().err
