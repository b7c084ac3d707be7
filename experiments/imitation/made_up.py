"""Explore many made-up worlds, for demonstrations of what the explorer asks for.

    python -m experiments.imitation.made_up --worlds 2000 --out runs/made_up.jsonl

Writes the tasks of worlds 0, 1, ... as lines, in the format of `--mode=explore`. The same command
goes on where it was interrupted: the last world in the file is explored again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from envs.made_up import MadeUp
from envs.made_up.world import STARTS
from envs.world import Task
from evolver.parts import Parts
from evolver.questioning import TaskPool
from evolver.questioning.curiosity import Curiosity
from models.files import write_atomically
from rl.seeds import seed_of

SEEDS = 4  # starts of a world that are explored
OPTIONS = {"rehearsals": 4, "rounds": 2, "breadth": 5, "depth": 10}


def explored(number: int, budget: int) -> list[Task]:
    """Return the tasks that the explorer invents in a world; fewer than `budget` if it finds no
    more."""
    world = MadeUp(number, n_train=SEEDS)
    pool = TaskPool(world.tasks("train"), overlap=0.8, capacity=10**9)
    explorer = Curiosity(Parts(task_pool=pool), **OPTIONS)
    pool.grow(explorer, lambda: MadeUp(number, n_train=SEEDS), budget, seed_of(number, "explore"))
    return list(pool.tasks.values())


def complete(path: Path) -> list[str]:
    """Return the lines of a file's worlds but the last, of which some tasks may be missing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    worlds = [json.loads(line)["seed"] // STARTS for line in lines]
    return [line for line, world in zip(lines, worlds) if world != worlds[-1]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/made_up.jsonl"))
    args = parser.parse_args(argv[1:])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept, first = complete(args.out), args.first
    if kept:
        first = json.loads(kept[-1])["seed"] // STARTS + 1
    write_atomically(args.out, "".join(kept))
    started, found, end = time.monotonic(), len(kept), args.first + args.worlds
    with args.out.open("a") as file:
        for number in range(first, end):
            tasks = explored(number, args.budget)
            found += len(tasks)
            file.write("".join(json.dumps(task.to_dict()) + "\n" for task in tasks))
            file.flush()
            if number % 50 == 49:
                seconds = time.monotonic() - started
                left = seconds / (number + 1 - first) * (end - number - 1)
                print(f"world {number + 1}  {found} tasks  {left:.0f} s left", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
