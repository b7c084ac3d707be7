"""The wording of tasks from what a world says about itself: descriptions of its tools, and values
that it shows.

Nobody has to write phrases for a world. A goal is worded as the description of the tool that
reaches it with what each argument stands for ("Add a bag to an order: order Ann Rome."), a question
as the description of the tool that answers it with the part of the answer that is wanted ("Look a
passenger up: name Ann. Reply with the last word."). An id that the agent has to look up is
described by the values that lead to it and tell it from its neighbours.
"""

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from envs.probed import Cell

_END = re.compile(r"(?<=[.!?])\s+|\n")
_LABEL = re.compile(r"^(?:[A-Z]\w*\s)?\w+:(?:\s+|$)")
_LONGEST = 160  # characters of a description
_THEN = (". Then ", ", and then ")  # between two goals
_REPLY = ". Reply with "
# How people ask: with a request before it, for something to be set, of one thing, for a number.
_JOINTS = (". Then ", ", and then ", " and ", ", then ")
_OPENINGS = ("", "", "please ", "please ", "I need you to ", "now ", "go and ")
_SETTING = (
    "{verb} {thing} to {value}", "{verb} the {object} of {thing} to {value}",
    "{verb} the {object} to {value} for {thing}", "let it be {value} {unit} in {thing}",
    "{text} of {value} {unit} for {thing}", "give {thing} {value} {unit}",
    "{thing} should have {value} {unit}", "I want {value} {unit} for {thing}",
)  # fmt: skip
_ABOUT = ("{text} for {value}", "{text} of {value}")
_CALLED = ("{text} with {name} {value}", "{text} to {value}")
_GIVING = ("{text} to {value}", "{text} with {value}", "{text} at {value}")
# What may follow a noun that a value takes the place of: in "the phone number" and in "the light of
# a zone" it stands for a part of a thing, of which the value would make nonsense.
_AFTER = (
    r"(?=$|[.,;:)]|'s\b|\s+(?:to|for|from|in|on|at|by|with|and|or|is|as|into|onto|next|\w+ly"
    r"|its|their|out|off|up|down|back|home|away|over)\b"
)
_A_NOUN = re.compile(rf"\b(?:an?|some) \w+{_AFTER}|\s+of\b)")
# Of a description, what nobody says who asks for it.
_ASIDE = re.compile(
    r"\s*\([^)]*\)|\s+that (?:is|are|you) .*"
    r"|,\s+(?:which|that|optionally|between|such as|for example|e\.g\.|i\.e\.)\b.*"
    r"|,?\s+(?:between \d+ and \d+|at (?:most|least) \d+|\d+ to \d+)\b.*"
)
_ITEM = re.compile(r"[\w-]+")
_QUOTED = r"[\"'`][\w-]+[\"'`]"
_WORD = rf"(?:{_QUOTED}|[\w-]+)"
_ALTERNATIVES = re.compile(  # "low, normal or high", "'on' or 'off'", "(on or off)", "low/high"
    rf"{_WORD}(?:, {_WORD})+,? (?:or|and) {_WORD}|{_QUOTED} or {_QUOTED}"
    rf"|(?<=[:(] ){_WORD} or {_WORD}|(?<=[(:]){_WORD} or {_WORD}|\w+(?:/\w+)+"
    rf"|^{_WORD} or {_WORD}(?=\.?$)|(?<=one of ){_WORD}(?:, {_WORD})+"  # "one of low, high"
)
# "Lists the cars", "Fetches a row": of a verb, not of things.
_THIRD = re.compile(
    r"^([A-Z][a-z]+?)(?:i(es)|(?<=[cs]h)es|(?<=ss)es|(?<=[xo])es|(?<=[^aiosu])s)"
    r"(?= (?:an?|the|one|all)\b)"
)
_ARTICLE = re.compile(r"^(?:an?|the) ")
_JOINT = re.compile(f"({'|'.join(map(re.escape, (*_THEN, _REPLY)))})")


def summaries(descriptions: Mapping[str, str]) -> dict[str, str]:
    """Return {tool: its description in one sentence without the period} of {tool: description}.

    Sentences that several tools share introduce all of them and are left out. A tool that is not
    described, or at too great length, is named by its name in words.
    """
    sentences = {name: _sentences(text) for name, text in descriptions.items()}
    counts = Counter(itertools.chain(*map(set, sentences.values())))
    own = {
        name: next((s for s in inner if counts[s] == 1), "") for name, inner in sentences.items()
    }
    return {name: text if 0 < len(text) <= _LONGEST else spaced(name) for name, text in own.items()}


