"""Phases 3 to 5: outcomes, labels, rewards and advantages of the trajectories of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.world import Evaluation
from evolver.attributing import Label, TurnJudge
from evolver.metrics import Metrics, Played, timed
from evolver.processes import hosts
from evolver.questioning import OutcomeJudge, is_verified
from rl import rewards
from rl.advantages import Batch, Estimator, estimate
from rl.advantages.estimators import of_outcomes, tells_apart
from rl.rewards import Reward
from rl.samples import void_reason
from rl.trajectory import StopReason, Trajectory, groups_of

# How the error of a rollout begins whose judge gave no verdict.
UNJUDGED = "the outcome was not judged"


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
        outcomes = self.outcomes.metrics() if self.outcomes else {}
        return outcomes | (self.turns.metrics() if self.turns else {})

    def close(self) -> None:
        """Close what the judges hold open."""
        if self.turns:
            self.turns.close()


def grade(grader: Grader, trajectories: Sequence[Trajectory]) -> None:
    """Score the outcomes of whole groups, then label their turns, in place. Only this function
    writes either of them.

    Raises TypeError if a judge of turns returns something other than a Label.
    """
    if grader.outcomes:
        score_outcomes(grader.outcomes, trajectories)
    if grader.turns:
        for trajectory, labels in zip(trajectories, grader.turns.label(trajectories), strict=True):
            for turn, label in zip(trajectory.turns, labels, strict=True):
                if not isinstance(label, Label):
                    name = type(grader.turns).__name__
                    raise TypeError(f"{name}.label returned {label!r} for a turn, not a Label")
                turn.label, turn.reason = label


Judge = Callable[[Grader, Sequence[Trajectory]], None]


def score_outcomes(judge: OutcomeJudge, trajectories: Sequence[Trajectory]) -> None:
    """Let the judge score the attempts at synthetic tasks, in place. Those without a verdict end
    as cancelled; of the others, "verified" keeps what the world itself says, if it can tell."""
    judged = [t for t in trajectories if t.task.origin == "synthetic" and not t.broken]
    if not judged:
        return
    for trajectory, verdict in zip(judged, judge.score(judged), strict=True):
        if isinstance(verdict, Evaluation):
            if is_verified(trajectory.task):
                world = {"verified": float(trajectory.reached.success)}
                verdict = replace(verdict, components=verdict.components | world)
            forfeited, trajectory.evaluation, trajectory.lost = trajectory.lost, verdict, None
            if forfeited:  # `rollout.must_end` holds for the judge's score too
                trajectory.forfeit()
        else:
            trajectory.evaluation, trajectory.stop = Evaluation(0.0, False), StopReason.CANCELLED
            trajectory.error = f"{UNJUDGED}: {verdict}"


def grade_all(grader: Grader, trajectories: Sequence[Trajectory], judge: Judge = grade) -> Played:
    """Return graded trajectories and the time that it took. Each host grades a share of the
    groups. judge: what grades groups, in place."""
    if judge is grade and not (grader.outcomes or grader.turns):
        return list(trajectories), Metrics()
    mine = hosts.share(list(groups_of(trajectories).values()))
    members = [trajectory for group in mine for trajectory in group]
    with timed("grade") as metrics:
        hosts.together(lambda: judge(grader, members))
        graded = hosts.gather_shares(mine)
    return [trajectory for group in graded for trajectory in group], metrics


def alike(
    config: Any, estimator: Estimator, trajectories: Sequence[Trajectory]
) -> set[tuple[str, int]]:
    """Return the groups whose rollouts are alike in all that the estimator reads, so that they have
    no signal, whatever its advantages are. Void rollouts do not count."""
    return {
        key
        for key, group in groups_of(trajectories).items()
        if not tells_apart(estimator, Batch.of(counted(config, group), 0))
    }


def counted(config: Any, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the rollouts that advantages are made from: those that are neither void nor
    replaced."""
    drop = config.learner.drop
    return [t for t in trajectories if not t.replaced and not void_reason(t, drop)]


def shape(config: Any, reward: Reward, trajectories: Sequence[Trajectory], step: int) -> None:
    """Write the rewards of rollouts that have none yet, in one batch. Void rollouts get none."""
    new = [t for t in counted(config, trajectories) if t.reward is None]
    if new:
        rewards.shape(reward, Batch.of(new, step))


def assign(
    config: Any, estimator: Estimator, trajectories: Sequence[Trajectory], step: int
) -> None:
    """Write an advantage into each turn. Rollouts that are void or replaced get none and are
    excluded from the estimator's statistics."""
    rewarded = counted(config, trajectories)
    if not rewarded:
        return
    batch = Batch.of(rewarded, step)
    value_NK, outcome_NK = estimate(estimator, batch), of_outcomes(estimator, batch)
    for n, trajectory in enumerate(rewarded):
        task = trajectory.task
        factor = config.advantage.synthetic if task.origin == "synthetic" else 1.0
        factor *= config.advantage.worlds.get(task.env, 1.0)
        for k, turn in enumerate(trajectory.turns):
            turn.advantage = factor * float(value_NK[n, k])
            if outcome_NK is not None:
                turn.outcome_advantage = factor * float(outcome_NK[n, k])
