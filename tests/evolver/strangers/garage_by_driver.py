"""A car-sharing garage. A car is booked only with half of its charge, and for a driver whose licence
was checked; no description says so. Bookings are listed for one driver at a time."""

from tests.evolver.strangers.garage import _made, _one

cars: list = []
drivers: list = []
bookings: list = []


def reset(seed: int) -> None:
    cars[:], drivers[:] = _made(seed)


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


def list_bookings(driver_id: str) -> list:
    """List the bookings of a driver."""
    _one(drivers, "driver_id", driver_id)
    return [booking for booking in bookings if booking["driver_id"] == driver_id]
