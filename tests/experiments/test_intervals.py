"""Intervals cover what their label says: with one run a side the sampling of tasks, with several
also how runs differ."""

import numpy as np
import pytest

from experiments import compare
from experiments.compare import Estimate, paired
from tests.experiments.results import scores_of

TASKS, ROLLOUTS, SIMULATIONS = 48, 8, 200


def coverage(monkeypatch, runs: int, sd: float) -> float:
    """The share of intervals that hold the true difference of two equal methods, 0, if runs differ
    by `sd` points."""
    over_seeds = compare.interval_over_seeds
    monkeypatch.setattr(compare, "interval_over_seeds", lambda x: over_seeds(x, draws=200))
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(SIMULATIONS):
        difficulty_N = draw.beta(1, 1, TASKS)
        shift = draw.normal(0, sd / 100, (2, runs, 1))
        success = draw.binomial(ROLLOUTS, np.clip(difficulty_N + shift, 0, 1)) / ROLLOUTS
        change = paired(dict(enumerate(success[0])), dict(enumerate(success[1])))
        held += change.low <= 0 <= change.high
    return held / SIMULATIONS


@pytest.mark.parametrize(
    ("runs", "sd", "low", "high"),
    [
        (1, 0, 0.9, 1), (1, 3, 0.6, 0.85), (1, 5, 0.45, 0.7),
        (3, 0, 0.95, 1), (3, 3, 0.93, 1), (3, 5, 0.9, 1),
    ],
)  # fmt: skip
def test_an_interval_of_one_run_covers_tasks_alone_and_that_of_several_the_runs(
    monkeypatch, runs, sd, low, high
):
    assert low <= coverage(monkeypatch, runs, sd) <= high


def test_an_interval_of_one_run_resamples_the_tasks_and_without_runs_there_is_none():
    one = np.array([[0.0, 1.0, 1.0, 0.0]])
    assert compare.interval_over_seeds(one) == pytest.approx((0.0, 1.0), abs=0.13)
    assert all(np.isnan(compare.interval_over_seeds(np.zeros((0, 3)))))


def test_an_interval_of_one_run_says_what_it_covers_wherever_it_is_shown():
    said = "(over tasks, of this one run)"
    alone = Estimate(50.0, 40.0, 60.0, float("nan"), 1)
    assert str(alone) == f"50.0 [40.0, 60.0] {said}"
    assert alone.signed() == f"+50.0 [+40.0, +60.0] {said}"
    assert said not in str(Estimate(50.0, 40.0, 60.0, 1.0, 2))
    runs = ([[1, 0], [0, 0]], [[1, 0], [1, 0]], [[1, 1], [0, 0]])
    one, two, three = ({1: scores_of(run)} for run in runs)
    first, second = compare.Row("plain", {0: one, 1: two}), compare.Row("other", {0: three})
    _, plain, other = compare.lines([first, second], [0, 1])
    assert said not in "".join(plain) and "".join(other).count(said) == 2
    figure = compare.new_figure(4, 3)
    values = {row.name: row.final() for row in (first, second)}
    compare.draw_intervals(figure.subplots(), values)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["plain", f"other\n{said}"]
