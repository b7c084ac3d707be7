"""Tasks of the smart home: one or two goals, graded by the number of calls in the shortest
solution.

A template such as "room.set+id.value" consists of goals: a subject and what is wanted of it.
Subjects are `id` (a device named by its id), `room`, `person` (their room), `number` (the id of a
room, which only an explorer writes) and `same` (the room of the first goal). Wanted is `set`, a
change, or one of `QUESTIONS`. A task has the phrases written here, or the words of the tools'
descriptions as an explorer words them (`envs.wording`).
"""

import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence

from envs.desk.plans import LEVELS, Plan, Planner
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


class Errand(Planner):
    """Makes the calls of one task in its home, and words them."""

    kind = Home
    ids = re.compile(r"[RLHSBD]\d\d")

    templates = staticmethod(templates)

    @classmethod
    def own_plans(
        cls, split: str, index: int, level: int, seed: int, house: House | None
    ) -> Iterator[Plan]:
        rng = random.Random(f"home {split} task {index} {seed}")
        pairs = [template for template in templates(level) if template.count(".set") == 2]
        held_out = split != "train" and bool(pairs) and index // len(LEVELS) % 2 == 0
        template = rng.choice(pairs if held_out else templates(level))
        yield cls.any_plan(split, rng, template, house, held_out=held_out)

    def write(
        self, *, plain: bool = False, held_out: bool = False, kinds: Sequence[str] = ()
    ) -> Plan:
        """kinds: of the devices of the goals, () = any. held_out: two changes of a pair of
        `HELD_OUT`."""
        self.kinds = self.plan.drawn["kinds"] = kinds or self._kinds(held_out)
        self.plain = plain
        self.room = self.via = ""  # of the last goal: its id, and the name by which it was found
        return super().write(plain=plain)

    def _kinds(self, held_out: bool) -> Sequence[str]:
        """Draw the kinds of the devices of the goals."""
        goals = self.plan.template.split("+")
        while True:
            kinds = self.rng.choice(HELD_OUT) if held_out else self.rng.choices(KINDS, k=len(goals))
            pair = self.plan.template.count(".set") == 2 and set(kinds) in map(set, HELD_OUT)
            if pair == held_out and not (goals[-1] == "same.set" and kinds[0] == kinds[1]):
                return self.rng.sample(kinds, len(kinds))

    def reach(self, subject: str, wanted: str) -> str:
        kind, data = self.kinds[self.goal], self.tools.data
        if subject != "same":
            needed = set(self.kinds) if "same" in self.plan.template else {kind}
            occupied = subject == "person" or wanted == "who"
            self.room = self.pick(
                room
                for room in data.rooms
                if needed <= {device.kind for device in data.devices_in(room)}
                and (data.person_in(room) or not occupied)
            )
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
        self.ask(part or kind)
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
