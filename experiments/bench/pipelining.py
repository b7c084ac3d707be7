"""Benefit of asynchronous rollouts: wall time of a step with `async_depth` 0 and 1 on the same
work.

    python -m experiments.bench.pipelining [--steps 24] [--turn 0.4] [--judge 1.0] [--tail 4]

Runs the real program with the quickstart's policy and simulated latencies: a call into the world
sleeps `turn` seconds on average, in one episode of sixteen `tail` times as long, and the judge of
turns sleeps `judge` seconds per call. Both runs use the same tasks and numbers of rollouts, and the
n-th episode of a task has the same latency in both. The first steps, which compile, are excluded;
the last steps, in which no further rollouts can be started ahead, are included. Prints one JSON
object.
"""

import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from configs import quickstart
from configs.keys import use
from envs.travel.world import Travel
from envs.values import Json
from envs.world import Observation, StepResult, Task
from evolver import loop
from evolver.attributing import ABSTAIN, Label, TurnJudge
from evolver.build import make_actor, open_run
from evolver.phases.record import Recorder
from experiments import commands
from experiments.bench.harness import clocked
from rl.bounds import NotNegative
from rl.rollout import Actor
from rl.trajectory import Trajectory

WARM_UP = 2  # steps that compile


class SlowTravel(Travel):
    """The travel world with a simulated latency of `turn` seconds per step."""

    episodes: ClassVar[Counter[str]] = Counter()  # episodes started, by task

    def __init__(self, turn: float, tail: float):
        super().__init__()
        self._turn, self._tail, self._seconds = turn, tail, 0.0

    def reset(self, task: Task, seed: int = 0) -> Observation:
        rng = random.Random(f"{task.id} {self.episodes[task.id]}")
        self.episodes[task.id] += 1
        slow = rng.random() < 1 / 16
        self._seconds = self._turn * (self._tail if slow else rng.uniform(0.5, 1.5))
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        time.sleep(self._seconds)
        return super().step(action)


class SlowJudge(TurnJudge):
    """A judge that abstains after `seconds`, like a server that answers many calls in parallel."""

    concurrency = 8

    def __init__(self, *, seconds: NotNegative):
        self._seconds = seconds

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[Label]]:
        time.sleep(self._seconds)
        return [[Label(ABSTAIN)] * len(trajectory.turns) for trajectory in trajectories]


def config_of(depth: int, *, steps: int, tasks: int, turn: float, tail: float, judge: float) -> Any:
    """Return the quickstart's config with the slow world and the slow judge as its only
    mechanism."""
    config = quickstart.get_config("grpo")
    use(config.env, "experiments.bench.pipelining:SlowTravel", turn=turn, tail=tail)
    use(config.attributing.judge, "experiments.bench.pipelining:SlowJudge", seconds=judge)
    settings = {
        "steps": steps + WARM_UP, "rollout.tasks": tasks, "rollout.group": 4,
        "rollout.async_depth": depth, "rollout.max_turns": 6, "rollout.max_tokens": 32,
        "learner.max_staleness": 2 * depth, "eval.every": 0, "eval.tasks": 1,
        "checkpoint.every": 1000, "log.trajectories": 0, "attributing.enabled": True,
    }  # fmt: skip
    config.update_from_flattened_dict(settings)
    return config


def threaded(*arguments: Any) -> Actor:
    """Return the run's actor, whose worlds may sleep without stopping the others."""
    return replace(make_actor(*arguments), threads=True)


def seconds_of(config: Any) -> tuple[list[float], float]:
    """Return (seconds of each step after the warm-up, mean rollouts per step)."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("evolver.build.make_actor", threaded),
        open_run(config, Path(folder) / "run") as run,
        Recorder(run) as recorder,
    ):
        SlowTravel.episodes.clear()
        loop.prepare(run, recorder)
        steps = itertools.count(1)
        seconds = clocked(lambda: loop.iterate(run, recorder, next(steps)), run.config.steps)
        rollouts = [line["rollout/count"] for line in run.workdir.metrics() if line["step"]]
        return seconds[WARM_UP:], statistics.mean(rollouts)


def main(
    *, steps: int = 24, tasks: int = 6, turn: float = 0.4, tail: float = 4.0, judge: float = 1.0
) -> None:
    """Print one JSON object.

    turn: mean seconds of a call into the world
    tail: factor on --turn in one episode of sixteen
    judge: seconds of a call of the judge
    """
    settings: Json = {"steps": steps, "tasks": tasks, "turn": turn}
    settings |= {"tail": tail, "judge": judge}
    result = {"benchmark": "pipelining", **settings}
    for depth in (0, 1):
        seconds, rollouts = seconds_of(config_of(depth, **settings))
        result[f"depth_{depth}"] = {
            "mean_s": statistics.mean(seconds),
            "seconds": [round(s, 2) for s in seconds],
            "rollouts_per_step": rollouts,
        }
    result["ratio"] = result["depth_0"]["mean_s"] / result["depth_1"]["mean_s"]
    print(json.dumps(result))


if __name__ == "__main__":
    commands.program(main)
