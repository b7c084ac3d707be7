"""A clinic, in which what is booked can be cancelled, and then is booked again."""

import random

patients: dict = {}
visits: dict = {}
numbers: list = []


def reset(seed: int) -> None:
    rng = random.Random(seed)
    numbers.extend([500])
    for number, name in zip(rng.sample(range(10, 99), 3), ["Mira Holt", "Jon Ask", "Lena Ruiz"]):
        patients[f"P{number}"] = name


def list_patients() -> list[dict]:
    """List the patients."""
    return [{"patient_id": id, "name": name} for id, name in patients.items()]


def list_visits() -> list[dict]:
    """List the visits."""
    return [{"visit_id": id, **visit} for id, visit in visits.items()]


def book_visit(patient_id: str, day: str) -> dict:
    """Book a visit.

    Args:
        patient_id: id of the patient
        day: Monday, Tuesday or Friday
    """
    if patient_id not in patients or day not in ("Monday", "Tuesday", "Friday"):
        raise ValueError("no such patient or day")
    numbers[0] += 1
    visits[f"V{numbers[0]}"] = {"patient": patients[patient_id], "day": day}
    return {"visit_id": f"V{numbers[0]}"}


def cancel_visit(visit_id: str) -> str:
    """Cancel a visit."""
    if visit_id not in visits:
        raise ValueError("no such visit")
    del visits[visit_id]
    return "cancelled"
