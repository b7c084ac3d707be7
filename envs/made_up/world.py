"""Made-up worlds: random tools, names, schemas and hidden rules, for a policy that reads tools.

A task's seed is the number of its world times `STARTS`, plus the number of its start.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from envs.made_up.plan import NONE, ONE, Attribute, Operation, Plan, Rule, plan_of
from envs.toolcalls import parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World

STARTS = 1000
SHOWN = 1_000_000  # worlds that demonstrations are of: the first ones
UNSEEN = 64
Entity = dict[str, str]  # attribute -> value, with "name"
State = list[dict[str, Entity]]  # of each kind: id -> entity


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
        if split not in first:
            raise ValueError(f"made_up has no split {split!r}; it has {', '.join(first)}")
        if self._number is None:
            worlds = range(SHOWN, SHOWN + UNSEEN) if split == "dev" else ()
            return [own_task(world * STARTS, split) for world in worlds]
        starts = range(first[split], first[split] + self._n_train)
        return [own_task(self._number * STARTS + start, split) for start in starts]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._world = task.seed // STARTS
        self.plan = plan_of(self._world)
        self.state = start_of(self.plan, task.seed)
        self._goal, self._answer = task.verifier, ""
        system = [{"role": "system", "content": self.plan.system}] * bool(self.plan.system)
        messages = [*system, {"role": "user", "content": task.query}]
        return Observation(messages, [op.schema for op in self.plan.operations])

    def step(self, action: str) -> StepResult:
        turn = parse(action)
        messages, info = run_calls(turn, self._call, most=8)
        if not messages:
            self._answer = turn.content
        return StepResult(messages, terminated=not messages, info=info)

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        op = next((op for op in self.plan.operations if op.name == tool), None)
        try:
            if op is None:
                raise Refused(f"no tool {tool}")
            return perform(self.plan, self.state, op, arguments), True
        except Refused as why:
            text = str(why)
            return (
                f"error: {text}", f"Error: {text}.", json.dumps({"error": text}), f"! {text}",
            )[self.plan.error], False  # fmt: skip

    def evaluate(self) -> Evaluation:
        wanted, answer = self._goal.get("state", []), self._goal.get("answer")
        done = bool(wanted or answer) and holds(self.state, wanted)
        done = done and (answer is None or answer.lower() == self._answer.strip(" .\n").lower())
        return Evaluation(float(done), done)

    def snapshot(self) -> Any:
        return [self._world, copy.deepcopy(self.state), self._goal, self._answer]

    def restore(self, snapshot: Any) -> None:
        self._world, state, self._goal, self._answer = snapshot
        self.plan, self.state = plan_of(self._world), copy.deepcopy(state)


def start_of(plan: Plan, seed: int, most: int = 7) -> State:
    """Return the entities at a start: from three of each kind to `most`."""
    rng = random.Random(f"start {seed}")
    state: State = []
    for kind in plan.kinds:
        entities: dict[str, Entity] = {}
        names: set[str] = set()
        size = 1 if kind.single else rng.randint(3, most)
        while len(entities) < size:
            name = kind.new_name(rng)
            id = ONE if kind.single else kind.new_id(name, rng)
            if id not in entities and name not in names:
                names.add(name)
                entities[id] = {"name": name}
        state.append(entities)
    for kind, entities in zip(plan.kinds, state):
        for entity in entities.values():
            for attribute in kind.attributes:
                entity[attribute.name] = _first(attribute, state, rng)
    return state


def _first(attribute: Attribute, state: State, rng: random.Random) -> str:
    if attribute.form != "link":
        return attribute.draw(rng)
    return rng.choice((NONE, NONE, *state[attribute.other]))


def holds(state: State, wanted: list[list[Any]]) -> bool:
    """Return True if the state has all of [kind, id or name, attribute, value]. The attribute
    "there" is "yes" for an entity of that name and "no" for one that is gone."""
    for kind, key, attribute, value in wanted:
        if attribute == "there":
            there = any(e["name"] == key for e in state[kind].values())
            if there != (value == "yes"):
                return False
        elif state[kind].get(key, {}).get(attribute) != value:
            return False
    return True


# --- calls ----------------------------------------------------------------------------------------


def perform(plan: Plan, state: State, op: Operation, arguments: dict[str, Any]) -> str:
    """Make a call and return the answer. Raises Refused."""
    if set(arguments) != set(op.parameters):
        raise Refused(f"{op.name} takes {', '.join(op.parameters) or 'nothing'}")
    given = {role: text_of(arguments[name]) for name, role in op.parameters.items()}
    if op.does == "list":
        kinds = range(len(plan.kinds)) if op.kind < 0 else [op.kind]
        return listing(plan, state, [(k, id) for k in kinds for id in state[k]], op.kind < 0)
    kind, entities = plan.kinds[op.kind], state[op.kind]
    if op.does == "which":
        found = [(op.kind, id) for id, e in entities.items() if e[op.attribute] == given["value"]]
        return listing(plan, state, found) if found else f"no {kind.noun}"
    if op.does == "add":
        return _added(plan, state, op, given["name"])
    if op.does == "find":
        named = [id for id, entity in entities.items() if entity["name"] == given["name"]]
        return row(
            plan, state, op.kind, (named or [known(plan, state, op.kind, "")])[0], whole=True
        )
    id = ONE if kind.single else known(plan, state, op.kind, given["entity"])
    if op.does == "show":
        return row(plan, state, op.kind, id, whole=True)
    other = ""
    if op.does == "link":
        other = known(plan, state, kind.attribute(op.attribute).other, given["other"])
    for rule in op.rules:
        if (broken := broken_by(plan, state, op, rule, id, other)) is not None:
            raise Refused(broken)
    if op.does == "drop":
        del entities[id]
        return (f"{id} is gone", "ok", f"{op.verb} {id}", '{"ok": true}', "done", id)[
            plan.confirmation
        ]
    value = other if op.does == "link" else op.value or given["value"]
    attribute = kind.attribute(op.attribute)
    if op.does == "set":
        _check(attribute, value)
    entities[id][op.attribute] = value
    return confirmed(plan, state, op, id)


def text_of(value: Any) -> str:
    """Return an argument as the state holds it."""
    return json.dumps(value) if isinstance(value, bool) else str(value).strip()


def known(plan: Plan, state: State, kind: int, id: str) -> str:
    """Return the id if there is such an entity. Raises Refused."""
    if id not in state[kind]:
        noun = plan.kinds[kind].noun
        raise Refused((f"no such {noun}", f"unknown {noun} {id[:20]}", "not found")[plan.rows % 3])
    return id


def _check(attribute: Attribute, value: str) -> None:
    if attribute.values and value not in attribute.values:
        raise Refused(f"{attribute.name} is one of {', '.join(attribute.values)}")
    if attribute.form == "number" and not (value.isdigit() and len(value) < 4):
        raise Refused(f"{attribute.name} is a number")
    if not 0 < len(value) < 80:
        raise Refused(f"no {attribute.name}")


def subject(plan: Plan, op: Operation, rule: Rule, id: str, other: str) -> tuple[int, str]:
    """Return (kind, id) of the entity that a rule is about."""
    if rule.who == "entity":
        return op.kind, id
    if rule.who == "other":
        return plan.kinds[op.kind].attribute(op.attribute).other, other
    return plan.operations[rule.by].kind, ONE


def broken_by(
    plan: Plan, state: State, op: Operation, rule: Rule, id: str, other: str
) -> str | None:
    """Return why a rule refuses an operation, None if it does not."""
    kind, about = subject(plan, op, rule, id, other)
    current = state[kind][about][rule.attribute]
    if current == rule.value:
        return None
    noun = plan.kinds[kind].noun
    if plan.explains:
        return f"the {noun} is not {rule.value if rule.value != 'yes' else rule.attribute}"
    return ("not allowed", f"cannot {op.verb} this", "refused", f"{noun} not ready")[plan.rows % 4]


def _added(plan: Plan, state: State, op: Operation, name: str) -> str:
    kind, entities = plan.kinds[op.kind], state[op.kind]
    if not 0 < len(name) < 40 or any(e["name"] == name for e in entities.values()):
        raise Refused(f"there is a {kind.noun} {name[:20]}" if name else "no name")
    if len(entities) > 30:
        raise Refused("full")
    rng = random.Random(f"{name} {len(entities)}")
    id = next(id for _ in iter(int, 1) if (id := kind.new_id(name, rng)) not in entities)
    entities[id] = {"name": name} | {a.name: _first(a, state, rng) for a in kind.attributes}
    return row(plan, state, op.kind, id)


# --- texts ----------------------------------------------------------------------------------------


def _fields(plan: Plan, state: State, kind: int, id: str, whole: bool) -> dict[str, str]:
    entity = state[kind][id]
    shown = [a.name for a in plan.kinds[kind].attributes if whole or a.listed]
    return {name: entity[name] for name in shown}


def row(plan: Plan, state: State, kind: int, id: str, whole: bool = False) -> str:
    """Return an entity as a line, in the world's format. whole: with all attributes."""
    k, fields = plan.kinds[kind], _fields(plan, state, kind, id, whole or plan.kinds[kind].single)
    name = state[kind][id]["name"]
    if k.single:
        named, key = k.noun, k.noun
    else:
        named, key = (name, name) if k.ids == "name" else (f"{id}: {name}", id)
    pairs = ", ".join(f"{label} {value}" for label, value in fields.items())
    if plan.rows == 0:
        return f"{k.noun if not k.single else 'the'} {named}{', ' * bool(pairs)}{pairs}"
    if plan.rows == 1:
        return " ".join(dict.fromkeys([key, *([name] * (not k.single)), *fields.values()]))
    if plan.rows == 2:
        return json.dumps(_record(plan, state, kind, id, fields))
    if plan.rows == 3:
        first = key if key in (name, k.noun) else f"{name} ({id})"
        return ", ".join([first, *(f"{label}: {value}" for label, value in fields.items())])
    if plan.rows == 4:
        return " | ".join(dict.fromkeys([key, *([name] * (not k.single)), *fields.values()]))
    return f"{named}" + "".join(f"; {label}={value}" for label, value in fields.items())


