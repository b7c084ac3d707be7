"""Curiosity walks over a world's tools, which discover its entities and the possible operations.

A walk has two phases, as in section 3.1 of the AgentEvolver paper: `breadth` steps that prefer the tools that have
shown least so far, then `depth` steps that use only the last `depth` observations and follow up on refused calls. The
next tool is drawn in proportion to its expected novelty: the mean over its outcomes of 1/sqrt(times seen), plus a bonus
for tools that were rarely tried (eq. 8, with a count-based bonus in place of a language model). The tool schemas do not
say which values an argument takes or which tool makes another one work; `Knowledge` learns this from calls that worked.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from envs.toolcalls import call_text
from envs.world import StepResult, Task, World
from evolver.traces import leaves, snapshot_of, text_of

_TOKEN = re.compile(r"\w[\w.:@'/-]*\w|\w")
_GUESSED = "<guessed>"
_VALUES_KEPT = 300  # per kind, over all worlds


@dataclass
class Event:
    """One call and its result."""

    tool: str
    arguments: dict[str, Any]
    result: str = ""
    ok: bool = False
    changed: list[list[Any]] = field(default_factory=list)  # rows of World.difference() that the call added or removed
    over: bool = False  # True if the episode ended

    @property
    def action(self) -> str:
        return call_text(self.tool, self.arguments)

    @property
    def key(self) -> tuple[str, str]:
        return self.tool, repr(sorted(self.arguments.items()))


@dataclass
class Walk:
    """The calls of one walk from the start of an episode of `probe`."""

    probe: Task
    events: list[Event]


class Episode:
    """An episode of `probe` that records each call as an event."""

    def __init__(self, world: World, probe: Task):
        self.world = world
        self.observation = world.reset(probe, probe.seed)
        self.difference = world.difference()

    def call(self, tool: str, arguments: dict[str, Any], *, watch: bool = True) -> Event:
        """Make a call. watch=False: the call is known to change nothing, so do not ask for the difference."""
        event = Event(tool, arguments)
        result = self.world.step(event.action)
        event.result, event.ok = text_of(result.messages), _succeeded(result)
        event.over = result.terminated or result.truncated
        before, after = self.difference, self.world.difference() if event.ok and watch else self.difference
        if after != before:
            event.changed = [row for row in after if row not in before] or [row for row in before if row not in after]
            self.difference = after
        return event


class Kinds:
    """Sorts values into kinds: entities of the profile by their id patterns, everything else by its characters."""

    def __init__(self, profile: dict[str, Any]):
        self._entities = [(entity["name"], re.compile(entity["id"])) for entity in profile["entities"]]
        self.vocabularies = {}  # entity -> its ids, for patterns that are a list of words
        for entity in profile["entities"]:
            words = entity["id"].split("|")
            if all(re.escape(word) == word for word in words):
                self.vocabularies[entity["name"]] = words
        self._sorted = lru_cache(50_000)(self._sort)

    def __call__(self, value: str) -> str:
        return self._sorted(value)

    def find(self, text: str) -> list[tuple[str, str]]:
        """Return (kind, value) of every token of `text`, in order and without repeats."""
        return [(self(token), token) for token in dict.fromkeys(_TOKEN.findall(text))]

    def entities_in(self, text: str) -> set[str]:
        """Return the entities that a text names or shows an id of."""
        named = {name for name, _ in self._entities} & set(_TOKEN.findall(text.lower()))
        return named | {kind for kind, _ in self.find(text) if self.is_entity(kind)}

    def is_entity(self, kind: str) -> bool:
        return any(kind == name for name, _ in self._entities)

    def _sort(self, value: str) -> str:
        for name, pattern in self._entities:
            if pattern.fullmatch(value):
                return name
        if value.isdigit():
            return "<number>"
        if any(c.isdigit() for c in value):
            return "<" + re.sub(r"\d+", "9", value) + ">"
        return "<Name>" if value[0].isupper() else "<word>"


class Knowledge:
    """Statistics over all walks so far. The state consists of JSON values."""

    def __init__(self):
        self.outcomes: dict[str, dict[str, int]] = {}  # tool -> signature of the outcome -> times
        self.kinds: dict[str, dict[str, list[int]]] = {}  # tool.parameter -> kind -> [worked, tried]
        self.values: dict[str, dict[str, list[int]]] = {}  # tool.parameter -> word or name -> [worked, tried]
        self.enables: dict[str, dict[str, list[int]]] = {}  # tool: error -> tool before a retry -> [helped, tried]
        self.blocks: dict[str, list[int]] = {}  # tool -> later calls with a value it changed: [refused, all]
        self.words: dict[str, dict[str, int]] = {}  # kind -> value without digits -> times shown

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state(self, state: dict[str, Any]) -> None:
        for key in vars(self):
            setattr(self, key, copy.deepcopy(state[key]))

    def novelty(self, tool: str) -> float:
        """Return the expected novelty of a tool.

        Changes are worth most and refusals least. A tool after which nothing more can be done, such as a cancellation,
        is worth less.
        """
        outcomes = self.outcomes.get(tool, {})
        times = sum(outcomes.values())
        worth = {"changed": 2.0, "shown": 1.0, "refused": 0.3}
        bonus = sum(n**0.5 * worth[signature.split(" ", 1)[0]] for signature, n in outcomes.items())
        refused, later = self.blocks.get(tool, (0, 0))
        return (bonus / max(times, 1) + (1 + times) ** -0.5) * (later - refused + 1) / (later + 1)

    def learn(self, event: Event, signature: str, kinds: Kinds, *, is_known: Callable[[str], bool]) -> None:
        """Count an outcome. is_known: returns False for a guessed value, which is not counted under its kind."""
        outcomes = self.outcomes.setdefault(event.tool, {})
        outcomes[signature] = outcomes.get(signature, 0) + 1
        for name, value in event.arguments.items():
            text, place = str(value), f"{event.tool}.{name}"
            _count(self.kinds, place, kinds(text) if is_known(text) else _GUESSED, event.ok)
            if not any(c.isdigit() for c in text):
                _count(self.values, place, text, event.ok)
        for kind, value in kinds.find(event.result) if event.ok else ():
            shown = self.words.setdefault(kind, {})
            if not any(c.isdigit() for c in value) and (value in shown or len(shown) < _VALUES_KEPT):
                shown[value] = shown.get(value, 0) + 1


class Walker:
    """Makes walks. One instance accumulates knowledge across worlds with the same tools and profile."""

    def __init__(self, profile: dict[str, Any], *, breadth: int, depth: int, branches: int):
        """branches: walks that share one breadth phase; their depth phases start from a snapshot, or from a replay."""
        self.kinds, self.knowledge = Kinds(profile), Knowledge()
        self.breadth, self.depth, self.branches = breadth, depth, branches
        self.arguments: dict[str, set[str]] = {}  # tool.parameter -> entities it takes, by the profile or the schema
        for operation in profile["operations"]:
            for name, entity in operation["arguments"].items():
                self.arguments.setdefault(f"{operation['tool']}.{name}", set()).add(entity)

    def walks(self, world: World, probe: Task, rng: random.Random, *, hints: str = "") -> Iterator[Walk]:
        """Explore one world and yield a walk per branch.

        hints: text whose values may be tried, such as the query of the masked task. The caller may use the world for
        something else between two walks.
        """
        episode = Episode(world, probe)
        trunk = _OpenWalk(self, episode, rng, hints)
        while len(trunk.events) < self.breadth and not trunk.over:
            trunk.explore()
        snapshot = snapshot_of(world)
        for number in range(self.branches):
            if number and snapshot is not None:
                world.restore(snapshot)
            elif number:
                episode = Episode(world, probe)
                for event in trunk.events:
                    episode.call(event.tool, event.arguments)
            branch = trunk.branch(self.depth)
            episode.difference = world.difference()
            while len(branch.events) < self.breadth + self.depth and not branch.over:
                branch.follow_up()
            yield Walk(probe, branch.events)


class _OpenWalk:
    """A walk that is still being made."""

    def __init__(self, walker: Walker, episode: Episode, rng: random.Random, hints: str):
        self.walker, self.kinds, self.knowledge = walker, walker.kinds, walker.knowledge
        self.episode, self.rng = episode, rng
        self.tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in episode.observation.tools}
        self.events: list[Event] = []
        self.seen: dict[str, dict[str, int]] = {}  # kind -> value -> the last event that showed it
        self.hints: dict[str, list[str]] = {}
        for kind, value in self.kinds.find(hints):
            if kind not in ("<word>", "<number>"):
                self.hints.setdefault(kind, []).append(value)
        self.window = 0  # observations that are used, 0 = all
        self.done: set[tuple[str, str]] = set()  # calls made
        self.plan: list[tuple[str, dict[str, Any]]] = []  # calls to make next
        self.refused: dict[str, int] = {}  # value -> consecutive refused calls with it
        self.changed: dict[str, str] = {}  # value -> the last tool that changed something with it
        self.trials: list[tuple[str, str]] = []  # (tool: error, tool tried as a remedy), until the retry

    @property
    def over(self) -> bool:
        return not self.tools or bool(self.events and self.events[-1].over)

    def branch(self, window: int) -> _OpenWalk:
        """Return a copy that continues independently and uses the last `window` observations."""
        other = _OpenWalk(self.walker, self.episode, self.rng, "")
        other.events, other.hints, other.window, other.done = list(self.events), self.hints, window, set(self.done)
        other.refused, other.changed = dict(self.refused), dict(self.changed)
        other.seen = {kind: dict(values) for kind, values in self.seen.items()}
        return other

    def explore(self) -> None:
        """Draw several tools by novelty, then one of them by the chance that its arguments fit, and call it."""
        names = list(self.tools)
        novelty = [self.knowledge.novelty(name) for name in names]
        drawn = [(name, *self._arguments(name, {})) for name in dict.fromkeys(self.rng.choices(names, novelty, k=6))]
        candidates = [(name, arguments, chance) for name, arguments, chance in drawn if arguments is not None]
        if candidates:
            name, arguments, _ = self.rng.choices(candidates, [chance for _, _, chance in candidates])[0]
            self._call(name, arguments)
        else:
            self._call(self.rng.choice(names), {})

    def follow_up(self) -> None:
        """Make the next planned call, or explore. If the call is refused, plan a remedy and a retry."""
        if self.plan:
            tool, arguments = self.plan.pop(0)
            self._call(tool, self._refreshed(arguments))
        else:
            self.trials.clear()
            self.explore()
        event = self.events[-1]
        if not event.ok and not event.over and len(self.trials) < 3:
            remedy = self._remedy(event)
            if remedy is not None:
                self.plan = [remedy, (event.tool, event.arguments)]

    def _refreshed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with guessed values replaced by values of their kind that the last call showed."""
        last = self.events[-1]
        shown = self.kinds.find(last.result) if last.ok else []
        by_kind = dict(self.rng.sample(shown, len(shown)))
        return {
            name: value if self._is_known(str(value)) else by_kind.get(self.kinds(str(value)), value)
            for name, value in arguments.items()
        }

    def _call(self, tool: str, arguments: dict[str, Any]) -> None:
        """Make a call and learn from it."""
        event = self.episode.call(tool, arguments)
        self.events.append(event)
        self.done.add(event.key)
        signature = _signature(event, self.kinds)
        self.knowledge.learn(event, signature, self.kinds, is_known=self._is_known)
        for kind, value in self.kinds.find(event.result) if event.ok else ():
            self.seen.setdefault(kind, {})[value] = len(self.events)
        for value in map(str, leaves(arguments)):
            self.refused[value] = 0 if event.ok else self.refused.get(value, 0) + 1
            if value in self.changed:
                counts = self.knowledge.blocks.setdefault(self.changed[value], [0, 0])
                counts[0] += not event.ok
                counts[1] += 1
            if event.changed:
                self.changed[value] = tool
        if self.trials and self.trials[-1][0].startswith(f"{tool}: "):
            failure, remedy = self.trials[-1]
            _count(self.knowledge.enables, failure, remedy, event.ok or f"{tool}: {signature}" != failure)

    def _is_known(self, value: str) -> bool:
        """Return False for an id that was neither seen nor hinted at."""
        kind = self.kinds(value)
        return not self.kinds.is_entity(kind) or value in self.seen.get(kind, ()) or value in self.hints.get(kind, ())

    def _remedy(self, event: Event) -> tuple[str, dict[str, Any]] | None:
        """Return a call after which a refused one may work, or None. Prefers tools that helped or are in the error."""
        failure = f"{event.tool}: {_signature(event, self.kinds)}"
        counts = self.knowledge.enables.get(failure, {})
        names = [name for name in self.tools if name != event.tool]
        trials = [counts.get(name, (0, 0)) for name in names]
        if not names or self.rng.random() > max((helped + 1) / (tried + 1) for helped, tried in trials) ** 2:
            return None
        factors = [10.0 if _is_named(name, event.result.lower()) else 1.0 for name in names]
        weights = [f * (helped + 0.5) / (tried + 1) for f, (helped, tried) in zip(factors, trials, strict=True)]
        given = {self.kinds(str(value)): str(value) for value in leaves(event.arguments)}
        for name in dict.fromkeys(self.rng.choices(names, weights, k=4)):
            arguments, chance = self._arguments(name, given)
            if arguments is not None and chance > 0.02:
                self.trials.append((failure, name))
                return name, arguments
        return None

    def _arguments(self, tool: str, given: dict[str, str]) -> tuple[dict[str, Any] | None, float]:
        """Return arguments for a call not yet made in this walk, and the chance that they fit; (None, 0) if none.

        given: {kind: value} to use first.
        """
        parameters = self.tools[tool]
        for _ in range(4):
            arguments, chance = {}, 1.0
            for name in parameters.get("required", list(parameters.get("properties", {}))):
                value, likely = self._value(tool, name, parameters["properties"][name], given)
                if value is None:
                    return None, 0.0
                arguments[name] = value
                chance *= likely
            if Event(tool, arguments).key not in self.done:
                return arguments, max(chance, 1e-4)
        return None, 0.0

    def _value(self, tool: str, name: str, schema: dict[str, Any], given: dict[str, str]) -> tuple[Any, float]:
        """Return a value for a parameter, None if there is none, and the chance that it fits."""
        if "enum" in schema or schema.get("type") == "boolean":
            return self.rng.choice(list(schema.get("enum", (True, False)))), 1.0
        place = f"{tool}.{name}"
        weight_of = self._kind_weights(place, name, schema)
        for kind, value in given.items():
            if weight_of(kind) >= 0.1 and _typed(value, schema) is not None:
                return _typed(value, schema), 1.0
        guess = self._guess(schema)
        source = self._source(weight_of, may_guess=guess is not None)
        if source is None:
            worked, tried = self.knowledge.kinds.get(place, {}).get(_GUESSED, (0, 0))
            return (None if guess is None else _typed(guess, schema)), (worked + 0.05) / (tried + 1)
        kind, share, values = source
        counts = self.knowledge.values.get(place, {})
        rates = [(worked + 0.5) / (tried + 1) for worked, tried in (counts.get(v, (0, 0)) for v in values)]
        rates = [rate / (1 + self.refused.get(value, 0)) ** 2 for rate, value in zip(rates, values, strict=True)]
        n = self.rng.choices(range(len(values)), rates)[0]
        return _typed(values[n], schema), weight_of(kind) * share * rates[n]

    def _source(self, weight_of: Callable[[str], float], *, may_guess: bool) -> tuple[str, float, list[str]] | None:
        """Draw (kind, share, values) from what this walk may know: values seen or hinted at, or shown in other worlds.

        None stands for a guess. It is drawn rarely if other values fit.
        """
        since = len(self.events) - self.window if self.window else 0
        sources: list[tuple[str, float, list[str]]] = []
        for kind, seen in self.seen.items():
            values = [value for value, n in seen.items() if n >= since]
            sources += [(kind, 1.0, values)] if values else []
        sources += [(kind, 0.5, values) for kind, values in self.hints.items()]
        sources += [(kind, 0.1, list(shown)) for kind, shown in self.knowledge.words.items() if shown]
        sources += [(kind, 0.1, words) for kind, words in self.kinds.vocabularies.items()]
        weights = [weight_of(kind) * share for kind, share, _ in sources]
        if may_guess or not sources:
            sources, weights = [*sources, None], [*weights, 0.01]
        return self.rng.choices(sources, weights)[0]

    def _kind_weights(self, place: str, name: str, schema: dict[str, Any]) -> Callable[[str], float]:
        """Return a function from a kind to the weight that the parameter takes such a value: by its schema if that
        names entities, else by the calls that worked."""
        counts = self.knowledge.kinds.get(place, {})
        entities = self.walker.arguments.get(place)
        if entities is None:
            entities = self.kinds.entities_in(f"{name} {schema.get('description', '')}")
            self.walker.arguments[place] = entities

        def weight(kind: str) -> float:
            if kind in entities:
                return 1.0
            worked, tried = counts.get(kind, (0, 0))
            return (worked + 0.05) / (tried + 1) * (0.01 if entities else 1.0)

        return weight

    def _guess(self, schema: dict[str, Any]) -> str | None:
        """Return a made-up value that looks like the example in a description, such as "like O12"."""
        tokens = self.kinds.find(schema.get("description", ""))
        examples = [token for _, token in tokens if any(c.isdigit() for c in token)]
        if not examples:
            return "1" if schema.get("type") in ("integer", "number") else None
        return re.sub(r"\d", lambda _: str(self.rng.randrange(10)), examples[0])


