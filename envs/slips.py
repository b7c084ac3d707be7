"""A careless agent that plays a known solution, and its slips: calls that it omits, repeats or gets
wrong."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envs.toolcalls import Call, call_text
from envs.values import Json
from envs.world import Task, World

# Probability of each slip per call at care 0; it is scaled by (1 - care).
SLIPS = {
    "stop": 0.2,  # make no more calls
    "skip": 0.2,  # omit the call
    "value": 0.4,  # take a value from another solution
    "repeat": 0.2,  # make the call twice
}


def played(world: World, task: Task, actions: Iterable[str], seed: int = 0) -> Json:
    """Play an episode of given actions. Return its "messages", "tools" and "success"."""
    opening = world.reset(task, seed)
    messages = list(opening.messages)
    for action in actions:
        answer = world.step(action).messages
        messages += [{"role": "assistant", "content": action}, *answer]
    success = world.evaluate().success
    return {"messages": messages, "tools": opening.tools, "success": success}


def values_of(calls: Iterable[Call]) -> dict[str, list[Any]]:
    """Return, for each parameter, the values that it has in the calls."""
    values: dict[str, list[Any]] = {}
    for call in calls:
        for name, value in call.arguments.items():
            values.setdefault(name, []).append(value)
    return values


def careless(
    calls: Sequence[Call], values: Mapping[str, list[Any]], rng: random.Random, care: float
) -> list[str]:
    """Return replies of one call each, with slips. values: what wrong values are drawn from, as by
    `values_of`."""
    replies = []
    for call in calls:
        slip = {name: rng.random() < p * (1 - care) for name, p in SLIPS.items()}
        if slip["stop"]:
            break
        if slip["skip"]:
            continue
        arguments = dict(call.arguments)
        if slip["value"] and arguments:
            name = rng.choice(sorted(arguments))
            arguments[name] = rng.choice(values[name])
        replies += [call_text(call.name, arguments)] * (2 if slip["repeat"] else 1)
    return replies
