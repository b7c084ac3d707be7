"""Demonstrations in made-up worlds: an agent that reads the tools and does what is asked.

Some demonstrations know the hidden rules of their world. In the others the agent is refused first,
makes the call that was missing and tries again. So a policy that imitates them makes unasked calls
now and then, and looks for a way where it is refused: where it begins to learn the rules of a world
that is new to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from envs.hints import experience_block, hint_text, when_text
from envs.made_up.plan import SYSTEMS
from envs.made_up.tasks import own_task
from envs.made_up.world import SHOWN, STARTS, MadeUp
from envs.slips import careless, values_of
from envs.toolcalls import Call, parse

REFUSED = 0.5  # share of the demonstrations in which the agent finds a rule out
ORIGIN = "The demonstrations come from made-up worlds: their tools, names and rules are random."
# Text of every prompt, a token each: the system messages, and rl/contexts/brief.py's of tools.
TOKENS = (
    *filter(None, SYSTEMS),
    "A call is ",
    '{"name": TOOL, "arguments": {PARAMETER: VALUE}}',
    " and these are the tools:",
)


def demonstrate(
    rng: random.Random, *, care: float, hint: float, worlds: int = SHOWN
) -> dict[str, Any]:
    """Play an own task of a random world. Returns {"messages", "tools", "success", "hinted"}."""
    task = own_task(rng.randrange(worlds) * STARTS + rng.randrange(STARTS // 2))
    actions, calls = list(task.reference), _calls(task.reference)
    hinted = rng.random() < hint
    if not hinted and rng.random() < REFUSED:
        for n in reversed(task.meta["needed"]):  # the call that is refused, before the needed one
            after = next(i for i in range(n, len(calls)) if i not in task.meta["needed"])
            actions.insert(n, actions[after])
    if care < 1:
        made = _calls(actions)
        actions = [*careless(made, values_of(made), rng, care), actions[-1]]
    if hinted:
        names = [call.name for call in calls]
        block = experience_block([hint_text(names, when_text(task.query))])
        task.query = block + task.query
    world = MadeUp()
    opening = world.reset(task)
    messages = list(opening.messages)
    for action in actions:
        result = world.step(action)
        messages += [{"role": "assistant", "content": action}, *result.messages]
    return {
        "messages": messages,
        "tools": opening.tools,
        "success": world.evaluate().success,
        "hinted": hinted,
    }


def _calls(actions: Sequence[str]) -> list[Call]:
    return [call for action in actions for call in parse(action).calls]
