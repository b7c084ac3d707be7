"""The desk of a small library: four tools, and a rule that no description mentions.

python -m envs.check lending:Lending
"""

from __future__ import annotations

import random
from typing import Any

from envs.toolcalls import call_text, parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World

PEOPLE = ["Ana", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gus", "Hana", "Ivo", "Jana", "Lea", "Max"]
TITLES = [
    "Atlas",
    "Candide",
    "Dune",
    "Emma",
    "Faust",
    "Hamlet",
    "Lolita",
    "Medea",
    "Momo",
    "Walden",
]
MEMBER = {"member": {"type": "string", "description": "The id of a member, such as M12."}}
BOOK = {"book": {"type": "string", "description": "The id of a book, such as B34."}}


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("find", "Show all members and books, and where the books are.", {}),
    _tool("card", "Show the card of a member with the unpaid fine.", MEMBER),
    _tool("pay", "Pay the fine of a member.", MEMBER),
    _tool("lend", "Lend a book to a member.", BOOK | MEMBER),
]


class Lending(World):
    """A desk whose members, books and fines follow from the seed of a task. A member with a fine
    is lent nothing until it is paid."""

    name = "lending"

    def tasks(self, split: str) -> list[Task]:
        first = {"train": 0, "dev": 10_000}
        if split not in first:
            raise ValueError(f"lending has no split {split!r}; it has {', '.join(first)}")
        return [self._task(split, first[split] + i) for i in range(32)]

    def _task(self, split: str, seed: int) -> Task:
        """Return a task of lending one or two books, to members of whom about half have a fine."""
        self._start(seed)
        rng = random.Random(f"task {seed}")
        wanted = dict(
            zip(rng.sample(sorted(self._books), 1 + seed % 2), rng.sample(sorted(self._fines), 2))
        )
        parts, reference = [], []
        for book, member in wanted.items():
            parts.append(f"{self._books[book]} ({book}) to {self._people[member]} ({member})")
            if self._fines[member]:
                reference.append(call_text("pay", {"member": member}))
            reference.append(call_text("lend", {"book": book, "member": member}))
        return Task(
            id=f"lending/{split}/{seed}",
            env=self.name,
            query=f"Please lend {' and '.join(parts)}.",
            split=split,
            seed=seed,
            reference=[*reference, "done"],
            verifier={"lent": wanted},
            difficulty=len(reference),
        )

    def _start(self, seed: int) -> None:
        rng = random.Random(f"desk {seed}")
        members = [f"M{n}" for n in rng.sample(range(10, 100), 4)]
        books = [f"B{n}" for n in rng.sample(range(10, 100), 5)]
        self._people = dict(zip(members, rng.sample(PEOPLE, 4)))
        self._books = dict(zip(books, rng.sample(TITLES, 5)))
        self._fines = {member: rng.choice((0, rng.randint(1, 9))) for member in members}
        self._lent: dict[str, str] = {}

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._start(task.seed)
        self._goal = task.verifier.get("lent", {})
        return Observation([{"role": "user", "content": task.query}], TOOLS)

    def step(self, action: str) -> StepResult:
        messages, info = run_calls(parse(action), self._call, most=4)
        return StepResult(messages, terminated=not messages, info=info)

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        member, book = arguments.get("member"), arguments.get("book")
        if tool == "find":
            people = [f"member {id}: {name}" for id, name in self._people.items()]
            books = [f"book {id}: {title}, {self._place(id)}" for id, title in self._books.items()]
            return "\n".join([*people, *books]), True
        if tool not in ("card", "pay", "lend"):
            return "error: the desk has no such tool", False
        if not isinstance(member, str) or member not in self._people:
            return "error: no such member", False
        if tool == "card":
            return f"{member} {self._people[member]}: fine {self._fines[member]}", True
        if tool == "pay":
            self._fines[member] = 0
            return f"{member} owes nothing", True
        if not isinstance(book, str) or book not in self._books:
            return "error: no such book", False
        if book in self._lent or self._fines[member]:
            return "error: the desk cannot lend this", False
        self._lent[book] = member
        return f"{book} is lent to {member}", True

    def _place(self, book: str) -> str:
        return f"lent to {self._lent[book]}" if book in self._lent else "on the shelf"

    def evaluate(self) -> Evaluation:
        done = bool(self._goal) and all(
            self._lent.get(book) == member for book, member in self._goal.items()
        )
        return Evaluation(float(done), done)

    def snapshot(self) -> Any:
        return [self._people, self._books, dict(self._fines), dict(self._lent), self._goal]

    def restore(self, snapshot: Any) -> None:
        people, books, fines, lent, self._goal = snapshot
        self._people, self._books, self._fines, self._lent = people, books, dict(fines), dict(lent)
