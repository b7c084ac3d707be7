"""Tasks of the travel agency in the words of its tools' descriptions (`envs.wording`), for
demonstrations.

An explorer that knows no phrases of a world words its tasks like this: "Add a bag to an order:
order Ann Rome. Then get
a quote for a flight: flight Milan noon. Reply with the last word."

A template such as "plain/trip.bag+city.quote" is a goal, or a change and a second goal. A goal is a
subject and a tool. The subjects are `order` (named by its id), `trip` (an order named by its
passenger), `same` (the order of the first goal), `city`, `passenger` and, without a tool, `book`.
The last goal may be a question about the tool's answer.
"""

from __future__ import annotations

import functools
import math
import random
import re

from envs.probed import cells
from envs.travel.agency import TOOLS, Agency
from envs.travel.data import data
from envs.travel.rules import House
from envs.travel.tasks import HELD_OUT, Draft, PlannedCall, Unfit
from envs.wording import distinguishing, goal_text, joined, summaries

PREFIX = "plain/"
SUMMARIES = summaries({tool["function"]["name"]: tool["function"]["description"] for tool in TOOLS})
MOST_CALLS = 6

_CHANGES = ("bag", "seat", "cancel", "refund", "move")
_ASKS = ("flights", "quote", "people", "orders", "order", "seats")
_LENGTHS = {"seat": 2, "move": 2, "": 2}  # calls of a tool besides those of `_looks`
_WEIGHTS = {"quote": 3, "flights": 2, "": 3}  # how often a goal is shown, compared to the others
_WRITTEN = {
    "cancel": "drop",
    "refund": "drop",
    "people": "card",
    "order": "name",
}  # names in the written templates
_ID = re.compile(r"[FPO]\d\d|\d[ABC]")


def reply(wanted: str, text: str) -> str:
    """Return the part of a tool's answer that a question wants."""
    if wanted == "the number of lines":
        return str(len(text.split("\n")))
    return text.split()[0 if wanted == "the first word" else -1]


@functools.cache
def templates(calls: int) -> tuple[str, ...]:
    """Return the templates whose solutions take about that many calls, as often as they should be
    shown.

    Pairs that the held-out templates of the tasks combine are left out.
    """
    changes = [f"{subject}.{tool}" for subject in ("order", "trip") for tool in _CHANGES] + ["book"]
    asks = ["city.flights", "city.quote", "passenger.people", "passenger.orders"]
    asks += [f"{subject}.{tool}" for subject in ("order", "trip") for tool in ("order", "seats")]
    same = [f"same.{tool}" for tool in (*_CHANGES, "order", "seats")]
    pairs = [f"{one}+{two}" for one in changes for two in changes + asks + same]
    held_out = {frozenset(template.split("+")) for held in HELD_OUT.values() for template in held}
    fitting = [
        name
        for name in (changes + asks) * 3 + pairs
        if _length(name) == calls and _written(name) not in held_out
    ]
    weight = {
        name: math.prod(_WEIGHTS.get(goal.partition(".")[2], 1) for goal in name.split("+"))
        for name in fitting
    }
    return tuple(PREFIX + name for name in fitting for _ in range(weight[name]))


def _length(template: str) -> int:
    """Return the number of calls of a solution whose goals share no look-up, or `MOST_CALLS` if
    they have to."""
    goals = [goal.partition(".") for goal in template.split("+")]
    looks = [_looks(subject, tool) for subject, _, tool in goals]
    most = sum(_LENGTHS.get(tool, 1) for _, _, tool in goals) + sum(map(len, looks))
    least = most - len(set.intersection(*looks)) * (len(looks) - 1)
    return MOST_CALLS if least <= MOST_CALLS < most else most


def _looks(subject: str, tool: str) -> set[str]:
    """Return the look-ups of a goal which another goal may share."""
    looks = {"trip": {"people", "orders"}, "book": {"people", "flights"}}.get(subject, set())
    looks = looks | ({"order"} if subject == "order" and tool != "order" else set())
    looks |= {"people"} if tool == "orders" else set()
    return looks | ({"flights"} if tool in ("quote", "move") else set())


