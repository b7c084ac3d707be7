"""A print shop. A press takes a job only with its paper and with ink, and what was collected alone is
invoiced; no description says so. Refusals are sentences that name what was asked for, jobs are lines
of a list, and it always begins in the same way."""

PRESSES = {
    "Heidelberg": {"paper": "matte", "ink": 3, "job": ""},
    "Konica": {"paper": "gloss", "ink": 1, "job": ""},
}
JOBS = {
    "poster for the fair": {"copies": 200, "paper": "gloss", "state": "waiting"},
    "wedding cards": {"copies": 80, "paper": "matte", "state": "waiting"},
    "menu of Casa Lola": {"copies": 40, "paper": "gloss", "state": "waiting"},
    "annual report": {"copies": 500, "paper": "matte", "state": "waiting"},
}
invoiced: list = []


def queue() -> str:
    """Show the jobs that wait."""
    waiting = [
        f"- {name} ({job['copies']} copies, {job['paper']})"
        for name, job in JOBS.items()
        if job["state"] == "waiting"
    ]
    return f"{len(waiting)} jobs wait:\n" + "\n".join(waiting) if waiting else "Nothing waits."


def status(press: str) -> str:
    """Show what a press has loaded and what it prints.

    press: its name, Heidelberg or Konica
    """
    if press not in PRESSES:
        return _no_press(press)
    paper, ink, job = PRESSES[press].values()
    return f"{press}: paper {paper}, ink for {ink} jobs, {f'printing {job}' if job else 'idle'}"


def load_paper(press: str, paper: str) -> str:
    """Load paper into a press.

    paper: matte, gloss or recycled
    """
    if press not in PRESSES:
        return _no_press(press)
    if paper not in ("matte", "gloss", "recycled"):
        return f"We do not stock {paper}."
    if PRESSES[press]["job"]:
        return "Not while it prints."
    PRESSES[press]["paper"] = paper
    return "Loaded."


def refill(press: str) -> str:
    """Fill up the ink of a press."""
    if press not in PRESSES:
        return _no_press(press)
    PRESSES[press]["ink"] = 3
    return "Filled."


def start(press: str, job: str) -> str:
    """Start a job on a press."""
    if press not in PRESSES:
        return _no_press(press)
    if job not in JOBS:
        return f"No such job: {job}."
    ours, asked = PRESSES[press], JOBS[job]
    if asked["state"] != "waiting":
        return f"This job is {asked['state']}."
    if ours["job"]:
        return "The press is busy."
    if ours["paper"] != asked["paper"]:
        return "Wrong paper."
    if not ours["ink"]:
        return "The ink is low."
    ours["job"], ours["ink"], asked["state"] = job, ours["ink"] - 1, "printing"
    return "Started."


def collect(press: str) -> str:
    """Take the finished job out of a press."""
    if press not in PRESSES:
        return _no_press(press)
    if not (job := PRESSES[press]["job"]):
        return "It is empty."
    JOBS[job]["state"], PRESSES[press]["job"] = "done", ""
    return f"Here is {job}."


def invoice(job: str) -> str:
    """Write the invoice of a job."""
    if job not in JOBS:
        return f"No such job: {job}."
    if JOBS[job]["state"] != "done":
        return "Nothing to invoice yet."
    JOBS[job]["state"] = "invoiced"
    invoiced.append(job)
    return f"Invoice {len(invoiced)} over {JOBS[job]['copies'] * 2} euros."


def invoices() -> str:
    """List the invoices that were written."""
    return "\n".join(f"{n}. {job}" for n, job in enumerate(invoiced, 1)) or "none"


def _no_press(name: str) -> str:
    return f"There is no press called {name}."
