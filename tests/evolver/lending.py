"""The desk of a library: four tools, and one rule that nothing mentions: whoever owes a fine
borrows no book."""

from __future__ import annotations

import random
from typing import Any

from envs.toolcalls import call_text, parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World

TITLES = (
    "Dune", "Emma", "Ulysses", "Kim", "Solaris", "Dracula", "Persuasion", "Walden", "Utopia",
    "Candide", "Beloved", "Ivanhoe",
)  # fmt: skip
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")


def _tool(name: str, description: str, *required: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in required}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("find", "Find a book by its title.", "title"),
    _tool("member", "Show a member by name.", "name"),
    _tool("lend", "Lend a book to a member.", "book", "member"),
    _tool("pay", "Take the payment of a member.", "member"),
]


class Lending(World):
    """Six books on two shelves, and four members of whom two or three owe a fine."""

    name = "lending"

    def tasks(self, split: str) -> list[Task]:
        seeds = {"train": range(16), "dev": range(100, 108)}
        if split not in seeds:
            raise ValueError(f"lending has no split {split}; it has {', '.join(seeds)}")
        return [self._task(split, seed) for seed in seeds[split]]

    def _task(self, split: str, seed: int) -> Task:
        self._begin(seed)
        book = next(id for id, row in self.books.items() if row[1] == "shelf")
        member = next(id for id, row in self.members.items() if row[1])
        calls = [
            call_text("find", {"title": self.books[book][0]}),
            call_text("member", {"name": self.members[member][0]}),
            call_text("pay", {"member": member}),
            call_text("lend", {"book": book, "member": member}),
        ]
        query = f"Lend {self.books[book][0]} to {self.members[member][0]}."
        wanted = {"book": book, "member": member}
        return Task(f"{split}/{seed}", self.name, query, split, "original", seed, calls, wanted)

    def _begin(self, seed: int) -> None:
        rng = random.Random(f"lending {seed}")
        names = rng.sample(NAMES, 4)
        fines = rng.sample([0, rng.randint(2, 9), rng.randint(2, 9), rng.choice((0, 4))], 4)
        titles = rng.sample(TITLES, 6)
        numbers = rng.sample(range(10, 100), 10)
        self.members = {f"M{numbers[n]}": [names[n], fines[n]] for n in range(4)}
        self.books = {f"B{numbers[4 + n]}": [titles[n], "shelf"] for n in range(6)}
        self.books[rng.choice(list(self.books))][1] = rng.choice(list(self.members))

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._begin(task.seed)
        self._wanted = task.verifier
        titles = ", ".join(row[0] for row in self.books.values())
        names = ", ".join(row[0] for row in self.members.values())
        rules = f"You work at the desk of a library. Books: {titles}. Members: {names}."
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": task.query}]
        return Observation(messages, TOOLS)

    def step(self, action: str) -> StepResult:
        messages, info = run_calls(parse(action), self._call, most=8)
        return StepResult(messages, terminated=not messages, info=info)

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        given = [str(value) for value in arguments.values()]
        wanted = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        if tool not in wanted or arguments.keys() != set(wanted[tool]["required"]):
            return f"error: call one of {', '.join(wanted)} with its arguments", False
        if tool == "find":
            found = [id for id, row in self.books.items() if row[0] == given[0]]
            return self._book(found[0]) if found else "error: no such title", bool(found)
        if tool == "member":
            found = [id for id, row in self.members.items() if row[0] == given[0]]
            return self._member(found[0]) if found else "error: no such name", bool(found)
        member = self.members.get(str(arguments["member"]))
        if member is None:
            return "error: no such member", False
        if tool == "pay":
            if not member[1]:
                return "error: nothing to pay", False
            member[1] = 0
            return self._member(arguments["member"]), True
        book = self.books.get(str(arguments["book"]))
        if book is None or book[1] != "shelf":
            return "error: no such book on the shelf", False
        if member[1]:
            return "error: not possible for this member", False
        book[1] = arguments["member"]
        return self._book(arguments["book"]), True

    def _book(self, id: str) -> str:
        title, place = self.books[id]
        return f"{id} {title} {place}"

    def _member(self, id: str) -> str:
        name, fine = self.members[id]
        return f"{id} {name} fine {fine or 'none'}"

    def evaluate(self) -> Evaluation:
        done = self.books[self._wanted["book"]][1] == self._wanted["member"]
        return Evaluation(float(done), done)
