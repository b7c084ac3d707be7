"""A car-sharing garage. A car is booked only with half of its charge, and for a driver whose licence
was checked; no description says so. Nothing is booked at first."""

import random

NAMES = ["Ava", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gwen", "Hugo", "Iris", "Jack"]
MODELS = ["Golf", "Clio", "Corsa", "Fiesta", "Punto", "Yaris", "Polo", "Twingo"]

cars: list = []
drivers: list = []
bookings: list = []


def reset(seed: int) -> None:
    cars[:], drivers[:] = _made(seed)


def _made(seed: int) -> tuple[list, list]:
    rng = random.Random(seed)
    cars = [
        {
            "plate": f"{rng.choice('ABCDEFGH')}{rng.randrange(100, 999)}",
            "model": model,
            "charge": rng.choice([10, 40, 90, 100]),
        }
        for model in rng.sample(MODELS, 4)
    ]
    drivers = [
        {
            "driver_id": f"DR{rng.randrange(100, 999)}",
            "name": name,
            "licence_checked": rng.random() < 0.4,
        }
        for name in rng.sample(NAMES, 4)
    ]
    return cars, drivers


def list_cars() -> list:
    """List the cars with their plates, models and charge in percent."""
    return cars


def find_driver(name: str) -> dict:
    """Find a driver by name."""
    return _one(drivers, "name", name)


def list_drivers() -> list:
    """List the names of all drivers."""
    return [driver["name"] for driver in drivers]


def check_licence(driver_id: str) -> str:
    """Record that a driver has shown the licence."""
    _one(drivers, "driver_id", driver_id)["licence_checked"] = True
    return "recorded"


def charge_car(plate: str) -> str:
    """Charge a car fully."""
    _one(cars, "plate", plate)["charge"] = 100
    return "charged"


def book_car(plate: str, driver_id: str) -> dict:
    """Book a car for a driver."""
    car, driver = _one(cars, "plate", plate), _one(drivers, "driver_id", driver_id)
    if car["charge"] < 50:
        raise ValueError("the battery is too low")
    if not driver["licence_checked"]:
        raise ValueError("not allowed yet")
    bookings.append({"booking": f"BK{len(bookings) + 1}", "plate": plate, "driver_id": driver_id})
    return bookings[-1]


def list_bookings() -> list:
    """List the bookings."""
    return bookings


def _one(rows, key, value):
    for row in rows:
        if row[key] == value:
            return row
    raise ValueError(f"nothing has the {key} {value}")
