"""Tasks out of reach, and those that training brings within reach."""

import dataclasses

import numpy as np
import pytest

from evolver.files.workdir import Workdir
from experiments import commands, discovery
from rl.evaluation import Scores
from tests.experiments.results import scores_of


def base(solved: list[int]) -> Scores:
    """Return 256 attempts of each task, of which the first `solved` succeed."""
    rows = np.arange(256) < np.array(solved)[:, None]
    first, *others = np.split(rows.astype(int), 4, axis=1)
    sweep = {heat: part.tolist() for heat, part in zip(("0.2", "0.4", "0.7"), others)}
    return scores_of(first.tolist(), sweep=sweep)


def trained(greedy: list[int]) -> Scores:
    return scores_of([[value] * 8 for value in greedy], greedy_N=greedy)


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


def test_a_base_that_is_there_is_not_evaluated_again(tmp_path, stderr, stdout, monkeypatch):
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
    assert "50.0 [" in stdout()
    assert (tmp_path / "out.md").read_text().startswith("2 of 4")
    assert main("nothing") == 2
    assert "no greedy evaluation" in stderr()
