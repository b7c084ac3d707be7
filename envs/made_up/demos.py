"""Demonstrations in made-up worlds: an agent that reads the tools and does what is asked.

Some demonstrations know the hidden rules of their world. In the others the agent is refused first,
makes the call that was missing and tries again. So a policy that imitates them makes unasked calls
now and then, and looks for a way where it is refused: where it begins to learn the rules of a world
that is new to it.

Others are exercises in reading lists, which is what tiny policies learn last: to find the id of a
name that a query says, in a row that may show the id first.
"""

import itertools
import random
from collections.abc import Sequence

from envs.hints import experience_block, hint_text, when_text
from envs.made_up.plan import SYSTEMS, plan_of
from envs.made_up.tasks import own_task
from envs.made_up.world import SHOWN, STARTS, MadeUp, start_of
from envs.slips import careless, played, values_of
from envs.toolcalls import Call, parse
from envs.values import Json

REFUSED = 0.5  # share of the demonstrations in which the agent finds a rule out
LISTS = 0.3  # share of the demonstrations that are exercises in reading lists
LONGEST = 10  # entities of such a list
ORIGIN = "The demonstrations come from made-up worlds: their tools, names and rules are random."
# Text of every prompt, a token each: the system messages, and rl/contexts/brief.py's of tools.
TOKENS = (
    *filter(None, SYSTEMS),
    "A call is ",
    '{"name": TOOL, "arguments": {PARAMETER: VALUE}}',
    " and these are the tools:",
)


def demonstrate(rng: random.Random, *, care: float, hint: float, worlds: int = SHOWN) -> Json:
    """Play an own task of a random world, or read a list of one. Returns {"messages", "tools",
    "success", "hinted"}."""
    seed = rng.randrange(worlds) * STARTS + rng.randrange(STARTS // 2)
    if rng.random() < LISTS:
        return reading(rng, seed)
    task = own_task(seed)
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
    return {**played(MadeUp(), task, actions), "hinted": hinted}


def reading(rng: random.Random, seed: int) -> Json:
    """Answer questions about a list of a world: for entities that are told by one of their fields,
    say another one; for all of them in any order, or for those that are named before the list."""
    plan = plan_of(seed // STARTS)
    kind = rng.choice([kind for kind in plan.kinds if not kind.single])
    state = start_of(plan, seed, LONGEST)
    text = state.listing([(kind, id) for id in state[kind]])
    fields = [[entity["name"], id] for id, entity in state[kind].items()]
    if kind.ids == "name":  # the id says no more than the name
        shown = [a.name for a in kind.attributes if a.listed]
        name = rng.choice(shown) if shown else "name"
        fields = [[id, entity[name]] for id, entity in state[kind].items()]
    elif rng.random() < 0.2:
        fields = [pair[::-1] for pair in fields]
    rng.shuffle(fields)
    if rng.random() < 0.3:
        answer = "\n".join(f"{told}: {sought}" for told, sought in fields)
    else:
        asked = fields[: rng.randint(1, 6)]
        text = ", ".join(told for told, _ in asked) + "\n" + text
        answer = ", ".join(sought for _, sought in asked)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "tools": [], "success": True, "hinted": False}


def _calls(actions: Sequence[str]) -> list[Call]:
    return list(itertools.chain(*(parse(action).calls for action in actions)))
