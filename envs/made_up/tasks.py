"""Tasks of made-up worlds with their solutions, in words of their own or in the explorer's."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, NamedTuple

from envs.made_up.plan import Kind, Operation, Plan, plan_of
from envs.made_up.words import (
    CLOSINGS,
    GREETINGS,
    LINK_REQUESTS,
    OPENINGS,
    PUT_BY_VALUE,
    PUT_REQUESTS,
    PUT_STATEMENTS,
    QUESTIONS,
    SET_BRIEFLY,
    SET_REQUESTS,
    SET_STATEMENTS,
)  # fmt: skip
from envs.made_up.world import STARTS, Refused, State, broken_by, holds, perform, start_of, subject
from envs.probed import cells
from envs.toolcalls import call_text
from envs.wording import goal_text, inlined, joined, spaced, summaries
from envs.world import Task

SETTING = ("set", "change", "put", "make", "switch", "adjust")  # what any tool that sets does
JOINTS = (" and ", ", then ", ". Then ", ", and ")
DONE = "done"
YES_NO = ("yes", "no")
TRIES = 200
SMALL_TALK = 0.12  # share of the queries with a greeting, and of those with a closing
EXPLORERS = 0.5  # share of the tasks in the explorer's words
INLINED = 0.7  # share of those with values in place of their parameters
ASKED = 0.2  # share of the tasks that are questions
LOOKED_UP = 0.6  # share of the tasks that name entities without their ids
AGAIN = 0.4  # share of the tasks of several goals whose first two are of one tool
RULED = 4.0  # how much likelier a goal is whose tool has a hidden rule


class Made(NamedTuple):
    """A call of a solution. needed: for a rule, and not what the task asks for."""

    op: Operation
    arguments: dict[str, Any]
    needed: bool


class Goal(NamedTuple):
    """The words of a goal. request: they may follow "please". elided: the verb is the one of the
    goal before, and is not repeated."""

    text: str
    request: bool = True
    elided: bool = False


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
    goals: list[Goal] = []
    calls: list[Made] = []
    wanted: list[list[Any]] = []
    answer, asked = "", ""
    if not plan.changing() or rng.random() < ASKED:
        text, calls, answer, asked = _question(plan, state, words, rng)
        goals = [Goal(text, not text.startswith(("what", "which", "I ")))]
    else:
        numbers = plan.changing()
        ruled = [RULED if plan.operations[n].rules else 1.0 for n in numbers]
        chosen = rng.choices(numbers, ruled, k=rng.choice((1, 1, 2, 2, 3)))
        elided = 0
        if len(chosen) > 1 and rng.random() < AGAIN:
            chosen[1] = chosen[0]
            elided = plan.operations[chosen[0]].does in ("put", "link") and rng.random() < 0.7
        for n, number in enumerate(chosen):
            op, plain = plan.operations[number], bool(elided) and n < 2
            goal, made, changes = _goal(plan, state, op, words, rng, plain)
            if plain and n:
                goal = Goal(goal.text.removeprefix(f"{op.verb} "), elided=True)
            goals.append(goal)
            calls += made
            wanted += changes
    if len({tuple(map(str, change[:3])) for change in wanted}) < len(wanted):
        raise Unfit
    if not holds(state, wanted) or (wanted and holds(start_of(plan, seed), wanted)):
        raise Unfit  # the second goal undid the first
    calls = [look for look in words.look_ups() if look not in calls[:1]] + calls
    if words.explorers:
        query = joined([goal.text for goal in goals], asked, rng)
        if rng.random() < INLINED:
            query = inlined(query, words.named)
            if rng.random() < 0.5:
                query = f"Please {query[:1].lower()}{query[1:]}"
    else:
        query = _request(goals, rng)
    return _task(plan, seed, split, query, calls, state, wanted, answer)


def _request(goals: list[Goal], rng: random.Random) -> str:
    """Return a query in words of its own."""
    joint = rng.choice(JOINTS)
    text = goals[0].text
    for goal in goals[1:]:
        text += (" and " if goal.elided else joint) + goal.text
    opening = rng.choice(OPENINGS) if goals[0].request else ""
    end = "?" if (opening or text).startswith(("can", "could", "would", "what", "which")) else "."
    text = opening + text
    if goals[0].request or text.startswith(("the ", "wh", "I ", "we ")):  # a name stays as it is
        text = text[0].upper() + text[1:]
    greeting = rng.choice(GREETINGS) if rng.random() < SMALL_TALK else ""
    closing = rng.choice(CLOSINGS) if rng.random() < SMALL_TALK else ""
    return f"{greeting}{text}{closing}{end}"


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
        self.style = rng.choice((0, 3, 5) if rng.random() < LOOKED_UP else (1, 2, 4))
        self.explorers = rng.random() < EXPLORERS
        self.sought: list[tuple[int, str]] = []
        self.told: set[int] = set()  # kinds of entities that a list alone tells
        self.named: list[str] = []
        self.summaries = summaries({op.name: op.description for op in plan.operations})

    def __call__(self, kind: int, id: str) -> str:
        k, name = self.plan.kinds[kind], self.state[kind][id]["name"]
        if k.single:
            return f"the {k.noun}"
        by_name = self.style in (0, 3, 5)
        told = self._told(kind, id) if self.style == 5 and not self.explorers else ""
        if told or (by_name and k.ids != "name"):
            self.sought.append((kind, id))
            self.told |= {kind} if told else set()
        if self.explorers:
            return name if by_name else id
        if told:
            return told
        if k.names == "plain" and self.rng.random() < 0.7:
            name = f"the {name}"
        if k.ids == "name":
            return (name, name, f"{k.noun} {name}", f"the {k.noun} {name}", name, name)[self.style]
        return (
            name, f"{name} ({id})", f"{k.noun} {id}", f"the {k.noun} {name}", id, name,
        )[self.style]  # fmt: skip

    def _told(self, kind: int, id: str) -> str:
        """Return words that tell an entity by a listed attribute, "" if none does."""
        k, entities = self.plan.kinds[kind], self.state[kind]
        lists = looking(self.plan, "list", kind) or looking(self.plan, "list", -1)
        found = []
        for a in k.attributes:
            value = entities[id][a.name]
            if a.listed and a.form in ("choice", "number", "text"):
                found += [a] * (sum(e[a.name] == value for e in entities.values()) == 1)
        if not found or not lists:
            return ""
        a = self.rng.choice(found)
        forms = ["the {noun} whose {a} is {v}", "the {noun} with the {a} {v}"]
        forms += ["the {v} {noun}"] * (a.form == "choice" and entities[id][a.name] not in YES_NO)
        return self.rng.choice(forms).format(noun=k.noun, a=a.name, v=entities[id][a.name])

    def described(self, op: Operation, phrases: dict[str, str]) -> str:
        """Return a goal in the explorer's words. phrases: {role of a parameter: its value}."""
        arguments = {name: phrases[role] for name, role in op.parameters.items()}
        self.named += arguments.values()
        return goal_text(self.summaries[op.name], arguments)

    def look_ups(self) -> list[Made]:
        """Return the calls that show the ids which the query does not tell."""
        made: list[Made] = []
        ways: dict[int, Operation] = {}
        for kind, id in self.sought:
            lists = looking(self.plan, "list", -1) or looking(self.plan, "list", kind)
            finds = looking(self.plan, "find", kind) if kind not in self.told else []
            op = ways.setdefault(kind, self.rng.choice([*lists[:1], *finds]))
            name = self.state[kind][id]["name"]
            look = Made(op, dict.fromkeys(op.parameters, name), False)
            made += [look] * (look not in made)
        return made


