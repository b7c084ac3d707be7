"""Tasks of made-up worlds with their solutions, in words of their own or in the explorer's."""

import json
import random
from typing import Any, NamedTuple

from envs.made_up.plan import ALL, Kind, Operation, Plan, plan_of
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
from envs.made_up.world import STARTS, Refused, start_of
from envs.probed import cells
from envs.toolcalls import call_text
from envs.values import Json
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
    arguments: Json
    needed: bool = False


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
    rng, plan = random.Random(f"task {seed}"), plan_of(seed // STARTS)
    for _ in range(TRIES):
        draft = _Draft(plan, seed, rng)
        try:
            query = draft.query()
            break
        except (Unfit, Refused):
            continue
    else:  # in a small world everything may be as it should be
        draft = _Draft(plan, seed, rng)
        draft.calls = [Made(op, {}) for op in plan.operations if not op.parameters][:1]
        query = "What is there?"
    calls, answer = draft.calls, draft.answer
    said = [call_text(call.op.name, call.arguments) for call in calls]
    return Task(
        id=f"made_up/{seed}", env="made_up", query=query, split=split, seed=seed,
        reference=[*said, answer or DONE],
        verifier={"state": draft.wanted} | ({"answer": answer} if answer else {}),
        difficulty=len(calls),
        meta={"needed": [n for n, call in enumerate(calls) if call.needed]},
    )  # fmt: skip


class _Draft:
    """A task that is being made, and the words by which its query refers to entities. Some
    references make a look-up necessary.

    start, state: the entities before and after the calls. wanted: what is so after them. answer,
    asked: of a question, and what to reply with in the explorer's words. explorers: goals are in
    the explorer's words, which are `summaries` of tools with arguments. named: the values that
    these say. sought: the entities, (kind, id), whose ids are to be looked up. told: kinds of
    entities that a list alone tells.
    """

    def __init__(self, plan: Plan, seed: int, rng: random.Random):
        self.plan, self.rng = plan, rng
        self.start, self.state = start_of(plan, seed), start_of(plan, seed)
        self.style = rng.choice((0, 3, 5) if rng.random() < LOOKED_UP else (1, 2, 4))
        self.explorers = rng.random() < EXPLORERS
        self.calls: list[Made] = []
        self.wanted: list[list[Any]] = []
        self.answer = self.asked = ""
        self.sought: list[tuple[Kind, str]] = []
        self.told: set[Kind] = set()
        self.named: list[str] = []
        self.summaries = summaries({op.name: op.description for op in plan.operations})

    def query(self) -> str:
        """Draw the goals, make their calls, and return their words. Raises Unfit or Refused."""
        rng, changing = self.rng, self.plan.changing()
        if changing and rng.random() >= ASKED:
            goals = self._changes(changing)
        else:
            text = self._question()
            goals = [Goal(text, not text.startswith(("what", "which", "I ")))]
        if len({tuple(map(str, change[:3])) for change in self.wanted}) < len(self.wanted):
            raise Unfit
        if not self.state.holds(self.wanted) or (self.wanted and self.start.holds(self.wanted)):
            raise Unfit  # the second goal undid the first
        self.calls = [look for look in self._look_ups() if look not in self.calls[:1]] + self.calls
        if not self.explorers:
            return _request(goals, rng)
        query = joined([goal.text for goal in goals], self.asked, rng)
        if rng.random() < INLINED:
            query = inlined(query, self.named)
            if rng.random() < 0.5:
                query = f"Please {query[:1].lower()}{query[1:]}"
        return query

    # --- goals ------------------------------------------------------------------------------------

    def _changes(self, changing: list[Operation]) -> list[Goal]:
        """Make one to three changes and return their words."""
        rng = self.rng
        ruled = [RULED if op.needs else 1.0 for op in changing]
        chosen = rng.choices(changing, ruled, k=rng.choice((1, 1, 2, 2, 3)))
        elided = False
        if len(chosen) > 1 and rng.random() < AGAIN:
            chosen[1] = chosen[0]
            elided = chosen[0].does in ("put", "link") and rng.random() < 0.7
        goals = []
        for n, op in enumerate(chosen):
            plain = elided and n < 2
            goal = self._addition(op) if op.does == "add" else self._change(op, plain)
            if plain and n:
                goal = Goal(goal.text.removeprefix(f"{op.verb} "), elided=True)
            goals.append(goal)
        return goals

    def _addition(self, op: Operation) -> Goal:
        kind = op.kind
        name = kind.new_name(self.rng)
        self._make(op, name=name)
        self.wanted.append([kind.number, name, "there", "yes"])
        if self.explorers:
            return Goal(self._described(op, name=name))
        called = self.rng.choice(("called", "named", "with the name"))
        return Goal(f"{op.verb if op.verb != 'new' else 'make'} a {kind.noun} {called} {name}")

    def _change(self, op: Operation, plain: bool) -> Goal:
        """Make a change, and before it the one that a rule needs. Return its words, which begin
        with the verb of the tool if they are to be plain."""
        kind, attribute, rng = op.kind, op.attribute, self.rng
        id = self._any(kind)
        other = self._any(attribute.other) if op.does == "link" else ""
        drop = op.does == "drop"
        value = other or ("" if drop else op.value or attribute.draw(rng))
        if not drop and self.state[kind][id][attribute.name] == value:
            raise Unfit
        if op.needs and (needed := self.state.missing(op, id, other)):
            self._make(op.needs, True, entity=needed)
        called = self._reference(kind, id)
        said = self._reference(attribute.other, other) if other else value
        if self.explorers:
            goal = Goal(self._described(op, entity=called, other=said, value=said))
        else:
            goal = self._worded(op, called, said, plain)
        self._make(op, entity=id, other=other, value=value)
        gone = [kind.number, self.start[kind][id]["name"], "there", "no"]
        self.wanted.append(gone if drop else [kind.number, id, attribute.name, value])
        return goal

    def _any(self, kind: Kind) -> str:
        """Draw one of the entities that were there from the start."""
        return self.rng.choice([id for id in self.state[kind] if id in self.start[kind]])

    def _question(self) -> str:
        """Make the calls that show an attribute, and return a question about it."""
        rng, kind = self.rng, self.rng.choice(self.plan.kinds)
        attributes = [a for a in kind.attributes if a.form != "link"]
        if not attributes:
            raise Unfit
        attribute, id = rng.choice(attributes), rng.choice(list(self.state[kind]))
        entity, finds = self.state[kind][id], self._looking("find", kind)
        name = called = entity["name"]
        shows = finds
        if not (finds and self.explorers and rng.random() < 0.6):
            called, shows = self._reference(kind, id), self._looking("show", kind)
        lists = self._looking("list", kind) or self._looking("list", ALL)
        if shows:
            shown = self._make(shows[0], entity=id, name=name)
            if self.explorers:
                text = self._described(shows[0], entity=called, name=name)
                self.asked, self.answer = _reply(shown, text, rng)
                return text
        elif lists and (attribute.listed or kind.single):
            self.calls.append(Made(lists[0], {}))
        elif finds and (kind, id) in self.sought and kind not in self.told:
            self.sought.remove((kind, id))
            self._make(finds[0], name=name)
        self.explorers = False
        self.answer = entity[attribute.name]
        text = rng.choice(QUESTIONS).format(a=attribute.name, e=called)
        if not self.calls or self.answer in text:
            raise Unfit
        return text

    # --- calls ------------------------------------------------------------------------------------

    def _make(self, op: Operation, needed: bool = False, **given: str) -> str:
        """Make a call and return its answer. given: the values of the roles of its parameters."""
        properties, arguments = op.schema["function"]["parameters"]["properties"], {}
        for name, role in op.parameters.items():
            text = properties[name]["type"] == "string"
            arguments[name] = given[role] if text else json.loads(given[role])
        shown = self.state.perform(op, arguments)
        self.calls.append(Made(op, arguments, needed))
        return shown

    def _look_ups(self) -> list[Made]:
        """Return the calls that show the ids which the query does not tell."""
        made: list[Made] = []
        ways: dict[Kind, Operation] = {}
        for kind, id in self.sought:
            lists = self._looking("list", ALL) or self._looking("list", kind)
            finds = self._looking("find", kind) if kind not in self.told else []
            op = ways.setdefault(kind, self.rng.choice([*lists[:1], *finds]))
            look = Made(op, dict.fromkeys(op.parameters, self.start[kind][id]["name"]))
            made += [look] * (look not in made)
        return made

    def _looking(self, does: str, kind: Kind) -> list[Operation]:
        """Return the tools that list, show or find entities of a kind."""
        return [op for op in self.plan.operations if op.does == does and op.kind is kind]

    # --- words ------------------------------------------------------------------------------------

    def _reference(self, kind: Kind, id: str) -> str:
        """Return the words for an entity."""
        name = self.start[kind][id]["name"]
        if kind.single:
            return f"the {kind.noun}"
        by_name = self.style in (0, 3, 5)
        told = self._told(kind, id) if self.style == 5 and not self.explorers else ""
        if told or (by_name and kind.ids != "name"):
            self.sought.append((kind, id))
            self.told |= {kind} if told else set()
        if self.explorers:
            return name if by_name else id
        if told:
            return told
        noun = kind.noun
        if kind.names == "plain" and self.rng.random() < 0.7:
            name = f"the {name}"
        if kind.ids == "name":
            return (name, name, f"{noun} {name}", f"the {noun} {name}", name, name)[self.style]
        forms = (name, f"{name} ({id})", f"{noun} {id}", f"the {noun} {name}", id, name)
        return forms[self.style]

    def _told(self, kind: Kind, id: str) -> str:
        """Return words that tell an entity by a listed attribute, "" if none does."""
        entities = self.start[kind]
        lists = self._looking("list", kind) or self._looking("list", ALL)
        found = []
        for a in kind.attributes:
            values = [entity[a.name] for entity in entities.values()]
            alone = values.count(entities[id][a.name]) == 1
            if alone and a.listed and a.form in ("choice", "number", "text"):
                found.append(a)
        if not found or not lists:
            return ""
        a = self.rng.choice(found)
        noun, value = kind.noun, entities[id][a.name]
        forms = [f"the {noun} whose {a.name} is {value}", f"the {noun} with the {a.name} {value}"]
        if a.form == "choice" and value not in YES_NO:
            forms.append(f"the {value} {noun}")
        return self.rng.choice(forms)

    def _described(self, op: Operation, **phrases: str) -> str:
        """Return a goal in the explorer's words. phrases: {role of a parameter: its value}."""
        arguments = {name: phrases[role] for name, role in op.parameters.items()}
        self.named += arguments.values()
        return goal_text(self.summaries[op.name], arguments)

    def _worded(self, op: Operation, called: str, value: str, plain: bool) -> Goal:
        """Return a change in words of its own. plain: begin with the verb of the tool."""
        rng, attribute, verb = self.rng, op.attribute, op.verb
        requests, statements = list(PUT_REQUESTS), list[str]()
        if op.does == "link":
            requests = list(LINK_REQUESTS)
        elif op.does == "set":
            verb = rng.choice((op.verb, op.verb, *SETTING))
            requests, statements = SET_REQUESTS, SET_STATEMENTS
            alone = len(self._looking("set", op.kind)) == 1
            if alone and attribute.form in ("choice", "number") and rng.random() < 0.4:
                requests, statements = SET_BRIEFLY, []
            if attribute.unit and rng.random() < 0.6:
                value = f"{value} {attribute.unit}"
            elif attribute.form == "text" and rng.random() < 0.3:
                value = f'"{value}"'
        elif op.does == "put" and value not in YES_NO and rng.random() < 0.5:
            requests, statements = PUT_BY_VALUE, PUT_STATEMENTS
        stated = not plain and bool(statements) and rng.random() < 0.3
        form = rng.choice(statements if stated else requests[:1] if plain else requests)
        words = {"verb": verb, "e": called, "v": value, "a": attribute.name}
        text = form.format(**words, prep=op.preposition)
        return Goal(text, not stated and not form.startswith(("I ", "we ")))


def _request(goals: list[Goal], rng: random.Random) -> str:
    """Return a query in words of its own."""
    joint = rng.choice(JOINTS)
    text = goals[0].text
    for goal in goals[1:]:
        text += (" and " if goal.elided else joint) + goal.text
    opening = rng.choice(OPENINGS) if goals[0].request else ""
    text = opening + text
    end = "?" if text.startswith(("can", "could", "would", "what", "which")) else "."
    if goals[0].request or text.startswith(("the ", "wh", "I ", "we ")):  # a name stays as it is
        text = text[0].upper() + text[1:]
    greeting = rng.choice(GREETINGS) if rng.random() < SMALL_TALK else ""
    closing = rng.choice(CLOSINGS) if rng.random() < SMALL_TALK else ""
    return f"{greeting}{text}{closing}{end}"


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
