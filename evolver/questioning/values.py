"""The values that a walk knows, and the arguments that it fills with them."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from envs.probed import Cell, cells
from evolver.questioning.calls import Event, Json, Key, Operation, key_of, required_of
from evolver.questioning.operation_stats import (
    GUESSED,
    LISTED,
    NO_TRIALS,
    UNTRIED,
    Acceptance,
    OperationStats,
    is_field,
)

# Texts for arguments that take any text, such as the name of a new file.
NEW_TEXTS = (
    "amber", "birch", "cobalt", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper",
)  # fmt: skip
_WORDS_OF_TEXT = (1, 1, 2, 3)  # of a made-up text, one of these
# A path, a file, an address: a name between other parts.
_NAMED_PLACE = re.compile(r"((?:[^\s/]*/)*)([^\W\d_][\w-]*)((?:\.\w{1,5})?|@\S+)")
_NO_VALUES = ("", "true", "false", "none", "null")
_LONGEST = 60  # characters of a text that is tried as an argument
_LONGEST_TOKEN = 400  # characters of a value without spaces, such as an access token
_TIMES = {"date": "%Y-%m-%d", "time": "%H:%M", "date-time": "%Y-%m-%dT%H:%M"}
_FEWEST_PLACES, _SHARE_PLACES = 4, 0.25  # of others, where a new path or address is made up
_LEAST_NUMBER, _MOST_NUMBER = 1, 100  # of a made-up number, where the schema gives no bounds
_RANGE = re.compile(r"(?<![\w.-])(-?\d+) ?(?:to|and|-|–) ?(-?\d+)(?![\w-]|\.\d)")  # in words

# --- shape of a call ---

_DRAWS = 4  # of arguments, until a call is found that was not yet made
_OPTIONAL = 0.1  # how often an optional argument is given
_LONGER_LIST = 0.2  # how often a list gets a second item
_LEAST_CHANCE = 1e-4  # of a call, so that it may be drawn at all
_DOUBTFUL = 0.2  # chance of a value, below which an optional argument is left out

# --- choice of a value ---

_UNTESTED = 0.5  # how often a value of a refused call is tried in a remedy that never took its kind
_UNTESTED_CHANCE = 0.3  # that it fits
_HALF = 0.5  # a trial that half worked, by which rates of values that were not tried are estimated
_ANY_TEXT, _SOME_TEXT = 0.5, 0.05  # the same for a made-up value, if any text may do, and if not
_BESIDE = 9  # a value is so much more likely if the operation's group stands in its row
_EARLIER, _ELSEWHERE = 0.3, 0.1  # weight of values of earlier walks, and of words of other worlds
_WILD = 0.2  # weight of all kinds that nothing speaks for, compared to all others
_WILD_IF_FOCUSED = 0.05  # the same in a walk of a few groups of operations, which sees much more
_GUESS = 0.3  # weight of a made-up value that always works, and of the schema's example alone
_GUESS_WORKS = 0.2  # how often a made-up value works before one was tried
_LEAST_GUESS = 0.01  # weight of a made-up value, so that it is tried now and then
_SOURCES = 6  # that are drawn until one has a value of the right type

Given = dict[str, str]  # kind -> value


@dataclass
class SeenValues:
    """Values that earlier episodes in the same initial state showed: {kind: {value: None}}, kept in
    order.

    shown_by: {value: [operation, arguments]} of a call that showed it, which may have to be made
    again before the value is accepted as an argument.
    """

    values: dict[str, dict[str, None]] = field(default_factory=dict)
    shown_by: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, shown: Iterable[Cell], event: Event | None = None) -> None:
        """Add values. event: the call that showed them."""
        for cell in shown:
            if len(cell.value) > _LONGEST:  # a token, by which no task could be worded
                continue
            for kind in cell.kinds:
                self.values.setdefault(kind, {})[cell.value] = None
            if event is not None and cell.value not in event.values:
                self.shown_by.setdefault(cell.value, [event.name, event.arguments])

    def in_answers(self) -> set[str]:
        """Return the values that answers showed, without those of refusals and openings."""
        found: set[str] = set()
        for kind, values in self.values.items():
            if not kind.startswith(("!", "opening")):
                found.update(values)
        return found


class Values:
    """The values that a walk may know: those seen in it, in its world, or in other worlds.

    needed: operations that others need, such as a login, if the walk draws a few groups only; None
    if it draws all operations.
    """

    def __init__(
        self,
        stats: OperationStats,
        rng: random.Random,
        seen: SeenValues,
        beside: dict[str, set[str]],
        needed: set[str] | None,
    ):
        """beside: {value: the values in its row, in lower case}, to which `add` adds."""
        self.stats = stats
        self.rng = rng
        self.seen = seen
        self.beside = beside
        self.needed = needed
        self.shown: dict[str, dict[str, int]] = {}  # kind -> value -> time when it was shown last
        self.kinds: dict[str, list[str]] = {}  # value -> its kinds
        self.refused: dict[str, int] = {}  # value -> refused calls with it since the last success
        self.time = 0  # number of calls so far
        self.window = 0  # observations that count, 0 = all
        self.listed: dict[str, dict[str, None]] = {}  # argument -> words of its description
        for kind, values in seen.values.items():
            for value in values:
                self.kinds.setdefault(value, []).append(kind)

    def copy(self) -> Values:
        """Return a copy that changes independently."""
        other = copy.copy(self)
        other.refused = dict(self.refused)
        other.shown = {kind: dict(values) for kind, values in self.shown.items()}
        other.kinds = {value: list(kinds) for value, kinds in self.kinds.items()}
        return other

    def add(self, shown: Iterable[Cell], event: Event | None, *, lasting: bool) -> None:
        """Add values. event: the call that showed them. lasting: another walk can see them too."""
        shown = [cell for cell in shown if _is_value(cell.value)]
        for row, inner in itertools.groupby(shown, key=lambda cell: cell.label and cell.row):
            if row:
                found = list(inner)
                for cell in found:
                    self.beside[cell.value] = {other.value.lower() for other in found}
        for cell in shown:
            kinds = self.kinds.setdefault(cell.value, [])
            for kind in cell.kinds:
                self.shown.setdefault(kind, {})[cell.value] = self.time
                if kind not in kinds:
                    kinds.append(kind)
        if lasting:
            self.seen.add(shown, event)

    def knows(self, value: str) -> bool:
        """Return True if the walk has shown a value."""
        return any(value in values for values in self.shown.values())

    # --- arguments --------------------------------------------------------------------------------

    def arguments(
        self, operation: Operation, given: Given, done: set[Key]
    ) -> tuple[Json | None, float]:
        """Return arguments for a call that was not `done`, and the chance that they fit; (None, 0)
        if none. given: values to use first."""
        for _ in range(_DRAWS):
            arguments, chance = self._fill(operation, given)
            if arguments is None:
                break
            if key_of(operation.name, arguments) not in done:
                return arguments, max(chance, _LEAST_CHANCE)
        return None, 0.0

    def _fill(self, operation: Operation, given: Given) -> tuple[Json | None, float]:
        """Fill the required parameters, and now and then an optional one."""
        chosen = list(operation.required)
        for name in operation.properties:
            if name not in operation.required and self.rng.random() < _OPTIONAL:
                chosen.append(name)
        arguments = {}
        chance = 1.0
        for name, words in operation.listed.items():
            self.listed[f"{operation.name}.{name}"] = dict.fromkeys(words)
            for word in words:
                known = self.kinds.setdefault(word, [])
                known += [LISTED] * (LISTED not in known)
        for name in chosen:
            schema = operation.properties.get(name, {})
            value, likely = self._value(f"{operation.name}.{name}", schema, given)
            if self.needed is not None and name not in operation.required and likely < _DOUBTFUL:
                continue
            if value is None:
                return None, 0.0
            arguments[name] = value
            chance *= likely
        return arguments, chance

    def _value(self, place: str, schema: Json, given: Given) -> tuple[Any, float]:
        """Return a value for a schema, None if there is none, and the chance that it fits. Fills
        lists and objects."""
        schema = _plain(schema)
        if "enum" in schema or schema.get("type") == "boolean":
            return self.rng.choice(list(schema.get("enum") or (True, False))), 1.0
        if schema.get("type") == "array":
            size = max(int(schema.get("minItems", 1)), 1 + (self.rng.random() < _LONGER_LIST))
            return self._several([(f"{place}.*", schema.get("items") or {})] * size, given)
        if schema.get("type") == "object":
            inner = schema.get("properties") or {}
            names = required_of(schema)
            wanted = [(f"{place}.{name}", inner.get(name, {})) for name in names]
            values, chance = self._several(wanted, given)
            return None if values is None else dict(zip(names, values)), chance
        return self._leaf(place, schema, given)

    def _several(
        self, wanted: Sequence[tuple[str, Json]], given: Given
    ) -> tuple[list[Any] | None, float]:
        """Return values for (place, schema) pairs, and the chance that all of them fit."""
        values = []
        chance = 1.0
        for place, schema in wanted:
            value, likely = self._value(place, schema, given)
            if value is None:
                return None, 0.0
            values.append(value)
            chance *= likely
        return values, chance

    def _leaf(self, place: str, schema: Json, given: Given) -> tuple[Any, float]:
        about = str(schema.get("description", ""))
        accepts = self.stats.acceptance(place, hinted(schema), about)
        kinds = self.stats.kinds.get(place, {})
        untested = []
        for kind, value in given.items():
            converted = typed(value, schema)
            if converted is not None:
                if accepts.fits(kind):
                    return converted, 1.0
                if kind not in kinds:
                    untested.append(converted)
        if untested and self.rng.random() < _UNTESTED:
            return self.rng.choice(untested), _UNTESTED_CHANCE
        guess = guessed(schema, self.rng)
        if self._takes_text(place, schema):
            guess = self._new_place(place) or self._new_text()
        kind, share, values = self._source(place, schema, accepts)
        if not values:
            worked, tried = kinds.get(GUESSED, NO_TRIALS)
            prior = _ANY_TEXT if self._takes_any_text(place, schema) else _SOME_TEXT
            return typed(guess, schema), (worked + prior) / (tried + 1)
        rates = self._rates(place, values)
        n = self.rng.choices(range(len(values)), rates)[0]
        return typed(values[n], schema), accepts[kind] * share * rates[n]

    def _new_text(self) -> str:
        return " ".join(self.rng.sample(NEW_TEXTS, self.rng.choice(_WORDS_OF_TEXT)))

    def _new_place(self, place: str) -> str:
        """Return a made-up path, file or address that looks like those which other arguments of
        this name or operation demand, "" if they demand none."""
        operation, _, name = place.rpartition(".")
        known: list[str] = []
        for other, counts in self.stats.values.items():
            akin = other.startswith(f"{operation}.") or other.rpartition(".")[2] == name
            if akin and not self.stats.takes_anything(other):
                known += [value for value, (won, _) in counts.items() if won]
        found = [_NAMED_PLACE.fullmatch(value) for value in known if not is_made_up(value)]
        places = [place for place in found if place and (place[1] or place[3])]
        # Walks name what they make by any word, and then these words are found there as well.
        if len(places) < max(_FEWEST_PLACES, _SHARE_PLACES * len(found)):
            return ""
        before, _, after = self.rng.choice(places).groups()
        return f"{before}{self.rng.choice(NEW_TEXTS)}{after}"

    def _rates(self, place: str, values: Sequence[str]) -> list[float]:
        """Return how often each value is likely to work."""
        counts = self.stats.values.get(place, {})
        rates = []
        operation = place.rpartition(".")[0]
        # The password beside "spotify" is the one for "spotify.login".
        names = {group_of(place), *name_parts(operation)}
        for value in values:
            worked, tried = counts.get(value, NO_TRIALS)
            rate = (worked + _HALF) / (tried + 1) / (1 + self.refused.get(value, 0)) ** 2
            rates.append(rate * (1 if names.isdisjoint(self.beside.get(value, ())) else _BESIDE))
        return rates

    def _source(
        self, place: str, schema: Json, accepts: Acceptance
    ) -> tuple[str, float, list[str]]:
        """Draw (kind, weight of its source, values) from what this walk may know: seen in it, in
        this world, or in other worlds.

        No values stand for a guess, which is drawn rarely if other values fit, unless guesses are
        known to work.
        """
        # (kind, weight of its source, {value: time when it was shown}, only recent ones count)
        sources: list[tuple[str, float, Mapping[str, Any], bool]] = []
        for share, of_kind, recent in (
            (1.0, self.shown, True),
            (_EARLIER, self.seen.values, False),
            (_ELSEWHERE, self.stats.words, False),
        ):
            sources += [(kind, share, values, recent) for kind, values in of_kind.items()]
        if self.listed.get(place):
            sources.append((LISTED, 1.0, self.listed[place], False))
        if self._takes_text(place, schema):
            # Words of other fields would be accepted, and make no sense there.
            sources = [source for source in sources if is_field(source[0], place)]
        rates = [accepts[source[0]] for source in sources]
        best = max(rates, default=1.0)
        weights = [(rate / best) ** 2 * source[1] for rate, source in zip(rates, sources)]
        fitting = sum(weight for weight, rate in zip(weights, rates) if rate > UNTRIED)
        others = sum(weights) - fitting
        if fitting and others:
            # The many words of answers, prompt and errors would outweigh the right kind.
            wild = _WILD if self.needed is None else _WILD_IF_FOCUSED
            factor = min(1.0, wild * fitting / others)
            weights = [w * (factor if r <= UNTRIED else 1) for w, r in zip(weights, rates)]
        sources.append((GUESSED, 1.0, {}, True))
        weights.append(self._guess_weight(place, schema, weights, best, bool(fitting)))
        since = self.time - self.window if self.window else 0
        for kind, share, values, recent in self.rng.choices(sources, weights, k=_SOURCES):
            known = [value for value, time in values.items() if not recent or time >= since]
            found = [value for value in known if typed(value, schema) is not None]
            if found or kind == GUESSED:
                return kind, share, found
        return GUESSED, 1.0, []

    def _guess_weight(
        self, place: str, schema: Json, weights: Sequence[float], best: float, fitting: bool
    ) -> float:
        """Return the weight of a made-up value. weights: those of other sources, of which the best
        rate is `best`. fitting: something speaks for one of them."""
        kinds = self.stats.kinds.get(place, {})
        worked, tried = kinds.get(GUESSED, NO_TRIALS)
        weight = max(_GUESS * (worked + _GUESS_WORKS) / (tried + 1) / best, _LEAST_GUESS)
        if best <= UNTRIED and self._takes_any_text(place, schema):
            return sum(weights) + weight
        if hinted(schema) and not fitting and not any(counts[0] for counts in kinds.values()):
            # The schema's example is all that is known.
            return max(weight, _GUESS * (sum(weights) + weight))
        return weight

    def _takes_text(self, place: str, schema: Json) -> bool:
        """Return True if an argument was seen to take any text, or the values of a field with its
        name."""
        text = schema.get("type") == "string" and not hinted(schema)
        known = self.stats.takes_anything(place) or self.stats.has_field(place)
        return self.needed is None and text and known

    def _takes_any_text(self, place: str, schema: Json) -> bool:
        """Return True if a made-up text may do. Where walks see everything, they find this out by
        trying.

        What others need, such as a login, does not take it."""
        if self.needed is None or place.rpartition(".")[0] in self.needed:
            return False
        return schema.get("type") == "string" and "format" not in schema and not hinted(schema)


def guessed(schema: Json, rng: random.Random) -> str:
    """Return a made-up value: one that looks like the example in a description ("like O12"), a
    number or a word."""
    if schema.get("type") in ("integer", "number"):
        said = _RANGE.search(str(schema.get("description", "")))
        bounds = map(int, said.groups()) if said else (_LEAST_NUMBER, _MOST_NUMBER)
        least, most = (int(schema.get(*bound)) for bound in zip(("minimum", "maximum"), bounds))
        return str(rng.randint(least, max(least, most)))
    if schema.get("format") in _TIMES:
        when = datetime(2026, 1, 1) + timedelta(days=rng.randrange(365), hours=rng.randrange(24))
        return when.strftime(_TIMES[schema["format"]])
    hints = hinted(schema)
    if hints:
        return re.sub("9", lambda _: str(rng.randrange(10)), rng.choice(sorted(hints)))
    return rng.choice(NEW_TEXTS)


def is_made_up(value: str) -> bool:
    """Return True for made-up words and for a path or an address with a made-up name."""
    place = _NAMED_PLACE.fullmatch(value)
    return set([place[2]] if place else value.split()) <= set(NEW_TEXTS)


def _is_value(text: str) -> bool:
    longest = _LONGEST if " " in text else _LONGEST_TOKEN
    return text.lower() not in _NO_VALUES and len(text) <= longest


def hinted(schema: Json) -> frozenset[str]:
    """Return the kinds of the ids in a parameter's description, such as that of "O12" in "order id,
    like O12"."""
    return _ids_in(str(schema.get("description", "")))


