"""The words of the agency's hand-written tasks, and its profile for explorers.

Synthetic tasks are not worded with these phrases: `PROFILE`, which language models may read, has
none of them.
"""

from envs.travel.agency import ARGUMENTS
from envs.travel.data import CITIES, NAMES, Data
from envs.values import Json

# Operation -> phrases with slots for its arguments.
PHRASES = {
    "book": (
        "book {passenger} on {flight}",
        "put {passenger} on {flight}",
        "get {passenger} a place on {flight}",
        "buy {passenger} a ticket for {flight}",
        "make a booking for {passenger} on {flight}",
    ),
    "bag": (
        "add a bag to {order}",
        "put a bag on {order}",
        "include a bag in {order}",
        "check in a bag for {order}",
        "give {order} a bag",
    ),
    "seat": (
        "take {seat} for {order}",
        "give {order} {seat}",
        "reserve {seat} for {order}",
        "set {seat} on {order}",
        "choose {seat} for {order}",
    ),
    "drop": (
        "drop {order}, with money back if possible",
        "get rid of {order}, refunded if possible",
        "end {order} and get the money back if you can",
        "give up {order} and lose no money if possible",
        "call off {order}, refunded if the fare allows",
    ),
}

# Subject and attribute -> requests that can be joined to others, and questions that stand alone.
QUESTIONS = {
    ("city", "flights"): (
        ("count the flights to {it}", "tell me the number of flights to {it}"),
        ("How many flights go to {it}?", "How many flights to {it} are there?"),
    ),
    ("passenger", "card"): (
        ("tell me the card of {it}", "say which card {it} has"),
        ("Which card has {it}?", "What is the card of {it}?"),
    ),
    ("passenger", "orders"): (
        ("count the orders of {it}", "tell me the number of orders of {it}"),
        ("How many orders has {it}?", "How many orders are there for {it}?"),
    ),
    ("order", "name"): (
        ("tell me the passenger of {it}", "say who travels on {it}"),
        ("Who travels on {it}?", "Who is the passenger of {it}?"),
    ),
    ("order", "to"): (
        ("tell me the city of {it}", "say where {it} goes"),
        ("Where does {it} go?", "What is the city of {it}?"),
    ),
}

_TOOLS = (
    ("book", "book"),
    ("bag", "bag"),
    ("seat", "seat"),
    ("drop", "refund"),
    ("drop", "cancel"),
)

# A concept of the paper: entities, operations and the preferred tasks, without the preconditions.
PROFILE: Json = {
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
        {"name": name, "tool": tool, "arguments": {entity: entity for entity in ARGUMENTS[tool]}}
        for name, tool in _TOOLS
    ],
    "preference": {
        "calls": [1, 6],
        "operations": 2,
        "answers": 1,
        "style": "one short order or question, as a customer would say it",
    },
}


def attributes(data: Data, entity: str, id: str) -> dict[str, str]:
    """Return the attributes of a city, passenger or order at the start of an episode, as texts."""
    if entity == "city":
        return {"id": id, "flights": str(len(data.flights_to(id)))}
    if entity == "passenger":
        passenger, n = data.passengers[id], len(data.orders_of(id))
        return {"id": id, "name": passenger.name, "card": passenger.card, "orders": str(n)}
    order = data.orders[id]
    flight = data.flights[order.flight]
    return {
        "id": id,
        "name": data.passengers[order.passenger].name,
        "to": flight.city,
        "day": flight.day,
        "fare": flight.fare,
        "window": data.free_seat(flight.id, "window"),
        "aisle": data.free_seat(flight.id, "aisle"),
    }


def trip_phrases(data: Data, order: str) -> list[str]:
    """Return phrases for an order that do not name its id."""
    name = data.passengers[data.orders[order].passenger].name
    city = data.flights[data.orders[order].flight].city
    return [f"{name}'s trip to {city}", f"{name}'s order to {city}", f"the {city} trip of {name}"]


def flight_phrases(data: Data, id: str) -> list[str]:
    """Return phrases for a flight. Days and prices are unique among a city's flights, times and
    fares are not."""
    flight = data.flights[id]
    to = f"flight to {flight.city}"
    phrases = [f"the {flight.day} {to}", f"the {to} on {flight.day}"]
    if flight == data.flights_to(flight.city)[0]:  # they are sorted by price
        phrases += [f"the cheapest {to}", f"the {to} at the lowest price"]
    return phrases
