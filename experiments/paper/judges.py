"""Judges of outcomes that ask no language model, for the tiny cells of figure 12b.

They see what the paper's judges see: `Ended` the trajectory alone, as the naive judge; `Orderly`
also principles of what a good attempt looks like. Neither knows the reference, so both can be
fooled; the verifier stands for the judge that does.
"""

from collections.abc import Sequence

from envs.world import Evaluation
from evolver.questioning import OutcomeJudge
from rl.trajectory import StopReason, Trajectory


class Ended(OutcomeJudge):
    """Scores 1 for an attempt that the agent ended itself."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        return [self.evaluation(float(t.stop is StopReason.DONE)) for t in trajectories]

    def evaluation(self, score: float) -> Evaluation:
        """Return the evaluation of a score in [0, 1]; more than one half is a success."""
        return Evaluation(score, score > 0.5, {"judged": score})


class Orderly(Ended):
    """Scores an attempt that ended itself between 0.6 and 1, and another between 0 and 0.4, less
    for each refused turn and each repeated one; one that called nothing gets 0."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        return [self.evaluation(self.grade(t)) for t in trajectories]

    def grade(self, trajectory: Trajectory) -> float:
        """Return the score of one attempt."""
        turns = trajectory.turns
        if not any(turn.info.get("calls") for turn in turns):
            return 0.0
        refused = sum(
            bool(turn.info.get("errors") or turn.info.get("parse_error")) for turn in turns
        )
        repeated = len(turns) - len({turn.action for turn in turns})
        low, high = (0.6, 1.0) if trajectory.stop is StopReason.DONE else (0.0, 0.4)
        return max(low, high - 0.1 * (refused + repeated))
