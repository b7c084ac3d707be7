"""Plans of tasks: the calls that solve a task, and its words.

A plan follows a template such as "room.set+id.value", goals joined by "+". Desk calls do not count
for its level, so that all houses have the same tasks.
"""

import functools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from envs.desk.rules import House
from envs.desk.tools import Tools
from envs.probed import cells
from envs.wording import distinguishing, goal_text, joined

SPLITS = ("train", "dev", "test", "demonstrations")
LEVELS = (1, 2, 3, 4, 5, 6)  # numbers of calls in the shortest solution
WORLDS = 1_000_000  # world seeds of a split: train starts at 0, dev at WORLDS


class Unfit(Exception):
    """Error of an attempt that found nothing in the world that fits the template; another attempt
    may succeed."""


class PlannedCall(NamedTuple):
    """One call of a solution. goal: the index of its goal. desk: it is a desk call."""

    tool: str
    arguments: dict[str, str]
    goal: int
    desk: bool = False


@dataclass
class Plan:
    """A task and the calls that solve it. wanted: what is asked for, None for nothing: a part of
    the last answer (`reply`), or what the world's own agent understands."""

    template: str
    seed: int  # of its world
    query: str = ""
    calls: list[PlannedCall] = field(default_factory=list)
    wanted: Any = None
    answer: str | None = None
    drawn: dict[str, Any] = field(default_factory=dict)  # arguments of `Planner.write`

    @property
    def level(self) -> int:
        return sum(not call.desk for call in self.calls)

    @property
    def tools(self) -> list[str]:
        return [call.tool for call in self.calls]


