"""Tasks of the smart home: one or two goals, graded by the number of calls in the shortest
solution.

A template such as "room.set+id.value" consists of goals: a subject and what is wanted of it.
Subjects are `id` (a device named by its id), `room`, `person` (their room), `number` (the id of a
room, which only an explorer writes) and `same` (the room of the first goal). Wanted is `set`, a
change, or one of `QUESTIONS`. A task has the phrases written here, or the words of the tools'
descriptions as an explorer words them (`envs.wording`).
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence

from envs.desk.plans import SPLITS, WORLDS, Plan, Planner, Unfit, reply, sentence, words
from envs.desk.rules import House
from envs.home.data import KINDS, VALUES
from envs.home.devices import Home, change

# Changed together in dev and test only.
HELD_OUT = (("lamp", "door"), ("heater", "speaker"), ("blind", "lamp"))

# Goal -> its phrase, "" if only an explorer words it, and the part of the last answer that it
# wants, "" for the value of the device's kind.
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
_DEVICES = ("set", "value", "count")  # what is wanted of the devices of a room


@functools.cache
def templates(level: int, *, plain: bool = False) -> tuple[str, ...]:
    """Return the templates of a level, those with changes more often. plain: those that an explorer
    can word."""
    changes = ["id.set", "room.set", "person.set", *["number.set"] * plain]
    asks = [goal for goal, (phrase, wanted) in QUESTIONS.items() if (wanted if plain else phrase)]
    pairs = map("+".join, itertools.product(changes, (*changes * 3, *asks)))
    same = [f"{one}+same.set" for one in changes[1:]]
    every = [*changes * 3, *asks, *pairs, *same * 3]
    return tuple(t for t in every if sum(map(_calls, t.split("+"))) == level)


def _calls(goal: str) -> int:
    subject, _, wanted = goal.partition(".")
    named = subject in ("room", "person")
    return 1 + named * (wanted in _DEVICES) + (named or subject == "number") * (wanted == "set")


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
        drawn = kinds or _kinds(template, held_out, rng)
        try:
            return _Planner(world, rng, template, house).write(drawn, plain)
        except Unfit:
            continue


def _kinds(template: str, held_out: bool, rng: random.Random) -> Sequence[str]:
    """Draw the kinds of the devices of the goals."""
    while True:
        kinds = rng.choice(HELD_OUT) if held_out else rng.choices(KINDS, k=1 + template.count("+"))
        together = template.count(".set") == 2 and any(set(kinds) == set(pair) for pair in HELD_OUT)
        if together == held_out and not ("same" in template and kinds[0] == kinds[1]):
            return rng.sample(kinds, len(kinds))


class _Planner(Planner):
    """Makes the calls of one task in its home, and words them."""

    ids = re.compile(r"[RLHSBD]\d\d")
    kind = Home

    def write(self, kinds: Sequence[str], plain: bool) -> Plan:
        plan, self.plain, self.unused = self.plan, plain, list(self.tools.data.rooms)
        plan.drawn = kinds, plain
        self.room = self.via = ""  # of the last goal: its id, and the name by which it was found
        targets, parts = [], []
        for self.goal, goal in enumerate(plan.template.split("+")):
            subject, wanted = goal.split(".")
            parts.append(self._goal(subject, wanted, kinds))
            targets.append(len(plan.calls) - 1)
        if plain:
            plan.query = self.joined(self.described(targets), plan.wanted or "")
        else:
            plan.query = self._sentences(parts)
        if plan.answer and plan.answer in words(plan.query):
            raise Unfit
        return plan

    def _goal(self, subject: str, wanted: str, kinds: Sequence[str]) -> str:
        """Make the calls of a goal and return its words."""
        kind, data = kinds[self.goal], self.tools.data
        if subject != "same":
            needed = set(kinds) if "same" in self.plan.template else {kind}
            self.room = self._pick(needed, occupied=subject == "person" or wanted == "who")
        device = next((d.id for d in data.devices_in(self.room) if d.kind == kind), "")
        if subject in ("room", "person"):
            self.via = data.rooms[self.room] if subject == "room" else data.person_in(self.room)
            self.call(subject, name=self.via)
        if subject in ("room", "person", "number") and wanted in _DEVICES:
            self.call("devices", room=self.room)
        it = device if subject == "id" else self.via
        if wanted == "set":
            return self._set(kind, device, subject, it)
        if subject == "id":
            self.call("device", id=device)
        question, part = QUESTIONS[f"{subject}.{wanted}"]
        self.plan.wanted = part or kind
        self.plan.answer = reply(self.plan.wanted, self.texts[-1])
        return question.format(kind=kind, it=it)

    def _set(self, kind: str, device: str, subject: str, it: str) -> str:
        """Set a device to another value and return the words for it."""
        value = self.rng.choice([v for v in VALUES[kind] if v != self.tools.state[device]])
        tool, arguments = change(kind, value)
        self.desk(tool, device)
        self.call(tool, device=device, **arguments)
        if self.plain:
            return ""
        phrase = self.rng.choice(PHRASES[subject]).format(kind=kind, it=it)
        return self.rng.choice(SET.get(value) or SET[kind]).format(it=phrase, value=value)

    def _pick(self, kinds: set[str], occupied: bool) -> str:
        """Return a room of which no other goal is."""
        data = self.tools.data
        fitting = [
            room
            for room in self.unused
            if kinds <= {device.kind for device in data.devices_in(room)}
            and (data.person_in(room) or not occupied)
        ]
        if not fitting:
            raise Unfit
        self.unused.remove(room := self.rng.choice(fitting))
        return room

    def _sentences(self, parts: list[str]) -> str:
        changes = [part for part in parts if not part.endswith("?")]
        text = self.rng.choice((" and ", ", then ")).join(changes)
        return " ".join([*filter(None, [sentence(text)]), *parts[len(changes) :]])
