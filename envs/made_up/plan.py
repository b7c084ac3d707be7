"""The plan of a made-up world: its kinds of entities, its tools, its hidden rules and its style."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

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
from envs.values import Json
from envs.world import Tool, tool_of

NONE = "none"  # the value of a link that leads nowhere
ONE = "it"  # the id of the only entity of a kind that has one
SYSTEMS = (
    "",
    "You have tools. Use them to do what the user asks, then answer in words, without a call.",
    "You are an assistant with tools.",
    "Do what the user wants. Call one tool at a time.",
)
# What an operation does -> the roles of its parameters.
ROLES = {
    "list": "", "show": "entity", "find": "name", "which": "value", "put": "entity",
    "set": "entity value", "link": "entity other", "add": "name", "drop": "entity",
}  # fmt: skip
WRITES = ("put", "set", "link", "add", "drop")
# Shares of words that no language has. With known words alone a policy learns those by heart, and
# copies no others.
COINED_NOUNS, COINED_VERBS = 0.6, 0.4
COUNTED = 0.5  # share of the numbers that have a unit
FOUND = 0.35  # share of the kinds with ids whose entities can be found by name
UNLISTED = 0.25  # share of the kinds with names for ids that no tool lists
FOUND_ALONE = 0.6  # the same of those that can be found


@dataclass(eq=False)
class Attribute:
    """An attribute of the entities of a kind. form: "choice", "flag", "number", "text" or "link".
    values: of a choice or flag. other: the kind that a link leads to. listed: shown in lists. unit:
    what a number counts, "" if nobody says."""

    name: str
    form: str
    values: tuple[str, ...] = ()
    other: Any = None
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


NOTHING = Attribute("", "text")  # the attribute of an operation that is about none


@dataclass(eq=False)
class Kind:
    """A kind of entity. ids: style of the ids: "letter" and "dash" begin with letters of the noun,
    "plate" and "code" with any, "number", "hash", or "name" if an entity's name is its id. names:
    what names are drawn from. single: there is only one. letters, digits: how many an id has.
    number: its place among the kinds of its world."""

    noun: str
    ids: str
    names: str
    attributes: list[Attribute] = field(default_factory=list)
    single: bool = False
    letters: int = 1
    digits: int = 2
    number: int = -1

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
        return rng.choice({"plain": NOUNS, "people": PEOPLE, "things": THINGS}[self.names])


ALL = Kind("thing", "name", "things")  # the kind of an operation that is about all kinds


@dataclass(eq=False)
class Operation:
    """A tool. does: a key of ROLES. verb, preposition: for queries. value: what it sets, "" if its
    caller says. parameters: {its name: its role}. needs: the operation without which it is refused,
    which is a hidden rule."""

    does: str
    kind: Kind
    verb: str
    attribute: Attribute = NOTHING
    value: str = ""
    preposition: str = ""
    name: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    needs: Operation | None = None
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

    def changing(self) -> list[Operation]:
        return [op for op in self.operations if op.does in WRITES]


@functools.lru_cache(maxsize=64)
def plan_of(number: int) -> Plan:
    """Return the plan of a world, which depends on its number only."""
    rng = random.Random(f"made-up world {number}")
    nouns = [_open(noun, COINED_NOUNS, rng) for noun in rng.sample(NOUNS, 3)]
    kinds = [_kind(noun, rng) for noun in nouns[: rng.choice((1, 1, 2, 2, 2, 3))]]
    if rng.random() < 0.25:
        noun = _one("station unit studio system panel device desk console", rng)
        kinds.append(Kind(noun, "name", "things", single=True))
    for place, kind in enumerate(kinds):
        kind.number = place
    naming, style = rng.randrange(6), rng.randrange(4)
    makers = _changes(kinds, rng)
    operations = [*_looks(kinds, rng), *makers]
    names: set[str] = set()
    for op in operations:
        _name(op, naming, names, rng)
        _describe(op, kinds, style, rng)
    rng.shuffle(operations)
    _rule(operations, rng)
    return Plan(
        kinds, operations, rng.randrange(6), rng.randrange(6), rng.randrange(4),
        rng.random() < 0.4, rng.choice(SYSTEMS),
    )  # fmt: skip


def _one(words: str, rng: random.Random) -> str:
    """Return one of the words of a text."""
    return rng.choice(words.split())


def _open(word: str, share: float, rng: random.Random) -> str:
    """Return a word, or by chance one that no language has."""
    return coined(rng) if rng.random() < share else word


def _kind(noun: str, rng: random.Random) -> Kind:
    ids = _one("letter letter letter dash plate code number hash name name", rng)
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
        kind = rng.choice(kinds)
        does = rng.choices(WRITES, (8, 7, 5, 1, 1))[0]
        others = [other for other in kinds if other is not kind and not other.single]
        if len(made) == wanted:
            continue
        if does == "put":
            verb, after, before = (_open(w, COINED_VERBS, rng) for w in rng.choice(CHANGES))
            name = rng.choice((after, "status", "state", f"{verb}_state"))
            values = ("yes", "no") if name == after else (after, before)
            attribute = Attribute(name, "choice", values)
            if _add(kind, attribute, rng):
                made.append(Operation(does, kind, verb, attribute, values[0]))
        elif does == "set":
            attribute = _attribute(rng)
            if _add(kind, attribute, rng):
                verb = _one("set change update choose adjust edit", rng)
                made.append(Operation(does, kind, verb, attribute))
        elif does == "link" and others and not kind.single:
            verb, preposition, name = rng.choice(LINKS)
            verb, name = _open(verb, COINED_VERBS, rng), _open(name, COINED_VERBS, rng)
            attribute = Attribute(name, "link", other=rng.choice(others))
            if _add(kind, attribute, rng):
                made.append(Operation(does, kind, verb, attribute, preposition=preposition))
        elif does in ("add", "drop") and not kind.single:
            verbs = "create add new" if does == "add" else "delete remove discard"
            if not any(op.does == does and op.kind is kind for op in made):
                made.append(Operation(does, kind, _one(verbs, rng)))
    return made


def _attribute(rng: random.Random) -> Attribute:
    form = _one("choice choice flag number number text text", rng)
    if form == "choice":
        name, values = rng.choice(CHOICES)
        if rng.random() < COINED_VERBS:
            values = tuple({coined(rng): None for _ in values})
        return Attribute(_open(name, COINED_VERBS, rng), form, values)
    if form == "flag":
        return Attribute(_open(rng.choice(FLAGS), COINED_VERBS, rng), form, ("true", "false"))
    name = rng.choice(NUMBERS if form == "number" else rng.choice((TEXTS, PATTERNS)))
    unit = _open(rng.choice(UNITS), COINED_VERBS, rng) if rng.random() < COUNTED else ""
    if name not in PATTERNS:
        name = _open(name, COINED_VERBS, rng)
    return Attribute(name, form, unit=unit if form == "number" else "")


def _looks(kinds: list[Kind], rng: random.Random) -> list[Operation]:
    """Return operations that show what there is."""
    made: list[Operation] = []
    if len(kinds) > 1 and rng.random() < 0.45:
        made.append(Operation("list", ALL, _one("look overview survey", rng)))
    whole = bool(made)
    for kind in kinds:
        named = kind.ids == "name"
        found = not named and rng.random() < FOUND
        if found:
            made.append(Operation("find", kind, _one("find search lookup get identify", rng)))
        unlisted = (found or named) and not kind.single
        unlisted = unlisted and rng.random() < (FOUND_ALONE if found else UNLISTED)
        if not (unlisted or whole):
            verb = "read" if kind.single else _one("list show get view", rng)
            made.append(Operation("list", kind, verb))
        if kind.single:
            continue
        if any(not a.listed for a in kind.attributes) or rng.random() < 0.3:
            verb = _one("inspect describe get details view check", rng)
            made.append(Operation("show", kind, verb))
        choices = [a for a in kind.attributes if a.form == "choice"]
        if choices and rng.random() < 0.12:
            attribute = rng.choice(choices)
            made.append(Operation("which", kind, _one("search filter", rng), attribute))
    return made


def _rule(operations: list[Operation], rng: random.Random) -> None:
    """Add hidden rules: some operations are refused until another one was made."""
    puts = [op for op in operations if op.does == "put"]
    for op in operations:
        if op.does not in ("put", "set", "link", "drop") or rng.random() < 0.25:
            continue
        about = (op.kind, op.attribute.other)
        # Only an operation without rules makes another one possible, so that none waits for itself.
        free = [
            by for by in puts
            if by is not op and not by.needs and (by.kind in about or by.kind.single)
        ]  # fmt: skip
        if free and not any(other.needs is op for other in operations):
            op.needs = rng.choice(free)


# --- words ----------------------------------------------------------------------------------------


def _name(op: Operation, naming: int, names: set[str], rng: random.Random) -> None:
    """Name an operation and its parameters."""
    kind = op.kind
    noun = "all" if kind is ALL else kind.noun
    if op.does == "list" and not (kind is ALL or kind.single):
        noun = plural(noun)
    verb = _open(op.verb, 0.2, rng)
    about = f"{noun}_{op.attribute.name}" if op.does in ("set", "which") else noun
    named = f"{verb}_{about}"
    plain = verb if op.does in ("put", "link", "add", "drop") else named
    name = (plain, named, f"{about}_{verb}", f"{noun}.{verb}", f"{verb}_{noun}", verb)[naming]
    if rng.random() < 0.15:
        first, *rest = name.replace(".", "_").split("_")
        name = first + "".join(part.capitalize() for part in rest)
    while name in names:
        name += rng.choice(("_it", "_now", "2", "_one"))
    names.add(name)
    op.name = name
    for role in ROLES[op.does].split():
        if not (role == "entity" and kind.single):
            parameter = _parameter(op, role, rng)
            # an attribute may be called like a kind
            op.parameters[parameter + "_2" * (parameter in op.parameters)] = role
    if rng.random() < 0.15:
        op.parameters = dict(reversed(op.parameters.items()))


def _parameter(op: Operation, role: str, rng: random.Random) -> str:
    noun, attribute = op.kind.noun, op.attribute
    if role == "value":
        name = attribute.name
        return rng.choice((name, attribute.unit or name, "value", f"new_{name}"))
    if role == "name":
        return rng.choice(("name", "name", f"{noun}_name"))
    if role == "other":
        noun = attribute.other.noun
        return rng.choice((noun, f"{noun}_id", f"to_{noun}"))
    return rng.choice((noun, noun, f"{noun}_id", "id"))


def _describe(op: Operation, kinds: list[Kind], style: int, rng: random.Random) -> None:
    """Describe an operation and its parameters, and write its schema."""
    noun, verb, attribute = op.kind.noun, op.verb, op.attribute.name
    a = "the" if op.kind.single else rng.choice(("a", "a", "the"))
    other = op.attribute.other.noun if op.does == "link" else ""
    every = " and ".join(plural(kind.noun) for kind in kinds if not kind.single)
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
    if op.kind is ALL:
        texts["list"] = (f"Show all {every}", "Show everything there is", f"List {every}")
    elif op.kind.single:
        texts["list"] = (f"Show the {noun}", f"Read the {noun}", f"State of the {noun}")
    if op.value in ("yes", "no"):
        texts["put"] = texts["put"][::2]
    text = rng.choice(texts[op.does])
    text = (text[0].upper() if style else text[0].lower()) + text[1:]
    if rng.random() < 0.15:
        text += rng.choice((" with this id", " of the house", " by its id", " right away"))
    text += "." if style != 3 else ""
    if rng.random() < 0.2:
        text += rng.choice((
            f" Returns the {noun}.", f" The {noun} must exist.", " Fails if it cannot be done.",
            f" Use it to {verb} things.", f" Works for every {noun}.", " Returns what changed.",
        ))  # fmt: skip
    op.description = "" if rng.random() < 0.04 else text
    properties = {name: _schema(op, role, style, rng) for name, role in op.parameters.items()}
    op.schema = tool_of(op.name, op.description, properties, list(properties))


def _schema(op: Operation, role: str, style: int, rng: random.Random) -> Json:
    """Return the schema of a parameter."""
    attribute = op.attribute if role == "value" else Attribute("name", "text")
    if role in ("value", "name"):
        types = {"number": "integer", "flag": "boolean"}
        schema: Json = {"type": types.get(attribute.form, "string")}
        choice = attribute.form == "choice"
        if choice and style % 2:
            schema["enum"] = list(attribute.values)
        elif style == 2 or rng.random() < 0.4:
            values = f": {', '.join(attribute.values)}" if choice and rng.random() < 0.7 else ""
            schema["description"] = f"The {attribute.name}{values}."
        return schema
    kind = op.attribute.other if role == "other" else op.kind
    schema = {"type": "integer" if kind.ids == "number" else "string"}
    if style == 2 or rng.random() < 0.4:
        example = kind.new_id(kind.new_name(rng), rng)
        what = "name" if kind.ids == "name" else "id"
        form = rng.choice((f", such as {example}", f", e.g. {example}", ""))
        schema["description"] = f"The {what} of a {kind.noun}{form}."
    return schema
