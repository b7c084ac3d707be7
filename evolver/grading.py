"""Phases 3 to 5: outcomes, labels, rewards and advantages of the trajectories of a step."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envs.world import Evaluation
from evolver.attributing import Label, TurnJudge
from evolver.metrics import Metrics
from evolver.questioning import OutcomeJudge, is_verified
from rl import rewards
from rl.advantages import Batch, Estimator, estimate
from rl.advantages.estimators import of_outcomes, tells_apart
from rl.rewards import Reward
from rl.samples import void_reason
from rl.trajectory import StopReason, Trajectory, groups_of

T = TypeVar("T")
Group = tuple[str, int]  # a task and the draw of it, see `Trajectory.group`
# How the error of a rollout begins whose judge gave no verdict.
UNJUDGED = "the outcome was not judged"


@dataclass(frozen=True)
class Grader:
    """The judges of a run: `outcomes` is None if the world's own evaluation counts, `turns` if
    nothing is labelled.

    Up to `concurrency` threads grade groups as they end.
    """

    outcomes: OutcomeJudge | None = None
    turns: TurnJudge | None = None

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.turns)

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
            forfeited = trajectory.lost
            trajectory.evaluation = verdict
            trajectory.lost = None
            if forfeited:  # `rollout.must_end` holds for the judge's score too
                trajectory.forfeit()
        else:
            trajectory.evaluation = Evaluation(0.0, False)
            trajectory.stop = StopReason.CANCELLED
            trajectory.error = f"{UNJUDGED}: {verdict}"


@dataclass
class Grading:
    """Grades the groups of some rollouts in threads, each as soon as its last rollout has ended,
    while others go on.

    work: grades whole groups, in place. sizes: {group: the number of its rollouts}. threads: those
    that work at a time. A thread that becomes free takes all groups that wait for one.
    """

    work: Callable[[Sequence[Trajectory]], None]
    sizes: Mapping[Group, int]
    threads: int

    def __post_init__(self) -> None:
        self._free = self.threads
        self._ended: dict[Group, list[Trajectory]] = {group: [] for group in self.sizes}
        self._waiting: list[Trajectory] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="judge")

    async def until_graded(self, played: Coroutine[Any, Any, T]) -> T:
        """Return what `played` does, once all of its groups are graded. `add` gets each rollout
        as it ends. Raises what either of them raises; the other one is abandoned."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                result = self._tasks.create_task(played)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        return result.result()

    def add(self, *trajectories: Trajectory) -> None:
        """Note that rollouts have ended."""
        for trajectory in trajectories:
            members = self._ended[trajectory.group]
            members.append(trajectory)
            if len(members) == self.sizes[trajectory.group]:
                self._waiting += sorted(members, key=lambda member: member.rollout)
        self._start()

    def _start(self) -> None:
        if self._waiting and self._free and self._tasks:
            self._free -= 1
            members = self._waiting
            self._waiting = []
            self._tasks.create_task(self._grade(members))

    async def _grade(self, members: Sequence[Trajectory]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self.work, members)
        self._free += 1
        self._start()


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
    value_NK = estimate(estimator, batch)
    outcome_NK = of_outcomes(estimator, batch)
    for n, trajectory in enumerate(rewarded):
        task = trajectory.task
        factor = config.advantage.synthetic if task.origin == "synthetic" else 1.0
        factor *= config.advantage.worlds.get(task.env, 1.0)
        for k, turn in enumerate(trajectory.turns):
            turn.advantage = factor * float(value_NK[n, k])
            if outcome_NK is not None:
                turn.outcome_advantage = factor * float(outcome_NK[n, k])
