"""The estimators, against brute force, closed forms and the sequential procedure that they
vectorise."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from envs.world import Task
from rl import evaluation
from rl.trajectory import Trajectory


def sequential_best(scores: np.ndarray, k: int) -> float:
    """The published procedure, one resample at a time."""
    np.random.seed(42)
    return np.mean([np.random.choice(scores, size=k).max() for _ in range(1000)])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=8, max_size=8), min_size=1, max_size=3),
    st.sampled_from([2, 4, 8]),
)
def test_best_at_k_draws_exactly_what_the_published_procedure_draws(score_NR, k):
    expected = [sequential_best(np.array(row), k) for row in score_NR]
    assert_allclose(evaluation.best_at_k(score_NR, k), expected, rtol=1e-12)


@pytest.mark.parametrize("rollouts,k", [(8, 1), (8, 8), (8, 4), (5, 2), (1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(rollouts, k):
    for wins in range(rollouts + 1):
        row = [True] * wins + [False] * (rollouts - wins)
        subsets = list(itertools.combinations(row, k))
        (value,) = evaluation.pass_at_k([row], k)
        assert value == pytest.approx(np.mean([any(s) for s in subsets]))


def test_pass_at_k_refuses_fewer_rollouts_than_k():
    with pytest.raises(ValueError, match="needs at least 8"):
        evaluation.pass_at_k([[True] * 4], 8)


def test_intervals_cover_the_mean_and_shrink_with_tasks():
    rng = np.random.default_rng(3)
    narrow, wide = rng.random(400), rng.random(20)
    for value_N in (narrow, wide):
        low, high = evaluation.interval(value_N)
        assert low < value_N.mean() < high
    width = [np.ptp(evaluation.interval(v)) for v in (narrow, wide)]
    assert width[0] < width[1] / 2
    # against the normal approximation, which a mean of 400 uniform values follows closely
    assert width[0] == pytest.approx(2 * 1.96 * narrow.std() / 20, rel=0.1)


def test_an_interval_contains_the_chance_of_the_rollouts():
    rng = np.random.default_rng(2)

    def means_of_tasks():
        return (rng.random((60, 8)) < rng.random((60, 1))).mean(axis=1)

    spread = np.std([means_of_tasks().mean() for _ in range(1000)])
    widths = [np.ptp(evaluation.interval(means_of_tasks())) for _ in range(20)]
    assert np.mean(widths) / (2 * 1.96) == pytest.approx(spread, rel=0.1)
    assert np.isnan(evaluation.interval([])).all()


def scores() -> evaluation.Scores:
    return evaluation.Scores(
        tasks=["a", "b", "c"],
        difficulty_N=[1, 2, 2],
        score_NR=[[1.0, 0.5], [0.0, 0.0], [1.0, 1.0]],
        success_NR=[[1, 0], [0, 0], [1, 1]],
        greedy_N=[1, 0, 1],
        broken=1,
    )


def measured(*scores):
    return dict(evaluation.measures(*scores))


def test_measures_name_every_estimate_with_its_interval():
    measures = measured(scores())
    expected = {"avg@2": 0.5, "pass@2": 2 / 3, "score": 3.5 / 6, "greedy": 2 / 3, "broken": 1}
    expected |= {"tasks": 3, "avg@2/difficulty_1": 0.5, "avg@2/difficulty_2": 0.5}
    assert {name: measures[name] for name in expected} == pytest.approx(expected)
    assert measures["best@2"] < measures["pass@2"]
    for name in ("avg@2", "best@2", "pass@2", "score", "greedy"):
        assert measures[f"{name}/low"] <= measures[name] <= measures[f"{name}/high"]


def test_a_mixture_is_measured_by_world():
    mixed = dataclasses.replace(scores(), worlds=["home", "home", "travel"])
    measures = measured(mixed)
    assert (measures["avg@2/world_home"], measures["avg@2/world_travel"]) == (0.25, 1.0)
    assert measures["greedy/world_home"] == 0.5
    assert not [name for name in measured(scores()) if "world" in name]
    two = [Trajectory(Task(id, id[0], "q"), 0, 0, []) for id in ("a1", "b1")]
    assert evaluation.scores_of(two, [], temperature=1.0, sweep={}).worlds == ["a", "b"]
    assert evaluation.scores_of(two[:1], [], temperature=1.0, sweep={}).worlds == []


def test_measures_of_several_seeds_are_means_with_their_deviation():
    success_NR = [[1, 1], [1, 0], [1, 1]]
    again = dataclasses.replace(scores(), success_NR=success_NR, greedy_N=[], broken=2)
    one, measures = measured(scores()), measured(scores(), again)
    assert measures["avg@2"] == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert measures["avg@2/sd"] == pytest.approx(np.std([3 / 6, 5 / 6], ddof=1))
    assert measures["greedy"] == one["greedy"] and "greedy/sd" not in measures
    assert measures["seeds"] == 2 and measures["broken"] == 3 and measures["tasks"] == 3
    assert measures["avg@2/low"] == evaluation.interval([0.75, 0.25, 1.0])[0]
    assert not [key for key in one if key.endswith("/sd") or key == "seeds"]


def test_unknown_measures_are_named():
    with pytest.raises(ValueError, match="median"):
        scores().per_task("median")


def test_the_best_temperature_is_the_one_with_the_highest_success_and_greedy_counts():
    found = scores()
    assert found.best_temperature()[0] == 0.0  # greedy solves two of three tasks
    assert_allclose(found.best_temperature()[1], [1, 0, 1])
    found.sweep = {"0.2": [[1, 1], [1, 0], [1, 1]], "0.4": [[0, 0], [0, 0], [0, 0]]}
    temperature, success_N = found.best_temperature()
    assert temperature == 0.2
    assert_allclose(success_N, [1, 0.5, 1])
    found.greedy_N = []
    found.sweep = {"0.2": [[0, 0], [0, 0], [0, 0]]}
    assert found.best_temperature()[0] == found.temperature
    measures = measured(found)
    assert measures["temperature/0.2"] == 0
    assert (measures["best_temperature"], measures["best_temperature/avg"]) == (1.0, 0.5)


def test_a_scenario_is_solved_where_every_one_of_its_tasks_is():
    tasks = ["ab_1", "cd_1", "ab_2", "lone", "ab_3", "cd_2"]
    assert evaluation.scenarios_of(tasks) == [[0, 2, 4], [1, 5], [3]]
    success_NR = np.zeros((6, 8), int)
    success_NR[[0, 2, 4], [0, 3, 7]] = 1  # ab: each task once, by different rollouts
    success_NR[1] = 1  # cd: one task always, the other never
    assert_allclose(evaluation.scenario_pass_at_k(tasks, success_NR, 8), [1, 0, 0])
    assert_allclose(evaluation.scenario_pass_at_k(tasks, success_NR, 4), [0.5**3, 0, 0])


def test_the_estimate_for_scenarios_is_the_mean_over_all_choices_of_rollouts():
    rng = np.random.default_rng(1)
    success_NR = rng.integers(0, 2, size=(2, 4))
    choices = list(itertools.combinations(range(4), 2))
    solved_2C = success_NR[:, choices].any(axis=2)
    exact = np.outer(*solved_2C).mean()
    found = evaluation.scenario_pass_at_k(["s_1", "s_2"], success_NR, 2)
    assert_allclose(found, [exact])


def test_sample_efficiency_of_a_curve():
    curve = {20: 0.4, 0: 0.1, 10: 0.5}
    assert evaluation.steps_to(curve, 0.45) == 10 and evaluation.steps_to(curve, 0.6) is None
