"""The seeded data of one travel agency, as dataclasses and as a SQLite image."""

from __future__ import annotations

import functools
import random
import sqlite3
from dataclasses import dataclass

# fmt: off
CITIES = (
    "Rome", "Paris", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Berlin", "Madrid", "Lisbon",
    "Vienna", "Prague", "Athens", "Dublin", "London", "Milan", "Seoul", "Sydney", "Boston",
    "Dallas", "Miami", "Quito", "Havana", "Geneva",
)
NAMES = (
    "Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mia", "Nina", "Omar", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Yara", "Zoe",
    "Adam", "Bella", "Clara", "David", "Elsa", "Felix", "Grace", "Henry", "Ida", "Jonas", "Laura",
    "Marco", "Nora", "Oscar", "Peter", "Sara",
)
# fmt: on
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
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


@dataclass(frozen=True)
class Passenger:
    """A passenger. First names are unique within an agency."""

    id: str
    name: str
    card: str


@dataclass(frozen=True)
class Flight:
    """A flight from the agency's own city to another one."""

    id: str
    city: str
    day: str
    time: str
    price: int
    fare: str


@dataclass(frozen=True)
class Order:
    """A booking of a passenger on a flight."""

    id: str
    passenger: str
    flight: str
    bag: int
    seat: str  # "" = none
    status: str  # "open" | "cancelled" | "refunded"


@dataclass(frozen=True)
class Data:
    """The agency at the start of an episode. `flights` are sorted by price; `spare` holds the ids
    of new orders."""

    passengers: dict[str, Passenger]
    flights: dict[str, Flight]
    seats: dict[str, dict[str, str]]  # flight -> seat -> kind
    orders: dict[str, Order]
    spare: tuple[str, ...]

    def flights_to(self, city: str) -> list[Flight]:
        return [flight for flight in self.flights.values() if flight.city == city]

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
    names = rng.sample(NAMES, N_PASSENGERS)
    passengers = {
        id: Passenger(id, name, rng.choice(CARDS))
        for id, name in zip(_ids("P", rng, N_PASSENGERS), names, strict=True)
    }
    flights = _flights(rng)
    seats = {id: _seats(rng) for id in flights}
    order_ids = _ids("O", rng, 60)
    orders: dict[str, Order] = {}
    for id in sorted(order_ids[:N_ORDERS]):
        # A passenger has at most three orders, all to different cities, so that "Ann's trip to
        # Rome" is unambiguous.
        while True:
            passenger, flight = rng.choice(list(passengers)), rng.choice(list(flights.values()))
            booked = [
                flights[order.flight].city
                for order in orders.values()
                if order.passenger == passenger
            ]
            if len(booked) < 3 and flight.city not in booked:
                break
        seat = ""
        if rng.random() < 0.25:
            seat = rng.choice(
                [s for r in "123456789" for s in (f"{r}A", f"{r}C") if s not in seats[flight.id]]
            )
            seats[flight.id][seat] = SEATS[seat[1]]
        orders[id] = Order(id, passenger, flight.id, int(rng.random() < 0.25), seat, "open")
    return Data(passengers, flights, seats, orders, tuple(order_ids[N_ORDERS:]))


@functools.lru_cache(maxsize=1024)
def image(seed: int) -> bytes:
    """Return the serialized SQLite database of a world seed."""
    agency = data(seed)
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    connection.executemany(
        "INSERT INTO passengers VALUES (?,?,?)",
        [(p.id, p.name, p.card) for p in agency.passengers.values()],
    )
    connection.executemany(
        "INSERT INTO flights VALUES (?,?,?,?,?,?)",
        [(f.id, f.city, f.day, f.time, f.price, f.fare) for f in agency.flights.values()],
    )
    connection.executemany(
        "INSERT INTO seats VALUES (?,?,?)",
        [
            (flight, seat, kind)
            for flight, seats in agency.seats.items()
            for seat, kind in seats.items()
        ],
    )
    connection.executemany(
        "INSERT INTO orders VALUES (?,?,?,?,?,?)",
        [(o.id, o.passenger, o.flight, o.bag, o.seat, o.status) for o in agency.orders.values()],
    )
    connection.commit()
    image = connection.serialize()
    connection.close()
    return image


def _ids(letter: str, rng: random.Random, n: int) -> list[str]:
    return [f"{letter}{number}" for number in rng.sample(range(10, 100), n)]


def _flights(rng: random.Random) -> dict[str, Flight]:
    """Draw two or three flights per city, on different days at different prices, sorted by
    price."""
    ids = iter(_ids("F", rng, 3 * N_CITIES))
    flights = []
    for city in rng.sample(CITIES, N_CITIES):
        n = rng.choice((2, 3))
        days, prices = rng.sample(DAYS, n), rng.sample(range(30, 100), n)
        for day, price in zip(days, prices, strict=True):
            flights.append(
                Flight(next(ids), city, day, rng.choice(TIMES), price, rng.choice(FARES))
            )
    return {
        flight.id: flight
        for flight in sorted(flights, key=lambda flight: (flight.price, flight.id))
    }


def _seats(rng: random.Random) -> dict[str, str]:
    """Draw the free seats of a flight: one window seat, one aisle seat, and with probability 0.5 a
    middle seat."""
    letters = "ABC" if rng.random() < 0.5 else "AC"
    return {f"{rng.randint(1, 9)}{letter}": SEATS[letter] for letter in letters}