@lru_cache(maxsize=4096)
def _ids_in(description: str) -> frozenset[str]:
    return frozenset(cell.kinds[0] for cell in cells("", description) if "@" not in cell.kinds[0])


def typed(value: str, schema: Json) -> Any:
    """Return the value in the type of the schema, None if it cannot be converted."""
    kind = schema.get("type")
    try:
        # A number is as it was shown: 3 is not 3.0.
        whole = kind == "integer" or (kind == "number" and value.removeprefix("-").isdecimal())
        return int(value) if whole else float(value) if kind == "number" else value
    except ValueError:
        return None


def _plain(schema: Json) -> Json:
    """Return a schema with one type: the first that is not null, of a list of types or
    alternatives."""
    for key in ("anyOf", "oneOf", "allOf"):
        inner = [option for option in schema.get(key, ()) if option.get("type") != "null"]
        if inner:
            return _plain({**schema, key: (), **inner[0]})
    if isinstance(schema.get("type"), list):
        kinds = [name for name in schema["type"] if name != "null"]
        return {**schema, "type": [*kinds, "string"][0]}
    return schema


def group_of(name: str) -> str:
    """Return the first part of an operation's name: the app, as in "notes.add"."""
    return name.partition(".")[0]


def name_parts(name: str) -> list[str]:
    """Return the words of a name, without the shortest ones."""
    return [part for part in re.split(r"[\W_]+", name.lower()) if len(part) > 2]
