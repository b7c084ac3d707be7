"""The table of faults is whole, and (slow) no fault breaks a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from evolver.files.workdir import Workdir
from tests.experiments.test_view import record
from tests.faults.long import verdict
from tests.faults.registry import BOTH, KINDS
from tests.faults.stage import FATES, ROLLOUTS, Broken, Stage, overdue
from tests.faults.table import TABLE

ROOT = Path(__file__).parents[1]


def test_the_table_has_a_hundred_faults_of_all_kinds_sync_and_async():
    assert len({fault.name for fault in TABLE}) == len(TABLE) >= 100
    assert {fault.kind for fault in TABLE} == set(KINDS)
    for kind in KINDS:
        assert {mode for fault in TABLE if fault.kind == kind for mode in fault.modes} == set(BOTH)


def test_a_step_past_its_deadlines_is_told_from_one_that_waited_for_them():
    config = {"env": {"timeout": 4.0}, "rollout": {"timeout": 300.0}, "llm": {"deadline": 10.0}}
    straight = {"stop/env_timeout": 0, "stop/cancelled": 0}
    for found, allowed in (
        ({}, 0), ({"stop/env_timeout": 3}, 24), ({"stop/cancelled": 1}, 600), ({"llm/judge/failures/timeout": 2}, 20),
        ({"eval/broken": 1}, 608),
    ):  # fmt: skip
        for past in (-1, 1):
            took = {"time/elapsed": 9.0 + 60.0 + allowed + past}
            lines = [
                straight | {"step": 0, "time/elapsed": 9.0},
                straight | found | took | {"step": 1},
            ]
            late = f"step 1 took {61 + allowed} s, and its deadlines allow {60 + allowed} s"
            assert overdue(lines, config, slack=60.0) == (late if past > 0 else "")


def test_books_that_do_not_add_up_are_told(tmp_path):
    stage = Stage.__new__(Stage)
    stage.workdir, stage.paused, stage.slack = tmp_path, 0.0, 60.0
    workdir, whole = Workdir(tmp_path), {"ledger/rollouts": ROLLOUTS, "rollout/count": ROLLOUTS}
    whole |= dict.fromkeys((f"ledger/{fate}" for fate in FATES), 0) | {"stop/cancelled": 0}
    config = {"env": {"timeout": 1.0}, "rollout": {"timeout": 1.0}, "llm": {"deadline": 1.0}}
    workdir.claim(config)
    workdir.log_metrics(0, {"time/elapsed": 0.0})
    ledger = {"ledger/trained": ROLLOUTS, "stop/done": ROLLOUTS, "time/elapsed": 1.0}
    workdir.log_metrics(1, whole | ledger)
    workdir.log_trajectories(1, [record(n) for n in range(ROLLOUTS)])
    stage.adds_up(1)
    workdir.log_trajectories(1, [record(n, fate="stale") for n in range(ROLLOUTS)])
    with pytest.raises(Broken, match="other fates than the ledger"):
        stage.adds_up(1)
    with pytest.raises(Broken, match=r"the steps of metrics.jsonl are \[0, 1\]"):
        stage.adds_up(2)


def test_growth_is_told_from_noise(capsys):
    flat = {"rss_mb": 400.0, "fds": 30, "threads": 20, "children": 0, "disk_mb": 2.0}
    noise = lambda step: {"rss_mb": 400.0 + 5 * (step % 3), "fds": 30 + step % 2}
    noisy = [(step, flat | noise(step)) for step in range(1, 101)]
    assert verdict(noisy) == 0 and "nothing grows" in capsys.readouterr().out
    leaking = [(step, values | {"fds": 30 + step // 10}) for step, values in noisy]
    assert verdict(leaking) == 1 and "grows: fds" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [*([f"--only={kind}"] for kind in KINDS), ["--long", "--steps=200"]]
)
def test_no_fault_breaks_a_run_and_nothing_grows_in_a_long_one(words):
    subprocess.run([sys.executable, "-m", "tests.faults", *words], cwd=ROOT, check=True)
