"""Explore many made-up worlds, for demonstrations of what the explorer asks for.

    python -m experiments.imitation.made_up --worlds 2000 --out runs/made_up.jsonl

Writes the tasks of worlds 0, 1, ... as lines, in the format of `--mode=explore`. The same command
goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from envs.made_up import MadeUp
from envs.made_up.world import STARTS
from envs.world import Task
from evolver.parts import Parts
from evolver.processes.interrupt import RunEnds
from evolver.questioning import TaskPool
from evolver.questioning.curiosity import Curiosity
from rl.seeds import seed_of

SEEDS = 4  # starts of a world that are explored
OPTIONS = {"rehearsals": 4, "rounds": 2, "breadth": 5, "depth": 10}


def explored(number: int, budget: int) -> list[Task]:
    """Return the tasks that the explorer invents in a world; fewer than `budget` if it finds no
    more."""
    world = MadeUp(number, n_train=SEEDS)
    pool = TaskPool(world.tasks("train"), overlap=0.8, capacity=10**9)
    explorer = Curiosity(Parts(task_pool=pool), **OPTIONS)
    with contextlib.suppress(RunEnds, ValueError):  # there may be nothing to find
        pool.grow(
            explorer, lambda: MadeUp(number, n_train=SEEDS), budget, seed_of(number, "explore")
        )
    return list(pool.tasks.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/made_up.jsonl"))
    args = parser.parse_args(argv[1:])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.is_file() else []
    done = max((json.loads(line)["seed"] // STARTS + 1 for line in lines), default=args.first)
    started, found = time.monotonic(), len(lines)
    with args.out.open("a") as file:
        for number in range(done, args.first + args.worlds):
            tasks = explored(number, args.budget)
            found += len(tasks)
            file.writelines(json.dumps(task.to_dict()) + "\n" for task in tasks)
            if number % 50 == 49:
                seconds = time.monotonic() - started
                left = seconds / (number + 1 - done) * (args.first + args.worlds - number - 1)
                print(f"world {number + 1}  {found} tasks  {left:.0f} s left", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
