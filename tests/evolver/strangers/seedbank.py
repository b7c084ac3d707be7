"""A seed bank. Only dried samples are tested and stored, only tested ones are lent, and only to
members whose membership has not lapsed. It always begins in the same way."""

_drawers = {"A1": None, "A2": "kale", "B1": None, "B2": "pea", "C1": None}
_samples = {
    "s-101": {"variety": "kale", "grams": 40, "dried": True, "germination": None},
    "s-102": {"variety": "pea", "grams": 75, "dried": False, "germination": 91},
    "s-103": {"variety": "leek", "grams": 12, "dried": False, "germination": None},
    "s-104": {"variety": "beet", "grams": 60, "dried": True, "germination": 64},
}
_loans = {}
_gardeners = {"Ida": "active", "Noor": "lapsed", "Pavel": "active"}


def list_samples() -> list:
    """List the samples with their varieties and weights in grams."""
    return [{"id": i, "variety": s["variety"], "grams": s["grams"]} for i, s in _samples.items()]


def sample_details(sample_id: str) -> dict:
    """Show all that is known of a sample."""
    if sample_id not in _samples:
        raise ValueError(f"no sample {sample_id}")
    return _samples[sample_id]


def list_gardeners() -> dict:
    """List the gardeners and whether their membership is active or lapsed."""
    return _gardeners


def renew(gardener: str) -> str:
    """Renew the membership of a gardener."""
    if gardener not in _gardeners:
        raise ValueError(f"no gardener {gardener}")
    _gardeners[gardener] = "active"
    return "renewed"


def dry(sample_id: str) -> str:
    """Put a sample into the drying cabinet."""
    if sample_id not in _samples:
        raise ValueError(f"no sample {sample_id}")
    if _samples[sample_id]["dried"]:
        raise ValueError("it is dry already")
    _samples[sample_id]["dried"] = True
    return "dry"


def test_germination(sample_id: str) -> dict:
    """Test how many percent of a sample germinate. Takes 2 grams of it."""
    s = _samples.get(sample_id)
    if s is None:
        raise ValueError(f"no sample {sample_id}")
    if not s["dried"]:
        raise ValueError("germination cannot be tested yet")
    s["grams"] -= 2
    s["germination"] = 60 + (sum(map(ord, s["variety"])) * 7) % 40
    return {"germination": s["germination"]}


def store(sample_id: str, drawer: str) -> str:
    """Put a sample into an empty drawer."""
    s = _samples.get(sample_id)
    if s is None:
        raise ValueError(f"no sample {sample_id}")
    if drawer not in _drawers:
        raise ValueError(f"no drawer {drawer}; drawers are {', '.join(_drawers)}")
    if _drawers[drawer] is not None:
        raise ValueError("the drawer is taken")
    if not s["dried"]:
        raise ValueError("only what is dry keeps")
    _drawers[drawer] = s["variety"]
    return "stored"


def drawers() -> dict:
    """Show which variety lies in which drawer."""
    return _drawers


def lend(sample_id: str, gardener: str, grams: int) -> dict:
    """Lend some grams of a sample to a gardener."""
    s = _samples.get(sample_id)
    if s is None:
        raise ValueError(f"no sample {sample_id}")
    if gardener not in _gardeners:
        raise ValueError(f"no gardener {gardener}")
    if _gardeners[gardener] != "active":
        raise ValueError("the membership has lapsed")
    if s["germination"] is None:
        raise ValueError("the sample has not been released")
    if grams > s["grams"] or grams < 1:
        raise ValueError(f"there are {s['grams']} grams")
    s["grams"] -= grams
    loan = f"loan-{len(_loans) + 1}"
    _loans[loan] = {"sample": sample_id, "gardener": gardener, "grams": grams}
    return {"loan": loan}


def loans(gardener: str) -> list:
    """List the loans of a gardener."""
    return [v | {"id": k} for k, v in _loans.items() if v["gardener"] == gardener]
