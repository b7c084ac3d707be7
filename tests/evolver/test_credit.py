"""The outcome of an episode: what the world or a judge says, and what counts."""

from __future__ import annotations

import dataclasses

import pytest

from envs.world import Evaluation
from evolver import grading
from evolver.questioning import OutcomeJudge
from rl.trajectory import StopReason
from tests.evolver.toy import Library, attempt, call, task

LEND = dataclasses.replace(task("Lend Solaris.", lent=["B15"]), origin="synthetic")


class Generous(OutcomeJudge):
    """Gives everyone the same verdict."""

    def __init__(self, verdict):
        self.verdict = verdict

    def score(self, trajectories):
        return [self.verdict] * len(trajectories)


@pytest.mark.parametrize("forfeits,counts", [(False, (0.8, True)), (True, (0.0, False))])
def test_an_episode_that_forfeits_does_so_whoever_scores_it(forfeits, counts):
    trajectory = attempt(Library(), LEND, [call("shelf", "green")])
    trajectory.stop = StopReason.MAX_TURNS
    if forfeits:
        trajectory.forfeit()
    grading.grade(grading.Grader(outcomes=Generous(Evaluation(0.8, True))), [trajectory])
    assert (trajectory.outcome, trajectory.evaluation.success) == counts
    assert (trajectory.reached.score, trajectory.reached.success) == (0.8, True)
    assert trajectory.evaluation.components.get("reached") == (0.8 if forfeits else None)


def test_an_episode_without_a_verdict_is_broken():
    trajectory = attempt(Library(), LEND, [call("shelf", "green")])
    grading.grade(grading.Grader(outcomes=Generous("no answer")), [trajectory])
    assert trajectory.broken and trajectory.error == f"{grading.UNJUDGED}: no answer"
