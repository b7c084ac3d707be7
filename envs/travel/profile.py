"""The words of the agency's hand-written tasks, and its profile for explorers.

Synthetic tasks are not worded with these phrases: `PROFILE`, which language models may read, has
none of them.

    OPERATIONS  changes: {"name", "tool", "arguments": {argument: entity}, "if":
                {"argument.attribute": value}, "phrases": [text with {argument} slots]}; "if"
                compares attributes of `describe`
    QUESTIONS   {"name", "entity", "attribute", "tools": [...], "phrases": [...], "questions":
    [...]}; the slot is {it};
                "phrases" are requests that can be joined to others, "questions" stand alone
    PROFILE     a concept of the paper: entities, operations and the preferred tasks, without the
    preconditions

`describe` lists phrases for an entity, {"text", "via"}: "via" are the tools that lead from the
phrase to the entity. An order that was booked in the episode is "it", or named by passenger and
city if there are several.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.travel.data import CITIES, NAMES, Data

_DROP = [
    "drop {order}, with money back if possible",
    "get rid of {order}, refunded if possible",
    "end {order} and get the money back if you can",
    "give up {order} and lose no money if possible",
    "call off {order}, refunded if the fare allows",
]

OPERATIONS: list[dict[str, Any]] = [
    {
        "name": "book",
        "tool": "book",
        "arguments": {"flight": "flight", "passenger": "passenger"},
        "phrases": [
            "book {passenger} on {flight}",
            "put {passenger} on {flight}",
            "get {passenger} a place on {flight}",
            "buy {passenger} a ticket for {flight}",
            "make a booking for {passenger} on {flight}",
        ],
    },
    {
        "name": "bag",
        "tool": "bag",
        "arguments": {"order": "order"},
        "phrases": [
            "add a bag to {order}",
            "put a bag on {order}",
            "include a bag in {order}",
            "check in a bag for {order}",
            "give {order} a bag",
        ],
    },
    {
        "name": "seat",
        "tool": "seat",
        "arguments": {"order": "order", "seat": "seat"},
        "phrases": [
            "take {seat} for {order}",
            "give {order} {seat}",
            "reserve {seat} for {order}",
            "set {seat} on {order}",
            "choose {seat} for {order}",
        ],
    },
    {
        "name": "drop",
        "tool": "refund",
        "arguments": {"order": "order"},
        "if": {"order.fare": "flex"},
        "phrases": _DROP,
    },
    {
        "name": "drop",
        "tool": "cancel",
        "arguments": {"order": "order"},
        "if": {"order.fare": "basic"},
        "phrases": _DROP,
    },
]

QUESTIONS: list[dict[str, Any]] = [
    {
        "name": "city flights",
        "entity": "city",
        "attribute": "flights",
        "tools": ["flights"],
        "phrases": ["count the flights to {it}", "tell me the number of flights to {it}"],
        "questions": ["How many flights go to {it}?", "How many flights to {it} are there?"],
    },
    {
        "name": "passenger card",
        "entity": "passenger",
        "attribute": "card",
        "tools": [],
        "phrases": ["tell me the card of {it}", "say which card {it} has"],
        "questions": ["Which card has {it}?", "What is the card of {it}?"],
    },
    {
        "name": "passenger orders",
        "entity": "passenger",
        "attribute": "orders",
        "tools": ["orders"],
        "phrases": ["count the orders of {it}", "tell me the number of orders of {it}"],
        "questions": ["How many orders has {it}?", "How many orders are there for {it}?"],
    },
    {
        "name": "order name",
        "entity": "order",
        "attribute": "name",
        "tools": [],
        "phrases": ["tell me the passenger of {it}", "say who travels on {it}"],
        "questions": ["Who travels on {it}?", "Who is the passenger of {it}?"],
    },
    {
        "name": "order to",
        "entity": "order",
        "attribute": "to",
        "tools": [],
        "phrases": ["tell me the city of {it}", "say where {it} goes"],
        "questions": ["Where does {it} go?", "What is the city of {it}?"],
    },
]

PROFILE: dict[str, Any] = {
    "name": "travel",
    "description": "A travel agency: passengers, flights, orders, seats and bags.",
    "entities": [
        {"name": "city", "id": "|".join(CITIES), "attributes": ["flights"]},
        {"name": "flight", "id": r"F\d\d", "attributes": ["to", "day", "time", "price", "fare"]},
        {
            "name": "passenger",
            "id": r"P\d\d",
            "attributes": ["name", "card", "orders"],
            "examples": [f"{name} (name)" for name in NAMES[:2]] + ["P11 (id)"],
        },
        {
            "name": "order",
            "id": r"O\d\d",
            "attributes": ["name", "to", "day", "fare", "window", "aisle"],
        },
        {"name": "seat", "id": r"\d[ABC]", "attributes": ["kind"]},
    ],
    "operations": [
        {key: operation[key] for key in ("name", "tool", "arguments")} for operation in OPERATIONS
    ],
    "preference": {
        "calls": [1, 6],
        "operations": 2,
        "answers": 1,
        "style": "one short order or question, as a customer would say it",
    },
}


def describe(
    data: Data,
    entity: str,
    id: str,
    arguments: dict[str, str] | None = None,
    now: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return an entity's attributes at the start of the episode, as text, and the phrases that name
    it; {} if unknown.

    `arguments` are those of the call that uses the entity; they identify the order of a seat. `now`
    holds the current orders, id -> (passenger, flight), including those booked or moved in the
    episode.
    """
    start: Mapping[str, Sequence[str]] = {
        order.id: [order.passenger, order.flight] for order in data.orders.values()
    }
    now = start if now is None else now
    if entity == "city" and id in CITIES:
        return {"id": id, "flights": str(len(data.flights_to(id))), "phrases": [_phrase(id)]}
    if entity == "flight" and id in data.flights:
        return _flight(data, id)
    if entity == "passenger" and id in data.passengers:
        passenger = data.passengers[id]
        return {
            "id": id,
            "name": passenger.name,
            "card": passenger.card,
            "orders": str(len(data.orders_of(id))),
            "phrases": [_phrase(passenger.name, "people")],
        }
    if entity == "order" and (id in start or id in now):
        return _order(data, id, {key: pair for key, pair in now.items() if key not in start})
    if entity == "seat":
        order = (arguments or {}).get("order", "")
        return _seat(data, id, now[order][1]) if order in now else {}
    return {}


