"""Made-up worlds: random tools, names, schemas and hidden rules, for a policy that reads tools.

A task's seed is the number of its world times `STARTS`, plus the number of its start.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

from envs.made_up.plan import ALL, NONE, ONE, Attribute, Kind, Operation, Plan, plan_of
from envs.toolcalls import parse, run_calls
from envs.values import Json
from envs.world import Evaluation, Observation, StepResult, Task, World, check_split, message

STARTS = 1000
SHOWN = 1_000_000  # worlds that demonstrations are of: the first ones
UNSEEN = 64
Entity = dict[str, str]  # attribute -> value, with "name"


class Refused(Exception):
    """A call that fails; the message is the world's answer."""


class MadeUp(World):
    """One made-up world. number: which one; None: that of each task's seed. Its held-out tasks are
    then one of each of `UNSEEN` worlds that no demonstration shows."""

    name = "made_up"

    def __init__(self, number: int | None = None, *, n_train: int = 32):
        self._number, self._n_train = number, n_train

    def tasks(self, split: str) -> list[Task]:
        from envs.made_up.tasks import own_task

        first = {"train": 0, "dev": STARTS // 2}
        check_split(self.name, split, first)
        if self._number is None:
            worlds = range(SHOWN, SHOWN + UNSEEN) if split == "dev" else ()
            return [own_task(world * STARTS, split) for world in worlds]
        start = self._number * STARTS + first[split]
        return [own_task(seed, split) for seed in range(start, start + self._n_train)]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._world = task.seed // STARTS
        plan = plan_of(self._world)
        self.state = start_of(plan, task.seed)
        self._goal, self._answer = task.verifier, ""
        messages = [message("system", plan.system)] * bool(plan.system)
        messages.append(message("user", task.query))
        return Observation(messages, [op.schema for op in plan.operations])

    def step(self, action: str) -> StepResult:
        turn = parse(action)
        messages, info = run_calls(turn, self._call, most=8)
        if not messages:
            self._answer = turn.content
        return StepResult(messages, terminated=not messages, info=info)

    def _call(self, tool: str, arguments: Json) -> tuple[str, bool]:
        plan = self.state.plan
        op = next((op for op in plan.operations if op.name == tool), None)
        try:
            if op is None:
                raise Refused(f"no tool {tool}")
            return self.state.perform(op, arguments), True
        except Refused as why:
            text = str(why)
            forms = (f"error: {text}", f"Error: {text}.", json.dumps({"error": text}), f"! {text}")
            return forms[plan.error], False

    def evaluate(self) -> Evaluation:
        wanted, answer = self._goal.get("state", []), self._goal.get("answer")
        done = bool(wanted or answer) and self.state.holds(wanted)
        done = done and (answer is None or answer.lower() == self._answer.strip(" .\n").lower())
        return Evaluation(float(done), done)

    def snapshot(self) -> Any:
        return [self._world, copy.deepcopy(self.state.entities), self._goal, self._answer]

    def restore(self, snapshot: Any) -> None:
        self._world, entities, self._goal, self._answer = snapshot
        self.state = State(plan_of(self._world), copy.deepcopy(entities))


def start_of(plan: Plan, seed: int, most: int = 7) -> State:
    """Return the entities at a start: from three of each kind to `most`."""
    rng = random.Random(f"start {seed}")
    state = State(plan, [{} for _ in plan.kinds])
    for kind in plan.kinds:
        entities, names = state[kind], set[str]()
        size = 1 if kind.single else rng.randint(3, most)
        while len(entities) < size:
            name = kind.new_name(rng)
            id = ONE if kind.single else kind.new_id(name, rng)
            if id not in entities and name not in names:
                names.add(name)
                entities[id] = {"name": name}
    for kind in plan.kinds:
        for entity in state[kind].values():
            entity |= state.drawn(kind, rng)
    return state


def text_of(value: Any) -> str:
    """Return an argument as the state holds it."""
    return json.dumps(value) if isinstance(value, bool) else str(value).strip()


class State:
    """The entities of a world, {id: entity} of each kind, and what its tools do to them."""

    def __init__(self, plan: Plan, entities: list[dict[str, Entity]]):
        self.plan, self.entities = plan, entities

    def __getitem__(self, kind: Kind) -> dict[str, Entity]:
        return self.entities[kind.number]

    def drawn(self, kind: Kind, rng: random.Random) -> Entity:
        """Draw the attributes of an entity."""
        return {
            a.name: rng.choice((NONE, NONE, *self[a.other])) if a.other else a.draw(rng)
            for a in kind.attributes
        }

    def holds(self, wanted: list[list[Any]]) -> bool:
        """Return True if the state has all of [number of a kind, id or name, attribute, value]. The
        attribute "there" is "yes" for an entity of that name and "no" for one that is gone."""
        for kind, key, attribute, value in wanted:
            entities = self.entities[kind]
            if attribute == "there":
                there = any(entity["name"] == key for entity in entities.values())
                if there != (value == "yes"):
                    return False
            elif entities.get(key, {}).get(attribute) != value:
                return False
        return True

    # --- calls ------------------------------------------------------------------------------------

    def perform(self, op: Operation, arguments: Json) -> str:
        """Make a call and return the answer. Raises Refused."""
        if set(arguments) != set(op.parameters):
            raise Refused(f"{op.name} takes {', '.join(op.parameters) or 'nothing'}")
        given = {role: text_of(arguments[name]) for name, role in op.parameters.items()}
        kind, attribute = op.kind, op.attribute.name
        if op.does == "list":
            kinds = self.plan.kinds if kind is ALL else [kind]
            listed = itertools.chain(*(itertools.product([k], self[k]) for k in kinds))
            return self.listing(list(listed), kind is ALL)
        entities = self[kind]
        if op.does == "which":
            found = [(kind, id) for id, e in entities.items() if e[attribute] == given["value"]]
            return self.listing(found) if found else f"no {kind.noun}"
        if op.does == "add":
            return self._add(kind, given["name"])
        key = given.get("entity", "")
        if op.does == "find":
            key = next((id for id, e in entities.items() if e["name"] == given["name"]), "")
        id = ONE if kind.single else self._known(kind, key)
        if op.does in ("find", "show"):
            return self.row(kind, id, whole=True)
        other = self._known(op.attribute.other, given["other"]) if op.does == "link" else ""
        if self.missing(op, id, other):
            raise Refused(self._rule(op))
        if op.does == "drop":
            del entities[id]
            said = (f"{id} is gone", "ok", f"{op.verb} {id}", '{"ok": true}', "done", id)
            return said[self.plan.confirmation]
        value = other or op.value or given["value"]
        if op.does == "set":
            _check(op.attribute, value)
        entities[id][attribute] = value
        return self._confirmed(op, id)

    def missing(self, op: Operation, id: str, other: str) -> str:
        """Return the id of the entity for which another operation has to be made first, "" if there
        is none."""
        if not (by := op.needs):
            return ""
        about = {op.kind: id, op.attribute.other: other}.get(by.kind, ONE)
        return about if self[by.kind][about][by.attribute.name] != by.value else ""

    def _rule(self, op: Operation) -> str:
        """Return the error of an operation whose hidden rule is broken."""
        assert op.needs
        noun, value = op.needs.kind.noun, op.needs.value
        if self.plan.explains:
            return f"the {noun} is not {value if value != 'yes' else op.needs.attribute.name}"
        forms = ("not allowed", f"cannot {op.verb} this", "refused", f"{noun} not ready")
        return forms[self.plan.rows % 4]

    def _known(self, kind: Kind, id: str) -> str:
        """Return the id if there is such an entity. Raises Refused."""
        if id not in self[kind]:
            forms = (f"no such {kind.noun}", f"unknown {kind.noun} {id[:20]}", "not found")
            raise Refused(forms[self.plan.rows % 3])
        return id

    def _add(self, kind: Kind, name: str) -> str:
        entities = self[kind]
        if not 0 < len(name) < 40 or any(e["name"] == name for e in entities.values()):
            raise Refused(f"there is a {kind.noun} {name[:20]}" if name else "no name")
        if len(entities) > 30:
            raise Refused("full")
        rng = random.Random(f"{name} {len(entities)}")
        id = kind.new_id(name, rng)
        while id in entities:
            id = kind.new_id(name, rng)
        entities[id] = {"name": name} | self.drawn(kind, rng)
        return self.row(kind, id)

    # --- texts ------------------------------------------------------------------------------------

    def row(self, kind: Kind, id: str, whole: bool = False) -> str:
        """Return an entity as a line, in the world's format. whole: with all attributes."""
        rows, fields = self.plan.rows, self._fields(kind, id, whole)
        if rows == 2:
            return json.dumps(self._record(kind, id, fields))
        name, key = self[kind][id]["name"], id
        named = name if kind.ids == "name" else f"{id}: {name}"
        if kind.single:
            name = key = named = kind.noun
        if rows in (1, 4):
            return (" " if rows == 1 else " | ").join(dict.fromkeys([key, name, *fields.values()]))
        first, joint, sign = {
            0: (f"{'the' if kind.single else kind.noun} {named}", ", ", " "),
            3: (key if key in (name, kind.noun) else f"{name} ({id})", ", ", ": "),
            5: (named, "; ", "="),
        }[rows]
        return joint.join([first, *(label + sign + value for label, value in fields.items())])

    def listing(self, found: list[tuple[Kind, str]], everything: bool = False) -> str:
        """Return entities (kind, id) as lines or as one JSON value."""
        if self.plan.rows == 2 and everything:
            by_kind: dict[str, list[Any]] = {kind.noun: [] for kind, _ in found}
            for kind, id in found:
                by_kind[kind.noun].append(self._record(kind, id, self._fields(kind, id)))
            return json.dumps(by_kind)
        rows = [self.row(kind, id) for kind, id in found]
        if self.plan.rows == 2:
            return f"[{', '.join(rows)}]" if len(rows) != 1 else rows[0]
        return "\n".join(rows) or "nothing"

    def _fields(self, kind: Kind, id: str, whole: bool = False) -> dict[str, str]:
        shown = [a.name for a in kind.attributes if whole or kind.single or a.listed]
        return {name: self[kind][id][name] for name in shown}

    def _record(self, kind: Kind, id: str, fields: dict[str, str]) -> Json:
        named = {} if kind.single else {"name": self[kind][id]["name"]}
        own = {"id": int(id) if kind.ids == "number" else id} if kind.ids != "name" else {}
        return own | named | {n: int(v) if v.isdigit() else v for n, v in fields.items()}

    def _confirmed(self, op: Operation, id: str) -> str:
        """Return what a change answers."""
        kind, name = op.kind, op.attribute.name
        who, value = kind.noun if kind.single else id, self[kind][id][name]
        return (
            f"{who} {name} {value}",
            "ok",
            f"{name} is {value}" if kind.single else f"{kind.noun} {who} is {value}",
            json.dumps({"ok": True}),
            self.row(kind, id, whole=True),
            f"{op.verb} {who}: done",
        )[self.plan.confirmation]


def _check(attribute: Attribute, value: str) -> None:
    """Raise Refused for a value that the attribute cannot have."""
    if attribute.values and value not in attribute.values:
        raise Refused(f"{attribute.name} is one of {', '.join(attribute.values)}")
    if attribute.form == "number" and not (value.isdigit() and len(value) < 4):
        raise Refused(f"{attribute.name} is a number")
    if not 0 < len(value) < 80:
        raise Refused(f"no {attribute.name}")
