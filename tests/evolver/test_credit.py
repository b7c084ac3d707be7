"""The outcome of an episode: what the world or a judge says, and what counts."""

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest

from configs import base
from envs.world import Evaluation
from evolver import grading
from evolver.questioning import OutcomeJudge
from rl.advantages import estimators
from rl.samples import drop_reasons
from rl.trajectory import StopReason
from tests.evolver.toy import GREEN, tried
from tests.evolver.toy import LEND as ORIGINAL

LEND = dataclasses.replace(ORIGINAL, origin="synthetic")


class Generous(OutcomeJudge):
    """Gives everyone the same verdict."""

    def __init__(self, verdict):
        self.verdict = verdict

    def score(self, trajectories):
        return [self.verdict] * len(trajectories)


@pytest.mark.parametrize("forfeits,counts", [(False, (0.8, True)), (True, (0.0, False))])
def test_an_episode_that_forfeits_does_so_whoever_scores_it(forfeits, counts):
    trajectory = tried(GREEN, of=LEND)
    trajectory.stop = StopReason.MAX_TURNS
    if forfeits:
        trajectory.forfeit()
    grading.grade(grading.Grader(outcomes=Generous(Evaluation(0.8, True))), [trajectory])
    assert (trajectory.outcome, trajectory.evaluation.success) == counts
    assert (trajectory.reached.score, trajectory.reached.success) == (0.8, True)
    assert trajectory.evaluation.components.get("reached") == (0.8 if forfeits else None)


def test_an_episode_without_a_verdict_is_broken():
    trajectory = tried(GREEN, of=LEND)
    grading.grade(grading.Grader(outcomes=Generous("no answer")), [trajectory])
    assert trajectory.broken and trajectory.error == f"{grading.UNJUDGED}: no answer"


def group_of(draw, outcomes, labels=(1, 1)):
    """Return a group of rollouts of one turn each."""
    members = []
    for outcome, label in zip(outcomes, labels):
        trajectory = tried(GREEN, of=LEND)
        trajectory.draw = draw
        trajectory.evaluation = Evaluation(outcome, outcome == 1)
        trajectory.stop = StopReason.DONE
        trajectory.turns[0].label = label
        trajectory.turns[0].completion.tokens = [1]
        trajectory.turns[0].completion.logprobs = [0.0]
        members.append(trajectory)
    return members


def whitened(batch, *, scale=1.0):
    """Standardise over the whole batch."""
    return scale * (batch.outcome_N - batch.outcome_N.mean()) / batch.outcome_N.std()


@pytest.mark.parametrize(
    "estimator, silent",
    [
        (partial(estimators.grpo, eps=1e-6), {2, 3}),
        (partial(estimators.adca), {2}),
        # nobody knows of other estimators that they ignore labels
        (partial(whitened, scale=2.0), {2}),
    ],
)
def test_a_group_has_signal_if_the_estimator_can_tell_its_rollouts_apart(estimator, silent):
    config = base.get_config()
    played = [*group_of(1, (0.0, 1.0)), *group_of(2, (1.0, 1.0)), *group_of(3, (1.0, 1.0), (1, -1))]
    assert {draw for _, draw in grading.alike(config, estimator, played)} == silent
    for trajectory in played:  # the world gives the score as the reward of the last turn, too
        trajectory.turns.insert(0, copy.deepcopy(trajectory.turns[0]))
        trajectory.turns[-1].reward = trajectory.outcome
    assert {draw for _, draw in grading.alike(config, estimator, played)} == silent
    played[0].stop = StopReason.ENV_ERROR  # a lone rollout is compared with nobody
    assert {draw for _, draw in grading.alike(config, estimator, played)} == silent | {1}


def test_groups_that_are_refilled_are_in_no_statistics():
    config = base.get_config()
    with_signal = group_of(1, (0.0, 1.0))
    without = group_of(2, (1.0, 1.0))
    for replaced, expected in ((False, [-1.73, 0.58, 0.58, 0.58]), (True, [-1.0, 1.0, 0.0, 0.0])):
        for t in without:
            t.replaced = replaced
            t.turns[0].advantage = 0.0
        grading.assign(config, whitened, [*with_signal, *without], 1)
        got = [t.turns[0].advantage for t in (*with_signal, *without)]
        np.testing.assert_allclose(got, expected, atol=0.01)
    assert drop_reasons([*with_signal, *without], row=99, drop=()) == [None] * 2 + ["no_signal"] * 2
