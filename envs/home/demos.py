"""Scripted demonstrations by a more or less careless agent, which a base policy imitates before
reinforcement learning.

The agent writes correct syntax and copies correctly, but slips. It knows its own house. A policy
that imitates agents of many houses knows the desk calls and how common they are, but not which of
them a house wants. With an experience in front of the query the agent slips less. Half of the tasks
have the phrases of the home's own tasks, half the words of its tools' descriptions, so that the
policy reads the tasks of an explorer as well.
"""

from __future__ import annotations

import random
from typing import Any

from envs.hints import experience_block, hint_text, when_text
from envs.home.data import KINDS, PEOPLE, ROOMS, VALUES
from envs.home.devices import CHANGES, DESK, HOMES, LOOKS, NOT_READY
from envs.home.tasks import LEVELS, Plan, any_plan, reply, task_of, templates
from envs.home.world import SYSTEM, SmartHome
from envs.house_rules import House
from envs.toolcalls import call_text

CARE = 0.5
MAX_CALLS = 12

# Words that are copied from observations get one token each, so that copying takes one token for
# every kind of id. So do the letters of ids: behind a space, "H" would be another token than behind
# a quotation mark.
TOKENS = (
    SYSTEM,
    *"RDLHSB",
    *(str(number) for number in range(10, 100)),
    *ROOMS,
    *PEOPLE,
    *KINDS,
    *(value for values in VALUES.values() for value in values if not value.isdigit()),
    *DESK,
    *CHANGES,
    *(tool["function"]["name"] for tool in LOOKS),
)
ORIGIN = "The demonstrations come from homes of their own; none of them is the home of a task."

# Probability of each slip at care 0; it is scaled by (1 - care).
SLIPS = {
    "skip": 0.4,  # omit a desk call
    "desk": 0.3,  # make a desk call that other houses want
    "choose": 0.4,  # take another device of the room
    "forget": 0.4,  # end after the first goal
    "give up": 0.3,  # end after an error
    "insist": 0.3,  # repeat the call that was refused
    "answer": 0.4,  # answer with another word
}
HINTED = 0.25  # factor on each slip if an experience is shown


def demonstrate(
    rng: random.Random,
    *,
    care: float = CARE,
    hint: float = 0.0,
    plain: float = 0.5,
    houses: bool = False,
) -> dict[str, Any]:
    """Play one episode of the careless agent on a new random task, in a house if `houses`.

    care: in [0, 1]; an agent with care 1 never slips. hint, plain: probability of an experience in
    front of the query, and of a task in the words of the tools' descriptions. An agent that never
    slips shows houses only below an
    experience: without one, nothing tells which desk call comes next, and copying is learned
    soonest where every token can be predicted.
    """
    if not 0 <= plain <= 1:
        raise ValueError(f"plain must be in [0, 1], not {plain}")
    if not isinstance(houses, bool):
        raise ValueError(f"houses must be True or False, not {houses!r}")
    hinted = rng.random() < hint
    house = HOMES.any_house(rng) if houses and (hinted or care < 1) else None
    as_described = rng.random() < plain
    template = rng.choice(templates(rng.choice(LEVELS), plain=as_described))
    plan = any_plan("demonstrations", rng, template, house, plain=as_described)
    task = task_of(plan, house=house)
    world = SmartHome()
    world.house = house
    messages = world.reset(task).messages
    if hinted:
        messages[1]["content"] = _experience(plan, rng, house, as_described) + task.query
    agent = _Careless(plan, rng, (1 - care) * (HINTED if hinted else 1))
    while True:
        action = agent.act()
        messages.append({"role": "assistant", "content": action})
        result = world.step(action)
        if result.terminated:
            break
        messages += result.messages
        agent.observe(result.messages[0]["content"], result.info["calls"][0]["ok"])
    shown = {"messages": messages, "success": world.evaluate().success, "hinted": hinted}
    return shown | {"difficulty": task.difficulty, "template": template, "plain": as_described}


def _experience(plan: Plan, rng: random.Random, house: House | None, plain: bool) -> str:
    """Return an experience from the same goals in another home, sometimes next to an unrelated
    one."""
    plans = [any_plan("demonstrations", rng, plan.template, house, kinds=plan.kinds, plain=plain)]
    if rng.random() < 0.2:
        other = rng.choice(templates(rng.choice(LEVELS), plain=plain))
        plans.insert(rng.randrange(2), any_plan("demonstrations", rng, other, house, plain=plain))
    return experience_block(
        [hint_text([tool for tool, _, _ in plan.calls], when_text(plan.query)) for plan in plans]
    )


class _Careless:
    """An agent that follows a plan and slips. slips: factor on the probability of each slip."""

    def __init__(self, plan: Plan, rng: random.Random, slips: float):
        self.plan, self.rng, self.slips = plan, rng, slips
        self.pending = list(plan.calls)
        self.chosen: dict[str, str] = {}  # device of the plan -> device that the agent takes for it
        self.listed: list[str] = []  # devices in the last list
        self.text, self.refused, self.goal, self.calls = "", False, 0, 0
        self.planned, self.action = plan.calls[0], ""  # behind the last turn

    def act(self) -> str:
        insists = self.refused and self._slip("insist")
        if (
            self.calls == MAX_CALLS
            or not self.pending
            or (self.refused and not insists and self._slip("give up"))
        ):
            return self._closing()
        goal = self.pending[0][2]
        if goal != self.goal and self._slip("forget"):
            return self._closing()
        self.goal, self.calls = goal, self.calls + 1
        if insists:
            return self.action
        if self.pending[0][0] in DESK and not self.refused and self._slip("skip"):
            del self.pending[0]
        self.planned = self.pending[0]
        tool, arguments, _ = self.planned
        if tool in DESK and self._slip("desk"):
            tool = self.rng.choices(list(DESK), list(DESK.values()))[0]
        self.action = call_text(
            tool, {name: self._taken(value) for name, value in arguments.items()}
        )
        return self.action

    def observe(self, text: str, ok: bool) -> None:
        self.refused = not ok
        if ok:
            self.text = text
            if self.planned[0] == "devices":
                self.listed = [row.split()[-1] for row in text.split("\n")]
            if self.planned in self.pending:
                self.pending.remove(self.planned)
        elif text.endswith(
            NOT_READY
        ):  # it made no desk call, another one, or one for another device
            place = self.plan.calls.index(self.planned)
            self.pending[:0] = [
                call for call in self.plan.calls[max(place - 1, 0) : place] if call[0] in DESK
            ]
        else:
            self.chosen.clear()

    def _taken(self, value: str) -> str:
        if value in self.listed and value not in self.chosen:
            self.chosen[value] = self.rng.choice(self.listed) if self._slip("choose") else value
        return self.chosen.get(value, value)

    def _closing(self) -> str:
        if self.plan.wanted is None:
            return "done"
        if self.pending or self._slip("answer"):
            return self.rng.choice([*self.text.split(), "done"])
        return reply(self.plan.wanted, self.text)

    def _slip(self, name: str) -> bool:
        return self.rng.random() < self.slips * SLIPS[name]
