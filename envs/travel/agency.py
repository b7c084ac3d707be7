"""The tools of the travel agency: their specifications, preconditions and effects on the database.

The specifications do not mention the preconditions; as in a real service, an error names the
missing call:

    quote         a search in this episode returned the flight book, move    the flight was quoted
    book, orders  the passenger was looked up bag, seats, seat, cancel, refund, move    the order is
    open and was shown (by `order`, `orders` or its booking) seat          the seats of the order
    were listed for its current flight refund        the fare is flex book, bag, seat, cancel,
    refund, move    the desk call that the house wants was made (envs/house_rules.py)
"""

from __future__ import annotations

import base64
import sqlite3
from collections import Counter
from typing import Any

from envs.travel.data import data, image
from envs.travel.rules import DESK, House

NOT_CLEARED = "not cleared"  # the error of an operation without the desk call that the house wants
MEMORY = ("found", "quoted", "people", "orders", "seats", "desk")


class ToolError(Exception):
    """A refused call. The message is for the model."""


def _tool(name: str, description: str, /, **arguments: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": text} for key, text in arguments.items()
                },
                "required": list(arguments),
            },
        },
    }


TOOLS = [
    _tool("flights", "Search the flights to a city, cheapest first.", to="city"),
    _tool("people", "Look a passenger up by first name.", name="first name"),
    _tool("quote", "Get a quote for a flight.", flight="flight id, like F12"),
    _tool(
        "book",
        "Book a passenger on a flight.",
        flight="flight id, like F12",
        passenger="passenger id, like P12",
    ),
    _tool("orders", "List the open orders of a passenger.", passenger="passenger id, like P12"),
    _tool("order", "Show an order.", id="order id, like O12"),
    _tool("cancel", "Cancel an order without money back.", order="order id, like O12"),
    _tool("refund", "Cancel an order with money back.", order="order id, like O12"),
    _tool("seats", "List the free seats for an order.", order="order id, like O12"),
    _tool("seat", "Take a seat for an order.", order="order id, like O12", seat="seat, like 4A"),
    _tool("bag", "Add a bag to an order.", order="order id, like O12"),
    _tool(
        "move",
        "Move an order to another flight; its seat is given up.",
        order="order id",
        flight="flight id",
    ),
]
DESK_TOOLS = [
    _tool(name, f"{name.capitalize()} an order or a flight.", id="order or flight id")
    for name in DESK
]


def tools_of(house: House | None) -> list[dict[str, Any]]:
    """Return the tools of an agency: the same in all houses, without desk calls where there are no
    house rules."""
    return TOOLS + DESK_TOOLS if house else TOOLS