class Planner:
    """Makes the calls of one task in its world, and words them. A subclass defines `kind`, `ids`,
    `templates` and `reach`.

    A plain query has the words of the tools' descriptions, as those of an explorer that knows no
    phrases of the world (`envs.wording`): "Add a bag to an order: order Ann Rome. Then get a quote
    for a flight: flight Milan noon. Reply with the last word."
    """

    kind: ClassVar[type[Tools]]
    ids: ClassVar[re.Pattern[str]]  # of values that a query describes instead of naming them

    def __init__(self, seed: int, rng: random.Random, template: str, house: House | None = None):
        self.rng, self.house = rng, house
        self.plan = Plan(template, seed)
        self.texts: list[str] = []  # answers of the calls
        self.picked: set[str] = set()
        self.goal = 0

    @functools.cached_property
    def tools(self) -> Any:
        return self.kind(self.plan.seed, self.house)

    @classmethod
    def templates(cls, level: int, plain: bool = False) -> Sequence[str]:
        """Return the templates of a level, as often as they should be drawn. plain: for plain
        queries."""
        raise NotImplementedError

    @classmethod
    def own_plans(
        cls, split: str, index: int, level: int, seed: int, house: House | None
    ) -> Iterator[Plan]:
        """Yield plans for the task of a split that has this index and level, of which the first
        that fits is taken."""
        rng = random.Random(f"{cls.kind.family.name} {split} task {index} {seed}")
        yield cls.any_plan(split, rng, rng.choice(cls.templates(level)), house)

    @classmethod
    def any_plan(
        cls, split: str, rng: random.Random, template: str, house: House | None = None, **how: Any
    ) -> Plan:
        """Return a plan for a template in a world of a split, both drawn from `rng`. how: arguments
        of `write`."""
        while True:
            seed = SPLITS.index(split) * WORLDS + rng.randrange(WORLDS)
            try:
                return cls(seed, rng, template, house).write(**how)
            except Unfit:
                continue

    def write(self, *, plain: bool = False) -> Plan:
        """Return the plan of the template. Raises Unfit."""
        self.plan.drawn["plain"] = plain
        targets, parts = [], []
        for number, goal in enumerate(self.plan.template.split("+")):
            self.goal = number
            subject, _, wanted = goal.partition(".")
            parts.append(self.reach(subject, wanted))
            targets.append(len(self.plan.calls) - 1)
        if plain:
            hidden = self._hidden()
            goals = [self._described(n, hidden) for n in targets]
            self.question(goals)
            self.plan.query = joined(goals, self.plan.wanted or "", self.rng)
            # It must not name what has to be found.
            if len(set(goals)) < len(goals) or not words(self.plan.query).isdisjoint(hidden):
                raise Unfit
        else:
            self.plan.query = self._sentences(parts)
        if self.plan.answer and self.plan.answer in words(self.plan.query):
            raise Unfit
        return self.plan

    def reach(self, subject: str, wanted: str) -> str:
        """Make the calls of a goal and return its words: a request, or a question."""
        raise NotImplementedError

    def pick(self, ids: Iterable[str]) -> str:
        """Draw something that no other goal is about. Raises Unfit if there is nothing."""
        unused = [id for id in ids if id not in self.picked]
        if not unused:
            raise Unfit
        id = self.rng.choice(unused)
        self.picked.add(id)
        return id

    def question(self, goals: Sequence[str]) -> None:
        """Want something of the last answer of a plain query, unless `reach` has."""

    def ask(self, wanted: str) -> None:
        """Want a part of the last answer (`reply`)."""
        self.plan.wanted, self.plan.answer = wanted, reply(wanted, self.texts[-1])

    def _sentences(self, parts: list[str]) -> str:
        """Return the query of requests and of questions after them."""
        requests = [part for part in parts if not part.endswith("?")]
        text = self.rng.choice((" and ", ", then ")).join(requests)
        return " ".join([*filter(None, [sentence(text)]), *parts[len(requests) :]])

    def call(self, tool: str, /, **arguments: str) -> None:
        """Make a call unless it was made."""
        self.make(tool, arguments)

    def make(self, tool: str, arguments: dict[str, str], *, again: bool = False) -> None:
        """Make a call. One that was made is not repeated, or only if its answer has changed
        (`again`). Raises Unfit if it is refused or shows nothing."""
        pairs = zip(self.plan.calls, self.texts, strict=True)
        made = [text for call, text in pairs if call[:2] == (tool, arguments)]
        if made and not again:
            return
        text, ok = self.tools.call(tool, arguments)
        if not ok or text in made or text.startswith("no "):
            raise Unfit
        self.add(tool, arguments)
        self.texts.append(text)

    def add(self, tool: str, arguments: dict[str, str]) -> None:
        desk = tool in self.kind.family.desk
        self.plan.calls.append(PlannedCall(tool, arguments, self.goal, desk))

    def desk(self, tool: str, id: str) -> None:
        """Make the desk call that the house wants before a tool."""
        if self.house and (desk := self.house.desk(tool)):
            self.call(desk, id=id)

    def _hidden(self) -> dict[str, int]:
        """Return {id: the call that shows it} of the ids that are used after a call has shown
        them."""
        shown: dict[str, int] = {}
        hidden: dict[str, int] = {}
        named: set[str] = set()
        for n, (call, text) in enumerate(zip(self.plan.calls, self.texts, strict=True)):
            for value in call.arguments.values():
                if value in shown and value not in named:
                    hidden[value] = shown[value]
                else:
                    named.add(value)
            for value in self.ids.findall(text):
                shown.setdefault(value, n)
        return hidden

    def _described(self, n: int, hidden: dict[str, int]) -> str:
        """Return the goal that the call numbered n reaches, in words."""
        stated: list[str] = []
        phrases = {}
        call = self.plan.calls[n]
        for name, value in call.arguments.items():
            parts = self._phrase(value, hidden)
            phrases[name] = " ".join([part for part in parts if part not in stated] or parts)
            stated += parts
        return goal_text(self.kind.summaries[call.tool], phrases)

    def _phrase(self, value: str, hidden: dict[str, int]) -> list[str]:
        """Return the words for a value: itself, or those that lead to the call that shows it and to
        its row."""
        if value not in hidden:
            return [value]
        call, text = self.plan.calls[hidden[value]], self.texts[hidden[value]]
        parts = []
        for inner in call.arguments.values():
            parts += self._phrase(inner, hidden)
        found = distinguishing(cells(call.tool, text), value, list(hidden))
        if found is None:
            raise Unfit
        return list(dict.fromkeys([*parts, *found]))


def reply(wanted: str, text: str) -> str:
    """Return the part of an answer that a question wants: "the first word", "the last word", "the
    number of lines", or the first word of the row with `wanted` in it."""
    rows = text.split("\n")
    if wanted == "the number of lines":
        return str(len(rows))
    if wanted in ("the first word", "the last word"):
        return text.split()[0 if wanted == "the first word" else -1]
    return next((row.split()[0] for row in rows if f" {wanted} " in row), "")


def sentence(text: str) -> str:
    """Return requests as a sentence."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(re.findall(r"\w+", text))
