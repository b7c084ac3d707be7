"""Time of a warm worker to start an episode, to step and to score: `python -m
experiments.bench.reset`.

    python -m experiments.bench.reset --env appworld --python .venv-appworld/bin/python
    python -m experiments.bench.reset --env travel --tools --episodes 64

The worker is warm: its first episode, which loads data, is not counted. Both wall time and
processor time are shown, because wall time depends on the machine's load. With `--tools` each
tool's step is timed in this process, and the actions are those of the tasks' references and, in a
world with tools, those of the `curiosity` explorer's walks, which include calls that fail.
"""

import itertools
import json
import os
import random
import time
from collections import defaultdict
from typing import Any

from envs import make
from envs.process import ROOT, Worker
from envs.toolcalls import parse
from envs.values import Json
from evolver.questioning import probe_of
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Walker
from experiments import commands
from experiments.bench.harness import load_before, percentiles_ms, processor_s
from experiments.compare import Table, markdown

Calls = dict[str, list[tuple[float, float]]]  # (wall, processor) seconds, by operation
DEADLINE_S = 300.0  # long, so that a loaded machine gives slow figures, not errors


def measure(worker: Worker, split: str, episodes: int) -> Calls:
    """Return (wall, processor) seconds of each call, by operation, over `episodes` solved tasks."""
    seconds: Calls = defaultdict(list)

    def timed(op: str, *args: Any) -> Any:
        wall, processor = time.perf_counter(), processor_s(worker.pid)
        answer = worker.call(op, "", list(args), deadline=DEADLINE_S)
        seconds[op].append((time.perf_counter() - wall, processor_s(worker.pid) - processor))
        return answer

    tasks = worker.call("tasks", "", [split], deadline=DEADLINE_S)
    worker.call("reset", "", [tasks[-1], 0], deadline=DEADLINE_S)
    for number in range(episodes):
        task = tasks[number % len(tasks)]
        timed("reset", task, 0)
        for action in task["reference"]:
            timed("step", action)
        timed("evaluate")
    return seconds


def by_tool(env: str, kwargs: Json, split: str, episodes: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by the tools that it calls ("" = none), over `episodes`
    tasks."""
    seconds: dict[str, list[float]] = defaultdict(list)
    world = make(env, **kwargs)
    step = world.step

    def timed(action: str) -> Any:
        tools = " ".join(sorted({call.name for call in parse(action).calls}))
        began = time.perf_counter()
        result = step(action)
        seconds[tools].append(time.perf_counter() - began)
        return result

    world.step = timed  # type: ignore[method-assign]  # walks time their steps, too
    walker = Walker(breadth=6, depth=20, branches=2)
    tasks = world.tasks(split)
    for number in range(episodes):
        task = tasks[number % len(tasks)]
        world.reset(task, 0)
        for action in task.reference:
            world.step(action)
        if world.reset(probe_of(task), task.seed).tools:
            list(walker.walks(world, probe_of(task), random.Random(number), SeenValues()))
    world.close()
    return seconds


def tool_rows(seconds_of: dict[str, list[float]]) -> Table:
    """Return the table of `by_tool`."""
    everything = list(itertools.chain(*seconds_of.values()))
    rows = [["tool", "steps", "p50, ms", "p95", "max"]]
    for tools, seconds in [*sorted(seconds_of.items()), ("all", everything)]:
        cells = [*percentiles_ms(seconds), 1e3 * max(seconds)]
        rows.append([tools or "no call", str(len(seconds)), *(f"{cell:.3f}" for cell in cells)])
    return rows


def call_rows(seconds_of: Calls) -> Table:
    """Return the table of `measure`."""
    head = ["wall p50, ms", "wall p95", "processor p50, ms", "processor p95"]
    rows = [["call", "calls", *head]]
    for op, seconds in seconds_of.items():
        wall, processor = (percentiles_ms(values) for values in zip(*seconds))
        rows.append([op, str(len(seconds)), *(f"{cell:.1f}" for cell in wall + processor)])
    return rows


def main(
    *,
    env: str = "appworld",
    kwargs: str = "{}",
    python: str = ".venv-appworld/bin/python",
    split: str = "train",
    episodes: int = 60,
    tools: bool = False,
) -> None:
    """Measure and print a table.

    kwargs: JSON arguments of the environment
    python: interpreter of the worker
    tools: time the steps of each tool, without a worker
    """
    os.chdir(ROOT)
    values = json.loads(kwargs)
    where = "" if tools else " in one warm worker"
    print(f"{env}, {episodes} episodes{where}; {load_before()}")
    if tools:
        print(markdown(tool_rows(by_tool(env, values, split, episodes))), end="")
        return
    worker = Worker(env, values, python=python, deadline=DEADLINE_S)
    print(markdown(call_rows(measure(worker, split, episodes))), end="")
    worker.close()


if __name__ == "__main__":
    commands.program(main)
