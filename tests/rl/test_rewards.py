"""Rewards: what estimators compare, while the scores stay what they are."""

from functools import partial

import numpy as np
import pytest

from configs import base
from evolver import grading
from evolver.files.rollout_files import record_of
from evolver.metrics import rollout_metrics
from rl import rewards
from rl.advantages import Batch, estimators
from rl.rewards.overlong import length_penalty, overlong
from rl.trajectory import StopReason
from tests.rl.test_samples import trajectory, turn


def brief(batch, *, cost):
    """Fine each turn."""
    return batch.outcome_N - cost * batch.turns_N


def group():
    """Return two successes, of one turn and of two."""
    return [trajectory(turn()), trajectory(turn(), turn([1, 2, 3], [4, 5]))]


def test_estimators_compare_rewards_and_the_books_keep_the_scores():
    config, played = base.get_config(), group()
    played.append(trajectory(turn(), stop=StopReason.ENV_ERROR))
    assert "rollout/reward" not in rollout_metrics(played) and "reward" not in _record(played[0])
    grading.shape(config, partial(brief, cost=0.25), played, 1)
    assert [t.reward for t in played] == [0.75, 0.5, None]  # nothing is said of a broken one
    figures = rollout_metrics(played)
    assert (figures["rollout/score"], figures["rollout/reward"]) == (1.0, 0.625)
    assert (_record(played[1])["score"], _record(played[1])["reward"]) == (1.0, 0.5)
    grading.assign(config, estimators.dr_grpo, played, 1)
    assert [t.turns[-1].advantage for t in played] == [0.125, -0.125, 0.0]
    # A rollout is shaped once, whatever joins it later.
    grading.shape(config, partial(brief, cost=9.0), played, 1)
    assert [t.reward for t in played] == [0.75, 0.5, None]


def _record(trajectory):
    return record_of(trajectory, fate="trained")


def test_the_default_shapes_nothing():
    played = group()
    rewards.shape(partial(rewards.score), Batch.of(played, 1))
    assert [t.reward for t in played] == [None, None]
    np.testing.assert_array_equal(Batch.of(played, 1).outcome_N, [1, 1])


def test_dapos_penalty_is_that_of_its_equation_13():
    """L_max = 100, L_cache = 20: 0 up to 80 tokens, (80 - |y|) / 20 up to 100, -1 beyond."""
    tokens_N = np.array([0, 80, 85, 90, 100, 101, 500])
    np.testing.assert_allclose(length_penalty(tokens_N, 100, 20), [0, 0, -0.25, -0.5, -1, -1, -1])
    # Of rollouts with 1 and 3 tokens, in a limit of 3 whose last 2 are soft.
    np.testing.assert_allclose(overlong(Batch.of(group(), 1), longest=3, soft=2), [1, 0])


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda batch: batch.reward_NK, "returned shape (2, 2); expected (2,)"),
        (lambda batch: batch.outcome_N * np.nan, "returned nan for a rollout of task a"),
    ],
)
def test_a_reward_that_is_none_is_named(wrong, words):
    with pytest.raises(ValueError) as error:
        rewards.shape(wrong, Batch.of(group(), 1))
    assert words in str(error.value) and "<lambda>" in str(error.value)
