"""The queue of a print shop. A job passes four stages, and each is refused before the one in front
of it; no description says so. What destroys a job changes what a refused call is told, too."""

import random

TITLES = ["Menu", "Poster", "Flyer", "Calendar", "Zine", "Label"]
CUSTOMERS = ["Okafor", "Petrov", "Sato", "Varga"]
STAGES = ["queued", "proofed", "printed", "collected"]

jobs: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    jobs.clear()
    for number, title in zip(rng.sample(range(200, 700), 5), rng.sample(TITLES, 5)):
        customer = rng.choice(CUSTOMERS)
        jobs[number] = {"number": number, "title": title, "customer": customer, "stage": "queued"}


def queue() -> list[dict]:
    """List all jobs."""
    return list(jobs.values())


def jobs_of(customer: str) -> list[int]:
    """Return the numbers of the jobs of a customer."""
    return [number for number, job in jobs.items() if job["customer"] == customer]


def submit(title: str, customer: str) -> int:
    """Put a new job into the queue. Return its number."""
    number = max(jobs, default=200) + 1
    jobs[number] = {"number": number, "title": title, "customer": customer, "stage": "queued"}
    return number


def proof(job: int) -> str:
    """Print a proof of a job and have it approved."""
    return _advance(job, "proofed", "this job is past that", "approved")


def print_job(job: int) -> str:
    """Print all copies of a job."""
    return _advance(job, "printed", "the press refuses this job", "in the rack")


def hand_over(job: int) -> str:
    """Hand the printed copies of a job over to the customer."""
    return _advance(job, "collected", "nothing in the rack", "thank you")


def cancel(job: int) -> None:
    """Take a job out of the queue."""
    _job(job)
    del jobs[job]


def _job(number: int) -> dict:
    if number not in jobs:
        raise ValueError(f"there is no job {number}")
    return jobs[number]


def _advance(number: int, stage: str, refusal: str, answer: str) -> str:
    job = _job(number)
    if STAGES.index(job["stage"]) + 1 != STAGES.index(stage):
        raise ValueError(refusal)
    job["stage"] = stage
    return answer