def word(operation: dict[str, Any], phrases: dict[str, str], rng: random.Random) -> str:
    """Word an operation with one of its phrases; `phrases` fills the slots."""
    return rng.choice(operation["phrases"]).format(**phrases)


def sentence(parts: list[str], rng: random.Random) -> str:
    """Join requests into one sentence."""
    text = parts[0]
    for part in parts[1:]:
        text += rng.choice((" and ", ", then ")) + part
    return text[0].upper() + text[1:] + "."


def _phrase(text: str, *via: str) -> dict[str, Any]:
    return {"text": text, "via": list(via)}


def _flight(data: Data, id: str) -> dict[str, Any]:
    """Describe a flight. Days and prices are unique among a city's flights, times and fares are
    not."""
    flight = data.flights[id]
    others = [other for other in data.flights_to(flight.city) if other.id != id]
    to = f"flight to {flight.city}"
    texts = [f"the {flight.day} {to}", f"the {to} on {flight.day}"]
    if all(other.price > flight.price for other in others):
        texts += [f"the cheapest {to}", f"the {to} at the lowest price"]
    return {
        "id": id,
        "to": flight.city,
        "day": flight.day,
        "time": flight.time,
        "price": str(flight.price),
        "fare": flight.fare,
        "phrases": [_phrase(text, "flights") for text in texts],
    }


def _order(data: Data, id: str, booked: dict[str, Sequence[str]]) -> dict[str, Any]:
    """Describe an order; `booked` holds those that were booked in the episode."""
    if id in data.orders:
        passenger_id, flight_id = data.orders[id].passenger, data.orders[id].flight
    else:
        passenger_id, flight_id = booked[id]
    flight, name = data.flights[flight_id], data.passengers[passenger_id].name
    if id in data.orders:
        texts = [
            f"{name}'s trip to {flight.city}",
            f"{name}'s order to {flight.city}",
            f"the {flight.city} trip of {name}",
        ]
        phrases = [_phrase(f"order {id}", "order")] + [
            _phrase(text, "people", "orders") for text in texts
        ]
    elif len(booked) == 1:
        phrases = [_phrase("it", "book")]
    elif sum(pair == booked[id] for pair in booked.values()) == 1:
        phrases = [_phrase(f"{name}'s new trip to {flight.city}", "book")]
    else:
        phrases = []
    return {
        "id": id,
        "name": name,
        "to": flight.city,
        "day": flight.day,
        "fare": flight.fare,
        "window": data.free_seat(flight_id, "window"),
        "aisle": data.free_seat(flight_id, "aisle"),
        "phrases": phrases,
    }


def _seat(data: Data, id: str, flight: str) -> dict[str, Any]:
    kind = data.seats[flight].get(id)
    if kind is None:
        return {}
    unique = data.free_seat(flight, kind) == id
    return {
        "id": id,
        "kind": kind,
        "phrases": [_phrase(f"{'an' if kind == 'aisle' else 'a'} {kind} seat", "seats")]
        if unique
        else [],
    }
