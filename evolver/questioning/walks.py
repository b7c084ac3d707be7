"""Curiosity walks over the operations of a world, which discover its values and what can be done
with them.

A walk has two phases, as in section 3.1 of the AgentEvolver paper: `breadth` steps that may use all
observations, then `depth` steps that use only the last `depth` of them. In both, a refused call is
followed up: by the call that showed its values in an earlier episode, or by one that has helped
before, and a retry. Otherwise the next operation is drawn
in proportion to its expected novelty: the mean over its outcomes of 1/sqrt(times seen), plus a
bonus for operations that were rarely tried (eq. 8, with a count-based bonus in place of a language
model). Which values an argument takes, and which operation makes another one work, is learnt from
calls that worked (`Knowledge`).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.probed import Cell, cells, phrases, tokens
from envs.world import Task, World
from evolver.questioning.calls import Episode, Event, Operation
from evolver.questioning.knowledge import GUESSED, UNTRIED, Knowledge, count, signature
from evolver.replaying import snapshot_of
from evolver.transcripts import text_of

# Texts for arguments that take any text, such as the name of a new file.
NEW_TEXTS = (
    "amber",
    "birch",
    "cobalt",
    "delta",
    "ember",
    "fjord",
    "garnet",
    "harbor",
    "indigo",
    "juniper",
)
_NO_VALUES = ("", "true", "false", "none", "null")
_LONGEST = 60  # characters of a text that is tried as an argument
_LONGEST_TOKEN = 400  # characters of a value without spaces, such as an access token
_MANY = 100  # operations of which a walk draws those of some groups only
_GROUPS = 2
_FINALISTS = 6
_TRIALS = 3  # remedies that are tried for one error
_TRIALS_IN_A_ROW = 9
_WILD = 0.2  # how often a value of a kind is tried that nothing speaks for, compared to the others


@dataclass
class Walk:
    """The calls of one walk from the start of an episode of `task`."""

    task: Task
    events: list[Event]


@dataclass
class Known:
    """Values that earlier episodes in the same initial state showed: {kind: {value}}, kept in
    order.

    shown_by: {value: [operation, arguments]} of a call that showed it, which may have to be made
    again before the value is accepted as an argument.
    """

    values: dict[str, dict[str, None]] = field(default_factory=dict)
    shown_by: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, shown: Sequence[Cell], event: Event | None = None) -> None:
        """Add values. event: the call that showed them."""
        for cell in shown:
            if (
                len(cell.value) > _LONGEST
            ):  # a token of one episode, by which no task could be worded
                continue
            for kind in cell.kinds:
                self.values.setdefault(kind, {})[cell.value] = None
            if event is not None and cell.value not in event.values:
                self.shown_by.setdefault(cell.value, [event.name, event.arguments])

    def all(self) -> set[str]:
        """Return the values that answers showed, without those of refusals and openings."""
        answers = (
            values for kind, values in self.values.items() if not kind.startswith(("!", "opening"))
        )
        return {value for values in answers for value in values}


class Walker:
    """Makes walks. One instance accumulates knowledge across the worlds of one environment."""

    def __init__(self, *, breadth: int, depth: int, branches: int):
        """branches: walks that share one breadth phase; their depth phases start from a snapshot,
        or from a replay."""
        self.knowledge = Knowledge()
        self.breadth, self.depth, self.branches = breadth, depth, branches
        self.beside: dict[str, set[str]] = {}  # value -> the values in its row, in lower case
        self._needed: dict[tuple[str, ...], dict[str, set[str]]] = {}

    def needed(self, operations: dict[str, Operation]) -> dict[str, set[str]]:
        """Return {operation: others that the descriptions of its required arguments name}, such as
        "spotify.login" by "token obtained from spotify app login". Names of a single word are too
        common to count."""
        key = tuple(operations)
        if key not in self._needed:
            parts = {name: set(_parts(name)) for name in operations}
            parts = {name: own for name, own in parts.items() if len(own) > 1}
            self._needed[key] = {
                name: {other for other, own in parts.items() if own <= words and other != name}
                for name, op in operations.items()
                for words in [
                    {
                        w
                        for p in op.required
                        for w in _parts(str(op.properties.get(p, {}).get("description", "")))
                    }
                ]
            }
        return self._needed[key]

    def walks(
        self,
        world: World,
        task: Task,
        rng: random.Random,
        known: Known,
        first: Sequence[Event] = (),
        operations: dict[str, Operation] | None = None,
    ) -> Iterator[Walk]:
        """Explore one world and yield a walk per branch.

        known: values that may be tried; the walk adds what it sees. first: calls to begin with.
        operations: those to draw, None = all. The caller may use the world for something else
        between two walks.
        """
        episode = Episode(world, task, self.knowledge.refuses, operations=operations or {})
        trunk = _OpenWalk(self, episode, rng, known)
        for event in first:
            if not trunk.over:
                trunk.call(event.name, event.arguments)
        while len(trunk.events) < len(first) + self.breadth and not trunk.over:
            trunk.follow_up()
        snapshot = snapshot_of(world)
        for number in range(self.branches):
            if number and snapshot is not None:
                world.restore(snapshot)
            elif number:
                episode = Episode(world, task, self.knowledge.refuses, operations=trunk.operations)
                for event in trunk.events:
                    episode.call(event.name, event.arguments)
            branch = trunk.branch(self.depth)
            while len(branch.events) < len(trunk.events) + self.depth and not branch.over:
                branch.follow_up()
            yield Walk(task, branch.events)


class _OpenWalk:
    """A walk that is still being made."""

    def __init__(self, walker: Walker, episode: Episode, rng: random.Random, known: Known):
        self.walker, self.knowledge, self.known = walker, walker.knowledge, known
        self.episode, self.rng, self.operations = episode, rng, episode.operations
        self.events: list[Event] = []
        self.seen: dict[str, dict[str, int]] = {}  # kind -> value -> the last event that showed it
        self.kinds_of: dict[str, list[str]] = {}  # value -> its kinds
        self.window = 0  # observations that are used, 0 = all
        self.done: set[tuple[str, str]] = set()  # calls made
        self.plan: list[tuple[str, dict[str, Any]]] = []  # calls to make next
        self.refused: dict[str, int] = {}  # value -> consecutive refused calls with it
        self.changed: dict[
            str, str
        ] = {}  # value -> the last operation that changed something with it
        self.trials: list[
            tuple[str, str]
        ] = []  # (operation: error, operation tried as a remedy), until the retry
        self.named: set[str] = (
            set()
        )  # groups that an answer has named, such as the apps that have an account
        self.drawn = self._drawn()
        for kind, values in known.values.items():
            for value in values:
                self.kinds_of.setdefault(value, []).append(kind)
        if episode.prose:  # such a world describes the place to the user
            self._see(phrases(text_of(episode.opening.messages[-1:])))
        else:
            system = [m for m in episode.opening.messages if m.get("role") == "system"]
            self._see(cells("opening", text_of(system)))

    def _drawn(self) -> list[str]:
        """Return the operations that this walk draws: all; if there are very many, those of a few
        groups, such as the functions of one app, and those that require nothing. Others would fail
        for want of what their group needs."""
        groups = sorted({_group(name) for name in self.operations})
        if len(self.operations) <= _MANY or len(groups) > len(self.operations) // 10:
            return list(self.operations)
        groups = [group for group in groups if group in self.named] or groups
        chosen = self.rng.sample(groups, min(_GROUPS, len(groups)))
        return [
            name
            for name, op in self.operations.items()
            if not op.required or _group(name) in chosen
        ]

    @property
    def is_focused(self) -> bool:
        return len(self.drawn) < len(self.operations)

    @property
    def over(self) -> bool:
        return not self.operations or bool(self.events and self.events[-1].over)

    @property
    def last(self) -> str:
        return self.events[-1].name if self.events else ""

    def branch(self, window: int) -> _OpenWalk:
        """Return a copy that continues independently and uses the last `window` observations."""
        other = _OpenWalk(self.walker, self.episode, self.rng, self.known)
        other.events, other.window, other.done = (
            list(self.events),
            0 if self.is_focused else window,
            set(self.done),
        )
        other.refused, other.changed = dict(self.refused), dict(self.changed)
        other.named, other.drawn = self.named, self.drawn
        other.seen = {kind: dict(values) for kind, values in self.seen.items()}
        other.kinds_of = {value: list(kinds) for value, kinds in self.kinds_of.items()}
        return other

    def explore(self) -> None:
        """Draw several operations by novelty, then one of them by the chance that its arguments
        fit, and call it."""
        names = self.drawn
        done, needed = (
            {event.name for event in self.events if event.ok},
            self.walker.needed(self.operations),
        )
        wanted = Counter(other for others in needed.values() for other in others - done)
        novelty = [
            self.knowledge.novelty(name, self.last) * (1 + min(wanted[name], 20)) for name in names
        ]
        if self.is_focused:  # what one group refuses without arguments, the others do too
            refused = Counter(_within(e.name) for e in self.events if not e.ok and not e.arguments)
            novelty = [
                n / (1 + refused[_within(name)]) ** 2
                for name, n in zip(names, novelty, strict=True)
            ]
        else:  # an operation that has hardly ever worked may be a change
            novelty = [
                n if self.knowledge.is_practised(name) else 3 * n
                for name, n in zip(names, novelty, strict=True)
            ]
        several = dict.fromkeys(self.rng.choices(names, novelty, k=max(6, len(names) // 8)))
        drawn = [(name, *self._arguments(name, {})) for name in several]
        candidates = [
            (name, arguments, chance) for name, arguments, chance in drawn if arguments is not None
        ]
        if candidates:
            if (
                self.is_focused
            ):  # the improbable ones of many operations would together outweigh the probable ones
                candidates = [c for c in candidates if needed[c[0]] <= done] or candidates
                candidates = sorted(candidates, key=lambda candidate: -candidate[2])[:_FINALISTS]
            chances = [
                chance if needed[name] <= done else 0.05 * chance for name, _, chance in candidates
            ]
            if not self.is_focused:  # else what works already would be called again and again
                known = [self.knowledge.is_practised(name) for name, _, _ in candidates]
                chances = [
                    chance**0.5 if k else max(chance, 0.5)
                    for chance, k in zip(chances, known, strict=True)
                ]
            name, arguments, _ = self.rng.choices(candidates, chances)[0]
            self.call(name, arguments)
        else:  # everything was tried: repeat a call
            name = self.rng.choice(names)
            self.call(name, self._arguments(name, {}, again=True)[0] or {})

    def follow_up(self) -> None:
        """Make the next planned call, or explore. If the call is refused, plan a remedy and a
        retry."""
        if self.plan:
            name, arguments = self.plan.pop(0)
            self.call(name, self._refreshed(name, arguments))
        else:
            self.trials.clear()
            self.explore()
        event = self.events[-1]
        if not event.ok and not event.over and self._may_try(event):
            remedy = self._remedy(event)
            if remedy is not None:
                self.plan = [remedy, (event.name, event.arguments), *self.plan]

    def _may_try(self, event: Event) -> bool:
        """Return True if few remedies were tried for this error, and few in a row.

        The first limit is per error, because a remedy that leads to another error is progress: some
        calls need four or five others.
        """
        failure = f"{event.name}: {signature(event)}"
        return (
            sum(tried == failure for tried, _ in self.trials) < _TRIALS
            and len(self.trials) < _TRIALS_IN_A_ROW
        )

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        """Make a call and learn from it."""
        event = self.episode.call(name, arguments)
        event.changes = event.ok and self.knowledge.is_change(event)
        self.knowledge.learn(event, self.last, lambda value: self.kinds_of.get(value, ()))
        self.events.append(event)
        self.done.add(event.key)
        if not event.ok and not event.prose:
            self._see([Cell("", "", token, (f"!{name}",)) for token in tokens(event.result)[:40]])
        elif event.ok and not self.knowledge.says_nothing(event):
            self._see(event.shown, event)
            if self.is_focused and not self.named:
                self.named = {cell.value for cell in event.shown} & {
                    _group(name) for name in self.operations
                }
                self.drawn = self._drawn() if self.named else self.drawn
        for value in event.values:
            self.refused[value] = 0 if event.ok else self.refused.get(value, 0) + 1
            if value in self.changed:
                counts = self.knowledge.blocks.setdefault(self.changed[value], [0, 0])
                counts[0] += not event.ok
                counts[1] += 1
            if event.changes:
                self.changed[value] = name
        tried = next(
            (trial for trial in reversed(self.trials) if trial[0].startswith(f"{name}: ")), None
        )
        if tried is not None:
            failure, remedy = tried
            count(
                self.knowledge.enables,
                failure,
                remedy,
                event.ok or f"{name}: {signature(event)}" != failure,
            )

    def _see(self, shown: Sequence[Cell], event: Event | None = None) -> None:
        shown = [
            cell for cell in shown if cell.value.lower() not in _NO_VALUES and _is_short(cell.value)
        ]
        for row, cells_of_row in itertools.groupby(shown, key=lambda cell: cell.label and cell.row):
            if row:
                inner = list(cells_of_row)
                for cell in inner:
                    self.walker.beside[cell.value] = {other.value.lower() for other in inner}
        for cell in shown:
            for kind in cell.kinds:
                self.seen.setdefault(kind, {})[cell.value] = len(self.events)
                if kind not in self.kinds_of.setdefault(cell.value, []):
                    self.kinds_of[cell.value].append(kind)
        if not self.changed:  # later values may not exist at the start of another walk
            self.known.add(shown, event)

    def _refreshed(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments, some of them replaced by values that the last call showed: those
        that were guessed, and now and then another, which the last call did not confirm."""
        last = self.events[-1]
        shown = {cell.value: cell.kinds for cell in (last.shown if last.ok else ())}
        refreshed = dict(arguments)
        for name, value in arguments.items():
            keep = str(value) in self.kinds_of and self.rng.random() < 0.5
            schema = self.operations[operation].properties.get(name, {})
            keep = keep or "enum" in schema
            if keep or not isinstance(value, str) or value in shown or value in last.values:
                continue
            hints = hinted(schema)
            fits = self.knowledge.fits(f"{operation}.{name}", hints)
            fitting = [
                v for v, kinds in shown.items() if any(map(fits, kinds)) and v not in last.values
            ]
            if fitting:
                refreshed[name] = self.rng.choice(fitting)
        return refreshed

    def _remedy(self, event: Event) -> tuple[str, dict[str, Any]] | None:
        """Return a call after which a refused one may work, or None.

        First come the calls that showed its values in an earlier episode, then a draw that prefers
        operations that helped, are named in the error, or take the same arguments as one that
        helped against this error elsewhere.
        """
        failure = f"{event.name}: {signature(event)}"
        for value in () if self.is_focused else event.values:
            name, arguments = self.known.shown_by.get(value, ("", {}))
            if name in self.operations and not any(value in seen for seen in self.seen.values()):
                if Event(name, arguments, "").key not in self.done:
                    self.trials.append((failure, name))
                    return name, arguments
        counts = self.knowledge.enables.get(failure, {})
        names = [name for name in self.operations if name != event.name]
        if self.is_focused:  # of so many, a blind one helps too rarely
            done, needed = (
                {e.name for e in self.events if e.ok},
                self.walker.needed(self.operations)[event.name],
            )
            names = [name for name in names if name in needed - done or counts.get(name, (0, 0))[0]]
        trials = [counts.get(name, (0, 0)) for name in names]
        if (
            not names
            or self.rng.random() > max((helped + 1) / (tried + 1) for helped, tried in trials) ** 2
        ):
            return None
        elsewhere = self.knowledge.helpers(failure)
        alike = [self.operations[name].properties for name in elsewhere if name in self.operations]
        weights = []
        for name, (helped, tried) in zip(names, trials, strict=True):
            hopeful = (
                30 if 2 * helped > tried else 5 if self.operations[name].properties in alike else 1
            )
            named = 10 if _is_named(name, event.result.lower()) else 1
            apart = (
                0.1 if self.knowledge.changes(name) else 1
            )  # a change would become part of the task
            weights.append(apart * max(hopeful, named) * (helped + 0.5) / (tried + 1))
        given = {kind: value for value in event.values for kind in self.kinds_of.get(value, ())}
        given = {} if self.is_focused else given  # a refused token is no password
        drawn = [
            (name, *self._arguments(name, given))
            for name in dict.fromkeys(self.rng.choices(names, weights, k=4))
        ]
        drawn = [
            trial
            for trial in drawn
            if trial[1] is not None and trial[2] > (0.2 if self.is_focused else 0.02)
        ]
        if not drawn:
            return None
        name, arguments, _ = self.rng.choices(drawn, [chance for _, _, chance in drawn])[0]
        self.trials.append((failure, name))
        return name, arguments

    # --- arguments --------------------------------------------------------------------------------

    def _arguments(
        self, name: str, given: dict[str, str], *, again: bool = False
    ) -> tuple[dict[str, Any] | None, float]:
        """Return arguments for a call not yet made in this walk, and the chance that they fit;
        (None, 0) if none.

        given: {kind: value} to use first. again: a call that was made is fine.
        """
        operation = self.operations[name]
        for _ in range(4):
            arguments, chance = {}, 1.0
            for parameter in self._chosen(operation):
                value, likely = self._value(
                    f"{name}.{parameter}", operation.properties.get(parameter, {}), given
                )
                if self.is_focused and parameter not in operation.required and likely < 0.2:
                    continue
                if value is None:
                    return None, 0.0
                arguments[parameter] = value
                chance *= likely
            if again or Event(name, arguments, "").key not in self.done:
                return arguments, max(chance, 1e-4)
        return None, 0.0

    def _chosen(self, operation: Operation) -> list[str]:
        """Return the parameters to fill: the required ones, and now and then an optional one."""
        optional = [name for name in operation.properties if name not in operation.required]
        return [*operation.required, *(name for name in optional if self.rng.random() < 0.1)]

    def _value(
        self, place: str, schema: dict[str, Any], given: dict[str, str]
    ) -> tuple[Any, float]:
        """Return a value for a schema, None if there is none, and the chance that it fits. Fills
        lists and objects."""
        schema = _plain(schema)
        if "enum" in schema or schema.get("type") == "boolean":
            return self.rng.choice(list(schema.get("enum") or (True, False))), 1.0
        if schema.get("type") == "array":
            size = max(int(schema.get("minItems", 1)), 1 + (self.rng.random() < 0.2))
            return self._several([(None, f"{place}.*", schema.get("items") or {})] * size, given)
        if schema.get("type") == "object":
            inner = schema.get("properties") or {}
            wanted = schema.get("required", list(inner))
            return self._several(
                [(name, f"{place}.{name}", inner.get(name, {})) for name in wanted], given
            )
        return self._leaf(place, schema, given)

    def _several(
        self, wanted: list[tuple[str | None, str, dict]], given: dict[str, str]
    ) -> tuple[Any, float]:
        """Return an object (or a list, where the names are None) of values, and the chance that all
        of them fit."""
        values, chance = [], 1.0
        for _, place, schema in wanted:
            value, likely = self._value(place, schema, given)
            if value is None:
                return None, 0.0
            values.append(value)
            chance *= likely
        if wanted and wanted[0][0] is None:
            return values, chance
        return {name: value for (name, _, _), value in zip(wanted, values, strict=True)}, chance

    def _leaf(self, place: str, schema: dict[str, Any], given: dict[str, str]) -> tuple[Any, float]:
        hints = hinted(schema)
        about = str(schema.get("description", ""))
        weight_of, fits = (
            self.knowledge.weights(place, hints, about),
            self.knowledge.fits(place, hints, about),
        )
        for kind, value in given.items():
            if fits(kind) and typed(value, schema) is not None:
                return typed(value, schema), 1.0
        counts = self.knowledge.kinds.get(place, {})
        untested = [
            v for kind, v in given.items() if kind not in counts and typed(v, schema) is not None
        ]
        if untested and self.rng.random() < 0.5:
            return typed(self.rng.choice(untested), schema), 0.3
        guess = guessed(schema, self.rng)
        kind, share, values = self._source(place, schema, hints)
        if not values:
            worked, tried = self.knowledge.kinds.get(place, {}).get(GUESSED, (0, 0))
            return typed(guess, schema), (
                worked + (0.5 if self._takes_any_text(place, schema) else 0.05)
            ) / (tried + 1)
        counts = self.knowledge.values.get(place, {})
        rates = [
            (worked + 0.5) / (tried + 1)
            for worked, tried in (counts.get(v, (0, 0)) for v in values)
        ]
        rates = [
            rate / (1 + self.refused.get(value, 0)) ** 2
            for rate, value in zip(rates, values, strict=True)
        ]
        named = {
            _group(place),
            *_parts(place.rpartition(".")[0]),
        }  # the password beside "spotify" is the one for "spotify.login"
        rates = [
            rate * (9 if named & self.walker.beside.get(v, set()) else 1)
            for rate, v in zip(rates, values, strict=True)
        ]
        n = self.rng.choices(range(len(values)), rates)[0]
        return typed(values[n], schema), weight_of(kind) * share * rates[n]

    def _source(
        self, place: str, schema: dict[str, Any], hints: set[str]
    ) -> tuple[str, float, list[str]]:
        """Draw (kind, share, values) from what this walk may know: seen in it, in this world, or in
        other worlds.

        No values stand for a guess, which is drawn rarely if other values fit, unless guesses are
        known to work.
        """
        since = len(self.events) - self.window if self.window else 0
        sources = [(kind, 1.0, values) for kind, values in self.seen.items()]
        sources += [(kind, 0.3, values) for kind, values in self.known.values.items()]
        sources += [(kind, 0.1, values) for kind, values in self.knowledge.words.items()]
        weight_of = self.knowledge.weights(place, hints, str(schema.get("description", "")))
        rates = [weight_of(kind) for kind, _, _ in sources]
        best = max(rates, default=1.0)
        weights = [
            (rate / best) ** 2 * share for rate, (_, share, _) in zip(rates, sources, strict=True)
        ]
        fitting = sum(weight for weight, rate in zip(weights, rates, strict=True) if rate > UNTRIED)
        others = sum(weights) - fitting
        if (
            fitting and others
        ):  # the many words of answers, prompt and errors would outweigh the right kind
            factor = min(1.0, (0.05 if self.is_focused else _WILD) * fitting / others)
            weights = [
                w if r > UNTRIED else w * factor for w, r in zip(weights, rates, strict=True)
            ]
        worked, tried = self.knowledge.kinds.get(place, {}).get(GUESSED, (0, 0))
        sources.append((GUESSED, 1.0, {}))
        weights.append(max(0.3 * (worked + 0.2) / (tried + 1) / best, 0.01))
        if (
            hints
            and not fitting
            and not any(counts[0] for counts in self.knowledge.kinds.get(place, {}).values())
        ):
            weights[-1] = max(
                weights[-1], 0.3 * sum(weights)
            )  # the schema's example is all that is known
        if best <= UNTRIED and self._takes_any_text(place, schema):
            weights[-1] = sum(weights)
        for kind, share, values in self.rng.choices(sources, weights, k=6):
            recent = [v for v, n in values.items() if n >= since] if share == 1.0 else list(values)
            fitting = [value for value in recent if typed(value, schema) is not None]
            if fitting or kind == GUESSED:
                return kind, share, fitting
        return GUESSED, 1.0, []

    def _takes_any_text(self, place: str, schema: dict[str, Any]) -> bool:
        """Return True if a made-up text may do. Where walks see everything, they find this out by
        trying.

        What others need, such as a login, does not take it."""
        needed = self.walker.needed(self.operations) if self.is_focused else {}
        if any(place.rpartition(".")[0] in others for others in needed.values()):
            return False
        return (
            self.is_focused
            and schema.get("type") == "string"
            and "format" not in schema
            and not hinted(schema)
        )


