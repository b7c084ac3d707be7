"""Scripted demonstrations by a more or less careless agent, which a base policy imitates before
reinforcement learning.

The agent always writes correct syntax and copies correctly, but it slips: it omits calls, takes the
wrong row of a list, forgets the second half of a task, gives up after an error or answers with
another word. Every correct continuation stays likely enough to be sampled, so that the reward can
reinforce it. It knows its own house. A policy that imitates agents of many houses knows the desk
calls and how common they are, but not which of them the house before it wants. With an experience
in front of the query the agent uses the tools named there and slips less, so that the policy learns
to follow experience.

Half of the tasks have the phrases of the world's own tasks, half the words of its tools'
descriptions, so that the policy reads the tasks of an explorer as well.
"""

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from envs.desk.plans import LEVELS, SPLITS, Plan, PlannedCall, Unfit, reply
from envs.desk.rules import House
from envs.desk.world import Desk, DeskWorld
from envs.hints import experience_block, hint_text, when_text
from envs.toolcalls import call_text
from envs.values import Json
from envs.world import Task

MAX_CALLS = 12
Made = tuple[str, dict[str, str]]  # a call: tool and arguments


class Careless:
    """An agent that follows a plan and slips. The defaults suit a world whose lists have an id at
    the end of each row."""

    # Probability of each slip at care 0; it is scaled by (1 - care). A slip that is not listed is
    # not drawn.
    slips: ClassVar[Mapping[str, float]] = {
        "skip": 0.4,  # omit a desk call, or one of `looks`
        "desk": 0.3,  # make a desk call that other houses want
        "choose": 0.4,  # take another row of a list
        "forget": 0.4,  # end after a goal although another is left
        "insist": 0.3,  # repeat the call that was refused
        "give up": 0.3,  # end after an error
        "answer": 0.4,  # answer with another word
    }
    # Other slips: "stop" anywhere, "repeat" a call that succeeded, "wander" to a look-up that is
    # not needed, and "swap" a call for that of `swaps`.
    heeding: ClassVar[Mapping[str, float]] = {}  # factor below an experience, 0.25 if not listed
    swaps: ClassVar[Mapping[str, str]] = {}
    looks: ClassVar[Sequence[str]] = ()  # tools whose calls can be skipped, as desk calls
    keeps = False  # a skipped call is made up for, and a wrong choice is kept after an error

    def __init__(self, desk: Desk, plan: Plan, rng: random.Random, care: float, hinted: bool):
        self.family, self.plan, self.rng = desk.tools.family, plan, rng
        self.odds = odds(type(self), care, hinted)
        self.pending = list(plan.calls)
        self.planned: PlannedCall | None = None  # the planned call behind the last call
        self.last: Made = ("", {})  # the last call
        self.text = ""  # the last answer that was no error
        self.listed: list[str] = []  # ids of the last list
        self.choices: dict[str, str] = {}  # id in the plan -> id that the agent uses for it
        self.refused = self.finished = False  # the last call: refused, or the last one of a goal
        self.made = 0

    def act(self) -> str:
        call = self.next()
        if call is None:
            return self.closing()
        self.made, self.last = self.made + 1, call
        return call_text(*call)

    def observe(self, text: str, ok: bool) -> None:
        self.refused, self.finished = not ok, False
        if ok:
            self.saw(text)
            if self.planned in self.pending:
                self.pending.remove(self.planned)
                self.finished = all(call.goal != self.planned.goal for call in self.pending)
        elif text.endswith(self.family.refusal) and self.planned:
            # It made no desk call, another one, or one for something else.
            before = self.plan.calls[: self.plan.calls.index(self.planned)]
            desk = next((call for call in reversed(before) if call.desk), None)
            if desk and not (self.keeps and desk in self.pending):
                self.pending.insert(0, desk)
        elif not self.keeps:
            self.choices.clear()

    def next(self) -> Made | None:
        """Return the next call, planned or by a slip; None ends the episode."""
        if self.made == MAX_CALLS or (self.made and self.slip("stop")):
            return None
        if self.refused:
            # The first that is drawn, in the order of `slips`.
            slip = next((s for s in self.slips if s in ("give up", "insist") and self.slip(s)), "")
            if slip:
                return self.last if slip == "insist" else None
        elif self.made and self.slip("repeat"):
            self.planned = None
            return self.last
        elif self.finished and self.pending and self.slip("forget"):
            return None
        elif self.pending and self.slip("wander"):
            self.planned = None
            return self.wander()
        if not self.pending:
            return None
        self.planned, *rest = self.pending
        later = [call for call in rest if call.goal == self.planned.goal]
        skippable = self.planned.desk or self.planned.tool in self.looks
        if skippable and later and not self.refused and self.slip("skip"):
            if not self.keeps:
                del self.pending[0]
            self.planned = later[0]
        tool = self.planned.tool
        if self.planned.desk and self.slip("desk"):
            tool = self.family.any_desk(self.rng)
        if tool in self.swaps and self.slip("swap"):
            tool = self.swaps[tool]
        return tool, {
            name: self.take(name, value) for name, value in self.planned.arguments.items()
        }

    def slip(self, name: str) -> bool:
        return name in self.odds and self.rng.random() < self.odds[name]

    def take(self, name: str, value: str) -> str:
        """Return what the agent writes for an argument: the value, or by a slip another id of the
        list that showed it."""
        if value in self.listed and value not in self.choices:
            self.choices[value] = self.rng.choice(self.listed) if self.slip("choose") else value
        return self.choices.get(value, value)

    def saw(self, text: str) -> None:
        """Take an answer in."""
        self.text = text
        if "\n" in text:
            self.listed = [row.split()[-1] for row in text.split("\n")]

    def wander(self) -> Made:
        """Return a look-up of something that the agent has seen."""
        raise NotImplementedError

    def closing(self) -> str:
        """Return the answer to the task, or by a slip another word."""
        if self.plan.wanted is None:
            return "done"
        if self.pending or self.slip("answer"):
            return self.rng.choice([*self.text.split(), "done"])
        return reply(self.plan.wanted, self.text)


