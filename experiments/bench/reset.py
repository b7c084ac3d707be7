"""How long a warm worker takes to start an episode, to step and to score: `python -m experiments.bench.reset`.

    python -m experiments.bench.reset --env appworld --python .venv-appworld/bin/python

The worker is warm: its first episode, which loads what is slow to load, is not counted. Wall time is what a trainer
waits; processor time is what is left of it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from envs.process import ROOT, Worker

BOUND_MS = {"appworld": 150.0}  # of the p95 of a reset
DEADLINE_S = 300.0  # a loaded machine is a slow figure, not an error


def processor_s(pid: int) -> float:
    """Seconds that a process has run, threads that have ended included, to 10 ms (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(worker: Worker, split: str, episodes: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of each call by its name, over `episodes` solved tasks."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def timed(op: str, *args: Any) -> Any:
        wall, processor = time.perf_counter(), processor_s(worker.pid)
        answer = worker.call(op, "", list(args), deadline=DEADLINE_S)
        found[op].append((time.perf_counter() - wall, processor_s(worker.pid) - processor))
        return answer

    tasks = worker.call("tasks", "", [split], deadline=DEADLINE_S)
    worker.call("reset", "", [tasks[-1], 0], deadline=DEADLINE_S)
    for number in range(episodes):
        task = tasks[number % len(tasks)]
        timed("reset", task, 0)
        for action in task["reference"]:
            timed("step", action)
        timed("evaluate")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.reset", description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="appworld")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON arguments of the environment")
    parser.add_argument("--python", default=".venv-appworld/bin/python", help="interpreter of the worker")
    parser.add_argument("--split", default="train")
    parser.add_argument("--episodes", type=int, default=60)
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    worker = Worker(args.env, args.kwargs, python=args.python, deadline=DEADLINE_S)
    print(f"{args.env}, {args.episodes} episodes in one warm worker; load average {os.getloadavg()[0]:.1f} before")
    print("| call | calls | wall p50, ms | wall p95 | processor p50, ms | processor p95 |\n|---|---|---|---|---|---|")
    found = measure(worker, args.split, args.episodes)
    worker.close()
    for op, seconds in found.items():
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
