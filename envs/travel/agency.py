"""The tools of the travel agency: their specifications, preconditions and effects on the orders.

The specifications do not mention the preconditions; as in a real service, an error names the
missing call:

    quote, move   a search in this episode returned the flight
    book, move    the flight was quoted
    book, orders  the passenger was looked up
    bag, seats, seat, cancel, refund, move
                  the order is open and was shown (by `order`, `orders` or its booking)
    seat          the seats of the order were listed for its current flight
    refund        the fare is flex

What changes an order also wants the desk call of the house (envs/desk/rules.py). It takes the id of
the order or, before a booking, of the flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from envs.desk import Family, House, Refused, Tools, tool
from envs.desk.tools import names, required
from envs.travel.data import Order, changed, data, image, orders_in
from envs.values import Json

LOOKS = names("flights people quote orders order seats")  # tools that change nothing
FAMILY = Family(
    "travel",
    {0.25: "check stamp", 0.1: "scan sign tag", 0.03: "weigh seal", 0.01: "punch clip"},
    {
        "book": "book",
        "bag": "bag",
        "seat": "seat",
        "cancel": "drop",
        "refund": "drop",
        "move": "move",
    },
    subject="an order or a flight",
    id="order or flight id",
    refusal="not cleared",
)
# What an episode has to have seen of an id -> the error of a call that comes too early.
_EARLY = {
    "found": "search the flights first",
    "quoted": "quote the flight first",
    "people": "look the passenger up first",
    "orders": "look at the order first",
    "seats": "list the seats first",
}
_FLIGHT, _PASSENGER, _ORDER = "flight id, like F12", "passenger id, like P12", "order id, like O12"


class Agency(Tools):
    """The orders of an agency and a memory of what the episode has seen of its database. The
    arguments of the tools are arbitrary texts.

    A row of an answer ends with the word by which it is usually chosen and its id, because a small
    policy copies an id most reliably from right after the word it looks for.
    """

    schemas = [
        tool("flights", "Search the flights to a city, cheapest first.", to="city"),
        tool("people", "Look a passenger up by first name.", name="first name"),
        tool("quote", "Get a quote for a flight.", flight=_FLIGHT),
        tool("book", "Book a passenger on a flight.", flight=_FLIGHT, passenger=_PASSENGER),
        tool("orders", "List the open orders of a passenger.", passenger=_PASSENGER),
        tool("order", "Show an order.", id=_ORDER),
        tool("cancel", "Cancel an order without money back.", order=_ORDER),
        tool("refund", "Cancel an order with money back.", order=_ORDER),
        tool("seats", "List the free seats for an order.", order=_ORDER),
        tool("seat", "Take a seat for an order.", order=_ORDER, seat="seat, like 4A"),
        tool("bag", "Add a bag to an order.", order=_ORDER),
        tool(
            "move",
            "Move an order to another flight; its seat is given up.",
            order="order id",
            flight="flight id",
        ),
    ]
    family = FAMILY
    remembers = (*_EARLY, "desk")

    def __init__(self, seed: int, house: House | None = None):
        super().__init__(seed, house)
        self.start = data(seed)
        self.orders = dict(self.start.orders)
        # A snapshot is the image that the episode began with and what was written since. A
        # connection to SQLite for each episode would take longer than all of its calls.
        self._image = image(seed)
        self._written: tuple[Order, ...] = ()

    def snapshot(self) -> Json:
        memory = {key: sorted(values) for key, values in self.memory.items()}
        database = changed(self._image, self._written)
        return {"agency": {"seed": self.seed, "database": database, "memory": memory}}

    @classmethod
    def restored(cls, snapshot: Json, house: House | None) -> Agency:
        state = snapshot["agency"]
        agency = cls(state["seed"], house)
        agency.memory = {key: set(values) for key, values in state["memory"].items()}
        agency._image = state["database"]
        agency.orders = {order.id: order for order in orders_in(agency._image)}
        return agency

    def check(self, name: str, arguments: Json) -> None:
        required = self.required[name]
        if set(arguments) - set(required):
            raise Refused(f"{name} takes {' and '.join(required)} only")
        for key in required:
            if key not in arguments:
                raise Refused(f"{name} needs {key}")
            if not isinstance(arguments[key], str):
                raise Refused(f"{key} must be a string")

    def changes(self) -> list[list[Any]]:
        """Return the changes since the start as sorted rows [table, key, column, before, after].

        The key of an order made in this episode is "passenger flight" (with " #2" and so on for
        repetitions) instead of its id, so that the sequence of bookings does not matter. It has a
        row for each column with a non-default value.
        """
        rows: list[list[Any]] = []
        new: list[Order] = []
        for _, order in sorted(self.orders.items()):
            before = self.start.orders.get(order.id)
            if before is None:
                new.append(order)
                continue
            pairs = zip(Order._fields, before, order, strict=True)
            rows += [["orders", order.id, name, old, now] for name, old, now in pairs if old != now]
        count: Counter[str] = Counter()
        for order in sorted(new, key=lambda order: order[3:]):
            key = f"{order.passenger} {order.flight}"
            count[key] += 1
            key += f" #{count[key]}" if count[key] > 1 else ""
            made = zip(Order._fields[3:], order[3:])
            rows += [["orders", key, name, None, value] for name, value in made if value]
        return sorted(rows, key=repr)

    # --- look-ups ---------------------------------------------------------------------------------

    def _flights(self, to: str) -> str:
        flights = self.start.flights_to(to)
        self.memory["found"].update(flight.id for flight in flights)
        rows = (f"{f.city} {f.price} {f.fare} {f.time} {f.day} {f.id}" for f in flights)
        return "\n".join(rows) or "no flights"

    def _people(self, name: str) -> str:
        passenger = self.start.named(name)
        if passenger is None:
            raise Refused("nobody has that name")
        self.memory["people"].add(passenger.id)
        return " ".join(passenger)

    def _quote(self, flight: str) -> str:
        self._need("found", flight)
        self.memory["quoted"].add(flight)
        return f"{flight} {self.start.flights[flight].price}"

    def _orders(self, passenger: str) -> str:
        self._need("people", passenger)
        theirs = [o for _, o in sorted(self.orders.items()) if o.passenger == passenger]
        return self._show([o for o in theirs if o.status == "open"][:3]) or "no orders"

    def _order(self, id: str) -> str:
        if id not in self.orders:
            raise Refused("no such order")
        return self._show([self.orders[id]])

    def _seats(self, order: str) -> str:
        flight = self._open(order)
        self.memory["seats"].add(f"{order} {flight}")
        return "\n".join(f"{kind} {seat}" for seat, kind in self._free(flight)) or "no seats"

    # --- changes ----------------------------------------------------------------------------------

    def _book(self, flight: str, passenger: str) -> str:
        self._need_quote(flight)
        self._need("people", passenger)
        self.need_desk("book", flight)
        booked = len(self.orders) - len(self.start.orders)
        if booked >= len(self.start.spare):
            raise Refused("too many orders")
        id = self.start.spare[booked]
        return self._show([self._write(Order(id, passenger, flight))])

    def _cancel(self, order: str) -> str:
        self._open(order)
        self._set("cancel", order, status="cancelled")
        return f"{order} cancelled"

    def _refund(self, order: str) -> str:
        if self.start.flights[self._open(order)].fare != "flex":
            raise Refused("a basic fare is not refunded")
        self._set("refund", order, status="refunded")
        return f"{order} refunded"

    def _seat(self, order: str, seat: str) -> str:
        flight = self._open(order)
        self._need("seats", f"{order} {flight}")
        if seat not in [free for free, _ in self._free(flight)]:
            raise Refused("that seat is not free")
        self._set("seat", order, seat=seat)
        return f"{order} {seat}"

    def _bag(self, order: str) -> str:
        self._open(order)
        if self.orders[order].bag:
            raise Refused("it has a bag")
        self._set("bag", order, bag=1)
        return f"{order} bag"

    def _move(self, order: str, flight: str) -> str:
        if self._open(order) == flight:
            raise Refused("it is on that flight")
        self._need_quote(flight)
        return self._show([self._set("move", order, flight=flight, seat="")])

    # --- helpers ----------------------------------------------------------------------------------

    def find(self, id: str) -> None:
        if id not in self.start.flights and id not in self.orders:
            raise Refused("no such order or flight")

    def _set(self, tool: str, order: str, **change: Any) -> Order:
        self.need_desk(tool, order)
        return self._write(self.orders[order]._replace(**change))

    def _write(self, order: Order) -> Order:
        self.orders[order.id] = order
        self._written += (order,)
        return order

    def _show(self, orders: Iterable[Order]) -> str:
        lines = []
        for order in orders:
            self.memory["orders"].add(order.id)
            flight, name = self.start.flights[order.flight], self.start.passengers[order.passenger]
            words = [name.name, flight.day, flight.fare, "bag" * order.bag, order.seat]
            words += [order.status * (order.status != "open"), flight.city, order.id]
            lines.append(" ".join(word for word in words if word))
        return "\n".join(lines)

    def _free(self, flight: str) -> list[tuple[str, str]]:
        open_ = [o for o in self.orders.values() if o.flight == flight and o.status == "open"]
        taken = {order.seat for order in open_}
        free = [pair for pair in self.start.seats[flight].items() if pair[0] not in taken]
        return sorted(free)[:3]

    def _need(self, key: str, value: str) -> None:
        if value not in self.memory[key]:
            raise Refused(_EARLY[key])

    def _need_quote(self, flight: str) -> None:
        self._need("found", flight)
        self._need("quoted", flight)

    def _open(self, order: str) -> str:
        """Return the flight of an order. Raises Refused unless the order was shown before and is
        open."""
        self._need("orders", order)
        if self.orders[order].status != "open":
            raise Refused("the order is closed")
        return self.orders[order].flight


ARGUMENTS = required(Agency.schemas)
