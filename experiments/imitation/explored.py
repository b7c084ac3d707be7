"""Demonstrations of explored tasks: the explorer's own solutions, played with slips.

Any world that an explorer knows has them, without a line of code for it.
"""

import functools
import glob
import itertools
import json
import random
from typing import Any

import envs
from envs.probed import probed
from envs.slips import careless, values_of
from envs.toolcalls import call_text, parse
from envs.values import Json
from envs.world import Task, World
from evolver.files.workdir import read_tasks
from evolver.replaying import calls_of, play

DONE = "done"


def demonstrate(rng: random.Random, files: str, env: str, *, care: float, **world: Any) -> Json:
    """Play the solution of one of the tasks in files that match a pattern, as `--mode=explore`
    writes them.

    Returns {"messages", "tools", "success", "hinted"}. Raises ValueError without such tasks, and
    OSError.
    """
    there, tasks, values = _prepare(files, env, json.dumps(world, sort_keys=True))
    task = rng.choice(tasks)
    seed, calls = rng.randrange(2**31), calls_of(task)
    replies = careless(calls, values, rng, care)
    whole = [call_text(call.name, call.arguments) for call in calls]
    # What it did not look up, it does not know.
    closing = closing_of(task) if replies == whole else [DONE]
    return play(there, task, seed, [*replies, *closing])


@functools.lru_cache(maxsize=2)
def _prepare(
    files: str, env: str, arguments: str
) -> tuple[World, list[Task], dict[str, list[Any]]]:
    """Return the world, the tasks whose solutions are tool calls, and the values of each parameter
    in them."""
    there = itertools.chain.from_iterable(map(read_tasks, sorted(glob.glob(files))))
    found = {task.id: task for task in there}
    tasks = [task for task in found.values() if task.origin == "synthetic" and calls_of(task)]
    if not tasks:
        raise ValueError(
            f"config.explored={files} has no task that tool calls solve; "
            "--mode=explore writes such files"
        )
    values = values_of(itertools.chain.from_iterable(map(calls_of, tasks)))
    return probed(envs.make(env, **json.loads(arguments))), tasks, values


def closing_of(task: Task) -> list[str]:
    """Return the closing text of a task's solution, [] if it ends with a call."""
    return [] if not task.reference or parse(task.reference[-1]).calls else task.reference[-1:]
