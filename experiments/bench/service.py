"""Latency that the environment service adds to a step: `python -m experiments.bench.service`.

One service holds --instances instances, and --clients threads step through them. The added latency
is the difference to a direct call of the same step without a service, measured in the same run,
step by step. There are two loads: under `paced` a client waits between two steps, as if a policy
were generating (--think seconds on average, exponentially distributed); under `closed` it does not
wait.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time

from envs import make
from envs.process import ROOT, Deadlines
from envs.remote import Connections, RemoteWorld
from envs.source import serving
from envs.world import Task, World

BOUND_MS = 10.0  # bound on the added p95 under the paced load
DEADLINES = Deadlines(
    start=300.0, reset=300.0, step=300.0
)  # so that a loaded machine gives slow figures, not errors


def script(task: Task, rng: random.Random, steps: int) -> list[str]:
    """Return `steps` actions: calls of the reference, cyclically from a random one, that never end
    the episode."""
    calls = [action for action in task.reference if "<tool_call>" in action]
    first = rng.randrange(len(calls))
    return [calls[i % len(calls)] for i in range(first, first + steps)]


def timed(world: World, action: str) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    world.step(action)
    return time.perf_counter() - started


def direct(env: str, kwargs: dict, jobs: list[tuple[Task, list[str]]]) -> list[list[float]]:
    """Return the seconds of each step of each job, without a service."""
    world = make(env, **kwargs)
    seconds = []
    for task, actions in jobs:
        world.reset(task, 0)
        seconds.append([timed(world, action) for action in actions])
    world.close()
    return seconds


def drive(
    worlds: list[RemoteWorld], jobs: list, steps: range, clients: int, think: float
) -> tuple[list, float]:
    """Run these steps in every world with `clients` threads; return (seconds of each step by world,
    wall seconds)."""
    shares = [range(client, len(worlds), clients) for client in range(clients)]

    def client(share: range) -> dict[int, list[float]]:
        rng = random.Random(share.start)
        taken: dict[int, list[float]] = {index: [] for index in share}
        for step in steps:
            for index in share:
                if think:
                    time.sleep(rng.expovariate(1 / think))
                taken[index].append(timed(worlds[index], jobs[index][1][step]))
        return taken

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        shares_taken = list(threads.map(client, shares))
    merged = {index: seconds for taken in shares_taken for index, seconds in taken.items()}
    return [merged[index] for index in range(len(worlds))], time.perf_counter() - started


def resident_mb() -> float:
    """Return the resident memory of the service and its workers, which are descendants of this
    process, in MB."""
    table = subprocess.run(
        ["ps", "-eo", "pid,ppid,rss"], capture_output=True, text=True, check=True
    ).stdout
    rows = [tuple(map(int, line.split())) for line in table.splitlines()[1:]]
    family = {os.getpid()}
    for _ in range(5):
        family |= {pid for pid, parent, _ in rows if parent in family}
    return sum(rss for pid, _, rss in rows if pid in family - {os.getpid()}) / 1024


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """Return (p50, p95) in milliseconds."""
    cuts = statistics.quantiles(seconds, n=20)
    return cuts[9] * 1e3, cuts[18] * 1e3


def measure(env: str, kwargs: dict, args: argparse.Namespace) -> list[dict]:
    """Return one row per load."""
    rng = random.Random(0)
    splits = {"bfcl": "all"}
    tasks = [task for task in make(env, **kwargs).tasks(splits.get(env, "train")) if task.reference]
    paced = range(args.steps)
    closed = range(args.steps, 2 * args.steps)
    jobs = [
        (task, script(task, rng, 2 * args.steps)) for task in rng.choices(tasks, k=args.instances)
    ]
    alone = direct(env, kwargs, jobs)
    with serving(env, json.dumps(kwargs), "--workers", str(args.workers), "--step_s", "300") as url:
        connections = Connections(url)
        worlds = [RemoteWorld(connections, deadlines=DEADLINES) for _ in jobs]
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(args.clients) as threads:
            list(threads.map(lambda pair: pair[0].reset(pair[1][0], 0), zip(worlds, jobs)))
        created = time.perf_counter() - started
        rows = []
        for load, steps, think in (("paced", paced, args.think), ("closed", closed, 0.0)):
            remote, wall = drive(worlds, jobs, steps, args.clients, think)
            added = [
                r - a
                for rs, slots in zip(remote, alone)
                for r, a in zip(rs, slots[steps.start : steps.stop])
            ]
            row = {
                "env": env,
                "load": load,
                "instances": len(worlds),
                "MB": resident_mb(),
                "create_s": created,
            }
            row["steps_per_s"] = sum(map(len, remote)) / wall
            row["direct_p50"], row["direct_p95"] = percentiles(
                [s for slots in alone for s in slots]
            )
            row["http_p50"], row["http_p95"] = percentiles([s for slots in remote for s in slots])
            row["added_p50"], row["added_p95"] = percentiles(added)
            rows.append(row)
        with concurrent.futures.ThreadPoolExecutor(args.clients) as threads:
            list(threads.map(lambda world: world.close(), worlds))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print one table. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.service", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--envs", nargs="+", default=["travel", "bfcl"])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each instance under each load"
    )
    parser.add_argument(
        "--think", type=float, default=0.5, help="mean seconds of a client between two steps"
    )
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average {load:.1f} before the run; milliseconds")
    heads = (
        "env", "load", "instances", "MB", "create_s", "steps_per_s", "direct_p50", "direct_p95",
        "http_p50", "http_p95", "added_p50", "added_p95",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    rows = []
    for env in args.envs:
        for row in measure(env, {}, args):
            rows.append(row)
            cells = [row[head] for head in heads]
            print(
                "| "
                + " | ".join(
                    f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells
                )
                + " |",
                flush=True,
            )
    print(
        "\nLatency added to a step by the service, "
        f"with {args.instances} instances and {args.clients} clients:"
    )
    for row in rows:
        bound = f" (bound for p95: {BOUND_MS:g} ms)" if row["load"] == "paced" else ""
        print(
            f"  {row['env']}, {row['load']}: p50 {row['added_p50']:.1f} ms, "
            f"p95 {row['added_p95']:.1f} ms{bound}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