def _written(template: str) -> frozenset[str]:
    """Return the segments of the written template with the same goals (envs/travel/tasks.py)."""
    segments: list[str] = []
    for goal in template.split("+"):
        subject, _, tool = goal.partition(".")
        tool = _WRITTEN.get(tool, tool)
        if subject == "same":
            segments[-1] += f".{tool}"
        else:
            segments.append(f"{subject}.{tool}".removesuffix("."))
    return frozenset(segments)


def draft(world: int, rng: random.Random, template: str, house: House | None = None) -> Draft:
    """Plan and word a task. Raises Unfit if none of many attempts fits the world."""
    for _ in range(20):
        planner = _Planner(world, rng, house)
        try:
            return planner.plan(template)
        except Unfit:
            continue
        finally:
            planner.agency.close()
    raise Unfit(f"world {world} has nothing for {template}")


class _Planner:
    """Makes the calls of one task, and words them from what they showed."""

    def __init__(self, world: int, rng: random.Random, house: House | None):
        self.data, self.rng, self.agency = data(world), rng, Agency(world, house)
        self.calls: list[PlannedCall] = []
        self.texts: list[str] = []  # answers of the calls
        self.order = self.person = self.city = ""  # of the last goal
        self.goal = 0

    def plan(self, template: str) -> Draft:
        targets = []
        for self.goal, goal in enumerate(template.removeprefix(PREFIX).split("+")):
            subject, _, tool = goal.partition(".")
            self._reach(subject, tool)
            targets.append(len(self.calls) - 1)
        hidden = self._hidden()
        goals = [self._worded(n, hidden) for n in targets]
        wanted = self._question(" ".join(goals)) if self.calls[-1].tool in _ASKS else ""
        query = joined(goals, wanted, self.rng)
        result = Draft(template, self.agency.seed, calls=self.calls, query=query)
        if (
            len(set(goals)) < len(goals)
            or result.level > MOST_CALLS
            or not _words(query).isdisjoint(hidden)
        ):
            raise Unfit
        if wanted:
            result.ask = ("answer", self.calls[-1].tool, wanted)
            result.answer = reply(wanted, self.texts[-1])
        return result

    # --- calls ------------------------------------------------------------------------------------

    def _reach(self, subject: str, tool: str) -> None:
        if subject == "city":
            if tool == "quote":
                self._call("quote", flight=self._flight())
            else:
                self._call("flights", to=self._city(), again=True)
        elif subject == "passenger":
            self._person(again=tool == "people")
            if tool == "orders":
                self._call("orders", passenger=self.person, again=True)
        elif subject == "book":
            self._book()
        elif tool == "order":
            self._call("order", id=self._order(subject, look=False), again=True)
        else:
            self._change(self._order(subject), tool)

    def _change(self, order: str, tool: str) -> None:
        """Change an order, or list its seats."""
        if tool == "seat":
            self._call("seats", order=order)
            row = self.rng.choice(self.texts[-1].split("\n"))
            self._desk("seat", order)
            self._call("seat", order=order, seat=row.split()[-1])
        elif tool == "move":
            if any(call.tool == "seat" and call.arguments["order"] == order for call in self.calls):
                raise Unfit  # a move gives the seat up
            flight = self._flight()
            self._call("quote", flight=flight)
            self._desk("move", order)
            self._call("move", order=order, flight=flight)
        else:
            self._desk(tool, order)
            self._call(tool, order=order)

    def _book(self) -> None:
        first = self.rng.random() < 0.5
        if first:
            self._person()
        flight = self._flight()
        if not first:
            self._person()
        self._call("quote", flight=flight)
        self._desk("book", flight)
        self._call("book", flight=flight, passenger=self.person)
        self.order = _ID.findall(self.texts[-1])[-1]

    def _order(self, subject: str, *, look: bool = True) -> str:
        """Return the order that a goal is about after the calls that show it."""
        if subject == "same":
            return self.order
        orders = [order for order in self.data.orders.values() if order.id != self.order]
        if subject == "trip" and self.rng.random() < 0.5:
            orders = [order for order in orders if order.passenger == self.person] or orders
        order = self.rng.choice(orders)
        self.order, self.person = order.id, order.passenger
        if subject == "trip":
            self._call("people", name=self.data.passengers[order.passenger].name)
            self._call("orders", passenger=order.passenger)
        elif look:
            self._call("order", id=order.id)
        return order.id

    def _person(self, *, again: bool = False) -> None:
        """Look a passenger up, often the one of the last goal."""
        if not self.person or self.rng.random() < 0.5:
            self.person = self.rng.choice(list(self.data.passengers))
        self._call("people", name=self.data.passengers[self.person].name, again=again)

    def _flight(self) -> str:
        self._call("flights", to=self._city())
        return self.rng.choice(self.data.flights_to(self.city)).id

    def _city(self) -> str:
        """Return a city, often the one of the last goal."""
        if not self.city or self.rng.random() < 0.5:
            self.city = self.rng.choice(
                sorted({flight.city for flight in self.data.flights.values()})
            )
        return self.city

    def _desk(self, tool: str, id: str) -> None:
        """Make the desk call that the house wants before a tool."""
        if self.agency.house and (desk := self.agency.house.desk(tool)):
            self._call(desk, id=id)

    def _call(self, tool: str, *, again: bool = False, **arguments: str) -> None:
        """Make a call. A look-up that was made is not repeated, or only if its answer has changed
        (`again`)."""
        call = PlannedCall(tool, arguments, self.goal)
        made = [
            text
            for c, text in zip(self.calls, self.texts, strict=True)
            if (c.tool, c.arguments) == (tool, arguments)
        ]
        if made and not again:
            return
        text, ok = self.agency.call(tool, arguments)
        if not ok or text in made or text.startswith("no "):
            raise Unfit
        self.calls.append(call)
        self.texts.append(text)

    # --- words ------------------------------------------------------------------------------------

    def _hidden(self) -> dict[str, int]:
        """Return {id: the call that shows it} of the ids that are used after a call has shown
        them."""
        shown: dict[str, int] = {}
        hidden: dict[str, int] = {}
        named: set[str] = set()
        for n, (call, text) in enumerate(zip(self.calls, self.texts, strict=True)):
            for value in call.arguments.values():
                if value in shown and value not in named:
                    hidden[value] = shown[value]
                else:
                    named.add(value)
            for value in _ID.findall(text):
                shown.setdefault(value, n)
        return hidden

    def _worded(self, n: int, hidden: dict[str, int]) -> str:
        stated, phrases = [], {}
        for name, value in self.calls[n].arguments.items():
            parts = self._phrase(value, hidden)
            phrases[name] = " ".join([part for part in parts if part not in stated] or parts)
            stated += parts
        return goal_text(SUMMARIES[self.calls[n].tool], phrases)

    def _phrase(self, value: str, hidden: dict[str, int]) -> list[str]:
        """Return the words for a value: itself, or those that lead to the call that shows it and to
        its row."""
        if value not in hidden:
            return [value]
        call, text = self.calls[hidden[value]], self.texts[hidden[value]]
        parts = [part for inner in call.arguments.values() for part in self._phrase(inner, hidden)]
        found = distinguishing(cells(call.tool, text), value, list(hidden))
        if found is None:
            raise Unfit
        return list(dict.fromkeys([*parts, *found]))

    def _question(self, query: str) -> str:
        """Return what to reply with from the last answer, whose value the query must not hold."""
        several = "\n" in self.texts[-1]
        options = ["the number of lines"] if several else ["the first word", "the last word"]
        options = [
            option for option in options if reply(option, self.texts[-1]) not in _words(query)
        ]
        if not options:
            raise Unfit
        return self.rng.choice(options)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
