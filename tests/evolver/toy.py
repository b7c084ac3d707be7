"""A library of five books: the smallest world that the mechanisms can explore, guide and replay."""

import copy

from envs.toolcalls import call_text, parse
from envs.world import Evaluation, Observation, StepResult, Task, World, tool_of
from evolver import replaying

BOOKS = {
    "B11": ("Dune", "red"),
    "B12": ("Emma", "red"),
    "B13": ("Ulysses", "blue"),
    "B14": ("Kim", "blue"),
    "B15": ("Solaris", "green"),
}


COLOUR = {"colour": {"type": "string", "description": "a colour"}}
BOOK = {"book": {"type": "string", "description": "book id, like B10"}}
TOOLS = [
    tool_of("shelf", "shelf", COLOUR, ["colour"]),
    tool_of("lend", "lend", BOOK, ["book"]),
    tool_of("mark", "mark", BOOK, ["book"]),
]


class Library(World):
    """A book must be seen on its shelf before it is lent or marked. Subclasses change `snapshots`
    and `luck`."""

    name = "library"
    snapshots = True
    luck = 0  # counts evaluations; a world whose result depends on it is not deterministic

    def tasks(self, split):
        return [task("Lend Solaris.", lent=["B15"], split=split)]

    def reset(self, task, seed=0):
        self._task = task
        self._answer = None
        self._state = {"seen": [], "lent": [], "mark": []}
        return Observation([{"role": "user", "content": task.query}], TOOLS)

    def step(self, action):
        turn = parse(action)
        texts = []
        calls = []
        for call in turn.calls:
            text = self._call(call.name, str(next(iter(call.arguments.values()), "")))
            calls.append(
                {"name": call.name, "arguments": call.arguments, "ok": not text.startswith("error")}
            )
            texts.append(text)
        if not texts:
            self._answer = turn.content
        errors = sum(not call["ok"] for call in calls)
        return StepResult(
            [{"role": "tool", "content": text} for text in texts],
            terminated=not texts,
            info={"calls": calls, "errors": errors},
        )

    def _call(self, tool, value):
        if tool == "shelf":
            found = [id for id, (_, colour) in BOOKS.items() if colour == value]
            self._state["seen"] += found
            rows = [" ".join([id, BOOKS[id][0], value, *self._marks(id)]) for id in found]
            return "\n".join(rows) or "error: no such shelf, there are red, blue and green"
        if value not in self._state["seen"]:
            return "error: look at the shelf first"
        key = "lent" if tool == "lend" else "mark"
        if value not in self._state[key]:
            self._state[key].append(value)
        return f"{tool} {value}"

    def _marks(self, id):
        words = {"lent": "lent", "mark": "marked"}
        return [word for key, word in words.items() if id in self._state[key]]

    def evaluate(self):
        found = self.difference()
        verifier = self._task.verifier
        wanted = verifier["state"]
        answer = verifier["answer"]
        right = found == wanted and answer in (None, self._answer)
        reached = sum(1 if row in wanted else -1 for row in found)
        progress = 1.0 if right else 0.9 * max(reached, 0) / max(len(wanted), 1)
        solved = right and (bool(wanted) or answer is not None)
        return Evaluation(float(solved), right, {"progress": progress})

    def difference(self):
        return changes(self._state["lent"], self._state["mark"])

    def snapshot(self):
        if not self.snapshots:
            raise NotImplementedError
        return copy.deepcopy((self._task, self._answer, self._state))

    def restore(self, snapshot):
        self._task, self._answer, self._state = copy.deepcopy(snapshot)


class NoSnapshots(Library):
    snapshots = False


def changes(lent, mark):
    """Return the rows of a difference in which these books were lent and marked."""
    rows = [["books", id, "lent", False, True] for id in sorted(lent)]
    return rows + [["books", id, "mark", False, True] for id in sorted(mark)]


def task(query, *, lent=(), mark=(), answer=None, split="train", seed=0):
    verifier = {"state": changes(lent, mark), "answer": answer}
    return Task(f"library/{query}", "library", query, split=split, seed=seed, verifier=verifier)


def attempt(world, task, actions, *, rollout=0, experience=()):
    """Play `actions` and return the trajectory, marked with the ids of `experience`."""
    trajectory = replaying.attempt(world, task, actions, rollout=rollout)
    trajectory.experience = list(experience)
    return trajectory


def call(tool, value):
    return call_text(tool, {"colour" if tool == "shelf" else "book": value})


LEND = task("Lend Solaris.", lent=["B15"])
RED = call("shelf", "red")
BLUE = call("shelf", "blue")
GREEN = call("shelf", "green")
LEND_15 = call("lend", "B15")
LEND_11 = call("lend", "B11")
MARK_11 = call("mark", "B11")
WON = [GREEN, LEND_15, "done"]
LOST = [GREEN, "done"]


def tried(*actions, of=LEND, world=Library, **options):
    return attempt(world(), of, actions, **options)