def _sentences(text: str) -> list[str]:
    """Return the sentences of a description without their ends and labels ("Tool description:
    ..."), as requests ("Lists the cars" as "List the cars")."""
    parts = (" ".join(part.split()) for part in _END.split(text))
    told = [_LABEL.sub("", part).rstrip(".!? ") for part in parts if part.strip(".!? ")]
    return [_THIRD.sub(lambda verb: verb[1] + "y" * bool(verb[2]), text) for text in told]


def spaced(name: str) -> str:
    """Return a name in words: "order_id" and "orderId" become "order id"."""
    return " ".join(re.sub(r"([a-z])([A-Z])|[_.]", r"\1 \2", name).split())


def alternatives(text: str) -> list[str]:
    """Return the words of the first enumeration of alternatives in a text, [] if it has none."""
    found = _ALTERNATIVES.search(text)
    return [word for word in _ITEM.findall(found[0]) if word not in ("or", "and")] if found else []


def goal_text(summary: str, arguments: Mapping[str, str]) -> str:
    """Return a goal: what the tool does, and what each argument stands for, in words.

    Slots of a form of actions are filled in."""
    for name, phrase in list(arguments.items()):
        slot = name.split()[0].upper()  # "put OBJ on OBJ" has the arguments "obj" and "obj 2"
        found = re.search(rf"\b{re.escape(slot)}\b", summary)
        if found:
            summary = summary[: found.start()] + phrase + summary[found.end() :]
            arguments = {other: text for other, text in arguments.items() if other != name}
    stated = ", ".join(f"{spaced(name)} {phrase}".strip() for name, phrase in arguments.items())
    return f"{summary}: {stated}" if stated else summary


def joined(goals: Sequence[str], wanted: str, rng: random.Random) -> str:
    """Return the query of goals to reach in order and, if there is a question, of the last one.
    wanted: what to reply with, "" if nothing."""
    text = goals[0][:1].upper() + goals[0][1:]
    for goal in goals[1:]:
        text += rng.choice(_THEN) + goal[:1].lower() + goal[1:]
    return f"{text}{_REPLY}{wanted}." if wanted else f"{text}."


def inlined(query: str, named: Sequence[str]) -> str:
    """Return the explorer's query with values in place of their parameters. named: its values."""
    argument, parts = _argument(named), _JOINT.split(query.removesuffix("."))
    goals = (_inlined(part, argument) for part in parts)
    return "".join(_stated(text, ": ", left, ", ") for text, left, _ in goals) + "."


def asked(query: str, named: Sequence[str], rng: random.Random) -> str:
    """Return the explorer's query in one of the ways in which people ask for such things. named:
    its values."""
    argument, parts = _argument(named), _JOINT.split(query.removesuffix("."))
    text = _asked(*_inlined(parts[0], argument), rng)
    first = parts[0].partition(" ")[0]
    if text.startswith((first, "let ", "give ")):  # a request, and no statement
        opening = rng.choice(_OPENINGS)
        if text.lower().startswith(opening.removesuffix("and ") or " "):  # "go and go north"
            opening = ""
        text = opening + text[:1].lower() + text[1:]
        text = text[:1].upper() + text[1:]
    for joint, part in zip(parts[1::2], parts[2::2]):
        if joint == _REPLY:
            text += joint + part
        else:
            text += rng.choice(_JOINTS) + _asked(*_inlined(part, argument), rng)
    return f"{text}."


def _asked(text: str, left: Sequence[tuple[str, str]], speaks: bool, rng: random.Random) -> str:
    """Return one goal as people ask. text: the description with values; left: (name, value) of the
    arguments that it does not speak of. speaks: it does of others."""
    if len(left) == len(_A_NOUN.findall(text)) == 1 and rng.random() < 0.75:
        ((_, value),) = left
        return _A_NOUN.sub(lambda _: value, text)  # "Charge a car fully: plate A12"
    numbers = [pair for pair in left if pair[1].isdigit()]
    verb, _, rest = text.partition(" ")
    of: dict[str, str] = {"text": text, "verb": verb, "object": _ARTICLE.sub("", rest)}
    if len(left) == 2 and len(numbers) == 1 and _ARTICLE.match(rest):
        ((_, thing),) = (pair for pair in left if pair not in numbers)
        ((unit, value),) = numbers
        of |= {"thing": thing, "unit": unit, "value": value}
        return rng.choice(_SETTING).format(**of)
    if len(left) == 1:
        ((name, value),) = left
        of |= {"name": name, "value": value}
        amount = re.compile(rf"(?<!the )\b{re.escape(name)}\b")
        if numbers and name.endswith("s") and amount.search(text):
            return amount.sub(f"{value} {name}", text, 1)  # "Let 7 hours pass"
        is_id = name.endswith("id") or (value.isalnum() and any(c.isdigit() for c in value))
        # "Set the light of hall to dim", "Set the mode to fan", but "Show the card of M12".
        speaks |= text.endswith(f" the {name}")
        forms = _GIVING if numbers else _CALLED if speaks and not is_id else _ABOUT
        return rng.choice(forms).format(**of)
    return _stated(text, " with ", left, " and ")


