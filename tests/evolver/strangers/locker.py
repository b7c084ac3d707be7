"""Parcel lockers, whose answers are objects by id. What a call sets is set already for most things,
and its answer repeats it; nothing but its id names a free box. A parcel is collected only once it
is paid, and put only into a box that is not blocked; no description says so."""

import random

OWNERS = ["Ada", "Ben", "Cleo", "Dan", "Eli", "Fay"]

boxes: dict = {}
parcels: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    ids = [f"{letter}{n}" for letter in "AB" for n in range(1, 5)]
    blocked = rng.sample(ids, 2)
    for id in ids:
        size = "small" if id[0] == "A" else "large"
        boxes[id] = {"size": size, "parcel": None, "blocked": id in blocked}
    free = [id for id in ids if id not in blocked]
    for owner, number in zip(rng.sample(OWNERS, 5), rng.sample(range(10, 99), 5)):
        id, box = f"P{number}", free.pop(rng.randrange(len(free))) if rng.random() < 0.6 else None
        parcels[id] = {"owner": owner, "paid": rng.random() < 0.7, "box": box}
        if box:
            boxes[box]["parcel"] = id


def list_boxes(size: str | None = None) -> dict:
    """List the boxes, of one size or all."""
    return {id: box for id, box in boxes.items() if size in (None, box["size"])}


def list_parcels() -> dict:
    """List the parcels."""
    return parcels


def put_parcel(box_id: str, parcel_id: str) -> dict:
    """Put a parcel into a box."""
    box, parcel = _box(box_id), _parcel(parcel_id)
    if box["blocked"]:
        raise ValueError("the box is blocked")
    if box["parcel"]:
        raise ValueError("the box is taken")
    if parcel["box"]:
        raise ValueError("the parcel is in a box")
    box["parcel"], parcel["box"] = parcel_id, box_id
    return {"box": box_id, "parcel": parcel_id}


def unblock(box_id: str) -> dict:
    """Unblock a box."""
    _box(box_id)["blocked"] = False
    return {"box": box_id, "blocked": False}


def pay(parcel_id: str) -> dict:
    """Pay for a parcel."""
    _parcel(parcel_id)["paid"] = True
    return {"parcel": parcel_id, "paid": True}


def collect(parcel_id: str) -> dict:
    """Collect a parcel from its box."""
    parcel = _parcel(parcel_id)
    if not parcel["box"]:
        raise ValueError("the parcel is in no box")
    if not parcel["paid"]:
        raise ValueError("the parcel is not paid")
    boxes[parcel["box"]]["parcel"] = None
    parcel["box"] = None
    return {"parcel": parcel_id, "collected": True}


def _box(id: str) -> dict:
    if id not in boxes:
        raise ValueError(f"no box {id}")
    return boxes[id]


def _parcel(id: str) -> dict:
    if id not in parcels:
        raise ValueError(f"no parcel {id}")
    return parcels[id]
