"""Phases 3 to 5: outcomes, labels and advantages of the trajectories of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.world import Evaluation
from evolver.attributing import Label, TurnJudge
from evolver.metrics import Metrics, timed
from evolver.processes import hosts
from evolver.questioning import OutcomeJudge
from rl.advantages import Batch, estimate
from rl.samples import void_reason
from rl.trajectory import StopReason, Trajectory, groups_of

UNJUDGED = (
    "the outcome was not judged"  # how the error of a rollout begins whose judge gave no verdict
)


@dataclass(frozen=True)
class Grader:
    """The judges of a run: `outcomes` is None if the world's own evaluation counts, `turns` if
    nothing is labelled.

    With `rollout.async_depth`, up to `concurrency` threads grade groups as they end.
    """

    outcomes: OutcomeJudge | None = None
    turns: TurnJudge | None = None

    @property
    def concurrency(self) -> int:
        return self.turns.concurrency if self.turns else 8

    def metrics(self) -> Metrics:
        """Return the figures of both judges since the last call."""
        return Metrics(
            {
                k: v
                for judge in (self.outcomes, self.turns)
                if judge
                for k, v in judge.metrics().items()
            }
        )

    def close(self) -> None:
        """Close what the judges hold open."""
        if self.turns:
            self.turns.close()


def grade(grader: Grader, trajectories: Sequence[Trajectory]) -> None:
    """Score the outcomes of whole groups, then label their turns, in place. Only this function
    writes either of them.

    Raises TypeError if a judge of turns returns something other than a Label.
    """
    judged = (
        [t for t in trajectories if t.task.origin == "synthetic" and not t.broken]
        if grader.outcomes
        else []
    )
    if judged:
        for trajectory, verdict in zip(judged, grader.outcomes.score(judged), strict=True):
            if isinstance(verdict, Evaluation):
                forfeited, trajectory.evaluation, trajectory.lost = trajectory.lost, verdict, None
                if forfeited:  # `rollout.must_end` holds for the judge's score too
                    trajectory.forfeit()
            else:
                trajectory.evaluation, trajectory.stop = (
                    Evaluation(0.0, False),
                    StopReason.CANCELLED,
                )
                trajectory.error = f"{UNJUDGED}: {verdict}"
    if grader.turns:
        for trajectory, labels in zip(trajectories, grader.turns.label(trajectories), strict=True):
            for turn, label in zip(trajectory.turns, labels, strict=True):
                if not isinstance(label, Label):
                    raise TypeError(
                        f"{type(grader.turns).__name__}.label returned {label!r} for a turn, not a Label"
                    )
                turn.label, turn.reason = label


def grade_all(
    grader: Grader, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], Metrics]:
    """Return graded trajectories and the time that it took. Each host grades a share of the
    groups."""
    if not (grader.outcomes or grader.turns):
        return list(trajectories), Metrics()
    groups = list(groups_of(trajectories).values())
    mine = hosts.share(groups)
    with timed("grade") as metrics:
        hosts.together(
            lambda: grade(grader, [trajectory for group in mine for trajectory in group])
        )
        graded = hosts.gather_shares(mine)
    return [trajectory for group in graded for trajectory in group], metrics


def assign(
    config: Any, estimator: Callable[..., np.ndarray], trajectories: Sequence[Trajectory], step: int
) -> None:
    """Write an advantage into each turn. Void rollouts get no advantage and are excluded from group
    statistics."""
    counted = [t for t in trajectories if not void_reason(t, config.learner.drop)]
    if not counted:
        return
    for trajectory, value_K in zip(counted, estimate(estimator, Batch.of(counted, step))):
        factor = config.advantage.synthetic if trajectory.task.origin == "synthetic" else 1.0
        for turn, value in zip(trajectory.turns, value_K):
            turn.advantage = factor * float(value)