def _stated(text: str, joint: str, left: Sequence[tuple[str, str]], between: str) -> str:
    return text + joint * bool(left) + between.join(f"{name} {value}" for name, value in left)


def _argument(named: Sequence[str]) -> re.Pattern[str]:
    value = "|".join(re.escape(str(value)) for value in sorted(named, key=len, reverse=True))
    return re.compile(rf"([\w ]+?) ((?:{value})(?: (?:{value}))*)(?:, |$)")


@functools.lru_cache(1024)
def _spoken_of(nouns: str) -> re.Pattern[str]:
    """Return a pattern of one of the nouns with its article, where a value can take its place."""
    return re.compile(
        rf"\b(?:(?:an?|some|another) (?:{nouns}){_AFTER}|\s+of\b)|the (?:{nouns}){_AFTER}))"
    )


def _inlined(goal: str, argument: re.Pattern[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Return one goal, a description with arguments, with values in the description, (name, value)
    of the arguments that it does not speak of, and True if it does of others."""
    text, given = _parsed(goal, argument)
    if not given:  # it has no arguments, or is not of the explorer's form
        return goal, [], False
    text = _without_choices(text, [phrase for _, phrase in given])
    left = []
    for name, phrase in given:
        nouns = (name, name.removesuffix(" id"), name.removesuffix(" name"))
        place = _spoken_of("|".join(map(re.escape, nouns))).search(text)
        if place:
            text = text[: place.start()] + phrase + text[place.end() :]
        elif f" {phrase} " not in f" {text} ":
            left.append((name, phrase))
    return text, left, len(left) < len(given)


def _parsed(goal: str, argument: re.Pattern[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the description in a goal, and (name, value) of its arguments. There may be colons in
    the description."""
    for joint in re.finditer(": ", goal):
        given, end = [], joint.end()
        while found := argument.match(goal, end):
            given.append((found[1], found[2]))
            end = found.end()
        if end == len(goal) and given:
            return goal[: joint.start()], given
    return goal, []


def _without_choices(text: str, values: Sequence[str]) -> str:
    """Return a description without its asides and with the value in place of an enumeration of
    alternatives: "Move a card: todo or done" is not said by one who knows where."""
    chosen = [value for value in values if value in alternatives(text)]
    found = _ALTERNATIVES.search(text)
    if found and chosen:
        before, after = text[: found.start()], text[found.end() :]
        if before.rstrip().endswith((":", "(")):
            text = before.rstrip(" :(") + after.lstrip(")")
        else:
            text = before + chosen[0] + after
    return _ASIDE.sub("", text)


def distinguishing(
    cells: Sequence[Cell], value: str, hidden: Sequence[str], *, least: int = 0
) -> list[str] | None:
    """Return the fewest values of an answer, at least `least` of them, that tell the row of `value`
    from the other rows; None if there are none.

    Of several, those nearest to `value` in the row are returned: a name usually stands beside its
    id, and a policy finds an id most reliably right beside the word that it looks for. Values in
    `hidden` cannot be used, because the agent does not know them.
    """
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    own = next(row for row, inner in rows.items() if any(cell.value == value for cell in inner))
    others = [[named(cell) for cell in inner] for row, inner in rows.items() if row != own]
    place = next(n for n, cell in enumerate(rows[own]) if cell.value == value)
    near = [cell for _, cell in sorted(enumerate(rows[own]), key=lambda pair: abs(pair[0] - place))]
    unusable = {value, *hidden}
    usable = [c for c in near if c.value not in unusable and 0 < len(c.value) <= 40]
    # Words are better names than numbers.
    usable.sort(key=lambda cell: any(c.isdigit() for c in cell.value))
    words = list(dict.fromkeys(map(named, usable)))
    for size in range(least, 3):
        for chosen in itertools.combinations(words, size):
            if not any(set(chosen) <= set(other) for other in others):
                return list(chosen)
    return None


def named(cell: Cell) -> str:
    """Return a value in words: numbers and yes-or-no values of a JSON answer with the name of their
    field."""
    field = cell.label.rpartition(".")[2].removesuffix("[*]")
    needs_field = cell.value in ("true", "false") or not any(c.isalpha() for c in cell.value)
    return f"{spaced(field)} {cell.value}" if needs_field and field not in ("", "$") else cell.value
