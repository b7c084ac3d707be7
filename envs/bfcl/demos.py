"""Scripted demonstrations by a careless agent, which a tiny policy imitates before reinforcement
learning.

The agent plays ground truths, one call per reply, and slips: it omits a call, ends the user's turn
early, makes a call twice or uses a value from another conversation. A policy that imitates it knows
the format of calls and these very conversations, and succeeds about as often as the agent. It does
not understand English, so it cannot generalise to other conversations; both splits are therefore
demonstrated. Reinforcement learning then changes how carefully the policy works, on the tasks it
was rewarded for and on others.
"""

import functools
import itertools
import random
from typing import Any

from envs.bfcl.data import entries
from envs.bfcl.world import Bfcl
from envs.slips import careless, played, values_of
from envs.toolcalls import Call, tools_text
from envs.values import Json
from envs.world import Task

CARE = 0.5
DONE = "Done."
# Strings that every prompt repeats get one token each: the text around the list of tools and the
# syntax of a tool.
TOKENS = (
    DONE,
    *tools_text([]).split("\n\n</tools>"),
    '{"type": "function", "function": {"name": "',
    '", "parameters": {"type": "object", "properties": {',
    *(f'": {{"type": "{kind}"}}' for kind in ("string", "number", "integer", "boolean")),
    '": {"type": "array", "items": {"type": "string"}}',
)
ORIGIN = (
    "The demonstrations show the benchmark's own conversations, including those of the val split; "
    "the policy's score on them measures how carefully it works and is not comparable with any "
    "other BFCL score."
)


def demonstrate(rng: random.Random, *, care: float = CARE, hint: float = 0.0, **world: Any) -> Json:
    """Play one episode of the careless agent in `Bfcl(**world)`. Return {"messages", "tools",
    "success", "hinted"}.

    `hint` must be 0, because there is no experience to show."""
    if hint:
        raise ValueError(f"BFCL's demonstrations have no hints: hint must be 0, not {hint}")
    bfcl, tasks, values = _prepare(tuple(sorted(world.items())))
    task, seed = rng.choice(tasks), rng.randrange(2**31)
    turns = [[*careless(turn, values, rng, care), DONE] for turn in _truth(task)]
    return {**played(bfcl, task, itertools.chain(*turns), seed), "hinted": False}


@functools.lru_cache(maxsize=2)
def _prepare(arguments: tuple) -> tuple[Bfcl, list, dict[str, list[Any]]]:
    """Return the world, its tasks and, for each parameter, the values that it has in their
    solutions."""
    bfcl = Bfcl(**dict(arguments))
    tasks = bfcl.tasks("all")
    turns = itertools.chain(*map(_truth, tasks))
    return bfcl, tasks, values_of(itertools.chain(*turns))


def _truth(task: Task) -> list[list[Call]]:
    return entries(task.meta["category"])[task.id].truth
