"""A web shop whose cart takes lines: lists of objects. Its catalogue has pages."""

import random
from typing import Literal, TypedDict

THINGS = ("kettle", "toaster", "blender", "lamp", "fan", "clock", "mirror", "scale")


class Line(TypedDict):
    sku: str
    quantity: int


_products: dict[str, dict] = {}
_cart: dict[str, int] = {}
_chosen: dict[str, str | None] = {"coupon": None, "city": None}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    _products.clear()
    _cart.clear()
    _chosen.update(coupon=None, city=None)
    for name in rng.sample(THINGS, 6):
        price, stock = rng.randint(5, 90), rng.randint(0, 9)
        _products[f"SKU-{rng.randint(1000, 9999)}"] = {"name": name, "price": price, "stock": stock}


def list_products(page: int = 1) -> dict:
    """List products, two per page."""
    found = list(_products)[(page - 1) * 2 : page * 2]
    if not found:
        raise IndexError("no such page")
    return {"page": page, "products": [{"sku": sku, **_products[sku]} for sku in found]}


def add_to_cart(lines: list[Line]) -> dict:
    """Add lines (sku and quantity) to the cart."""
    for line in lines:
        if line["sku"] not in _products:
            raise KeyError(f"unknown sku {line['sku']}")
        if _products[line["sku"]]["stock"] < line["quantity"]:
            raise ValueError("not enough stock")
    for line in lines:
        _cart[line["sku"]] = _cart.get(line["sku"], 0) + line["quantity"]
    return {"lines": len(_cart)}


def view_cart() -> dict:
    """Show the cart."""
    return {"lines": [{"sku": sku, "quantity": n} for sku, n in _cart.items()], **_chosen}


def apply_coupon(code: Literal["SAVE10", "FREESHIP"]) -> str:
    """Apply a coupon to the cart."""
    if not _cart:
        raise ValueError("the cart is empty")
    _chosen["coupon"] = code
    return "ok"


def set_address(city: str, express: bool = False) -> str:
    """Set where to ship to."""
    _chosen["city"] = f"{city}, express" if express else city
    return "ok"
