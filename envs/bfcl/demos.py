"""Scripted demonstrations by a careless agent, for a tiny policy to imitate before it learns by reward.

The agent plays ground truths, one call per reply, and slips: it leaves a call out, ends the user's turn early, makes a
call twice, or gives it a value from another conversation. A policy that imitates it knows the form of calls and these
conversations, and is right about as often as the agent; it knows no English to understand another conversation with.
So both splits are demonstrated, and what learning by reward changes is how carefully the policy works: on tasks that it
was rewarded on, and on others.
"""

from __future__ import annotations

import functools
import random
from typing import Any

from envs.bfcl.data import entries
from envs.bfcl.world import Bfcl
from envs.toolcalls import Call, call_text, tools_text

CARE = 0.5
DONE = "Done."
# As tokens of their own, what every prompt repeats: the words around the list of tools, and the punctuation of a tool.
TOKENS = (
    DONE,
    *tools_text([]).split("\n\n</tools>"),
    '{"type": "function", "function": {"name": "',
    '", "parameters": {"type": "object", "properties": {',
    *(f'": {{"type": "{kind}"}}' for kind in ("string", "number", "integer", "boolean")),
    '": {"type": "array", "items": {"type": "string"}}',
)
COMMAND = "python run.py --config=configs/bfcl_tiny.py:base"
ORIGIN = (
    "The demonstrations are of the benchmark's own conversations, those of the val split included: what the policy"
    " scores on them says how carefully it works, and is not comparable with any other BFCL score."
)

# How often a slip happens at each call at care 0; it happens (1 - care) times as often.
SLIPS = {
    "stop": 0.2,  # end the user's turn
    "skip": 0.2,  # leave the call out
    "value": 0.4,  # take a value from another conversation
    "repeat": 0.2,  # make the call twice
}


def demonstrate(rng: random.Random, *, care: float = CARE, hint: float = 0.0, **world: Any) -> dict[str, Any]:
    """One episode of the careless agent in `Bfcl(**world)`: {"messages", "tools", "success", "hinted"}.

    `hint` has to be 0: there is no experience to show."""
    if hint:
        raise ValueError(f"BFCL's demonstrations have no hints; hint is {hint}")
    arguments = tuple(sorted(world.items()))
    place, tasks, values = _made(arguments)
    task = rng.choice(tasks)
    opening = place.reset(task, rng.randrange(2**31))
    messages = list(opening.messages)
    for action in _actions(task.id, values, rng, 1 - care):
        messages.append({"role": "assistant", "content": action})
        result = place.step(action)
        messages += result.messages
    return {"messages": messages, "tools": opening.tools, "success": place.evaluate().success, "hinted": False}


@functools.lru_cache(maxsize=2)
def _made(arguments: tuple) -> tuple[Bfcl, list, dict[str, list[Any]]]:
    """The world, its tasks, and the values that their solutions give each parameter."""
    place = Bfcl(**dict(arguments))
    tasks = place.tasks("all")
    values: dict[str, list[Any]] = {}
    for task in tasks:
        for call in _calls(task.id):
            for name, value in call.arguments.items():
                values.setdefault(name, []).append(value)
    return place, tasks, values


def _truth(id: str) -> list[list[Call]]:
    return entries(id.rsplit("_", 1)[0])[id].truth


def _calls(id: str) -> list[Call]:
    return [call for turn in _truth(id) for call in turn]


def _actions(id: str, values: dict[str, list[Any]], rng: random.Random, carelessness: float) -> list[str]:
    """The agent's replies of one episode."""
    actions = []
    for turn in _truth(id):
        for call in turn:
            slip = {name: rng.random() < p * carelessness for name, p in SLIPS.items()}
            if slip["stop"]:
                break
            if slip["skip"]:
                continue
            arguments = dict(call.arguments)
            if slip["value"] and arguments:
                name = rng.choice(sorted(arguments))
                arguments[name] = rng.choice(values[name])
            actions += [call_text(call.name, arguments)] * (2 if slip["repeat"] else 1)
        actions.append(DONE)
    return actions
