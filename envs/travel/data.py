"""The seeded data of one travel agency, as rows and as a SQLite image."""

import base64
import functools
import itertools
import random
import sqlite3
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs.desk.tools import ids_of, names

CITIES = names(
    "Rome Paris Oslo Cairo Lima Tokyo Delhi Berlin Madrid Lisbon Vienna Prague Athens Dublin "
    "London Milan Seoul Sydney Boston Dallas Miami Quito Havana Geneva"
)
NAMES = names(
    "Ann Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Nina Omar Paul Rosa Sam Tina Uma "
    "Vera Will Yara Zoe Adam Bella Clara David Elsa Felix Grace Henry Ida Jonas Laura Marco Nora "
    "Oscar Peter Sara"
)
DAYS = names("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
TIMES = ("morning", "noon", "evening")
FARES = ("flex", "basic")
CARDS = ("gold", "silver", "blue")
SEATS = {"A": "window", "B": "middle", "C": "aisle"}

N_CITIES, N_PASSENGERS, N_ORDERS = 12, 12, 8

SCHEMA = """
PRAGMA page_size = 1024;
CREATE TABLE passengers (id TEXT PRIMARY KEY, name TEXT UNIQUE COLLATE NOCASE, card TEXT) WITHOUT \
ROWID;
CREATE TABLE flights (id TEXT PRIMARY KEY, city TEXT COLLATE NOCASE, day TEXT, time TEXT, price \
INTEGER, fare TEXT)
  WITHOUT ROWID;
CREATE TABLE seats (flight TEXT, seat TEXT, kind TEXT, PRIMARY KEY (flight, seat)) WITHOUT ROWID;
CREATE TABLE orders (id TEXT PRIMARY KEY, passenger TEXT, flight TEXT, bag INTEGER, seat TEXT, \
status TEXT)
  WITHOUT ROWID;
"""
_WRITE = (
    "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET flight = "
    "excluded.flight, bag = excluded.bag, seat = excluded.seat, status = excluded.status"
)


class Passenger(NamedTuple):
    """A passenger. First names are unique within an agency."""

    id: str
    name: str
    card: str


class Flight(NamedTuple):
    """A flight from the agency's own city to another one."""

    id: str
    city: str
    day: str
    time: str
    price: int
    fare: str


class Order(NamedTuple):
    """A booking of a passenger on a flight."""

    id: str
    passenger: str
    flight: str
    bag: int = 0
    seat: str = ""  # "" = none
    status: str = "open"  # "open" | "cancelled" | "refunded"


@dataclass(frozen=True)
class Data:
    """The agency at the start of an episode. `flights` are sorted by price; `spare` holds the ids
    of new orders."""

    passengers: dict[str, Passenger]
    flights: dict[str, Flight]
    seats: dict[str, dict[str, str]]  # flight -> seat -> kind
    orders: dict[str, Order]
    spare: tuple[str, ...]

    @property
    def cities(self) -> list[str]:
        return sorted({flight.city for flight in self.flights.values()})

    def flights_to(self, city: str) -> list[Flight]:
        """Return the flights to a city, whatever its capitals are, cheapest first."""
        return self._by_city.get(folded(city), [])

    def named(self, name: str) -> Passenger | None:
        """Return the passenger of this first name, whatever its capitals are."""
        return self._by_name.get(folded(name))

    @functools.cached_property
    def _by_city(self) -> dict[bytes, list[Flight]]:
        found: dict[bytes, list[Flight]] = {}
        for flight in self.flights.values():
            found.setdefault(folded(flight.city), []).append(flight)
        return found

    @functools.cached_property
    def _by_name(self) -> dict[bytes, Passenger]:
        return {folded(passenger.name): passenger for passenger in self.passengers.values()}

    def orders_of(self, passenger: str) -> list[Order]:
        return [order for order in self.orders.values() if order.passenger == passenger]

    def free_seat(self, flight: str, kind: str) -> str:
        """Return the free seat of a kind, "" if there is none. A flight starts with at most one
        free seat per kind."""
        taken = {order.seat for order in self.orders.values() if order.flight == flight}
        return next(
            (seat for seat, k in self.seats[flight].items() if k == kind and seat not in taken), ""
        )


@functools.lru_cache(maxsize=1024)
def data(seed: int) -> Data:
    """Return the agency of a world seed. The same seed gives the same agency on every machine."""
    rng = random.Random(f"travel world {seed}")
    drawn = rng.sample(NAMES, N_PASSENGERS)
    passengers = {
        id: Passenger(id, name, rng.choice(CARDS))
        for id, name in zip(ids_of("P" * N_PASSENGERS, rng), drawn, strict=True)
    }
    flights = _flights(rng)
    seats = {id: _seats(rng) for id in flights}
    order_ids = ids_of("O" * 60, rng)
    orders: dict[str, Order] = {}
    for id in sorted(order_ids[:N_ORDERS]):
        # A passenger has at most three orders, all to different cities, so that "Ann's trip to
        # Rome" is unambiguous.
        while True:
            passenger, flight = rng.choice(list(passengers)), rng.choice(list(flights.values()))
            own = [order for order in orders.values() if order.passenger == passenger]
            if len(own) < 3 and flight.city not in [flights[order.flight].city for order in own]:
                break
        seat = ""
        if rng.random() < 0.25:
            taken = seats[flight.id]
            both = [row + letter for row, letter in itertools.product("123456789", "AC")]
            seat = rng.choice([seat for seat in both if seat not in taken])
            taken[seat] = SEATS[seat[1]]
        orders[id] = Order(id, passenger, flight.id, int(rng.random() < 0.25), seat)
    return Data(passengers, flights, seats, orders, tuple(order_ids[N_ORDERS:]))


def folded(text: str) -> bytes:
    """Return a text without its capitals of ASCII, as the NOCASE of the database compares it."""
    return text.encode("utf-8", "surrogatepass").lower()


@functools.lru_cache(maxsize=1024)
def image(seed: int) -> str:
    """Return the SQLite database of a world seed, serialized and in base64."""
    agency = data(seed)
    seats: list[tuple[str, str, str]] = []
    for flight, kinds in agency.seats.items():
        seats += [(flight, seat, kind) for seat, kind in kinds.items()]
    tables: dict[str, list[Any]] = {
        "passengers": [*agency.passengers.values()],
        "flights": [*agency.flights.values()],
        "seats": seats,
        "orders": [*agency.orders.values()],
    }
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    for table, rows in tables.items():
        marks = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    connection.commit()
    return _closed(connection)


@functools.lru_cache(maxsize=1024)
def changed(image: str, written: tuple[Order, ...]) -> str:
    """Return the image of a database after these orders were written, each new or in the place of
    the one with its id."""
    if not written:
        return image
    connection = _opened(image)
    for order in written:
        connection.execute(_WRITE, order)
    return _closed(connection)


@functools.lru_cache(maxsize=1024)
def orders_in(image: str) -> tuple[Order, ...]:
    """Return the orders in the image of a database."""
    connection = _opened(image)
    orders = connection.execute("SELECT * FROM orders").fetchall()
    connection.close()
    return tuple(map(Order._make, orders))


def _opened(image: str) -> sqlite3.Connection:
    # A connection that is filled again would be faster, but the unused bytes of its images would
    # depend on what it held before.
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(base64.b64decode(image))
    return connection


def _closed(connection: sqlite3.Connection) -> str:
    serialized = connection.serialize()
    connection.close()
    return base64.b64encode(serialized).decode()


def _flights(rng: random.Random) -> dict[str, Flight]:
    """Draw two or three flights per city, on different days at different prices, sorted by
    price."""
    ids = iter(ids_of("F" * 3 * N_CITIES, rng))
    flights = []
    for city in rng.sample(CITIES, N_CITIES):
        n = rng.choice((2, 3))
        days, prices = rng.sample(DAYS, n), rng.sample(range(30, 100), n)
        for day, price in zip(days, prices, strict=True):
            time, fare = rng.choice(TIMES), rng.choice(FARES)
            flights.append(Flight(next(ids), city, day, time, price, fare))
    return {flight.id: flight for flight in sorted(flights, key=lambda f: (f.price, f.id))}


def _seats(rng: random.Random) -> dict[str, str]:
    """Draw the free seats of a flight: one window seat, one aisle seat, and with probability 0.5 a
    middle seat."""
    letters = "ABC" if rng.random() < 0.5 else "AC"
    return {f"{rng.randint(1, 9)}{letter}": SEATS[letter] for letter in letters}
