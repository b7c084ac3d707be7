"""The counter of a cafe, where nothing is shown before somebody is on duty; no description says
so."""

import random

staff: dict = {"on duty": None}
orders: dict = {}
prices: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    dishes = rng.sample(["latte", "scone", "bagel", "quiche", "salad"], 4)
    prices.update({dish: rng.randrange(3, 20) for dish in dishes})
    for number, table in zip(rng.sample(range(10, 99), 3), ["window", "garden", "sofa"]):
        orders[f"R{number}"] = {"table": table, "dish": rng.choice(dishes), "paid": False}


def start_duty(name: str) -> str:
    """Start the duty of somebody.

    Args:
        name: one of Ana, Ben, Cleo
    """
    if name not in ("Ana", "Ben", "Cleo"):
        raise ValueError("nobody has this name")
    if staff["on duty"]:
        raise ValueError("somebody is on duty")
    staff["on duty"] = name
    return "welcome"


def list_orders() -> list[dict]:
    """List the orders."""
    _served()
    return [{"order_id": id, **order} for id, order in orders.items()]


def show_menu() -> dict:
    """Show the menu."""
    _served()
    return prices


def pay(order_id: str) -> str:
    """Take the payment of an order."""
    _served()
    if order_id not in orders or orders[order_id]["paid"]:
        raise ValueError("no such order to pay")
    orders[order_id]["paid"] = True
    return "paid"


def change_order(order_id: str, dish: str) -> str:
    """Change the dish of an order."""
    _served()
    if order_id not in orders or dish not in prices:
        raise ValueError("no such order or dish")
    orders[order_id]["dish"] = dish
    return "changed"


def _served() -> None:
    if not staff["on duty"]:
        raise ValueError("nobody is on duty")
