"""Time of a warm worker to start an episode, to step and to score: `python -m
experiments.bench.reset`.

    python -m experiments.bench.reset --env appworld --python .venv-appworld/bin/python
    python -m experiments.bench.reset --env travel --tools --episodes 64


The worker is warm: its first episode, which loads data, is not counted. Both wall time and
processor time are shown, because wall time depends on the machine's load. With `--tools` each
tool's step is timed in this process, and the actions are those of the tasks' references and, in a
world with tools, those of the `curiosity` explorer's walks, which include calls that fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from envs import make
from envs.process import ROOT, Worker
from envs.toolcalls import parse
from evolver.questioning import probe_of
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Walker

BOUND_MS = {"appworld": 150.0}  # bound on the p95 of a reset
TOOL_BOUND_MS = {"travel": 10.0}  # bound on any step
DEADLINE_S = 300.0  # long, so that a loaded machine gives slow figures, not errors


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process, ended threads included, to 10 ms (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(worker: Worker, split: str, episodes: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, processor) seconds of each call, by operation, over `episodes` solved tasks."""
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)

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


def by_tool(env: str, kwargs: dict[str, Any], split: str, episodes: int) -> dict[str, list[float]]:
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


def print_tools(env: str, seconds_of: dict[str, list[float]]) -> None:
    """Print a table and the bound."""
    print("| tool | steps | p50, ms | p95 | max |\n|---|---|---|---|---|")
    everything = [second for seconds in seconds_of.values() for second in seconds]
    for tools, seconds in [*sorted(seconds_of.items()), ("all", everything)]:
        cuts = statistics.quantiles(seconds, n=20) if len(seconds) > 1 else seconds * 19
        cells = [1e3 * value for value in (cuts[9], cuts[18], max(seconds))]
        print(
            f"| {tools or 'no call'} | {len(seconds)} | "
            + " | ".join(f"{cell:.3f}" for cell in cells)
            + " |"
        )
    if env in TOOL_BOUND_MS:
        print(f"  bound: {TOOL_BOUND_MS[env]:g} ms for any step", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.reset", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--env", default="appworld")
    parser.add_argument(
        "--kwargs", type=json.loads, default={}, help="JSON arguments of the environment"
    )
    parser.add_argument(
        "--python", default=".venv-appworld/bin/python", help="interpreter of the worker"
    )
    parser.add_argument("--split", default="train")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument(
        "--tools", action="store_true", help="time the steps of each tool, without a worker"
    )
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    load = f"load average {os.getloadavg()[0]:.1f} before"
    if args.tools:
        print(f"{args.env}, {args.episodes} episodes; {load}")
        print_tools(args.env, by_tool(args.env, args.kwargs, args.split, args.episodes))
        return 0
    worker = Worker(args.env, args.kwargs, python=args.python, deadline=DEADLINE_S)
    print(f"{args.env}, {args.episodes} episodes in one warm worker; {load}")
    print("| call | calls | wall p50, ms | wall p95 | processor p50, ms | processor p95 |")
    print("|---|---|---|---|---|---|")
    results = measure(worker, args.split, args.episodes)
    worker.close()
    for op, seconds in results.items():
        cells = []
        for values in zip(*seconds):
            cuts = statistics.quantiles(values, n=20)
            cells += [cuts[9] * 1e3, cuts[18] * 1e3]
        print(f"| {op} | {len(seconds)} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
        if op == "reset" and args.env in BOUND_MS:
            print(f"  bound: {BOUND_MS[args.env]:g} ms for a reset", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
