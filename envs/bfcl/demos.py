"""Scripted demonstrations by a careless agent, which a tiny policy imitates before reinforcement learning.

The agent plays ground truths, one call per reply, and slips: it omits a call, ends the user's turn early, makes a call
twice or uses a value from another conversation. A policy that imitates it knows the format of calls and these very
conversations, and succeeds about as often as the agent. It does not understand English, so it cannot generalise to
other conversations; both splits are therefore demonstrated. Reinforcement learning then changes how carefully the
policy works, on the tasks it was rewarded for and on others.
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
# Strings that every prompt repeats get one token each: the text around the list of tools and the syntax of a tool.
TOKENS = (
    DONE,
    *tools_text([]).split("\n\n</tools>"),
    '{"type": "function", "function": {"name": "',
    '", "parameters": {"type": "object", "properties": {',
    *(f'": {{"type": "{kind}"}}' for kind in ("string", "number", "integer", "boolean")),
    '": {"type": "array", "items": {"type": "string"}}',
)
ORIGIN = (
    "The demonstrations show the benchmark's own conversations, including those of the val split; the policy's score on"
    " them measures how carefully it works and is not comparable with any other BFCL score."
)

# Probability of each slip per call at care 0; it is scaled by (1 - care).
SLIPS = {
    "stop": 0.2,  # end the user's turn
    "skip": 0.2,  # omit the call
    "value": 0.4,  # take a value from another conversation
    "repeat": 0.2,  # make the call twice
}


def demonstrate(rng: random.Random, *, care: float = CARE, hint: float = 0.0, **world: Any) -> dict[str, Any]:
    """Play one episode of the careless agent in `Bfcl(**world)`. Return {"messages", "tools", "success", "hinted"}.

    `hint` must be 0, because there is no experience to show."""
    if hint:
        raise ValueError(f"BFCL's demonstrations have no hints: hint must be 0, not {hint}")
    bfcl, tasks, values = _prepare(tuple(sorted(world.items())))
    task = rng.choice(tasks)
    opening = bfcl.reset(task, rng.randrange(2**31))
    messages = list(opening.messages)
    for action in _actions(task.id, values, rng, 1 - care):
        messages.append({"role": "assistant", "content": action})
        result = bfcl.step(action)
        messages += result.messages
    return {"messages": messages, "tools": opening.tools, "success": bfcl.evaluate().success, "hinted": False}


@functools.lru_cache(maxsize=2)
def _prepare(arguments: tuple) -> tuple[Bfcl, list, dict[str, list[Any]]]:
    """Return the world, its tasks and, for each parameter, the values that it has in their solutions."""
    bfcl = Bfcl(**dict(arguments))
    tasks = bfcl.tasks("all")
    values: dict[str, list[Any]] = {}
    for task in tasks:
        for call in _calls(task.id):
            for name, value in call.arguments.items():
                values.setdefault(name, []).append(value)
    return bfcl, tasks, values


def _truth(id: str) -> list[list[Call]]:
    return entries(id.rsplit("_", 1)[0])[id].truth


def _calls(id: str) -> list[Call]:
    return [call for turn in _truth(id) for call in turn]


def _actions(id: str, values: dict[str, list[Any]], rng: random.Random, carelessness: float) -> list[str]:
    """Return the agent's replies in one episode."""
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
