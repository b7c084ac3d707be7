"""The plan of a made-up world: its kinds of entities, its tools, its hidden rules and its style."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, NamedTuple

from envs.made_up.words import (
    CHANGES,
    CHOICES,
    FLAGS,
    LINKS,
    NOUNS,
    NUMBERS,
    PATTERNS,
    PEOPLE,
    PLAIN,
    SUFFIXES,
    TEXTS,
    THINGS,
    UNITS,
    coined,
    patterned,
    plural,
)  # fmt: skip
from envs.world import Tool

NONE = "none"  # the value of a link that leads nowhere
ONE = "it"  # the id of the only entity of a kind that has one
KNOBS = ("station", "unit", "studio", "system", "panel", "device", "desk", "console")


@dataclass
class Attribute:
    """An attribute of the entities of a kind. form: "choice", "flag", "number", "text" or "link".
    values: of a choice or flag. other: the number of the kind that a link leads to. listed: shown
    in lists. unit: what a number counts, "" if nobody says."""

    name: str
    form: str
    values: tuple[str, ...] = ()
    other: int = -1
    listed: bool = True
    unit: str = ""

    def draw(self, rng: random.Random) -> str:
        """Return a value that is not a link."""
        if self.form == "number":
            return str(rng.randint(1, 99))
        if self.form == "text" and self.name in PATTERNS:
            return patterned(self.name, rng)
        if self.form == "text":
            return " ".join(rng.choices(PLAIN, k=rng.randint(1, 3)))
        return rng.choice(self.values)


@dataclass
class Kind:
    """A kind of entity. ids: style of the ids: "letter" and "dash" begin with letters of the noun,
    "plate" and "code" with any, "number", "hash", or "name" if an entity's name is its id. names:
    what names are drawn from. single: there is only one. letters, digits: how many an id has."""

    noun: str
    ids: str
    names: str
    attributes: list[Attribute] = field(default_factory=list)
    single: bool = False
    letters: int = 1
    digits: int = 2

    def attribute(self, name: str) -> Attribute:
        return next(a for a in self.attributes if a.name == name)

    def new_id(self, name: str, rng: random.Random) -> str:
        digits = rng.randrange(10 ** (self.digits - 1), 10**self.digits)
        letters = "".join(rng.choices(ascii_uppercase, k=self.letters))
        return {
            "letter": f"{self.noun[: self.letters].upper()}{digits}",
            "dash": f"{self.noun[:3]}-{digits}",
            "plate": f"{letters}{digits}",
            "code": f"{letters}-{digits}",
            "number": str(digits),
            "hash": f"{rng.randrange(16**self.digits):0{self.digits}x}",
            "name": name,
        }[self.ids]

    def new_name(self, rng: random.Random) -> str:
        if self.names == "file":
            return rng.choice((rng.choice(PLAIN), coined(rng))) + rng.choice(SUFFIXES)
        if self.names == "coined":
            return coined(rng)
        if self.names == "two words":
            return f"{rng.choice(THINGS)} {rng.choice(THINGS)}"
        if self.names == "plain":
            return rng.choice(NOUNS)
        return rng.choice(PEOPLE if self.names == "people" else THINGS)


class Rule(NamedTuple):
    """A hidden rule: `who` ("entity" or "other") must have `value`, which the tool numbered `by`
    gives."""

    who: str
    attribute: str
    value: str
    by: int


@dataclass
class Operation:
    """A tool. does: "list", "show", "find", "which", "put", "set", "link", "add" or "drop". kind:
    number of the kind, -1 for all. verb, preposition: for queries. parameters: {its name: its
    role}."""

    name: str
    does: str
    kind: int
    description: str
    verb: str = ""
    attribute: str = ""
    value: str = ""
    preposition: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    schema: Tool = field(default_factory=dict)


@dataclass
class Plan:
    """A world. rows, confirmation, error: formats of its answers. explains: it says which rule was
    broken."""

    kinds: list[Kind]
    operations: list[Operation]
    rows: int
    confirmation: int
    error: int
    explains: bool
    system: str
    names: list[str] = field(default_factory=list)

    def changing(self) -> list[int]:
        return [n for n, op in enumerate(self.operations) if op.does in WRITES]


WRITES = ("put", "set", "link", "add", "drop")
SYSTEMS = (
    "",
    "You have tools. Use them to do what the user asks, then answer in words, without a call.",
    "You are an assistant with tools.",
    "Do what the user wants. Call one tool at a time.",
)


# Shares of words that no language has. With known words alone a policy learns those by heart, and
# copies no others.
COINED_NOUNS, COINED_VERBS = 0.6, 0.4
COUNTED = 0.5  # share of the numbers that have a unit
FOUND = 0.35  # share of the kinds with ids whose entities can be found by name
UNLISTED = 0.25  # share of the kinds with names for ids that no tool lists
FOUND_ALONE = 0.6  # the same of those that can be found


def _open(word: str, share: float, rng: random.Random) -> str:
    return coined(rng) if rng.random() < share else word


@functools.lru_cache(maxsize=64)
def plan_of(number: int) -> Plan:
    """Return the plan of a world, which depends on its number only."""
    rng = random.Random(f"made-up world {number}")
    nouns = [_open(noun, COINED_NOUNS, rng) for noun in rng.sample(NOUNS, 3)]
    kinds = [_kind(noun, rng) for noun in nouns[: rng.choice((1, 1, 2, 2, 2, 3))]]
    if rng.random() < 0.25:
        kinds.append(Kind(rng.choice(KNOBS), "name", "things", single=True))
    naming, style = rng.randrange(6), rng.randrange(4)
    makers = _changes(kinds, rng)
    operations = [*_looks(kinds, rng), *makers]
    names: set[str] = set()
    for op in operations:
        _name(op, kinds, naming, names, rng)
        _describe(op, kinds, style, rng)
    rng.shuffle(operations)
    _rule(operations, kinds, rng)
    return Plan(
        kinds, operations, rng.randrange(6), rng.randrange(6), rng.randrange(4),
        rng.random() < 0.4, rng.choice(SYSTEMS),
    )  # fmt: skip


def _kind(noun: str, rng: random.Random) -> Kind:
    ids = rng.choice(
        ("letter", "letter", "letter", "dash", "plate", "code", "number", "hash", "name", "name")
    )
    names = rng.choice(
        ("people", "things", "coined", "coined", "coined", "two words", "file", "plain")
    )
    digits = rng.choice((2, 2, 3, 3, 4)) + 2 * (ids == "hash")
    return Kind(noun, ids, names, letters=rng.choice((1, 1, 2, 3)), digits=digits)


def _add(kind: Kind, attribute: Attribute, rng: random.Random) -> bool:
    """Give a kind another attribute; return False if it has one of this name."""
    attribute.listed = rng.random() < 0.6
    if any(a.name == attribute.name for a in kind.attributes):
        return False
    kind.attributes.append(attribute)
    return True


def _changes(kinds: list[Kind], rng: random.Random) -> list[Operation]:
    """Return operations that change something, and add what they change to the kinds."""
    made: list[Operation] = []
    wanted = rng.choice((2, 2, 3, 3, 4, 5))
    for _ in range(20):
        n = rng.randrange(len(kinds))
        kind = kinds[n]
        does = rng.choices(("put", "set", "link", "add", "drop"), (8, 7, 5, 1, 1))[0]
        others = [i for i, k in enumerate(kinds) if i != n and not k.single]
        if does == "put" and len(made) < wanted:
            verb, after, before = (_open(w, COINED_VERBS, rng) for w in rng.choice(CHANGES))
            name = rng.choice((after, "status", "state", f"{verb}_state"))
            values = ("yes", "no") if name == after else (after, before)
            if _add(kind, Attribute(name, "choice", values), rng):
                made.append(Operation("", does, n, "", verb, name, values[0]))
        elif does == "set" and len(made) < wanted:
            attribute = _attribute(rng)
            if _add(kind, attribute, rng):
                verb = rng.choice(("set", "change", "update", "choose", "adjust", "edit"))
                made.append(Operation("", does, n, "", verb, attribute.name))
        elif does == "link" and others and not kind.single and len(made) < wanted:
            verb, preposition, name = rng.choice(LINKS)
            verb, name = _open(verb, COINED_VERBS, rng), _open(name, COINED_VERBS, rng)
            if _add(kind, Attribute(name, "link", other=rng.choice(others)), rng):
                op = Operation("", does, n, "", verb, name, preposition=preposition)
                made.append(op)
        elif does in ("add", "drop") and not kind.single and len(made) < wanted:
            verbs = ("create", "add", "new") if does == "add" else ("delete", "remove", "discard")
            if not any(op.does == does and op.kind == n for op in made):
                made.append(Operation("", does, n, "", rng.choice(verbs)))
    return made


def _attribute(rng: random.Random) -> Attribute:
    form = rng.choice(("choice", "choice", "flag", "number", "number", "text", "text"))
    if form == "choice":
        name, values = rng.choice(CHOICES)
        if rng.random() < COINED_VERBS:
            values = tuple({coined(rng): None for _ in values})
        return Attribute(_open(name, COINED_VERBS, rng), form, values)
    if form == "flag":
        return Attribute(_open(rng.choice(FLAGS), COINED_VERBS, rng), form, ("true", "false"))
    names = NUMBERS if form == "number" else rng.choice((TEXTS, PATTERNS))
    name = rng.choice(names)
    unit = _open(rng.choice(UNITS), COINED_VERBS, rng) if rng.random() < COUNTED else ""
    return Attribute(
        name if name in PATTERNS else _open(name, COINED_VERBS, rng), form,
        unit=unit if form == "number" else "",
    )  # fmt: skip


def _looks(kinds: list[Kind], rng: random.Random) -> list[Operation]:
    """Return operations that show what there is."""
    made = []
    if len(kinds) > 1 and rng.random() < 0.45:
        made.append(Operation("", "list", -1, "", rng.choice(("look", "overview", "survey"))))
    whole = bool(made)
    for n, kind in enumerate(kinds):
        found = kind.ids != "name" and rng.random() < FOUND
        if found:
            verb = rng.choice(("find", "search", "lookup", "get", "identify"))
            made.append(Operation("", "find", n, "", verb))
        unlisted = (found or kind.ids == "name") and not kind.single
        unlisted = unlisted and rng.random() < (FOUND_ALONE if found else UNLISTED)
        if not (unlisted or whole):
            verb = rng.choice(("list", "show", "get", "view")) if not kind.single else "read"
            made.append(Operation("", "list", n, "", verb))
        hidden = any(not a.listed for a in kind.attributes)
        if not kind.single and (hidden or rng.random() < 0.3):
            verb = rng.choice(("inspect", "describe", "get", "details", "view", "check"))
            made.append(Operation("", "show", n, "", verb))
        choices = [a for a in kind.attributes if a.form == "choice"]
        if choices and not kind.single and rng.random() < 0.12:
            attribute = rng.choice(choices).name
            made.append(Operation("", "which", n, "", rng.choice(("search", "filter")), attribute))
    return made


def _rule(operations: list[Operation], kinds: list[Kind], rng: random.Random) -> None:
    """Add hidden rules: some operations are refused until another one was made."""
    puts = [n for n, op in enumerate(operations) if op.does == "put"]
    for n, op in enumerate(operations):
        if op.does not in ("put", "set", "link", "drop") or rng.random() < 0.25:
            continue
        roles = {op.kind: "entity"}
        if op.does == "link":
            roles[kinds[op.kind].attribute(op.attribute).other] = "other"
        single = [i for i, kind in enumerate(kinds) if kind.single and i != op.kind]
        roles |= dict.fromkeys(single, "single")
        # Only an operation without rules makes another one possible, so that none waits for itself.
        free = [
            i for i in puts
            if i != n and operations[i].kind in roles and not operations[i].rules
        ]  # fmt: skip
        used = any(rule.by == n for other in operations for rule in other.rules)
        if free and not used:
            by = operations[i := rng.choice(free)]
            op.rules.append(Rule(roles[by.kind], by.attribute, by.value, i))


# --- words ----------------------------------------------------------------------------------------


def _name(
    op: Operation, kinds: list[Kind], naming: int, names: set[str], rng: random.Random
) -> None:
    """Name an operation and its parameters."""
    kind = kinds[op.kind] if op.kind >= 0 else None
    noun = kind.noun if kind else "all"
    if op.does == "list" and kind and not kind.single:
        noun = plural(noun)
    verb = _open(op.verb, 0.2, rng)
    about = f"{noun}_{op.attribute}" if op.does in ("set", "which") else noun
    plain = verb if op.does not in ("set", "list", "show", "find", "which") else f"{verb}_{about}"
    forms = [
        plain, f"{verb}_{about}", f"{about}_{verb}", f"{noun}.{verb}", f"{verb}_{noun}", verb
    ]  # fmt: skip
    name = forms[naming]
    if rng.random() < 0.15:
        first, *rest = name.replace(".", "_").split("_")
        name = first + "".join(part.capitalize() for part in rest)
    while name in names:
        name += rng.choice(("_it", "_now", "2", "_one"))
    names.add(name)
    op.name = name
    roles = {
        "show": ("entity",), "which": ("value",), "put": ("entity",), "set": ("entity", "value"),
        "link": ("entity", "other"), "add": ("name",), "find": ("name",), "drop": ("entity",),
    }.get(op.does, ())  # fmt: skip
    for role in roles:
        if not (role == "entity" and kind and kind.single):
            parameter = _parameter(op, kinds, role, rng)
            # an attribute may be called like a kind
            op.parameters[parameter + "_2" * (parameter in op.parameters)] = role
    if rng.random() < 0.15:
        op.parameters = dict(reversed(op.parameters.items()))


def _parameter(op: Operation, kinds: list[Kind], role: str, rng: random.Random) -> str:
    kind = kinds[op.kind]
    if role == "value":
        unit = kind.attribute(op.attribute).unit or op.attribute
        return rng.choice((op.attribute, unit, "value", f"new_{op.attribute}"))
    if role == "name":
        return rng.choice(("name", "name", f"{kind.noun}_name"))
    if role == "other":
        kind = kinds[kind.attribute(op.attribute).other]
        return rng.choice((kind.noun, f"{kind.noun}_id", f"to_{kind.noun}"))
    return rng.choice((kind.noun, kind.noun, f"{kind.noun}_id", "id"))


def _describe(op: Operation, kinds: list[Kind], style: int, rng: random.Random) -> None:
    """Describe an operation and its parameters, and write its schema."""
    kind = kinds[op.kind] if op.kind >= 0 else Kind("thing", "name", "things")
    noun, verb, attribute = kind.noun, op.verb, op.attribute
    a = "the" if kind.single else rng.choice(("a", "a", "the"))
    other = ""
    if op.does == "link":
        other = kinds[kind.attribute(attribute).other].noun
    texts: dict[str, tuple[str, ...]] = {
        "list": (f"Show all {plural(noun)}", f"List the {plural(noun)}", f"Every {noun} there is"),
        "show": (f"Show {a} {noun}", f"Look at {a} {noun}", f"Details of {a} {noun}"),
        "find": (f"Find {a} {noun} by name", f"Look {a} {noun} up by its name",
                 f"The {noun} of this name"),
        "which": (f"Show the {plural(noun)} of a {attribute}",
                  f"Find {plural(noun)} by {attribute}"),
        "put": (f"{verb} {a} {noun}", f"Make {a} {noun} {op.value}", f"{verb} one {noun}"),
        "set": (f"{verb} the {attribute} of {a} {noun}", f"Give {a} {noun} another {attribute}",
                f"{verb} {a} {attribute}"),
        "link": (f"{verb} {a} {noun} {op.preposition} a {other}",
                 f"{verb} one {noun} {op.preposition} one {other}"),
        "add": (f"{verb if verb != 'new' else 'make'} a {noun}", f"Make a new {noun}"),
        "drop": (f"{verb} {a} {noun}", f"Take {a} {noun} away"),
    }  # fmt: skip
    if op.does == "list" and op.kind < 0:
        every = " and ".join(plural(k.noun) for k in kinds if not k.single)
        texts["list"] = (f"Show all {every}", "Show everything there is", f"List {every}")
    elif op.does == "list" and kind.single:
        texts["list"] = (f"Show the {noun}", f"Read the {noun}", f"State of the {noun}")
    elif op.value in ("yes", "no"):
        texts["put"] = (f"{verb} {a} {noun}", f"{verb} one {noun}")
    text = rng.choice(texts[op.does])
    text = (text[0].upper() + text[1:]) if style else text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text += rng.choice((" with this id", " of the house", " by its id", " right away"))
    text += "." if style != 3 else ""
    if rng.random() < 0.2:
        text += rng.choice((
            f" Returns the {noun}.", f" The {noun} must exist.", " Fails if it cannot be done.",
            f" Use it to {verb} things.", f" Works for every {noun}.", " Returns what changed.",
        ))  # fmt: skip
    op.description = "" if rng.random() < 0.04 else text
    properties = {}
    for name, role in op.parameters.items():
        properties[name] = _schema(op, kinds, role, style, rng)
    function = {
        "name": op.name,
        "description": op.description,
        "parameters": {
            "type": "object", "properties": properties, "required": list(properties)
        },
    }  # fmt: skip
    op.schema = {"type": "function", "function": function}


def _schema(
    op: Operation, kinds: list[Kind], role: str, style: int, rng: random.Random
) -> dict[str, Any]:
    kind = kinds[op.kind]
    if role in ("value", "name"):
        attribute = kind.attribute(op.attribute) if role == "value" else Attribute("name", "text")
        types = {"number": "integer", "flag": "boolean"}
        schema: dict[str, Any] = {"type": types.get(attribute.form, "string")}
        if attribute.form == "choice" and style % 2:
            schema["enum"] = list(attribute.values)
        elif style == 2 or rng.random() < 0.4:
            choice = attribute.form == "choice"
            values = f": {', '.join(attribute.values)}" if choice and rng.random() < 0.7 else ""
            schema["description"] = f"The {attribute.name}{values}."
        return schema
    if role == "other":
        kind = kinds[kind.attribute(op.attribute).other]
    schema = {"type": "integer" if kind.ids == "number" else "string"}
    if style == 2 or rng.random() < 0.4:
        example = kind.new_id(kind.new_name(rng), rng)
        what = "name" if kind.ids == "name" else "id"
        form = rng.choice((f"such as {example}", f"e.g. {example}", ""))
        schema["description"] = f"The {what} of a {kind.noun}{', ' * bool(form)}{form}."
    return schema
