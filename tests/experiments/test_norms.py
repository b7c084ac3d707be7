"""The comparison of norms reads what a run recorded, and shows the case that breaks equation 18."""

import gzip
import json

import numpy as np

from experiments import norms
from tests.experiments import test_view as rollouts


def record(task, labels, score, *, stop="done", fate="trained"):
    turn = rollouts.record(0)["turns"][0]
    turns = [turn | {"label": label, "advantage": 0.0} for label in labels]
    return rollouts.record(0, task, turns=turns, score=score, stop=stop, fate=fate)


def test_the_norms_are_compared_on_recorded_rollouts(tmp_path, stdout):
    step = [
        record("a", [1, -1], 1.0), record("a", [-1, -1, 1], 0.0), record("a", [1], 1.0, stop="env_error"),
        record("b", [1], 1.0, fate="no_signal"), record("b", [-1], 1.0, fate="no_signal"),
    ]  # fmt: skip
    found = norms.compared([step], alpha=0.1)
    assert list(found) == ["reference", "step", "trajectory"]
    for value, outcome in found.values():
        assert value.shape == (5,) and outcome.round(6).tolist() == [1, 1, -1, -1, -1]
        assert not np.array_equal(value, outcome)
    (tmp_path / "trajectories").mkdir()
    lines = "".join(json.dumps(r) + "\n" for r in step)
    (tmp_path / "trajectories/step_000001.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    norms.main((tmp_path,))
    _, _, *rows, last = stdout().splitlines()
    assert [row.split()[0] for row in rows] == list(found) and last.startswith("5 turns")
    assert rows[0].split()[-2:] == ["4.2", "-1.1"] and rows[2].split()[-2:] == ["74.6", "-66.8"]
