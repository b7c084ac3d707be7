"""A buffer of rollouts that survives a resume, for recipes that train on them again."""

import copy
import dataclasses
import random
from collections.abc import Iterable
from typing import Any

from envs.world import Evaluation, Task
from rl.trajectory import Completion, StopReason, Trajectory, Turn

# What the learner and the judges write into a turn, and what is no JSON.
_OWN = ("gap", "ratio", "weighed", "channels", "completion")


class ReplayBuffer:
    """The latest `capacity` rollouts that were added."""

    def __init__(self, capacity: int):
        self.capacity, self.kept = capacity, list[Trajectory]()

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep copies of rollouts; the oldest go."""
        self.kept += [loaded(saved(trajectory)) for trajectory in trajectories]
        self.kept = self.kept[-self.capacity :]

    def sample(self, n: int, seed: int) -> list[Trajectory]:
        """Return copies of at most n different rollouts."""
        chosen = random.Random(seed).sample(self.kept, min(n, len(self.kept)))
        return copy.deepcopy(chosen)

    def state(self) -> list[Any]:
        """Return the rollouts as JSON values."""
        return [saved(trajectory) for trajectory in self.kept]

    def load_state(self, state: list[Any]) -> None:
        """Continue from what `state` returned."""
        self.kept = [loaded(record) for record in state]


def saved(trajectory: Trajectory) -> dict[str, Any]:
    """Return what trains of a rollout, and its outcome, as JSON values."""
    turns = []
    for turn in trajectory.turns:
        own = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn)}
        said = turn.completion
        completion = [list(said.tokens), [float(x) for x in said.logprobs], said.stop, said.version]
        turns.append([completion, {name: x for name, x in own.items() if name not in _OWN}])
    return {
        "task": trajectory.task.to_dict(),
        "place": [trajectory.rollout, trajectory.seed, trajectory.draw],
        "messages": trajectory.messages,
        "stop": trajectory.stop.value,
        "evaluation": trajectory.evaluation.to_dict(),
        "experience": [trajectory.experience, trajectory.injected],
        "turns": turns,
    }


def loaded(record: dict[str, Any]) -> Trajectory:
    """Return the rollout of a record that `saved` made."""
    rollout, seed, draw = record["place"]
    turns = [Turn(completion=Completion(*said), **own) for said, own in record["turns"]]
    ids, texts = record["experience"]
    return Trajectory(
        Task.from_dict(record["task"]),
        rollout,
        seed,
        record["messages"],
        turns,
        StopReason(record["stop"]),
        Evaluation.from_dict(record["evaluation"]),
        list(ids),
        list(texts),
        draw=draw,
    )
