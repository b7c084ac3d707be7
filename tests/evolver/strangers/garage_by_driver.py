"""The garage, whose bookings are listed for one driver at a time."""
# ruff: noqa: F821

from pathlib import Path

exec(Path(__file__).with_name("garage.py").read_text())  # a module of functions of its own


def list_bookings(driver_id: str) -> list:
    """List the bookings of a driver."""
    _one(drivers, "driver_id", driver_id)
    return [booking for booking in bookings if booking["driver_id"] == driver_id]
