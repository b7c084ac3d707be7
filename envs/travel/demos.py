"""Demonstrations in travel agencies (envs/desk/agent.py).

The agent books without a quote, takes the first row of a list, cancels instead of refunding, or
answers with another column.
"""

import functools
import itertools
import random
import re
from typing import Any

from envs.desk.agent import Careless, Demonstrations, Made
from envs.desk.plans import LEVELS, WORLDS, Plan, reply
from envs.desk.rules import House
from envs.desk.tools import names
from envs.travel import plain as plain_tasks
from envs.travel import tasks
from envs.travel.agency import ARGUMENTS, FAMILY, LOOKS
from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, SEATS, TIMES, data
from envs.travel.plain import PREFIX
from envs.travel.profile import attributes
from envs.travel.tasks import held_out
from envs.travel.world import Travel
from envs.world import Task

CARE = 0.15
# share of `compositions()` among those with written phrases; the others use the templates of the
# tasks
COMPOSED = 0.6

# Words that are copied from observations get one token each, so that copying takes one token for
# every kind of id.
TOKENS = (
    Travel.desk.system,
    *(str(number) for number in range(10, 100)),
    *CITIES,
    *NAMES,
    *DAYS,
    *TIMES,
    *FARES,
    *CARDS,
    *FAMILY.desk,
    *(row + letter for row, letter in itertools.product("123456789", SEATS)),
)
ORIGIN = (
    "The demonstrations come from training worlds; no task of the default train, dev and test sets"
    " is among them."
)


@functools.cache
def reserved() -> frozenset[tuple[int, str]]:
    """Return the (world, query) pairs of the tasks of all splits, which no demonstration may
    show."""
    own = map(Travel().tasks, ("train", "dev", "test"))
    return frozenset((task.seed, task.query) for task in itertools.chain(*own))


# Goals, in combinations of which the policy learns to combine goals in general.
SEGMENTS = names(
    "book order.bag order.seat order.drop order.name order.to order.bag.seat order.bag.drop "
    "order.bag.name order.bag.to order.seat.bag order.seat.drop order.seat.name order.seat.to "
    "trip.bag trip.seat trip.drop trip.bag.seat trip.bag.drop trip.seat.bag trip.seat.drop "
    "book.bag book.seat book.bag.seat book.seat.bag city.flights passenger.card passenger.orders"
)
ASKS = (".name", ".to", ".flights", ".card", ".orders")


@functools.cache
def compositions() -> tuple[str, ...]:
    """Return all templates of one or two segments with one question at most, except the held-out
    ones. They are more than the tasks use."""
    pairs = itertools.combinations_with_replacement(SEGMENTS, 2)
    both = ["+".join(pair) for pair in pairs if not all(one.endswith(ASKS) for one in pair)]
    return tuple(t for t in (*SEGMENTS, *both) if frozenset(t.split("+")) not in held_out())


def any_plan(
    world: int,
    rng: random.Random,
    house: House | None,
    template: str | None = None,
    level: int | None = None,
) -> Plan:
    """Return a plan for a template of either wording, or for any written one of a level."""
    if template and template.startswith(PREFIX):
        return plain_tasks.plan(world, rng, template, house)
    return tasks.plan(world, rng, house, level=level, template=template)


