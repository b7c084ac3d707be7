"""What rollouts ahead of the learner are worth: wall time of a step at async_depth 0 and 1, on the same work.

    python -m experiments.bench.pipelining [--steps 24] [--turn 0.4] [--judge 1.0] [--tail 4]

The program is the real one, the policy the quickstart's. Latencies are slept: each call into the world takes `turn`
seconds on average, one episode in sixteen `tail` times that, and a judge takes `judge` seconds for what it is given.
Both runs play and train on rollouts of the same tasks in the same numbers, and the n-th episode of a task is as slow in
both. The first steps, which compile, do not count; the last ones do, in which nothing is left to run ahead. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from configs import quickstart
from envs.travel.world import Travel
from envs.world import Observation, StepResult, Task
from evolver import loop
from evolver.parts import open_run

WARM = 2  # steps that compile


class SlowTravel(Travel):
    """The travel agency behind a line of `turn` seconds."""

    episodes: ClassVar[Counter[str]] = Counter()  # begun, of each task

    def __init__(self, turn: float, tail: float):
        super().__init__()
        self._turn, self._tail, self._seconds = turn, tail, 0.0

    def reset(self, task: Task, seed: int = 0) -> Observation:
        rng = random.Random(f"{task.id} {self.episodes[task.id]}")
        self.episodes[task.id] += 1
        slow = rng.random() < 1 / 16
        self._seconds = self._turn * (self._tail if slow else rng.uniform(0.5, 1.5))
        return super().reset(task, seed)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._seconds)
        return super().step(action)


class SlowJudge:
    """Abstains, after `seconds`: what a server does that takes all calls at once."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def label(self, trajectories: list) -> list[list[int]]:
        time.sleep(self._seconds)
        return [[0] * len(trajectory.steps) for trajectory in trajectories]

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def config_of(args: argparse.Namespace, depth: int) -> Any:
    """The quickstart without mechanisms, in the slow world."""
    config = quickstart.get_config("grpo")
    config.steps = args.steps + WARM
    config.env.name = "experiments.bench.pipelining:SlowTravel"
    with config.env.args.unlocked():
        config.env.args.update({"turn": args.turn, "tail": args.tail})
    config.rollout.tasks, config.rollout.group, config.rollout.async_depth = args.tasks, 4, depth
    config.rollout.max_steps, config.rollout.max_tokens = 6, 32
    config.learner.max_staleness = 2 * depth
    config.eval.every, config.eval.tasks = 0, 1
    config.checkpoint.every, config.log.trajectories = 1000, 0
    config.attributing.judge = "llm"  # several groups are judged at a time
    return config


def seconds_of(args: argparse.Namespace, depth: int) -> tuple[list[float], float]:
    """Seconds of each step after the warm-up, and the rollouts per step."""
    with tempfile.TemporaryDirectory() as folder, open_run(config_of(args, depth), Path(folder) / "run") as run:
        run.judge = SlowJudge(args.judge)
        SlowTravel.episodes.clear()
        loop.resume(run)
        seconds, rollouts = [], []
        for step in range(1, run.config.steps + 1):
            began = time.monotonic()
            loop.iterate(run, step)
            seconds.append(time.monotonic() - began)
            rollouts.append(run.workdir.metrics()[-1]["rollout/count"])
        return seconds[WARM:], statistics.mean(rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a call into the world, on average")
    parser.add_argument("--tail", type=float, default=4.0, help="times that in one episode of sixteen")
    parser.add_argument("--judge", type=float, default=1.0, help="seconds of the judge")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "pipelining", **vars(args)}
    for depth in (0, 1):
        seconds, rollouts = seconds_of(args, depth)
        result[f"depth_{depth}"] = {"mean_s": statistics.mean(seconds), "seconds": [round(s, 2) for s in seconds],
                                    "rollouts_per_step": rollouts}  # fmt: skip
    result["ratio"] = result["depth_0"]["mean_s"] / result["depth_1"]["mean_s"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
