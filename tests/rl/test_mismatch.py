"""Figures of the gap between engine and learner, and the alarm that they raise."""

import numpy as np
import pytest

from rl import mismatch
from rl.packing import pack
from rl.samples import Sample


def sample(env, versions, gap, *, guided=False):
    n = len(versions)
    logp = np.full(n, -1.0, np.float32)
    mask = np.arange(n) > 0
    return Sample(np.ones(n), mask, None, logp, None, guided, 0, np.where(mask, versions, -1), env), gap


def batch_of(*members):
    packed = pack([s for s, _ in members], 16)
    gaps = np.zeros(packed.logp_RT.shape, np.float32)
    for number, (_, gap) in enumerate(members):
        gaps[packed.sample_RT == number] = gap
    packed.old_logp_RT = packed.logp_RT + gaps
    return packed


def test_gaps_are_told_apart_by_world_and_by_age_and_guided_tokens_are_left_out():
    batches = [
        batch_of(sample("a", [5, 5, 5, 4], 0.1), sample("b", [4, 4, 4], -0.5)),
        batch_of(sample("a", [5, 5], 0.3), sample("b", [5, 5, 5], 9.0, guided=True)),
    ]
    found = mismatch.figures(batches, 5, recomputed=True)
    assert found["staleness/max"] == 1 and found["staleness/mean"] == pytest.approx(3 / 6)
    assert found["mismatch/fresh"] == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    assert found["mismatch/abs/a"] == pytest.approx((3 * 0.1 + 0.3) / 4)
    assert found["mismatch/max/b"] == pytest.approx(0.5)
    assert found["mismatch/kl/b"] == pytest.approx(np.exp(-0.5) + 0.5 - 1)


def test_one_world_has_no_figures_of_its_own_and_nothing_is_claimed_without_scores():
    batches = [batch_of(sample("a", [3, 3, 3], 0.0))]
    assert set(mismatch.figures(batches, 3, recomputed=True)) == {"staleness/mean", "staleness/max", "mismatch/fresh"}
    assert set(mismatch.figures(batches, 3, recomputed=False)) == {"staleness/mean", "staleness/max"}
    assert mismatch.figures([], 3, recomputed=True) == {}


def test_the_alarm_compares_with_what_is_usual_and_forgives_rounding():
    alarm = mismatch.Alarm(3.0, 1e-3)
    for gap in (1e-6, 9e-4, 1e-6):
        assert alarm.check({"mismatch/fresh": gap}) == ""
    assert "does not sample with the weights it was given" in alarm.check({"mismatch/fresh": 2e-3})
    assert len(alarm.baseline) == 3  # an alarm is not usual
    alarm = mismatch.Alarm(3.0, 1e-3, baseline=[0.01] * 10)
    assert alarm.check({"mismatch/fresh": 0.029}) == "" and len(alarm.baseline) == 10
    assert alarm.check({"mismatch/fresh": 0.031}) and alarm.check({"mismatch/fresh": float("nan")})
    assert alarm.check({"mismatch/abs": 0.5, "staleness/max": 1.0}) == ""  # old tokens may differ
    assert alarm.check({"mismatch/abs": 0.5, "staleness/max": 0.0})
    assert mismatch.Alarm(0.0, 1e-3).check({"mismatch/fresh": 5.0}) == ""
