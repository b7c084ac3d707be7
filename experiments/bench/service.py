"""Latency that the environment service adds to a step: `python -m experiments.bench.service`.

One service holds --instances instances, and --clients threads step through them. The added latency
is the difference to a direct call of the same step without a service, measured in the same run,
step by step. There are two loads: under `paced` a client waits between two steps, as if a policy
were generating (--think seconds on average, exponentially distributed); under `closed` it does not
wait.
"""

import concurrent.futures
import functools
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from envs import make
from envs.process import Deadlines
from envs.remote import Connections, RemoteWorld
from envs.source import serving
from envs.world import Task, World
from experiments import commands
from experiments.bench.harness import clocked, family, load_before, percentiles_ms
from experiments.compare import markdown

# long, so that a loaded machine gives slow figures, not errors
DEADLINES = Deadlines(start=300.0, reset=300.0, step=300.0)
SPLITS = {"bfcl": "all"}  # worlds whose training split is not the one that is measured
HEAD = (
    "env", "load", "instances", "MB", "create_s", "steps_per_s", "direct_p50", "direct_p95",
    "http_p50", "http_p95", "added_p50", "added_p95",
)  # fmt: skip
Job = tuple[Task, list[str]]  # a task and the actions of an episode of it


def script(task: Task, rng: random.Random, steps: int) -> list[str]:
    """Return `steps` actions: calls of the reference, cyclically from a random one, that never end
    the episode."""
    calls = [action for action in task.reference if "<tool_call>" in action]
    first = rng.randrange(len(calls))
    return [calls[i % len(calls)] for i in range(first, first + steps)]


def timed(world: World, action: str) -> float:
    """Return the seconds of one step."""
    return clocked(functools.partial(world.step, action), 1)[0]


def direct(env: str, jobs: list[Job]) -> np.ndarray:
    """Return the seconds of each step of each job, without a service."""
    world = make(env)
    seconds = []
    for task, actions in jobs:
        world.reset(task, 0)
        seconds.append([timed(world, action) for action in actions])
    world.close()
    return np.array(seconds)


def drive(
    worlds: list[RemoteWorld], jobs: list[Job], steps: range, clients: int, think: float
) -> tuple[np.ndarray, float]:
    """Run these steps in every world with `clients` threads; return (seconds of each step by world,
    wall seconds)."""
    seconds_NK = np.zeros((len(worlds), len(steps)))

    def client(first: int) -> None:
        rng = random.Random(first)
        for k, step in enumerate(steps):
            for n in range(first, len(worlds), clients):
                if think:
                    time.sleep(rng.expovariate(1 / think))
                seconds_NK[n, k] = timed(worlds[n], jobs[n][1][step])

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
    return seconds_NK, time.perf_counter() - started


def resident_mb() -> float:
    """Return the resident memory of the service and its workers, which are descendants of this
    process, in MB."""
    _, *descendants = family(os.getpid())
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in descendants)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    env: str, instances: int, clients: int, workers: int, steps: int, think: float
) -> list[list[Any]]:
    """Return one row per load, as HEAD names its cells."""
    rng = random.Random(0)
    tasks = [task for task in make(env).tasks(SPLITS.get(env, "train")) if task.reference]
    jobs = [(task, script(task, rng, 2 * steps)) for task in rng.choices(tasks, k=instances)]
    alone = direct(env, jobs)
    loads = (("paced", range(steps), think), ("closed", range(steps, 2 * steps), 0.0))
    with serving(env, "{}", "--workers", str(workers), "--step_s", "300") as url:
        connections = Connections(url)
        worlds = [RemoteWorld(connections, deadlines=DEADLINES) for _ in jobs]
        with concurrent.futures.ThreadPoolExecutor(clients) as threads:
            started = time.perf_counter()
            list(threads.map(lambda world, job: world.reset(job[0], 0), worlds, jobs))
            created = time.perf_counter() - started
            rows = []
            for load, span, wait in loads:
                remote, wall = drive(worlds, jobs, span, clients, wait)
                row: list[Any] = [env, load, instances, resident_mb(), created, remote.size / wall]
                for seconds_NK in (alone, remote, remote - alone[:, span]):
                    row += percentiles_ms(seconds_NK.ravel())
                rows.append(row)
            list(threads.map(RemoteWorld.close, worlds))
    return rows


def main(
    *,
    envs: commands.Words = ("travel", "bfcl"),
    instances: int = 1000,
    clients: int = 64,
    workers: int = 2,
    steps: int = 4,
    think: float = 0.5,
) -> None:
    """Measure and print one table.

    steps: of each instance under each load
    think: mean seconds of a client between two steps
    """
    print(f"{load_before()} the run; milliseconds")
    rows = [list(HEAD)]
    for env in envs:
        for row in measure(env, instances, clients, workers, steps, think):
            rows.append([f"{c:.1f}" if isinstance(c, float) else str(c) for c in row])
    print(markdown(rows), end="")


if __name__ == "__main__":
    commands.program(main)