def guessed(schema: dict[str, Any], rng: random.Random) -> str:
    """Return a made-up value: one that looks like the example in a description ("like O12"), a
    number or a word."""
    if schema.get("type") in ("integer", "number"):
        least, most = int(schema.get("minimum", 1)), int(schema.get("maximum", 100))
        return str(rng.randint(least, max(least, most)))
    if hints := hinted(schema):
        return re.sub("9", lambda _: str(rng.randrange(10)), rng.choice(sorted(hints)))
    return rng.choice(NEW_TEXTS)


def _is_short(value: str) -> bool:
    return len(value) <= _LONGEST or (len(value) <= _LONGEST_TOKEN and " " not in value)


def hinted(schema: dict[str, Any]) -> set[str]:
    """Return the kinds of the ids in a parameter's description, such as that of "O12" in "order id,
    like O12"."""
    shown = cells("", str(schema.get("description", "")))
    return {kind for cell in shown for kind in cell.kinds if "@" not in kind}


def typed(value: str, schema: dict[str, Any]) -> Any:
    """Return the value in the type of the schema, None if it cannot be converted."""
    convert = {"integer": int, "number": float, "string": str}.get(
        str(schema.get("type", "string")), str
    )
    try:
        return convert(value)
    except ValueError:
        return None


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with one type: the first that is not null, of a list of types or
    alternatives."""
    for key in ("anyOf", "oneOf", "allOf"):
        inner = [option for option in schema.get(key, ()) if option.get("type") != "null"]
        if inner:
            return _plain({**schema, key: (), **inner[0]})
    if isinstance(schema.get("type"), list):
        return {
            **schema,
            "type": next((name for name in schema["type"] if name != "null"), "string"),
        }
    return schema


def _is_named(name: str, error: str) -> bool:
    """Return True if an error contains a word of an operation: "look at the order first" names
    `list_orders`."""
    return any(re.search(rf"\b{re.escape(part.rstrip('s'))}", error) for part in _parts(name))


def _group(name: str) -> str:
    """Return the first part of an operation's name: the app, as in "notes.add"."""
    return name.partition(".")[0]


def _within(name: str) -> str:
    """Return an operation's name without that of its group."""
    return name.partition(".")[2]


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[\W_]+", name.lower()) if len(part) > 2]


__all__ = ["Known", "Walk", "Walker", "typed"]
