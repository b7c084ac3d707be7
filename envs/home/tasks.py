"""Tasks of the smart home: one or two goals, graded by the number of calls in the shortest
solution.

Desk calls do not count for the level, so that all houses have the same tasks. A template such as
"room.set+id.value"
consists of goals: a subject and what is wanted of it. Subjects are `id` (a device named by its id),
`room`, `person` (their room), `number` (the id of a room, which only an explorer writes) and `same`
(the room of the first goal). Wanted is `set`, a change, or one of `QUESTIONS`. A task has the
phrases written here, or the words of the tools' descriptions as an explorer words them
(`envs.wording`).
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from envs.home.data import KINDS, VALUES
from envs.home.devices import DESK, TOOLS, Home, change
from envs.house_rules import House
from envs.toolcalls import call_text
from envs.wording import goal_text, joined, summaries
from envs.world import Task

LEVELS = (1, 2, 3, 4, 5, 6)
SPLITS = ("train", "dev", "test", "demonstrations")
WORLDS = 1_000_000  # world seeds of a split
HELD_OUT = (
    ("lamp", "door"),
    ("heater", "speaker"),
    ("blind", "lamp"),
)  # changed together in dev and test only
SUMMARIES = summaries({tool["function"]["name"]: tool["function"]["description"] for tool in TOOLS})

# Goal -> its phrase, "" if only an explorer words it, and the part of the last answer that it
# wants.
QUESTIONS = {
    "id.value": ("What is device {it} set to?", "the first word"),
    "id.where": ("Where is device {it}?", "the last word"),
    "room.who": ("Who is in the {it}?", "the first word"),
    "room.count": ("How many devices are in the {it}?", "the number of lines"),
    "room.value": ("What is the {kind} in the {it} set to?", ""),
    "room.id": ("", "the last word"),
    "person.where": ("Where is {it}?", "the first word"),
    "person.count": ("How many devices are in {it}'s room?", "the number of lines"),
    "person.value": ("What is the {kind} in {it}'s room set to?", ""),
    "person.id": ("", "the last word"),
    "number.count": ("", "the number of lines"),
}
SET = {
    "lamp": ("set {it} to {value}", "make {it} {value}"),
    "heater": ("set {it} to {value} degrees", "turn {it} to {value} degrees"),
    "speaker": ("play {value} on {it}", "put {value} on {it}"),
    "blind": ("move {it} to {value}", "set {it} to {value}"),
    "Locked": ("lock {it}", "make sure that {it} is locked"),
    "Open": ("unlock {it}", "make sure that {it} is open"),
}
PHRASES = {
    "id": ("{kind} {it}", "the {kind} {it}"),
    "room": ("the {kind} in the {it}", "the {it} {kind}"),
    "person": ("the {kind} in {it}'s room", "{it}'s {kind}"),
    "same": ("the {kind} there",),
}


@dataclass
class Plan:
    """A task and the calls that solve it: (tool, arguments, index of the goal).

    kinds: of the devices of the goals. wanted: the part of the last call's answer that is asked for
    (`reply`).
    """

    template: str
    world: int
    kinds: Sequence[str]
    query: str = ""
    calls: list[tuple[str, dict[str, str], int]] = field(default_factory=list)
    wanted: str | None = None
    answer: str | None = None

    @property
    def level(self) -> int:
        return sum(tool not in DESK for tool, _, _ in self.calls)


class Unfit(Exception):
    """Error of an attempt that found nothing in the world that fits the template; another attempt
    may succeed."""


@functools.cache
def templates(level: int, *, plain: bool = False) -> tuple[str, ...]:
    """Return the templates of a level, those with changes more often. plain: those that an explorer
    can word."""
    changes = ["id.set", "room.set", "person.set", *["number.set"] * plain]
    asks = [goal for goal, (phrase, wanted) in QUESTIONS.items() if (wanted if plain else phrase)]
    pairs = [f"{one}+{two}" for one in changes for two in (*changes * 3, *asks)]
    pairs += [f"{one}+same.set" for one in changes[1:]] * 3
    return tuple(t for t in changes * 3 + asks + pairs if sum(map(_calls, t.split("+"))) == level)


def _calls(goal: str) -> int:
    subject, _, wanted = goal.partition(".")
    looked_up = (
        {"set": 2, "value": 1, "count": 1}.get(wanted, 0) if subject in ("room", "person") else 0
    )
    return 1 + looked_up + (goal == "number.set")


@functools.lru_cache(maxsize=32)
def split_tasks(split: str, n: int, seed: int, house: House | None = None) -> tuple[Task, ...]:
    """Return n tasks that cycle through the levels. In dev and test, every other one of two changes
    is held out."""
    tasks = []
    for index in range(n):
        rng = random.Random(f"home {split} task {index} {seed}")
        level = LEVELS[index % len(LEVELS)]
        pairs = [template for template in templates(level) if template.count(".set") == 2]
        held_out = split != "train" and bool(pairs) and index // len(LEVELS) % 2 == 0
        template = rng.choice(pairs if held_out else templates(level))
        plan = any_plan(split, rng, template, house, held_out=held_out)
        tasks.append(replace(task_of(plan, split, house), id=f"home/{split}/{index:04d}"))
    return tuple(tasks)


def any_plan(
    split: str,
    rng: random.Random,
    template: str,
    house: House | None = None,
    *,
    plain: bool = False,
    held_out: bool = False,
    kinds: Sequence[str] = (),
) -> Plan:
    """Return a plan for a template in a world of a split, both drawn from `rng`.

    plain: in the words of the tools' descriptions. held_out: for two changes of a pair of
    `HELD_OUT`. kinds: of the devices of the goals, () = any.
    """
    while True:
        world = SPLITS.index(split) * WORLDS + rng.randrange(WORLDS)
        try:
            return _Planner(
                world, rng, template, house, kinds or _kinds(template, held_out, rng), plain
            ).plan
        except Unfit:
            continue


def _kinds(template: str, held_out: bool, rng: random.Random) -> Sequence[str]:
    """Draw the kinds of the devices of the goals."""
    while True:
        kinds = rng.choice(HELD_OUT) if held_out else rng.choices(KINDS, k=1 + template.count("+"))
        together = template.count(".set") == 2 and any(set(kinds) == set(pair) for pair in HELD_OUT)
        if together == held_out and not ("same" in template and kinds[0] == kinds[1]):
            return rng.sample(kinds, len(kinds))


def task_of(plan: Plan, split: str = "train", house: House | None = None) -> Task:
    """Return the task of a plan; executing its calls gives the verifier."""
    home = Home(plan.world, house)
    for tool, arguments, _ in plan.calls:
        home.call(tool, arguments)
    reference = [
        *(call_text(tool, arguments) for tool, arguments, _ in plan.calls),
        plan.answer or "done",
    ]
    verifier = {"changes": home.changes(), "answer": plan.answer}
    return Task(
        f"home/world/{plan.world}",
        "home",
        plan.query,
        split=split,
        seed=plan.world,
        reference=reference,
        verifier=verifier,
        difficulty=plan.level,
        meta={"template": plan.template},
    )


class _Planner:
    """Makes the calls of one task in its world, and words them."""

    def __init__(
        self,
        world: int,
        rng: random.Random,
        template: str,
        house: House | None,
        kinds: Sequence[str],
        plain: bool,
    ):
        self.rng, self.plain, self.home = rng, plain, Home(world, house)
        self.plan, self.text, self.unused = (
            Plan(template, world, kinds),
            "",
            list(self.home.data.rooms),
        )
        self.room = self.via = ""  # of the last goal: its id, and the name by which it was found
        goals = template.split("+")
        parts = [self._goal(n, goal, kinds) for n, goal in enumerate(goals)]
        if len(set(parts)) < len(parts):
            raise Unfit
        self.plan.query = (
            joined(parts, self.plan.wanted or "", rng) if plain else self._sentences(parts)
        )
        if self.plan.answer and self.plan.answer in re.findall(r"\w+", self.plan.query):
            raise Unfit

    def _goal(self, n: int, goal: str, kinds: Sequence[str]) -> str:
        """Make the calls of a goal and return its words."""
        subject, wanted = goal.split(".")
        kind, data = kinds[n], self.home.data
        if subject != "same":
            needed = set(kinds if "same" in self.plan.template else [kind])
            self.room = self._pick(needed, occupied=subject == "person" or wanted == "who")
        device = next((d.id for d in data.devices_in(self.room) if d.kind == kind), "")
        if subject == "room":
            self.via = data.rooms[self.room]
            self._call(n, "room", name=self.via)
        elif subject == "person":
            self.via = data.person_in(self.room)
            self._call(n, "person", name=self.via)
        elif subject == "number":
            self.via = self.room
        if subject in ("room", "person", "number") and wanted in ("set", "count", "value"):
            self._call(n, "devices", room=self.room)
        phrase = device if subject == "id" else f"{self.via} {kind}"
        named = {"kind": kind, "it": device if subject == "id" else self.via}
        if wanted == "set":
            value = self.rng.choice([v for v in VALUES[kind] if v != self.home.state[device]])
            tool, arguments = change(kind, device, value)
            if self.home.house and (desk := self.home.house.desk(tool)):
                self._call(n, desk, id=device)
            self._call(n, tool, **arguments)
            if self.plain:
                return goal_text(SUMMARIES[tool], arguments | {"device": phrase})
            it = self.rng.choice(PHRASES[subject]).format(**named)
            return self.rng.choice(SET.get(value) or SET[kind]).format(it=it, value=value)
        if subject == "id":
            self._call(n, "device", id=device)
        question, self.plan.wanted = QUESTIONS[f"{subject}.{wanted}"]
        self.plan.wanted = self.plan.wanted or kind
        self.plan.answer = reply(self.plan.wanted, self.text)
        tool, arguments, _ = self.plan.calls[-1]
        if self.plain:
            return goal_text(SUMMARIES[tool], {name: named["it"] for name in arguments})
        return question.format(**named)

    def _pick(self, kinds: set[str], occupied: bool) -> str:
        """Return a room of which no other goal is."""
        data = self.home.data
        fitting = [
            room
            for room in self.unused
            if kinds <= {device.kind for device in data.devices_in(room)}
        ]
        fitting = [room for room in fitting if data.person_in(room) or not occupied]
        if not fitting:
            raise Unfit
        self.unused.remove(room := self.rng.choice(fitting))
        return room

    def _call(self, goal: int, tool: str, **arguments: str) -> None:
        self.text, _ = self.home.call(tool, arguments)
        self.plan.calls.append((tool, arguments, goal))

    def _sentences(self, parts: list[str]) -> str:
        changes = [part for part in parts if not part.endswith("?")]
        text = self.rng.choice((" and ", ", then ")).join(changes)
        return " ".join(
            part
            for part in (text and f"{text[0].upper()}{text[1:]}.", *parts[len(changes) :])
            if part
        )


def reply(wanted: str, text: str) -> str:
    """Return the part of a tool's answer that a question wants: a word, the number of lines, or the
    value of a kind."""
    if wanted == "the number of lines":
        return str(len(text.split("\n")))
    if wanted in KINDS:
        return next((row.split()[0] for row in text.split("\n") if f" {wanted} " in row), "")
    return text.split()[0 if wanted == "the first word" else -1]
