"""The table of worlds that were evolved in."""

import pytest

from experiments import commands, evolving
from tests.experiments.results import scores_of


def scores(greedy, sampled, tasks="abcd"):
    return scores_of([[one, one] for one in sampled], tasks, greedy_N=greedy)


def test_a_row_compares_greedy_training_with_the_best_temperature_before_it():
    given, imitated = scores([0, 0, 0, 0], [1, 0, 0, 0]), scores([1, 1, 0, 0], [0, 1, 0, 0])
    result = evolving.Result(given, imitated, scores([1, 1, 1, 1], [0, 0, 0, 0]), 3.0)
    row = evolving.cells("desk", [result, result])
    assert row[:4] == ["desk", "2", "3", "4"]
    assert row[4:9] == ["0.0", "25.0", "50.0", "50.0", "100.0"]
    assert row[9].startswith("+75.0 [") and row[10].startswith("+50.0 [")
    (alone,) = [evolving.cells("desk", [result._replace(imitated=None)])]
    assert alone[4:8] == ["0.0", "25.0", "0.0", "25.0"] and alone[10] == alone[9]


def test_seeds_with_other_held_out_tasks_are_one_sample_of_tasks():
    few = scores([0, 1], [0, 1], "xy")
    results = [
        evolving.Result(few, None, few, 1.0),
        evolving.Result(*[scores([0] * 4, [0] * 4)] * 3, 1.0),
    ]
    assert evolving.cells("desk", results)[9] == "+0.0 [0.0, 0.0]"


def test_each_world_has_a_workdir_of_its_own_or_nothing_starts(tmp_path, stderr):
    assert evolving.folder_of(tmp_path, "--gym FrozenLake-v1", 2) == tmp_path / "FrozenLake-v1-2"
    start = ["--out", str(tmp_path / "out"), "--"]
    assert commands.run(evolving.main, [*start, "a:B", "a:B"]) == 2
    assert "same workdir" in stderr()
    with pytest.raises(SystemExit):
        commands.run(evolving.main, [*start, "--gym"])
    assert "expected one argument" in stderr() and not (tmp_path / "out").exists()