def looking(plan: Plan, does: str, kind: int) -> list[Operation]:
    """Return the tools that list, show or find entities of a kind."""
    return [op for op in plan.operations if op.does == does and op.kind == kind]


def _values(plan: Plan, kind: Kind, op: Operation, rng: random.Random) -> str:
    return op.value or kind.attribute(op.attribute).draw(rng)


def _goal(
    plan: Plan, state: State, op: Operation, words: _References, rng: random.Random, plain: bool
) -> tuple[Goal, list[Made], list[list[Any]]]:
    """Make a change. Return its words, plain ones if so wanted, the calls that make it, and what is
    then so."""
    kind, k = plan.kinds[op.kind], op.kind
    if op.does == "add":
        name = kind.new_name(rng)
        made = _made(plan, state, op, {"name": name}, False)
        if words.explorers:
            said = words.described(op, {"name": name})
            return Goal(said), [made], [[k, name, "there", "yes"]]
        called = rng.choice(("called", "named", "with the name"))
        verb = op.verb if op.verb != "new" else "make"
        text = f"{verb} a {kind.noun} {called} {name}"
        return Goal(text), [made], [[k, name, "there", "yes"]]
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
        goal = Goal(words.described(op, {"entity": called, "other": said, "value": said}))
    else:
        goal = _worded(plan, op, called, said, rng, plain)
    calls.append(_made(plan, state, op, given, False))
    if op.does == "drop":
        return goal, calls, [[k, name, "there", "no"]]
    return goal, calls, [[k, id, op.attribute, value]]


