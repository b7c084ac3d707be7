"""Tasks of the travel agency in the words of its tools' descriptions (`envs.wording`), for
demonstrations.

A template such as "plain/trip.bag+city.quote" is a goal, or a change and a second goal. A goal is a
subject and a tool. The subjects are `order` (named by its id), `trip` (an order named by its
passenger), `same` (the order of the first goal), `city`, `passenger` and, without a tool, `book`.
The last goal may be a question about the tool's answer.
"""

import functools
import itertools
import math
import random
import re
from collections.abc import Sequence

from envs.desk.plans import Plan, Planner, Unfit, reply, words
from envs.desk.rules import House
from envs.desk.tools import names
from envs.travel.agency import LOOKS, Agency
from envs.travel.data import Data
from envs.travel.tasks import held_out

PREFIX = "plain/"
MOST_CALLS = 6

CHANGES = names(
    "order.bag order.seat order.cancel order.refund order.move trip.bag trip.seat trip.cancel "
    "trip.refund trip.move book"
)
ASKS = names(
    "city.flights city.quote passenger.people passenger.orders order.order order.seats trip.order "
    "trip.seats"
)
SAME = names("same.bag same.seat same.cancel same.refund same.move same.order same.seats")
# The look-ups of subjects and of tools, which other goals may share, and the calls of a tool
# besides them.
_LOOKS = {
    "order": {"order"},
    "trip": {"people", "orders"},
    "book": {"people", "flights"},
    "orders": {"people"},
    "quote": {"flights"},
    "move": {"flights"},
}
_LENGTHS = {"seat": 2, "move": 2, "": 2}
_WEIGHTS = {"quote": 3, "flights": 2, "": 3}  # how often a goal is shown, compared to the others
# Tool -> its name in the written templates.
_WRITTEN = {"cancel": "drop", "refund": "drop", "people": "card", "order": "name"}


@functools.cache
def templates(calls: int) -> tuple[str, ...]:
    """Return the templates whose solutions take about that many calls, as often as they should be
    shown.

    Pairs that the held-out templates of the tasks combine are left out.
    """
    pairs = map("+".join, itertools.product(CHANGES, CHANGES + ASKS + SAME))
    shown: list[str] = []
    for name in [*(CHANGES + ASKS) * 3, *pairs]:
        if _length(name) == calls and _written(name) not in held_out():
            weights = [_WEIGHTS.get(goal.partition(".")[2], 1) for goal in name.split("+")]
            shown += [PREFIX + name] * math.prod(weights)
    return tuple(shown)


def _length(template: str) -> int:
    """Return the number of calls of a solution whose goals share no look-up, or `MOST_CALLS` if
    they have to."""
    goals = [goal.partition(".") for goal in template.split("+")]
    looks = [(_LOOKS.get(s, set()) | _LOOKS.get(t, set())) - {t} for s, _, t in goals]
    most = sum(_LENGTHS.get(tool, 1) for _, _, tool in goals) + sum(map(len, looks))
    least = most - len(set.intersection(*looks)) * (len(looks) - 1)
    return MOST_CALLS if least <= MOST_CALLS < most else most


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


def plan(world: int, rng: random.Random, template: str, house: House | None = None) -> Plan:
    """Plan and word a task. Raises Unfit if none of many attempts fits the world."""
    for _ in range(20):
        errand = _Errand(world, rng, template.removeprefix(PREFIX), house)
        try:
            plan = errand.write(plain=True)
        except Unfit:
            continue
        finally:
            errand.tools.close()
        if plan.level <= MOST_CALLS:
            plan.template = template
            return plan
    raise Unfit(f"world {world} has nothing for {template}")


class _Errand(Planner):
    """Makes the calls of one task."""

    kind = Agency
    ids = re.compile(r"[FPO]\d\d|\d[ABC]")
    order = person = city = ""  # of the last goal

    @property
    def data(self) -> Data:
        return self.tools.start

    def reach(self, subject: str, tool: str) -> str:
        if tool == "quote":
            self.call("quote", flight=self._flight())
        elif subject == "city":
            self.make("flights", {"to": self._city()}, again=True)
        elif subject == "passenger":
            self._person(again=tool == "people")
            if tool == "orders":
                self.make("orders", {"passenger": self.person}, again=True)
        elif subject == "book":
            self._book()
        elif tool == "order":
            self.make("order", {"id": self._order(subject, look=False)}, again=True)
        else:
            self._change(self._order(subject), tool)
        return ""

    def _change(self, order: str, tool: str) -> None:
        """Change an order, or list its seats."""
        arguments = {"order": order}
        if tool == "seat":
            self.call("seats", order=order)
            arguments["seat"] = self.rng.choice(self.texts[-1].split("\n")).split()[-1]
        elif tool == "move":
            if ("seat", order) in [(c.tool, c.arguments.get("order")) for c in self.plan.calls]:
                raise Unfit  # a move gives the seat up
            arguments["flight"] = self._flight()
            self.call("quote", flight=arguments["flight"])
        self.desk(tool, order)
        self.call(tool, **arguments)

    def _book(self) -> None:
        first = self.rng.random() < 0.5
        if first:
            self._person()
        flight = self._flight()
        if not first:
            self._person()
        self.call("quote", flight=flight)
        self.desk("book", flight)
        self.call("book", flight=flight, passenger=self.person)
        self.order = self.texts[-1].split()[-1]

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
            self.call("people", name=self.data.passengers[order.passenger].name)
            self.call("orders", passenger=order.passenger)
        elif look:
            self.call("order", id=order.id)
        return order.id

    def _person(self, *, again: bool = False) -> None:
        """Look a passenger up, often the one of the last goal."""
        if not self.person or self.rng.random() < 0.5:
            self.person = self.rng.choice(list(self.data.passengers))
        self.make("people", {"name": self.data.passengers[self.person].name}, again=again)

    def _flight(self) -> str:
        self.call("flights", to=self._city())
        return self.rng.choice(self.data.flights_to(self.city)).id

    def _city(self) -> str:
        """Return a city, often the one of the last goal."""
        if not self.city or self.rng.random() < 0.5:
            self.city = self.rng.choice(self.data.cities)
        return self.city

    def question(self, goals: Sequence[str]) -> None:
        """Draw what to reply with from the last answer, whose value the query must not hold."""
        if self.plan.tools[-1] not in LOOKS:
            return
        text, stated = self.texts[-1], words(" ".join(goals))
        options = ["the first word", "the last word"]
        if "\n" in text:
            options = ["the number of lines"]
        options = [option for option in options if reply(option, text) not in stated]
        if not options:
            raise Unfit
        self.ask(self.rng.choice(options))
