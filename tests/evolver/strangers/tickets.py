"""A help desk whose tickets are numbers. Only an assigned ticket can be closed; no description says
so."""

import random

SUBJECTS = [
    "printer jams", "no wifi", "password reset", "slow laptop", "broken screen", "phone dead",
]  # fmt: skip
PEOPLE = ["Ada", "Bill", "Cora", "Dan", "Eve", "Fred"]

tickets: dict = {}
agents: list = []


def reset(seed: int) -> None:
    rng = random.Random(seed)
    agents[:] = rng.sample(PEOPLE, 3)
    for subject in rng.sample(SUBJECTS, 4):
        assignee = rng.choice([None, None, *agents])
        tickets[rng.randrange(1000, 9999)] = {
            "subject": subject,
            "status": "assigned" if assignee else "open",
            "assignee": assignee,
            "priority": rng.choice(["low", "high"]),
        }


def search_tickets(status: str = "open") -> list:
    """Search tickets by status: open, assigned or closed."""
    return [
        {"ticket_id": id, "subject": ticket["subject"]}
        for id, ticket in tickets.items()
        if ticket["status"] == status
    ]


def get_ticket(ticket_id: int) -> dict:
    """Get a ticket by its number."""
    return {"ticket_id": ticket_id, **_get(ticket_id)}


def list_agents() -> list:
    """List the names of the agents on duty."""
    return agents


def assign_ticket(ticket_id: int, agent: str) -> str:
    """Assign a ticket to an agent."""
    if agent not in agents:
        raise ValueError(f"{agent} is not on duty")
    _get(ticket_id).update(status="assigned", assignee=agent)
    return "ok"


def close_ticket(ticket_id: int) -> str:
    """Close a ticket."""
    if _get(ticket_id)["status"] != "assigned":
        raise ValueError("cannot close this ticket now")
    tickets[ticket_id]["status"] = "closed"
    return "ok"


def set_priority(ticket_id: int, priority: str) -> str:
    """Set the priority of a ticket: low, normal or high."""
    if priority not in ("low", "normal", "high"):
        raise ValueError("priority must be low, normal or high")
    _get(ticket_id)["priority"] = priority
    return "ok"


def _get(ticket_id):
    if ticket_id not in tickets:
        raise ValueError(f"ticket {ticket_id} not found")
    return tickets[ticket_id]
