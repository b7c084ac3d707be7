"""Metrics of the gap between engine and learner, and the alarm that they raise."""

import numpy as np
import pytest

from rl import mismatch
from rl.packing import pack
from rl.samples import Sample


def sample(env, versions, gap, *, guided=False):
    n = len(versions)
    mask = np.arange(n) > 0
    version = np.where(mask, versions, -1)
    return Sample(np.ones(n), mask, logp=-1.0, guided=guided, version=version, env=env), gap


def batch_of(*members):
    packed = pack([s for s, _ in members], 16)
    gaps = np.zeros(packed.logp_RT.shape, np.float32)
    for number, (_, gap) in enumerate(members):
        gaps[packed.sample_RT == number] = gap
    packed.old_logp_RT = packed.logp_RT + gaps
    return packed


def test_gaps_are_reported_by_environment_and_age_without_guided_tokens():
    batches = [
        batch_of(sample("a", [5, 5, 5, 4], 0.1), sample("b", [4, 4, 4], -0.5)),
        batch_of(sample("a", [5, 5], 0.3), sample("b", [5, 5, 5], 9.0, guided=True)),
    ]
    metrics = mismatch.figures(batches, 5, recomputed=True)
    assert metrics["staleness/max"] == 1 and metrics["staleness/mean"] == pytest.approx(3 / 6)
    assert metrics["mismatch/fresh"] == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    assert metrics["mismatch/abs/a"] == pytest.approx((3 * 0.1 + 0.3) / 4)
    assert metrics["mismatch/max/b"] == pytest.approx(0.5)
    assert metrics["mismatch/kl/b"] == pytest.approx(np.exp(-0.5) + 0.5 - 1)


def test_metrics_of_one_environment_and_without_recomputed_log_probabilities():
    batches = [batch_of(sample("a", [3, 3, 3], 0.0))]
    staleness = {"staleness/mean", "staleness/max"}
    assert {*mismatch.figures(batches, 3, recomputed=True)} == staleness | {"mismatch/fresh"}
    assert {*mismatch.figures(batches, 3, recomputed=False)} == staleness
    assert mismatch.figures([], 3, recomputed=True) == {}


def test_the_alarm_compares_with_the_baseline_and_tolerates_rounding():
    fresh = lambda alarm, gap: alarm.check({"mismatch/fresh": gap})
    alarm = mismatch.Alarm(3.0, 1e-3)
    assert [fresh(alarm, gap) for gap in (1e-6, 9e-4, 1e-6)] == [""] * 3
    assert "does not sample with the weights it was given" in fresh(alarm, 2e-3)
    assert len(alarm.baseline) == 3  # a gap that raises the alarm does not enter the baseline
    alarm = mismatch.Alarm(3.0, 1e-3, baseline=[0.01] * 10)
    assert fresh(alarm, 0.029) == "" and len(alarm.baseline) == 10
    assert fresh(alarm, 0.031) and fresh(alarm, float("nan"))
    # Tokens of older weights may differ.
    assert alarm.check({"mismatch/abs": 0.5, "staleness/max": 1.0}) == ""
    assert alarm.check({"mismatch/abs": 0.5, "staleness/max": 0.0})
    assert fresh(mismatch.Alarm(0.0, 1e-3), 5.0) == ""


def test_tokens_of_unknown_log_probability_have_an_age_and_no_gap():
    known, unknown = sample("a", [5, 5, 5], 0.1), sample("judge", [5, 4, 3], 0.0)
    unknown[0].logp[1:] = np.nan
    metrics = mismatch.figures([batch_of(known, unknown)], 5, recomputed=True)
    assert metrics["mismatch/fresh"] == pytest.approx(0.1) and metrics["staleness/max"] == 2
    assert not any("/judge" in name for name in metrics)
    assert "mismatch/fresh" not in mismatch.figures([batch_of(unknown)], 5, recomputed=True)
