"""The agency's own tasks, composed of sub-goals and graded by the number of calls in the shortest
solution.

A template such as "trip.seat.bag+city.flights" consists of segments joined by "+". A segment is a
subject followed by operations (bag, seat, drop) and questions (an attribute of the subject in the
profile). Subjects are `order` (named by its id), `trip` (an order named by passenger and city),
`book` (a new booking) and, for questions only, `city` and `passenger`. A task asks at most one
question.
"""

import contextlib
import functools
import itertools
import random
from collections.abc import Iterator

from envs.desk.plans import LEVELS, SPLITS, WORLDS, Plan, Planner, Unfit, sentence
from envs.desk.rules import House
from envs.desk.tools import names
from envs.travel.agency import Agency
from envs.travel.data import Order, data
from envs.travel.profile import PHRASES, QUESTIONS, attributes, flight_phrases, trip_phrases

# Level (number of calls) -> templates. Held-out templates occur in dev and test only.
TEMPLATES = {
    1: names("city.flights passenger.card order.name order.to"),
    2: names("order.bag order.drop passenger.orders"),
    3: names("trip.bag trip.drop order.seat order.bag+passenger.card"),
    4: names("book trip.seat order.seat.bag order.bag+order.bag"),
    5: names("book.bag trip.seat.bag order.seat+order.drop"),
    6: names("book.seat book+order.drop trip.seat+order.bag"),
}
HELD_OUT = {
    1: (),
    2: names("order.bag.name"),
    3: names("order.drop+city.flights order.drop+passenger.card"),
    4: names("order.bag+order.drop trip.drop+passenger.card"),
    5: names("trip.bag+order.drop order.seat+order.bag"),
    6: names("book+order.bag trip.bag+order.seat"),
}


@functools.cache
def held_out() -> frozenset[frozenset[str]]:
    """Return the goals of the templates which no demonstration may show."""
    return frozenset(frozenset(t.split("+")) for t in itertools.chain(*HELD_OUT.values()))


def world_of(split: str, index: int, seed: int) -> int:
    """Draw the world seed of a task from the range of its split."""
    drawn = random.Random(f"{split} world {index} {seed}").randrange(WORLDS)
    return SPLITS.index(split) * WORLDS + drawn


def plan(
    world: int,
    rng: random.Random,
    house: House | None = None,
    *,
    level: int | None = None,
    template: str | None = None,
) -> Plan:
    """Plan and word a task, by a random training template unless one is given. Raises Unfit if none
    of many attempts fits the world."""
    for _ in range(200):
        chosen = template or rng.choice(TEMPLATES[level or rng.choice(LEVELS)])
        levels = [n for n in LEVELS if chosen in TEMPLATES[n] + HELD_OUT[n]] or LEVELS
        try:
            plan = Errand(world, rng, chosen, house).written()
        except Unfit:
            continue
        if plan.level in levels:
            return plan
    raise Unfit(f"world {world} has nothing for {template or level}")