class Agent(Careless):
    """A careless travel agent."""

    slips = {
        "skip": 0.6,  # omit a look-up or a desk call and continue with the next call
        "desk": 0.3,  # make a desk call that other houses want
        "choose": 0.75,  # take the first row, or any row
        "swap": 0.6,  # cancel instead of refund, refund instead of cancel
        "forget": 0.55,  # end after a sub-goal although another is left
        "stop": 0.05,  # end anywhere
        "give up": 0.4,  # end after an error
        "insist": 0.35,  # repeat the call that was refused
        "repeat": 0.08,  # repeat a call that succeeded
        "wander": 0.1,  # make a look-up that is not needed
        "answer": 0.5,  # answer with another column, or not at all
    }
    # An experience lists the tools in order, but not which row to choose.
    heeding = {"choose": 0.5, "swap": 0.5, "answer": 0.5}
    swaps = {"cancel": "refund", "refund": "cancel"}
    looks = LOOKS
    keeps = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.data = data(self.plan.seed)
        self.seen = self.plan.query  # all text that the agent may copy from
        self.seats: list[str] = []  # rows of the last list of seats
        self.succeeded: set[str] = set()  # tools

    def saw(self, text: str) -> None:
        self.seen += "\n" + text
        self.succeeded.add(self.last[0])
        if self.last[0] == "seats":
            self.seats = text.split("\n")
            self.choices.pop("seat", None)
        if self.planned is self.plan.calls[-1]:
            self.text = text

    def take(self, name: str, value: str) -> str:
        """Return the value or the id that the agent chooses; a word replaces an id that it has not
        seen."""
        if name in ("to", "name"):
            return value
        if name == "seat":
            return self._take_seat(SEATS[value[1]])
        if name == "passenger":
            return value if value in self.seen else self.data.passengers[value].name
        if value not in self.seen:
            order = self.data.orders.get(value)
            flight = value if name == "flight" else order and order.flight
            return self.data.flights[flight].city if flight else "it"
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
        if not self.slip("choose"):
            return right
        return rows[0] if self.rng.random() < 0.7 else self.rng.choice(rows)

    def _take_seat(self, kind: str) -> str:
        if not self.seats:
            return kind
        right = next((row for row in self.seats if row.startswith(kind)), self.seats[0])
        if "seat" not in self.choices:
            self.choices["seat"] = self._choose(right, self.seats).split()[-1]
        return self.choices["seat"]

    def wander(self) -> Made:
        ids = sorted(set(re.findall(r"[FPO]\d\d", self.seen)))
        passengers, orders, flights = ([id for id in ids if id[0] == kind] for kind in "POF")
        seen = {
            "orders": passengers,
            "order": orders,
            "seats": orders,
            "quote": flights,
            "people": [p.name for p in self.data.passengers.values() if p.name in self.seen],
            "flights": [city for city in self.data.cities if city in self.seen],
        }
        calls: list[Made] = []
        for tool, values in seen.items():
            (argument,) = ARGUMENTS[tool]
            calls += [(tool, {argument: value}) for value in values]
        return self.rng.choice(calls)

    def closing(self) -> str:
        wanted = self.plan.wanted
        if wanted is None:
            return "done"
        if isinstance(wanted, str):
            return self._reply(wanted)
        entity, id, attribute = wanted
        chosen = self.choices.get(id) or self._choose(id, self._rows(id))
        known = attributes(self.data, entity, chosen)
        value = known.pop(attribute)
        if self.slip("answer"):
            value = self.rng.choice([*filter(None, known.values()), "done"])
        # The agent can count a list that it has seen; any other answer is copied from an
        # observation.
        return value if value in self.seen or attribute in self.succeeded else "done"

    def _reply(self, wanted: str) -> str:
        """Return the wanted part of the last planned call's answer, or by a slip another word of
        it."""
        if not self.text:
            return "done"
        value = reply(wanted, self.text)
        if self.slip("answer"):
            others = [word for word in self.text.split() if word != value]
            value = self.rng.choice([*others, "done"])
        return value


class Agencies(Demonstrations):
    """Tasks of training worlds."""

    def plan(self, rng: random.Random, plain: bool, house: House | None) -> tuple[Plan, Task]:
        level, template = rng.choice(LEVELS), None
        if plain:
            template = rng.choice(plain_tasks.templates(level))
        elif rng.random() < COMPOSED:
            template = rng.choice(compositions())
        world = rng.randrange(WORLDS)
        while True:
            plan = any_plan(world, rng, house, template, level)
            if (world, plan.query) not in reserved():
                break
        task = Travel.desk.task_of(plan, house=house)
        rng.random()  # a draw of earlier versions: without it a seed gives another episode
        return plan, task

    def similar(self, plan: Plan, rng: random.Random, house: House | None) -> list[Plan]:
        similar = any_plan(rng.randrange(WORLDS), rng, house, plan.template)
        plans = [similar]
        if rng.random() < 0.2:
            other = any_plan(rng.randrange(WORLDS), rng, house)
            plans.insert(rng.randrange(2), other)
        # If the similar task takes the same calls, those of `plan` are put into its order.
        reordered, rest = [], list(plan.calls)
        for call in similar.calls:
            match = next((own for own in rest if _kind(own.tool) == _kind(call.tool)), None)
            if match is not None:
                rest.remove(match)
                reordered.append(match)
        if not rest and [call.goal for call in similar.calls] == [call.goal for call in reordered]:
            plan.calls[:] = reordered
        return plans


def _kind(tool: str) -> str:
    return "drop" if tool in Agent.swaps else tool


AGENCIES = Agencies(Travel, Agent)
demonstrate = functools.partial(AGENCIES.demonstrate, care=CARE)