def _record(plan: Plan, state: State, kind: int, id: str, fields: dict[str, str]) -> dict[str, Any]:
    k = plan.kinds[kind]
    named = {} if k.single else {"name": state[kind][id]["name"]}
    own = {"id": int(id) if k.ids == "number" else id} if k.ids != "name" else {}
    return own | named | {n: int(v) if v.isdigit() else v for n, v in fields.items()}


def listing(
    plan: Plan, state: State, found: list[tuple[int, str]], everything: bool = False
) -> str:
    """Return entities (kind, id) as lines or as one JSON value."""
    if plan.rows == 2 and everything:
        by_kind: dict[str, list[Any]] = {plan.kinds[kind].noun: [] for kind, _ in found}
        for kind, id in found:
            fields = _fields(plan, state, kind, id, plan.kinds[kind].single)
            by_kind[plan.kinds[kind].noun].append(_record(plan, state, kind, id, fields))
        return json.dumps(by_kind)
    rows = [row(plan, state, kind, id) for kind, id in found]
    if plan.rows == 2:
        return f"[{', '.join(rows)}]" if len(rows) != 1 else rows[0]
    return "\n".join(rows) or "nothing"


def confirmed(plan: Plan, state: State, op: Operation, id: str) -> str:
    """Return what a change answers."""
    kind, entity = plan.kinds[op.kind], state[op.kind][id]
    who, value = kind.noun if kind.single else id, entity[op.attribute]
    return (
        f"{who} {op.attribute} {value}",
        "ok",
        f"{kind.noun} {who} is {value}" if not kind.single else f"{op.attribute} is {value}",
        json.dumps({"ok": True}),
        row(plan, state, op.kind, id, whole=True),
        f"{op.verb} {who}: done",
    )[plan.confirmation]