class Errand(Planner):
    """Writer of one task."""

    kind = Agency

    def written(self) -> Plan:
        """Return the plan of the template in the words of the profile. Raises Unfit."""
        self.data = data(self.plan.seed)
        self.parts: list[str] = []
        segments = self.plan.template.split("+")
        self.rng.shuffle(segments)
        for segment in segments:
            subject, *rest = segment.split(".")
            getattr(self, f"_{subject}")(rest)
        alone = self.parts[0].endswith("?")
        self.plan.query = self.parts[0] if alone else self._sentence()
        return self.plan

    @classmethod
    def own_plans(
        cls, split: str, index: int, level: int, seed: int, house: House | None
    ) -> Iterator[Plan]:
        rng = random.Random(f"{split} task {index} {seed}")
        held_out = split != "train" and level > 1 and (index // len(LEVELS) + level) % 3 == 0
        template = rng.choice((HELD_OUT if held_out else TEMPLATES)[level])
        for attempt in range(1000):
            with contextlib.suppress(Unfit):
                world = world_of(split, index * 1000 + attempt, seed)
                yield plan(world, rng, house, template=template)

    def make(self, tool: str, arguments: dict[str, str], *, again: bool = False) -> None:
        """Plan a call without making it. `task_of` finds the few that are refused."""
        if (tool, arguments) not in [call[:2] for call in self.plan.calls]:
            self.add(tool, arguments)

    # --- subjects ---------------------------------------------------------------------------------

    def _order(self, rest: list[str]) -> None:
        order = self._pick_order()
        self.call("order", id=order.id)
        self._do(rest, order, f"order {order.id}")

    def _trip(self, rest: list[str]) -> None:
        order = self._pick_order()
        self.call("people", name=self.data.passengers[order.passenger].name)
        self.call("orders", passenger=order.passenger)
        self._do(rest, order, self.rng.choice(trip_phrases(self.data, order.id)))

    def _book(self, rest: list[str]) -> None:
        passenger = self.data.passengers[self.pick(sorted(self.data.passengers))]
        city = self.pick(self.data.cities)
        flight = self.rng.choice(self.data.flights_to(city)).id
        phrase = self.rng.choice(flight_phrases(self.data, flight))
        looks = [("flights", {"to": city}), ("people", {"name": passenger.name})]
        self.rng.shuffle(looks)
        for tool, arguments in looks:
            self.call(tool, **arguments)
        self.call("quote", flight=flight)
        self.desk("book", flight)
        self.call("book", flight=flight, passenger=passenger.id)
        self._word("book", passenger=passenger.name, flight=phrase)
        id = self.data.spare[self.plan.tools.count("book") - 1]
        self._do(rest, Order(id, passenger.id, flight), "it")

    def _city(self, rest: list[str]) -> None:
        city = self.pick(self.data.cities)
        self.call("flights", to=city)
        self._ask("city", city, rest[0], city)

    def _passenger(self, rest: list[str]) -> None:
        id = self.pick(sorted(self.data.passengers))
        if rest[0] == "orders" and not self.data.orders_of(id):
            raise Unfit
        name = self.data.passengers[id].name
        self.call("people", name=name)
        if rest[0] == "orders":
            self.call("orders", passenger=id)
        self._ask("passenger", id, rest[0], name)

    # --- operations and questions -----------------------------------------------------------------

    def _do(self, rest: list[str], order: Order, phrase: str) -> None:
        for name in rest:
            if ("order", name) in QUESTIONS:
                self._ask("order", order.id, name, phrase)
            else:
                self._change(name, order, phrase)
            phrase = "it"

    def _change(self, operation: str, order: Order, phrase: str) -> None:
        tool, seat, phrases = operation, dict[str, str](), {"order": phrase}
        if operation in ("bag", "seat") and getattr(order, operation):
            raise Unfit
        if operation == "drop":
            tool = "refund" if self.data.flights[order.flight].fare == "flex" else "cancel"
        elif operation == "seat":
            kind = self.rng.choice(("window", "aisle"))
            self.call("seats", order=order.id)
            seat["seat"] = self.data.free_seat(order.flight, kind)
            phrases["seat"] = f"{'an' if kind == 'aisle' else 'a'} {kind} seat"
        self.desk(tool, order.id)
        self.call(tool, order=order.id, **seat)
        self._word(operation, **phrases)

    def _ask(self, entity: str, id: str, attribute: str, phrase: str) -> None:
        requests, questions = QUESTIONS[entity, attribute]
        alone = self.plan.template.count(".") == 1 and "+" not in self.plan.template
        self.plan.wanted = (entity, id, attribute)
        self.plan.answer = attributes(self.data, entity, id)[attribute]
        self._say(self.rng.choice(requests + questions * 2 * alone).format(it=phrase))

    # --- words ------------------------------------------------------------------------------------

    def _word(self, operation: str, **phrases: str) -> None:
        self._say(self.rng.choice(PHRASES[operation]).format(**phrases))

    def _say(self, text: str) -> None:
        self.parts.append(text)
        self.goal += 1

    def _sentence(self) -> str:
        first, *rest = self.parts
        rest = [self.rng.choice((" and ", ", then ")) + part for part in rest]
        return sentence("".join([first, *rest]))

    def _pick_order(self) -> Order:
        """Draw an order of a passenger that no other segment is about."""
        order = self.data.orders[self.pick(sorted(self.data.orders))]
        if order.passenger in self.picked:
            raise Unfit
        self.picked.add(order.passenger)
        return order