def arguments_of(tools: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return {name: required arguments} of tools."""
    return {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}


class Agency:
    """A database and a record of what the episode has seen of it. A call takes well under a
    millisecond."""

    def __init__(self, seed: int, house: House | None = None):
        self.house, self._arguments = house, arguments_of(tools_of(house))
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        self.reset(seed)

    def reset(self, seed: int) -> None:
        self.seed = seed
        self.start = data(seed)
        self._memory: dict[str, set[str]] = {key: set() for key in MEMORY}
        self._connection.deserialize(image(seed))

    def snapshot(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "database": base64.b64encode(self._connection.serialize()).decode(),
            "memory": {key: sorted(values) for key, values in self._memory.items()},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.seed = snapshot["seed"]
        self.start = data(self.seed)
        self._memory = {key: set(values) for key, values in snapshot["memory"].items()}
        self._connection.deserialize(base64.b64decode(snapshot["database"]))

    def close(self) -> None:
        self._connection.close()

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Run a tool. Return the text for the model, and False if the call was refused."""
        try:
            if name not in self._arguments:
                raise ToolError(f"no such tool, there are {', '.join(self._arguments)}")
            required = self._arguments[name]
            for key in arguments:
                if key not in required:
                    raise ToolError(f"{name} takes {' and '.join(required)} only")
            for key in required:
                if key not in arguments:
                    raise ToolError(f"{name} needs {key}")
                if not isinstance(arguments[key], str):
                    raise ToolError(f"{key} must be a string")
            if name in DESK:
                return self._desk(name, **arguments), True
            return getattr(self, f"_{name}")(**arguments), True
        except ToolError as error:
            return f"error: {error}", False

    def difference(self) -> list[list[Any]]:
        """Return the changes since the start as sorted rows [table, key, column, before, after].

        The key of an order made in this episode is "passenger flight" (with " #2" and so on for
        repetitions) instead of its id, so that the sequence of bookings does not matter. It has a
        row for each column with a non-default value.
        """
        rows: list[list[Any]] = []
        new: list[tuple[str, int, str, str]] = []
        for id, passenger, flight, bag, seat, status in self._connection.execute(
            "SELECT * FROM orders"
        ):
            before = self.start.orders.get(id)
            if before is None:
                new.append((f"{passenger} {flight}", bag, seat, status))
                continue
            for column, after in (
                ("flight", flight),
                ("bag", bag),
                ("seat", seat),
                ("status", status),
            ):
                if getattr(before, column) != after:
                    rows.append(["orders", id, column, getattr(before, column), after])
        count: Counter[str] = Counter()
        for pair, bag, seat, status in sorted(new):
            count[pair] += 1
            key = pair if count[pair] == 1 else f"{pair} #{count[pair]}"
            rows.append(["orders", key, "status", None, status])
            if bag:
                rows.append(["orders", key, "bag", None, bag])
            if seat:
                rows.append(["orders", key, "seat", None, seat])
        return sorted(rows, key=repr)

    def orders(self) -> dict[str, list[str]]:
        """Return the current orders: id -> [passenger, flight]."""
        return {id: pair for id, *pair in self._rows("SELECT id, passenger, flight FROM orders")}

    # The tools. Their arguments are arbitrary strings. A row of an answer ends with the word by
    # which it is usually chosen and its id, because a small policy copies an id most reliably from
    # right after the word it looks for.

    def _flights(self, to: str) -> str:
        rows = self._rows(
            "SELECT city, price, fare, time, day, id FROM flights WHERE city = ? ORDER BY price", to
        )
        self._memory["found"].update(row[-1] for row in rows)
        return "\n".join(" ".join(map(str, row)) for row in rows) or "no flights"

    def _people(self, name: str) -> str:
        rows = self._rows("SELECT id, name, card FROM passengers WHERE name = ?", name)
        if not rows:
            raise ToolError("nobody has that name")
        self._memory["people"].add(rows[0][0])
        return " ".join(rows[0])

    def _quote(self, flight: str) -> str:
        if flight not in self._memory["found"]:
            raise ToolError("search the flights first")
        self._memory["quoted"].add(flight)
        return f"{flight} {self.start.flights[flight].price}"

    def _book(self, flight: str, passenger: str) -> str:
        self._need_quote(flight)
        self._need_passenger(passenger)
        self._need_desk("book", flight)
        booked = self._rows("SELECT count(*) FROM orders")[0][0] - len(self.start.orders)
        if booked >= len(self.start.spare):
            raise ToolError("too many orders")
        id = self.start.spare[booked]
        self._rows("INSERT INTO orders VALUES (?, ?, ?, 0, '', 'open')", id, passenger, flight)
        return self._show("o.id = ?", id)

    def _orders(self, passenger: str) -> str:
        self._need_passenger(passenger)
        return self._show("p.id = ? AND o.status = 'open' LIMIT 3", passenger) or "no orders"

    def _order(self, id: str) -> str:
        text = self._show("o.id = ?", id)
        if not text:
            raise ToolError("no such order")
        return text

    def _cancel(self, order: str) -> str:
        self._need_order(order)
        self._need_desk("cancel", order)
        self._rows("UPDATE orders SET status = 'cancelled' WHERE id = ?", order)
        return f"{order} cancelled"

    def _refund(self, order: str) -> str:
        if self.start.flights[self._need_order(order)].fare != "flex":
            raise ToolError("a basic fare is not refunded")
        self._need_desk("refund", order)
        self._rows("UPDATE orders SET status = 'refunded' WHERE id = ?", order)
        return f"{order} refunded"

    def _seats(self, order: str) -> str:
        flight = self._need_order(order)
        self._memory["seats"].add(f"{order} {flight}")
        return "\n".join(f"{kind} {seat}" for seat, kind in self._free(flight)) or "no seats"

    def _seat(self, order: str, seat: str) -> str:
        flight = self._need_order(order)
        if f"{order} {flight}" not in self._memory["seats"]:
            raise ToolError("list the seats first")
        if seat not in [free for free, _ in self._free(flight)]:
            raise ToolError("that seat is not free")
        self._need_desk("seat", order)
        self._rows("UPDATE orders SET seat = ? WHERE id = ?", seat, order)
        return f"{order} {seat}"

    def _bag(self, order: str) -> str:
        self._need_order(order)
        if self._rows("SELECT bag FROM orders WHERE id = ?", order)[0][0]:
            raise ToolError("it has a bag")
        self._need_desk("bag", order)
        self._rows("UPDATE orders SET bag = 1 WHERE id = ?", order)
        return f"{order} bag"

    def _move(self, order: str, flight: str) -> str:
        if self._need_order(order) == flight:
            raise ToolError("it is on that flight")
        self._need_quote(flight)
        self._need_desk("move", order)
        self._rows("UPDATE orders SET flight = ?, seat = '' WHERE id = ?", flight, order)
        return self._show("o.id = ?", order)

    def _desk(self, name: str, id: str) -> str:
        if id not in self.start.flights and not self._rows(
            "SELECT id FROM orders WHERE id = ?", id
        ):
            raise ToolError("no such order or flight")
        self._memory["desk"].add(f"{name} {id}")
        return "ok"

    # Helpers of the tools.

    def _rows(self, sql: str, *values: str) -> list[tuple]:
        return self._connection.execute(sql, values).fetchall()

    def _show(self, where: str, value: str) -> str:
        rows = self._rows(
            "SELECT o.id, f.city, p.name, f.day, f.fare, o.bag, o.seat, o.status FROM orders o "
            "JOIN passengers p ON p.id = o.passenger JOIN flights f ON f.id = o.flight WHERE "
            f"{where}",
            value,
        )
        self._memory["orders"].update(row[0] for row in rows)
        lines = []
        for id, city, *words, bag, seat, status in rows:
            words += ["bag"] * bag + [seat] * bool(seat) + [status] * (status != "open")
            lines.append(" ".join([*words, city, id]))
        return "\n".join(lines)

    def _free(self, flight: str) -> list[tuple[str, str]]:
        return self._rows(
            "SELECT seat, kind FROM seats WHERE flight = ? AND seat NOT IN "
            "(SELECT seat FROM orders WHERE flight = seats.flight AND status = 'open') ORDER BY "
            "seat LIMIT 3",
            flight,
        )

    def _need_quote(self, flight: str) -> None:
        if flight not in self._memory["found"]:
            raise ToolError("search the flights first")
        if flight not in self._memory["quoted"]:
            raise ToolError("quote the flight first")

    def _need_passenger(self, passenger: str) -> None:
        if passenger not in self._memory["people"]:
            raise ToolError("look the passenger up first")

    def _need_desk(self, tool: str, id: str) -> None:
        desk = self.house.desk(tool) if self.house else ""
        if desk and f"{desk} {id}" not in self._memory["desk"]:
            raise ToolError(NOT_CLEARED)

    def _need_order(self, order: str) -> str:
        """Return the flight of an order. Raises ToolError unless the order was shown before and is
        open."""
        if order not in self._memory["orders"]:
            raise ToolError("look at the order first")
        flight, status = self._rows("SELECT flight, status FROM orders WHERE id = ?", order)[0]
        if status != "open":
            raise ToolError("the order is closed")
        return flight