def odds(agent: type[Careless], care: float, hinted: bool) -> dict[str, float]:
    """Return the probability of each slip."""
    return {
        name: p * (1 - care) * (agent.heeding.get(name, 0.25) if hinted else 1)
        for name, p in agent.slips.items()
    }


class Demonstrations:
    """The demonstrations of a world, drawn and played."""

    def __init__(self, world: type[DeskWorld], agent: type[Careless] = Careless):
        self.world, self.desk, self.agent = world, world.desk, agent

    def plan(self, rng: random.Random, plain: bool, house: House | None) -> tuple[Plan, Task]:
        """Draw a task that no split has. plain: with a plain query. Raises Unfit."""
        template = rng.choice(self.desk.planner.templates(rng.choice(LEVELS), plain=plain))
        plan = self.desk.planner.any_plan(SPLITS[-1], rng, template, house, plain=plain)
        return plan, self.desk.task_of(plan, house=house)

    def similar(self, plan: Plan, rng: random.Random, house: House | None) -> list[Plan]:
        """Return the plans whose experience is shown: one with the same goals in another world, and
        sometimes an unrelated one. May put the calls of `plan` into another order. Raises Unfit."""
        any_plan, plain = self.desk.planner.any_plan, plan.drawn["plain"]
        plans = [any_plan(SPLITS[-1], rng, plan.template, house, **plan.drawn)]
        if rng.random() < 0.2:
            other = rng.choice(self.desk.planner.templates(rng.choice(LEVELS), plain=plain))
            place = rng.randrange(2)
            plans.insert(place, any_plan(SPLITS[-1], rng, other, house, plain=plain))
        return plans

    def demonstrate(
        self,
        rng: random.Random,
        *,
        care: float = 0.5,
        hint: float = 0.0,
        plain: float = 0.5,
        houses: bool = False,
    ) -> Json:
        """Play one episode of the careless agent on a new random task.

        care: in [0, 1]; an agent with care 1 never slips. hint, plain: probability of an experience
        in front of the query, and of a task in the words of the tools' descriptions. houses: draw a
        house for each demonstration, else there are no house rules. An agent that never slips shows
        houses only below an experience: without one, nothing tells which desk call comes next, and
        copying is learned soonest where every token can be predicted. Returns {"messages",
        "success", "difficulty", "template", "hinted"}.
        """
        if not 0 <= plain <= 1:
            raise ValueError(f"plain must be in [0, 1], not {plain}")
        if not isinstance(houses, bool):
            raise ValueError(f"houses must be True or False, not {houses!r}")
        hinted = rng.random() < hint
        house = None
        if houses and (hinted or care < 1):
            house = self.desk.tools.family.any_house(rng)
        as_described = rng.random() < plain
        while True:
            try:
                plan, task = self.plan(rng, as_described, house)
                shown = self.similar(plan, rng, house) if hinted else []
                break
            except Unfit:
                continue
        return {
            **self._play(plan, task, shown, self.agent(self.desk, plan, rng, care, hinted), house),
            "difficulty": task.difficulty,
            "template": plan.template,
            "hinted": hinted,
        }

    def _play(
        self, plan: Plan, task: Task, shown: list[Plan], agent: Careless, house: House | None
    ) -> Json:
        world = self.world()
        world.house = house
        messages = world.reset(task).messages
        if shown:
            lessons = [hint_text(plan.tools, when_text(plan.query)) for plan in shown]
            messages[1]["content"] = experience_block(lessons) + task.query
        while True:
            action = agent.act()
            messages.append({"role": "assistant", "content": action})
            result = world.step(action)
            if result.terminated:
                break
            messages += result.messages
            agent.observe(result.messages[0]["content"], result.info["calls"][0]["ok"])
        success = world.evaluate().success
        world.close()
        return {"messages": messages, "success": success}
