"""Scripted demonstrations by a more or less careless agent, which a base policy imitates before
reinforcement learning.

The agent always writes correct syntax and copies ids and names correctly, but it slips. It books
without a quote, takes the first row of a list, cancels instead of refunding, forgets the second
half of a task, gives up after an error or answers with another column. Every correct continuation
stays likely enough to be sampled, so that the reward can reinforce it. With an experience in front
of the query the agent uses the tools named there and slips less, so that a policy that imitates it
learns to follow experience.

In an agency with house rules (envs/house_rules.py) the agent knows its own house. A policy that
imitates agents of many houses knows the desk calls and how common they are, but not which of them
the house before it wants.

Half of the tasks have the phrases of the sandbox's own tasks (`PROFILE`), half the words of its
tools' descriptions (envs/travel/plain.py), so that the policy reads the tasks of an explorer as
well.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from envs.hints import experience_block, hint_text, when_text
from envs.toolcalls import call_text
from envs.travel import plain as plain_tasks
from envs.travel.agency import NOT_CLEARED
from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, SEATS, TIMES, Data, data
from envs.travel.profile import describe
from envs.travel.rules import DESK, House, any_house
from envs.travel.tasks import (
    HELD_OUT,
    WORLDS,
    Draft,
    PlannedCall,
    Unfit,
    draft,
    is_training_world,
    split_tasks,
    task_of,
)
from envs.travel.world import SYSTEM, Travel

CARE = 0.15
LOOKUPS = {"flights", "people", "quote", "orders", "order", "seats", *DESK}
MAX_CALLS = 12
LEVELS = (1, 2, 3, 4, 5, 6)  # of the tasks shown, equally often
# share of `compositions()` among those with written phrases; the others use the templates of the
# tasks
COMPOSED = 0.6

# Words that are copied from observations get one token each, so that copying takes one token for
# every kind of id.
TOKENS = (
    SYSTEM,
    *(str(number) for number in range(10, 100)),
    *CITIES,
    *NAMES,
    *DAYS,
    *TIMES,
    *FARES,
    *CARDS,
    *DESK,
    *(f"{row}{letter}" for row in range(1, 10) for letter in SEATS),
)

ORIGIN = (
    "The demonstrations come from training worlds; no task of the default train, dev and test sets"
    " is among them."
)

# Probability of each slip at care 0; it is scaled by (1 - care).
SLIPS = {
    "skip": 0.6,  # omit a look-up or a desk call and continue with the next call
    "desk": 0.3,  # make a desk call that other houses want
    "choose": 0.75,  # take the first row, or any row
    "drop": 0.6,  # cancel instead of refund, refund instead of cancel
    "forget": 0.55,  # end after a sub-goal although another is left
    "stop": 0.05,  # end anywhere
    "give up": 0.4,  # end after an error
    "insist": 0.35,  # repeat the call that was refused
    "repeat": 0.08,  # repeat a call that succeeded
    "wander": 0.1,  # make a look-up that is not needed
    "answer": 0.5,  # answer with another column, or not at all
}

# Factor on each slip if an experience is shown: it lists the tools in order, but not which row to
# choose.
HINTED = dict.fromkeys(SLIPS, 0.25) | {"choose": 0.5, "drop": 0.5, "answer": 0.5}


@functools.lru_cache(maxsize=8)
def reserved(
    n_train: int = 64, n_dev: int = 48, n_test: int = 96, seed: int = 0
) -> frozenset[tuple[int, str]]:
    """Return the (world, query) pairs of the tasks of all splits, which no demonstration may
    show."""
    sizes = {"train": n_train, "dev": n_dev, "test": n_test}
    return frozenset(
        (task.seed, task.query)
        for split, n in sizes.items()
        for task in split_tasks(split, n, seed)
    )


def demonstration(
    world_seed: int,
    rng: random.Random,
    *,
    care: float = CARE,
    hint: float = 0.0,
    level: int | None = None,
    template: str | None = None,
    exclude: frozenset[tuple[int, str]] | None = None,
    house: House | None = None,
) -> dict[str, Any]:
    """Play one episode of the careless agent on a new random task in a training world.

    `care` is in [0, 1]; an agent with care 1 never slips. `hint` is the probability of an
    experience in front of the query. `exclude` holds the (world, query) pairs that must not be
    shown; None = `reserved()`. Return {"messages": [{"role", "content"}, ...], "success": bool,
    "difficulty": int, "template": str, "hinted": bool}.
    """
    exclude = reserved() if exclude is None else exclude
    if not is_training_world(world_seed):
        raise ValueError(
            f"world {world_seed} is not a training world; their seeds are 0 to {WORLDS - 1}"
        )
    while True:
        plan = _draft(world_seed, rng, house, level=level, template=template)
        if (world_seed, plan.query) not in exclude:
            break
    task = task_of(plan, house=house)
    world = Travel()
    world.house = house
    messages = world.reset(task).messages
    hinted = rng.random() < hint
    if hinted:
        messages = [messages[0], {"role": "user", "content": _hint(plan, rng, house) + task.query}]
    agent = _Careless(plan, rng, odds(care, hinted))
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
    return {
        "messages": messages,
        "success": success,
        "difficulty": task.difficulty,
        "template": plan.template,
        "hinted": hinted,
    }


def demonstrate(
    rng: random.Random,
    *,
    care: float = CARE,
    hint: float = 0.0,
    plain: float = 0.5,
    houses: bool = False,
) -> dict[str, Any]:
    """Return a `demonstration` in a training world, both drawn from `rng`.

    plain: probability of a task in the words of the tools' descriptions, as an explorer without
    phrases words them.
    houses: draw a house for each demonstration, else there are no house rules. An agent that never
    slips (care 1) shows
    houses only below an experience: without one, nothing tells which desk call comes next, and
    copying is learned soonest where every token can be predicted.
    """
    if not 0 <= plain <= 1:
        raise ValueError(f"plain must be in [0, 1], not {plain}")
    if not isinstance(houses, bool):
        raise ValueError(f"houses must be True or False, not {houses!r}")
    hinted = rng.random() < hint
    house = any_house(rng) if houses and (hinted or care < 1) else None
    as_described = rng.random() < plain
    while True:
        level, template = rng.choice(LEVELS), None
        if as_described:
            template = rng.choice(plain_tasks.templates(level))
        elif rng.random() < COMPOSED:
            template = rng.choice(compositions())
        world = rng.randrange(WORLDS)
        try:
            return demonstration(
                world, rng, care=care, hint=hinted, level=level, template=template, house=house
            )
        except Unfit:
            continue


@functools.cache
def compositions() -> tuple[str, ...]:
    """Return all templates of one or two segments except the held-out ones. They are more than the
    tasks use, so that the policy learns to combine goals in general."""
    asks = {
        "order": ("name", "to"),
        "trip": (),
        "book": (),
        "city": ("flights",),
        "passenger": ("card", "orders"),
    }
    operations = {
        "order": ("bag", "seat", "drop"),
        "trip": ("bag", "seat", "drop"),
        "book": ("bag", "seat"),
    }
    singles = ["book"]
    for subject, ask in asks.items():
        does = operations.get(subject, ())
        singles += [f"{subject}.{one}" for one in (*does, *ask)]
        singles += [
            f"{subject}.{one}.{two}"
            for one in does
            for two in (*does, *ask)
            if one not in (two, "drop")
        ]
    held_out = {_parts(template) for templates in HELD_OUT.values() for template in templates}
    pairs = [
        f"{one}+{two}"
        for i, one in enumerate(singles)
        for two in singles[i:]
        if _asks(one) + _asks(two) < 2
    ]
    return tuple(template for template in singles + pairs if _parts(template) not in held_out)


def _draft(
    world: int,
    rng: random.Random,
    house: House | None,
    *,
    level: int | None = None,
    template: str | None = None,
) -> Draft:
    if template is not None and template.startswith(plain_tasks.PREFIX):
        return plain_tasks.draft(world, rng, template, house)
    return draft(world, rng, level=level, template=template, house=house)


def _parts(template: str) -> frozenset[str]:
    return frozenset(template.split("+"))


def _asks(template: str) -> bool:
    return template.endswith((".name", ".to", ".flights", ".card", ".orders"))


def odds(care: float, hinted: bool) -> dict[str, float]:
    """Return the probability of each slip."""
    return {name: p * (1 - care) * (HINTED[name] if hinted else 1) for name, p in SLIPS.items()}


def _hint(plan: Draft, rng: random.Random, house: House | None) -> str:
    """Return an experience from a similar task in another world, sometimes next to an unrelated
    experience.

    If the similar task takes the same calls, the calls of `plan` are put into its order.
    """
    similar = _draft(rng.randrange(WORLDS), rng, house, template=plan.template)
    contents = [hint_text([call.tool for call in similar.calls], when_text(similar.query))]
    if rng.random() < 0.2:
        other = draft(rng.randrange(WORLDS), rng, house=house)
        contents.insert(
            rng.randrange(2), hint_text([call.tool for call in other.calls], when_text(other.query))
        )
    reordered, rest = [], list(plan.calls)
    for call in similar.calls:
        match = next((own for own in rest if _kind(own.tool) == _kind(call.tool)), None)
        if match is not None:
            rest.remove(match)
            reordered.append(match)
    if not rest and [call.goal for call in similar.calls] == [call.goal for call in reordered]:
        plan.calls[:] = reordered
    return experience_block(contents)


def _kind(tool: str) -> str:
    return "drop" if tool in ("cancel", "refund") else tool


class _Careless:
    """An agent that follows a plan and slips."""

    def __init__(self, plan: Draft, rng: random.Random, odds: dict[str, float]):
        self.plan, self.rng, self.odds = plan, rng, odds
        self.data: Data = data(plan.world)
        self.pending: list[PlannedCall] = list(plan.calls)
        self.seen = plan.query  # all text that the agent may copy from
        self.choices: dict[str, str] = {}  # id in the plan -> id that the agent uses for it
        self.seats: list[str] = []  # rows of the last list of seats
        self.last = plan.calls[-1]
        self.answer = ""  # what the last planned call showed
        self.planned: PlannedCall | None = None  # the planned call behind the last call
        self.call: tuple[str, dict[str, str]] = ("", {})  # the last call
        self.refused = self.finished = False  # its result: refused, or the last one of a sub-goal
        self.succeeded: set[str] = set()  # tools
        self.n_calls = 0

    def act(self) -> str:
        call = self._next() if self.n_calls < MAX_CALLS else None
        if call is None:
            return self._final()
        self.n_calls += 1
        self.call = call
        return call_text(*call)

    def observe(self, text: str, ok: bool) -> None:
        self.refused, self.finished = not ok, False
        if ok:
            self.seen += "\n" + text
            self.succeeded.add(self.call[0])
            if self.call[0] == "seats":
                self.seats = text.split("\n")
                self.choices.pop("seat", None)
            if self.planned is self.last:
                self.answer = text
            if self.planned in self.pending:
                self.pending.remove(self.planned)
                self.finished = all(call.goal != self.planned.goal for call in self.pending)
        elif text.endswith(NOT_CLEARED) and self.planned is not None:
            before = self.plan.calls[: self.plan.calls.index(self.planned)]
            desk = next((call for call in reversed(before) if call.tool in DESK), None)
            if desk is not None and desk not in self.pending:
                self.pending.insert(0, desk)  # it made another one in its place

    def _next(self) -> tuple[str, dict[str, str]] | None:
        """Return the next call, planned or by a slip; None ends the episode."""
        if self.n_calls and self._slips("stop"):
            return None
        if self.refused:
            if self._slips("give up"):
                return None
            if self._slips("insist"):
                return self.call
        elif self.n_calls and self._slips("repeat"):
            self.planned = None
            return self.call
        elif self.finished and self.pending and self._slips("forget"):
            return None
        elif self.pending and self._slips("wander"):
            self.planned = None
            return self._wander()
        if not self.pending:
            return None
        self.planned = self.pending[0]
        later = [call for call in self.pending[1:] if call.goal == self.planned.goal]
        if self.planned.tool in LOOKUPS and later and not self.refused and self._slips("skip"):
            self.planned = later[0]
        return self._fill(self.planned)

    def _slips(self, name: str) -> bool:
        return self.rng.random() < self.odds[name]

    def _fill(self, planned: PlannedCall) -> tuple[str, dict[str, str]]:
        """Return the actual call with the ids that the agent chooses; a word replaces an id that it
        has not seen."""
        tool = planned.tool
        if tool in DESK and self._slips("desk"):
            tool = self.rng.choices(list(DESK), list(DESK.values()))[0]
        if tool in ("cancel", "refund") and self._slips("drop"):
            tool = "cancel" if tool == "refund" else "refund"
        return tool, {name: self._take(name, value) for name, value in planned.arguments.items()}

    def _take(self, name: str, value: str) -> str:
        if name in ("to", "name"):
            return value
        if name == "seat":
            return self._take_seat(SEATS[value[1]])
        if name == "passenger":
            return value if value in self.seen else self.data.passengers[value].name
        if value not in self.seen:
            if name in ("order", "id"):
                return (
                    self.data.flights[self.data.orders[value].flight].city
                    if value in self.data.orders
                    else "it"
                )
            return self.data.flights[value].city
        if value not in self.choices:
            self.choices[value] = self._choose(value, self._rows(value))
        return self.choices[value]

    def _rows(self, id: str) -> list[str]:
        """Return the ids that a flight or an order can be mistaken for: those in the list that
        shows it."""
        if id in self.data.flights:
            return [flight.id for flight in self.data.flights_to(self.data.flights[id].city)]
        if id in self.data.orders and id not in self.plan.query:
            return [order.id for order in self.data.orders_of(self.data.orders[id].passenger)]
        return [id]

    def _choose(self, right: str, rows: list[str]) -> str:
        """Return the right row, or by a slip another one, mostly the first."""
        if not self._slips("choose"):
            return right
        return rows[0] if self.rng.random() < 0.7 else self.rng.choice(rows)

    def _take_seat(self, kind: str) -> str:
        if not self.seats:
            return kind
        right = next((row for row in self.seats if row.startswith(kind)), self.seats[0])
        if "seat" not in self.choices:
            self.choices["seat"] = self._choose(right, self.seats).split()[-1]
        return self.choices["seat"]

    def _wander(self) -> tuple[str, dict[str, str]]:
        """Return a look-up of something that the agent has seen."""
        ids = [(id[0], id) for id in sorted(set(re.findall(r"[FPO]\d\d", self.seen)))]
        names = [p.name for p in self.data.passengers.values() if p.name in self.seen]
        cities = sorted({f.city for f in self.data.flights.values() if f.city in self.seen})
        calls = [("orders", {"passenger": id}) for kind, id in ids if kind == "P"]
        calls += [("order", {"id": id}) for kind, id in ids if kind == "O"]
        calls += [("seats", {"order": id}) for kind, id in ids if kind == "O"]
        calls += [("quote", {"flight": id}) for kind, id in ids if kind == "F"]
        calls += [("people", {"name": name}) for name in names] + [
            ("flights", {"to": city}) for city in cities
        ]
        return self.rng.choice(calls)

    def _final(self) -> str:
        if self.plan.ask is None:
            return "done"
        entity, id, attribute = self.plan.ask
        if entity == "answer":
            return self._reply(attribute)
        description = describe(
            self.data, entity, self.choices.get(id) or self._choose(id, self._rows(id))
        )
        value = description[attribute]
        if self._slips("answer"):
            others = [
                other
                for key, other in description.items()
                if key not in (attribute, "phrases") and other
            ]
            value = self.rng.choice(others + ["done"])
        # The agent can count a list that it has seen; any other answer is copied from an
        # observation.
        return value if value in self.seen or attribute in self.succeeded else "done"

    def _reply(self, wanted: str) -> str:
        """Return the wanted part of the last planned call's answer, or by a slip another word of
        it."""
        if not self.answer:
            return "done"
        value = plain_tasks.reply(wanted, self.answer)
        if self._slips("answer"):
            value = self.rng.choice(
                [word for word in self.answer.split() if word != value] + ["done"]
            )
        return value
