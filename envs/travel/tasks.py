"""Tasks of the travel agency, composed of sub-goals and graded by the number of calls in the
shortest solution.

The desk calls of a house do not count for the level, so that all houses have the same tasks.

A template such as "trip.seat.bag+city.flights" consists of segments joined by "+". A segment is a
subject followed by operations (bag, seat, drop) and questions (an attribute of the subject in the
profile). Subjects are `order` (named by its id), `trip` (an order named by passenger and city),
`book` (a new booking) and, for questions only, `city` and `passenger`. A task asks at most one
question.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace

from envs.toolcalls import call_text
from envs.travel.agency import Agency
from envs.travel.data import Data, data
from envs.travel.profile import OPERATIONS, QUESTIONS, describe, sentence, word
from envs.travel.rules import DESK, House
from envs.travel.verify import verify
from envs.world import Task

# Level (number of calls) -> templates. Held-out templates occur in dev and test only.
TEMPLATES: dict[int, list[str]] = {
    1: ["city.flights", "passenger.card", "order.name", "order.to"],
    2: ["order.bag", "order.drop", "passenger.orders"],
    3: ["trip.bag", "trip.drop", "order.seat", "order.bag+passenger.card"],
    4: ["book", "trip.seat", "order.seat.bag", "order.bag+order.bag"],
    5: ["book.bag", "trip.seat.bag", "order.seat+order.drop"],
    6: ["book.seat", "book+order.drop", "trip.seat+order.bag"],
}
HELD_OUT: dict[int, list[str]] = {
    1: [],
    2: ["order.bag.name"],
    3: ["order.drop+city.flights", "order.drop+passenger.card"],
    4: ["order.bag+order.drop", "trip.drop+passenger.card"],
    5: ["trip.bag+order.drop", "order.seat+order.bag"],
    6: ["book+order.bag", "trip.bag+order.seat"],
}
LEVELS = tuple(TEMPLATES)

SPLITS = ("train", "dev", "test")
WORLDS = 1_000_000  # world seeds per split: train starts at 0, dev at WORLDS, test at 2 * WORLDS

_QUESTIONS = {(q["entity"], q["attribute"]): q for q in QUESTIONS}
_OPERATIONS: dict[str, list[dict]] = {}
for _operation in OPERATIONS:
    _OPERATIONS.setdefault(_operation["name"], []).append(_operation)


@dataclass
class PlannedCall:
    """One call of a solution; `goal` is the index of its sub-goal."""

    tool: str
    arguments: dict[str, str]
    goal: int


@dataclass
class Draft:
    """A task under construction: the wording of its parts and the calls that solve it."""

    template: str
    world: int
    parts: list[str] = field(default_factory=list)
    calls: list[PlannedCall] = field(default_factory=list)
    ask: tuple[str, str, str] | None = None  # entity, id, attribute
    answer: str | None = None
    query: str = ""

    @property
    def level(self) -> int:
        """The number of calls without desk calls, so that a task has the same level in every
        house."""
        return sum(call.tool not in DESK for call in self.calls)


class Unfit(Exception):
    """Error of an attempt that found nothing in the world that fits the template; another attempt
    may succeed."""


def world_of(split: str, index: int, seed: int) -> int:
    """Draw the world seed of a task from the range of its split."""
    return SPLITS.index(split) * WORLDS + random.Random(f"{split} world {index} {seed}").randrange(
        WORLDS
    )


def is_training_world(world: int) -> bool:
    """Return True if a world seed belongs to the train split, and so may be explored and
    demonstrated."""
    return 0 <= world < WORLDS


@functools.lru_cache(maxsize=32)
def split_tasks(
    split: str, n: int, seed: int, house: House | None = None, level: int = 0
) -> tuple[Task, ...]:
    """Return n tasks that cycle through the levels, or are of one `level`.

    In dev and test a third of those above level 1 are held out.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    only, tasks = level, []
    for index in range(n):
        level = only or LEVELS[index % len(LEVELS)]
        held_out = split != "train" and level > 1 and (index // len(LEVELS) + level) % 3 == 0
        rng = random.Random(f"{split} task {index} {seed}")
        template = rng.choice((HELD_OUT if held_out else TEMPLATES)[level])
        for attempt in range(1000):
            world = world_of(split, index * 1000 + attempt, seed)
            try:
                task = generate(world, rng, template=template, split=split, house=house)
                break
            except Unfit:
                continue
        else:
            raise RuntimeError(f"no world fits template {template}")
        tasks.append(replace(task, id=f"travel/{split}/{index:04d}"))
    return tuple(tasks)


def generate(
    world: int,
    rng: random.Random,
    *,
    level: int | None = None,
    template: str | None = None,
    split: str = "train",
    house: House | None = None,
) -> Task:
    """Return a task in the given world, from a random training template unless one is given."""
    return task_of(
        draft(world, rng, level=level, template=template, house=house), split=split, house=house
    )


def task_of(draft: Draft, split: str = "train", house: House | None = None) -> Task:
    """Return the task of a draft; executing its calls gives the verifier. Raises Unfit if a call is
    refused."""
    agency = Agency(draft.world, house)
    for call in draft.calls:
        text, ok = agency.call(call.tool, call.arguments)
        if not ok:
            raise Unfit(
                f"{draft.template} in world {draft.world}: {call.tool} {call.arguments}: {text}"
            )
    verifier = {"state": agency.difference(), "answer": draft.answer}
    agency.close()
    assert not verify(verifier, [], "").success, (
        f"{draft.template} in world {draft.world}: doing nothing succeeds"
    )
    turns = [call_text(call.tool, call.arguments) for call in draft.calls] + [
        draft.answer or "done"
    ]
    return Task(
        id=f"travel/world/{draft.world}",
        env="travel",
        query=draft.query,
        split=split,
        seed=draft.world,
        reference=turns,
        verifier=verifier,
        difficulty=draft.level,
        meta={"template": draft.template},
    )


def draft(
    world: int,
    rng: random.Random,
    *,
    level: int | None = None,
    template: str | None = None,
    house: House | None = None,
) -> Draft:
    """Plan and word a task. Raises Unfit if none of many attempts fits the world."""
    for _ in range(200):
        chosen = template or rng.choice(TEMPLATES[level or rng.choice(LEVELS)])
        lengths = [n for n in LEVELS if chosen in TEMPLATES[n] + HELD_OUT[n]] or LEVELS
        try:
            result = _Writer(world, rng, house).write(chosen)
        except Unfit:
            continue
        if result.level in lengths:
            return result
    raise Unfit(f"world {world} has nothing for {template or level}")


class _Writer:
    """Writer of one draft."""

    def __init__(self, world: int, rng: random.Random, house: House | None):
        self.data: Data = data(world)
        self.rng, self.house = rng, house
        self.draft = Draft("", world)
        self.used: set[str] = set()  # subjects of segments, so that no two segments have the same
        self.called: set[tuple[str, str]] = set()
        self.goal = 0
        self.booked = 0
        self.now = {
            order.id: (order.passenger, order.flight) for order in self.data.orders.values()
        }

    def write(self, template: str) -> Draft:
        self.draft.template = template
        segments = template.split("+")
        self.rng.shuffle(segments)
        for segment in segments:
            subject, *rest = segment.split(".")
            getattr(self, f"_{subject}")(rest)
        parts = self.draft.parts
        self.draft.query = parts[0] if parts[0].endswith("?") else sentence(parts, self.rng)
        return self.draft

    # Subjects.

    def _order(self, rest: list[str]) -> None:
        id = self._pick(sorted(self.data.orders))
        self._free_passenger(self.data.orders[id].passenger)
        self._call("order", id=id)
        self._on_order(id, f"order {id}", rest)

    def _trip(self, rest: list[str]) -> None:
        id = self._pick(sorted(self.data.orders))
        passenger = self.data.passengers[self.data.orders[id].passenger]
        self._free_passenger(passenger.id)
        self._call("people", name=passenger.name)
        self._call("orders", passenger=passenger.id)
        self._on_order(id, self._phrase("order", id, via=["people", "orders"]), rest)

    def _book(self, rest: list[str]) -> None:
        passenger = self.data.passengers[self._pick(sorted(self.data.passengers))]
        flight, phrase = self._pick_flight()
        looks = [
            ("flights", {"to": self.data.flights[flight].city}),
            ("people", {"name": passenger.name}),
        ]
        self.rng.shuffle(looks)
        for tool, arguments in looks:
            self._call(tool, **arguments)
        self._call("quote", flight=flight)
        self._desk("book", flight)
        self._call("book", flight=flight, passenger=passenger.id)
        id = self.data.spare[self.booked]
        self.booked += 1
        self.now[id] = (passenger.id, flight)
        self._say(
            word(_OPERATIONS["book"][0], {"passenger": passenger.name, "flight": phrase}, self.rng)
        )
        for name in rest:
            self._operate(name, id, "it")

    def _city(self, rest: list[str]) -> None:
        city = self._pick(sorted({flight.city for flight in self.data.flights.values()}))
        self._call("flights", to=city)
        self._ask("city", city, rest[0], city)

    def _passenger(self, rest: list[str]) -> None:
        id = self._pick(sorted(self.data.passengers))
        if rest[0] == "orders" and not self.data.orders_of(id):
            raise Unfit
        name = self.data.passengers[id].name
        self._call("people", name=name)
        if rest[0] == "orders":
            self._call("orders", passenger=id)
        self._ask("passenger", id, rest[0], name)

    # Operations and questions.

    def _on_order(self, id: str, phrase: str, rest: list[str]) -> None:
        for name in rest:
            if ("order", name) in _QUESTIONS:
                self._ask("order", id, name, phrase)
            else:
                self._operate(name, id, phrase)
            phrase = "it"

    def _operate(self, name: str, id: str, phrase: str) -> None:
        flight = self.now[id][1]
        start = self.data.orders.get(id)
        slots = {"order": phrase}
        operation = _OPERATIONS[name][0]
        if name == "bag":
            if start and start.bag:
                raise Unfit
            self._desk("bag", id)
            self._call("bag", order=id)
        elif name == "drop":
            operation = next(
                o
                for o in _OPERATIONS["drop"]
                if o["if"]["order.fare"] == self.data.flights[flight].fare
            )
            self._desk(operation["tool"], id)
            self._call(operation["tool"], order=id)
        elif name == "seat":
            if start and start.seat and start.flight == flight:
                raise Unfit
            kind = self.rng.choice(("window", "aisle"))
            seat = self.data.free_seat(flight, kind)
            slots["seat"] = describe(self.data, "seat", seat, {"order": id}, self.now)["phrases"][
                0
            ]["text"]
            self._call("seats", order=id)
            self._desk("seat", id)
            self._call("seat", order=id, seat=seat)
        self._say(word(operation, slots, self.rng))

    # Wording and calls.

    def _ask(self, entity: str, id: str, attribute: str, phrase: str) -> None:
        question = _QUESTIONS[entity, attribute]
        alone = len(self.draft.template.replace("+", ".").split(".")) == 2
        texts = question["phrases"] + (question["questions"] * 2 if alone else [])
        self.draft.ask = (entity, id, attribute)
        self.draft.answer = describe(self.data, entity, id)[attribute]
        self._say(self.rng.choice(texts).format(it=phrase))

    def _say(self, text: str) -> None:
        self.draft.parts.append(text)
        self.goal += 1

    def _desk(self, tool: str, id: str) -> None:
        """Add the desk call that the house wants before a tool."""
        if self.house and (desk := self.house.desk(tool)):
            self._call(desk, id=id)

    def _call(self, tool: str, **arguments: str) -> None:
        """Add a call unless the plan already contains it."""
        key = (tool, repr(arguments))
        if key in self.called:
            return
        self.called.add(key)
        self.draft.calls.append(PlannedCall(tool, arguments, self.goal))

    def _pick(self, ids: list[str]) -> str:
        ids = [id for id in ids if id not in self.used]
        if not ids:
            raise Unfit
        id = self.rng.choice(ids)
        self.used.add(id)
        return id

    def _free_passenger(self, id: str) -> None:
        if id in self.used:
            raise Unfit
        self.used.add(id)

    def _pick_flight(self) -> tuple[str, str]:
        """Draw a flight to a city that no other segment is about, and a phrase for it."""
        city = self._pick(sorted({flight.city for flight in self.data.flights.values()}))
        flight = self.rng.choice(self.data.flights_to(city))
        phrases = [p["text"] for p in describe(self.data, "flight", flight.id)["phrases"]]
        if not phrases:
            raise Unfit
        return flight.id, self.rng.choice(phrases)

    def _phrase(self, entity: str, id: str, via: list[str]) -> str:
        texts = [p["text"] for p in describe(self.data, entity, id)["phrases"] if p["via"] == via]
        return self.rng.choice(texts)
