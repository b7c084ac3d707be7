"""Tasks of made-up worlds with their solutions, in words of their own or in the explorer's."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, NamedTuple

from envs.made_up.plan import Kind, Operation, Plan, plan_of
from envs.made_up.world import STARTS, Refused, State, broken_by, holds, perform, start_of, subject
from envs.probed import cells
from envs.toolcalls import call_text
from envs.wording import goal_text, inlined, joined, spaced, summaries
from envs.world import Task

OPENINGS = ("", "", "Please ", "I need you to ", "Can you ")
JOINTS = (" and ", ", then ", ". Then ", ", and ")
DONE = "done"
TRIES = 200
EXPLORERS = 0.5  # share of the tasks in the explorer's words
INLINED = 0.7  # share of those with values in place of their parameters
ASKED = 0.2  # share of the tasks that are questions
LOOKED_UP = 0.6  # share of the tasks that name entities without their ids
RULED = 4.0  # how much likelier a goal is whose tool has a hidden rule


class Made(NamedTuple):
    """A call of a solution. needed: for a rule, and not what the task asks for."""

    op: Operation
    arguments: dict[str, Any]
    needed: bool


class Unfit(Exception):
    """A draft that makes no task."""


def own_task(seed: int, split: str = "train") -> Task:
    """Return the task of a start in the world's own words."""
    rng = random.Random(f"task {seed}")
    plan = plan_of(seed // STARTS)
    for _ in range(TRIES):
        try:
            return _drafted(plan, seed, split, rng)
        except (Unfit, Refused):
            continue
    state = start_of(plan, seed)  # in a small world everything may be as it should be
    calls = [Made(op, {}, False) for op in plan.operations if not op.parameters][:1]
    return _task(plan, seed, split, "What is there?", calls, state, [], "")


def _drafted(plan: Plan, seed: int, split: str, rng: random.Random) -> Task:
    state = start_of(plan, seed)
    words = _References(plan, state, rng)
    goals, calls, wanted, answer, asked = [], [], [], "", ""
    if not plan.changing() or rng.random() < ASKED:
        text, made, answer, asked = _question(plan, state, words, rng)
        goals, calls = [text], made
    else:
        numbers = plan.changing()
        ruled = [RULED if plan.operations[n].rules else 1.0 for n in numbers]
        for n in rng.choices(numbers, ruled, k=rng.choice((1, 1, 2, 2, 3))):
            text, made, changes = _goal(plan, state, plan.operations[n], words, rng)
            goals.append(text)
            calls += made
            wanted += changes
    if len({tuple(map(str, change[:3])) for change in wanted}) < len(wanted):
        raise Unfit
    if not holds(state, wanted) or (wanted and holds(start_of(plan, seed), wanted)):
        raise Unfit  # the second goal undid the first
    looks = words.look_ups()
    calls = [Made(op, {}, False) for op in looks if not any(c.op is op for c in calls[:1])] + calls
    if words.explorers:
        query = joined(goals, asked, rng)
        if rng.random() < INLINED:
            query = inlined(query, words.named)
            if rng.random() < 0.5:
                query = f"Please {query[:1].lower()}{query[1:]}"
    else:
        joint = rng.choice(JOINTS)
        if joint.endswith("Then "):
            goals[1:] = [goal[0].lower() + goal[1:] for goal in goals[1:]]
        query = ("" if answer else rng.choice(OPENINGS)) + joint.join(goals)
        query = query[0].upper() + query[1:]
        query += "?" if query.startswith(("Can", "What")) else "."
    return _task(plan, seed, split, query, calls, state, wanted, answer)


def _task(
    plan: Plan, seed: int, split: str, query: str, calls: list[Made], state: State,
    wanted: list[list[Any]], answer: str,
) -> Task:  # fmt: skip
    verifier: dict[str, Any] = {"state": wanted} | ({"answer": answer} if answer else {})
    said = [call_text(call.op.name, call.arguments) for call in calls]
    needed = [n for n, call in enumerate(calls) if call.needed]
    return Task(
        id=f"made_up/{seed}", env="made_up", query=query, split=split, seed=seed,
        reference=[*said, answer or DONE], verifier=verifier, difficulty=len(calls),
        meta={"needed": needed},
    )  # fmt: skip


class _References:
    """The words by which a query refers to entities. Some references make a look-up necessary.

    explorers: goals are in the explorer's words, which are `summaries` of tools with arguments.
    named: the values that these say.
    """

    def __init__(self, plan: Plan, state: State, rng: random.Random):
        self.plan, self.state, self.rng = plan, copy.deepcopy(state), rng
        self.style = rng.choice((0, 3) if rng.random() < LOOKED_UP else (1, 2, 4))
        self.explorers, self.sought = rng.random() < EXPLORERS, set[int]()
        self.named: list[str] = []
        self.summaries = summaries({op.name: op.description for op in plan.operations})

    def __call__(self, kind: int, id: str) -> str:
        k, name = self.plan.kinds[kind], self.state[kind][id]["name"]
        if k.single:
            return f"the {k.noun}"
        if self.style in (0, 3) and k.ids != "name":
            self.sought.add(kind)
        if self.explorers:
            return name if self.style in (0, 3) else id
        if k.ids == "name":
            return (name, name, f"{k.noun} {name}", f"the {k.noun} {name}", name)[self.style]
        return (
            name, f"{name} ({id})", f"{k.noun} {id}", f"the {k.noun} {name}", id,
        )[self.style]  # fmt: skip

    def described(self, op: Operation, phrases: dict[str, str]) -> str:
        """Return a goal in the explorer's words. phrases: {role of a parameter: its value}."""
        arguments = {name: phrases[role] for name, role in op.parameters.items()}
        self.named += arguments.values()
        return goal_text(self.summaries[op.name], arguments)

    def look_ups(self) -> list[Operation]:
        """Return the calls that show the ids which the query does not tell."""
        lists = [op for op in self.plan.operations if op.does == "list"]
        whole = [op for op in lists if op.kind < 0]
        return whole if whole and self.sought else [op for op in lists if op.kind in self.sought]


def _values(plan: Plan, kind: Kind, op: Operation, rng: random.Random) -> str:
    return op.value or kind.attribute(op.attribute).draw(rng)


def _goal(
    plan: Plan, state: State, op: Operation, words: _References, rng: random.Random
) -> tuple[str, list[Made], list[list[Any]]]:
    """Make a change. Return its words, the calls that make it, and what is then so."""
    kind, k = plan.kinds[op.kind], op.kind
    if op.does == "add":
        name = kind.new_name(rng)
        made = _made(plan, state, op, {"name": name}, False)
        if words.explorers:
            return words.described(op, {"name": name}), [made], [[k, name, "there", "yes"]]
        called = rng.choice(("called", "named", "with the name"))
        verb = op.verb if op.verb != "new" else "make"
        return f"{verb} a {kind.noun} {called} {name}", [made], [[k, name, "there", "yes"]]
    id = rng.choice([id for id in state[k] if id in words.state[k]])
    given = {"entity": id}
    other = ""
    if op.does == "link":
        link = kind.attribute(op.attribute).other
        other = rng.choice([id for id in state[link] if id in words.state[link]])
        given["other"] = other
    value = other or ("" if op.does == "drop" else _values(plan, kind, op, rng))
    if op.does != "drop" and state[k][id][op.attribute] == value:
        raise Unfit
    calls = []
    for rule in op.rules:
        if broken_by(plan, state, op, rule, id, other) is not None:
            by = plan.operations[rule.by]
            calls.append(
                _made(plan, state, by, {"entity": subject(plan, op, rule, id, other)[1]}, True)
            )
    called, name = words(k, id), state[k][id]["name"]
    if op.does == "set":
        given["value"] = value
    said = words(link, other) if other else value
    if words.explorers:
        text = words.described(op, {"entity": called, "other": said, "value": said})
    else:
        text = _worded(op, called, said, rng)
    calls.append(_made(plan, state, op, given, False))
    if op.does == "drop":
        return text, calls, [[k, name, "there", "no"]]
    return text, calls, [[k, id, op.attribute, value]]


def _worded(op: Operation, called: str, value: str, rng: random.Random) -> str:
    if op.does == "drop":
        return f"{op.verb} {called}"
    if op.does == "link":
        return f"{op.verb} {called} {op.preposition} {value}"
    if op.does == "set":
        form = rng.randrange(4)
        verb = op.verb if form == 0 else ("set", "change")[form % 2]
        plain = f"{verb} the {op.attribute} of {called} to {value}"
        return plain if form < 3 else f"make the {op.attribute} of {called} {value}"
    plain = f"{op.verb} {called}"
    if value in ("yes", "no") or rng.random() < 0.6:
        return plain
    return rng.choice((f"make {called} {value}", f"make sure that {called} is {value}"))


def _made(plan: Plan, state: State, op: Operation, given: dict[str, str], needed: bool) -> Made:
    arguments: dict[str, Any] = {}
    for name, role in op.parameters.items():
        kind = op.schema["function"]["parameters"]["properties"][name]["type"]
        arguments[name] = given[role] if kind == "string" else json.loads(given[role])
    perform(plan, state, op, arguments)
    return Made(op, arguments, needed)


def _question(
    plan: Plan, state: State, words: _References, rng: random.Random
) -> tuple[str, list[Made], str, str]:
    """Return a question about an attribute, the calls that show it, the answer, and what to reply
    with if the question is in the explorer's words."""
    k = rng.randrange(len(plan.kinds))
    kind = plan.kinds[k]
    attributes = [a for a in kind.attributes if a.form != "link"]
    if not attributes:
        raise Unfit
    attribute, id = rng.choice(attributes), rng.choice(list(state[k]))
    called = words(k, id)
    shows = [op for op in plan.operations if op.does == "show" and op.kind == k]
    calls = [_made(plan, state, op, {"entity": id}, False) for op in shows[:1]]
    if words.explorers and calls:
        text = words.described(shows[0], {"entity": called})
        wanted, answer = _reply(perform(plan, state, shows[0], calls[0].arguments), text, rng)
        return text, calls, answer, wanted
    words.explorers = False
    if not calls:
        if not attribute.listed and not kind.single:
            raise Unfit
        lists = [op for op in plan.operations if op.does == "list" and op.kind in (k, -1)]
        calls = [Made(op, {}, False) for op in lists[:1]]
    text = rng.choice(("what is the {} of {}", "tell me the {} of {}", "say the {} of {}"))
    return text.format(attribute.name, called), calls, state[k][id][attribute.name], ""


def _reply(shown: str, query: str, rng: random.Random) -> tuple[str, str]:
    """Return what to reply with, as the explorer words it, and that value of an answer. Raises
    Unfit if the query tells every one."""
    found = cells("", shown)
    if found and found[0].label:
        options = [(f"the {spaced(c.label.removeprefix('$.'))}", c.value) for c in found]
    else:
        options = [("the first word", found[0].value), ("the last word", found[-1].value)]
    options = [option for option in options if option[1] not in query]
    if not options:
        raise Unfit
    return rng.choice(options)