def _worded(
    plan: Plan, op: Operation, called: str, value: str, rng: random.Random, plain: bool
) -> Goal:
    """Return a change in words of its own. plain: begin with the verb of the tool."""
    verb, requests, statements = op.verb, list(PUT_REQUESTS), list[str]()
    if op.does == "link":
        requests = list(LINK_REQUESTS)
    elif op.does == "set":
        a = plan.kinds[op.kind].attribute(op.attribute)
        verb = rng.choice((op.verb, op.verb, *SETTING))
        requests, statements = SET_REQUESTS, SET_STATEMENTS
        settable = [o for o in plan.operations if o.does == "set" and o.kind == op.kind]
        if len(settable) == 1 and a.form in ("choice", "number") and rng.random() < 0.4:
            requests, statements = SET_BRIEFLY, []
        if a.unit and rng.random() < 0.6:
            value = f"{value} {a.unit}"
        elif a.form == "text" and rng.random() < 0.3:
            value = f'"{value}"'
    elif op.does == "put" and value not in YES_NO and rng.random() < 0.5:
        requests, statements = PUT_BY_VALUE, PUT_STATEMENTS
    stated = not plain and bool(statements) and rng.random() < 0.3
    form = rng.choice(statements if stated else requests[:1] if plain else requests)
    words = {"verb": verb, "e": called, "v": value, "a": op.attribute, "prep": op.preposition}
    return Goal(form.format(**words), not stated and not form.startswith(("I ", "we ")))


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
    finds, name = looking(plan, "find", k), state[k][id]["name"]
    if finds and words.explorers and rng.random() < 0.6:
        called, shows = name, finds
    else:
        called, shows = words(k, id), looking(plan, "show", k)
    calls = [_made(plan, state, op, {"entity": id, "name": name}, False) for op in shows[:1]]
    if words.explorers and calls:
        text = words.described(shows[0], {"entity": called, "name": name})
        wanted, answer = _reply(perform(plan, state, shows[0], calls[0].arguments), text, rng)
        return text, calls, answer, wanted
    words.explorers = False
    lists = looking(plan, "list", k) or looking(plan, "list", -1)
    if not calls and lists and (attribute.listed or kind.single):
        calls = [Made(lists[0], {}, False)]
    elif not calls and finds and (k, id) in words.sought and k not in words.told:
        words.sought.remove((k, id))
        calls = [_made(plan, state, finds[0], {"name": name}, False)]
    text = rng.choice(QUESTIONS).format(a=attribute.name, e=called)
    if not calls or state[k][id][attribute.name] in text:
        raise Unfit
    return text, calls, state[k][id][attribute.name], ""


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