def _signature(event: Event, kinds: Kinds) -> str:
    """Return the class of an outcome: the error without its values, what changed, or the kinds in the first line."""
    lines = event.result.splitlines() or [""]
    tokens = _TOKEN.findall(lines[0])
    if not event.ok:
        return " ".join(["refused", *(token if kinds(token) == "<word>" else kinds(token) for token in tokens[:12])])
    if event.changed:
        return " ".join(["changed", *sorted({f"{row[0]}.{row[2]}" for row in event.changed})])
    return " ".join(["shown", str(min(len(lines), 3)), *(kinds(token) for token in tokens[:8])])


def _is_named(tool: str, error: str) -> bool:
    """Return True if an error contains a word of the tool's name: "look at the order first" names `list_orders`."""
    parts = [part for part in tool.lower().split("_") if len(part) > 2]
    return any(re.search(rf"\b{re.escape(part.rstrip('s'))}", error) for part in parts)


def _typed(value: str, schema: dict[str, Any]) -> Any:
    """Return the value in the type of the schema, None if it cannot be converted."""
    convert = {"integer": int, "number": float, "string": str}.get(str(schema.get("type", "string")), lambda _: None)
    try:
        return convert(value)
    except ValueError:
        return None


def _succeeded(result: StepResult) -> bool:
    calls = result.info.get("calls") or [{}]
    return bool(calls[0].get("ok", not result.info.get("errors"))) and not result.info.get("parse_error")


def _count(table: dict[str, dict[str, list[int]]], place: str, key: str, ok: bool) -> None:
    pair = table.setdefault(place, {}).setdefault(key, [0, 0])
    pair[0] += ok
    pair[1] += 1
