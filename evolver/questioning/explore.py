"""Curiosity: walk over a world's tool schemas to see what there is and what can be done.

A walk has two phases, as in section 3.1 of the AgentEvolver paper: `breadth` steps over whatever tool has shown least
so far, then `depth` steps that see only the last `depth` observations and follow up on refusals. Which tool comes
next is drawn in proportion to its expected novelty: the mean over its outcomes of 1/sqrt(times seen), plus a bonus for
tools that were hardly tried (eq. 8 with a count-based bonus in the place of an LLM). What the arguments of a tool take,
and which tool makes another one work, is not in the schemas: it is learnt from what went through, in `Knowledge`.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from envs.toolcalls import call_text
from envs.world import StepResult, Task, World
from evolver.traces import leaves, text_of

_TOKEN = re.compile(r"\w[\w.:@'/-]*\w|\w")
_GUESSED = "<guessed>"
_VALUES_KEPT = 300  # per kind, across worlds


@dataclass
class Event:
    """One call and what came of it."""

    tool: str
    arguments: dict[str, Any]
    result: str = ""
    ok: bool = False
    changed: list[list[Any]] = field(default_factory=list)  # rows of World.difference() that the call made, or undid
    over: bool = False

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


class Play:
    """An episode of `probe` as a sequence of events."""

    def __init__(self, world: World, probe: Task):
        self.world = world
        self.observation = world.reset(probe, probe.seed)
        self.difference = world.difference()

    def take(self, tool: str, arguments: dict[str, Any], *, watch: bool = True) -> Event:
        """Make a call. `watch`: see what it changed; a call known to change nothing need not be watched."""
        event = Event(tool, arguments)
        result = self.world.step(event.action)
        event.result, event.ok = text_of(result.messages), _went_through(result)
        event.over = result.terminated or result.truncated
        before, after = self.difference, self.world.difference() if event.ok and watch else self.difference
        if after != before:
            event.changed = [row for row in after if row not in before] or [row for row in before if row not in after]
            self.difference = after
        return event


def probe_of(task: Task) -> Task:
    """An episode in the world of `task` with nothing to do: the query is masked."""
    verifier = {"state": [], "answer": None}
    return Task(
        id=f"probe/{task.id}",
        env=task.env,
        query="",
        split=task.split,
        seed=task.seed,
        verifier=verifier,
        meta=task.meta,
    )


class Kinds:
    """Sorts values into kinds: the entities of a profile by their id patterns, and the look of everything else."""

    def __init__(self, profile: dict[str, Any]):
        self._entities = [(entity["name"], re.compile(entity["id"])) for entity in profile["entities"]]
        self.vocabularies = {}
        for entity in profile["entities"]:
            words = entity["id"].split("|")
            if all(re.escape(word) == word for word in words):
                self.vocabularies[entity["name"]] = words
        self._known: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) > 50_000:
                self._known.clear()
            self._known[value] = self._sort(value)
        return self._known[value]

    def find(self, text: str) -> list[tuple[str, str]]:
        """(kind, value) of every token of `text`, in order, without repeats."""
        return [(self(token), token) for token in dict.fromkeys(_TOKEN.findall(text))]

    def entities_in(self, text: str) -> set[str]:
        """The entities that a text names, or shows an id of."""
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
    """What all walks so far have learnt; JSON values in and out."""

    def __init__(self):
        self.outcomes: dict[str, dict[str, int]] = {}  # tool -> signature -> times
        self.kinds: dict[str, dict[str, list[int]]] = {}  # tool.parameter -> kind -> [went through, tried]
        self.values: dict[str, dict[str, list[int]]] = {}  # tool.parameter -> value -> the same, for words and names
        self.enables: dict[str, dict[str, list[int]]] = {}  # tool: error -> tool before a retry -> [helped, tried]
        self.spoils: dict[str, list[int]] = {}  # tool -> of calls with a value it changed something of: [refused, all]
        self.words: dict[str, dict[str, int]] = {}  # kind -> value -> times; of kinds that are not ids

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state(self, state: dict[str, Any]) -> None:
        for key in vars(self):
            setattr(self, key, copy.deepcopy(state[key]))

    def novelty(self, tool: str) -> float:
        """The expected bonus of a tool. Changes are wanted most and refusals least, and a tool after which nothing more
        can be done (a cancellation) comes seldom."""
        seen = self.outcomes.get(tool, {})
        times = sum(seen.values())
        worth = {"changed": 2.0, "shown": 1.0, "refused": 0.3}
        bonus = sum(n**0.5 * worth[look.split(" ", 1)[0]] for look, n in seen.items())
        refused, later = self.spoils.get(tool, (0, 0))
        return (bonus / max(times, 1) + (1 + times) ** -0.5) * (later - refused + 1) / (later + 1)

    def learn(self, event: Event, signature: str, kinds: Kinds, *, known: Callable[[str], bool]) -> None:
        """Count an outcome. `known` tells the values that were not guessed: a guess says nothing about its kind."""
        seen = self.outcomes.setdefault(event.tool, {})
        seen[signature] = seen.get(signature, 0) + 1
        for name, value in event.arguments.items():
            text, place = str(value), f"{event.tool}.{name}"
            _count(self.kinds, place, kinds(text) if known(text) else _GUESSED, event.ok)
            if not any(c.isdigit() for c in text):
                _count(self.values, place, text, event.ok)
        for kind, value in kinds.find(event.result) if event.ok else ():
            heard = self.words.setdefault(kind, {})
            if not any(c.isdigit() for c in value) and (value in heard or len(heard) < _VALUES_KEPT):
                heard[value] = heard.get(value, 0) + 1


class Explorer:
    """Walks. One instance keeps its knowledge over worlds of the same tools and profile."""

    def __init__(self, profile: dict[str, Any], *, breadth: int = 6, depth: int = 20, branches: int = 2):
        """`branches` walks share one breadth phase: the depth phase restarts from a snapshot (or is replayed)."""
        self.profile, self.kinds, self.knowledge = profile, Kinds(profile), Knowledge()
        self.breadth, self.depth, self.branches = breadth, depth, branches
        self.arguments: dict[str, set[str]] = {}  # tool.parameter -> entities it takes, as profile or schema say
        for operation in profile["operations"]:
            for name, entity in operation["arguments"].items():
                self.arguments.setdefault(f"{operation['tool']}.{name}", set()).add(entity)

    def walks(self, world: World, probe: Task, rng: random.Random, *, hints: str = "") -> Iterator[Walk]:
        """Explore one world. `hints` is text whose values may be tried, such as the query of the masked task.

        Between two walks the world may be used for something else.
        """
        play = Play(world, probe)
        start = _Stroll(self, play, rng, hints)
        while len(start.events) < self.breadth and not start.over:
            start.wander()
        camp = _snapshot(world)
        for branch in range(self.branches):
            if branch and camp is not None:
                world.restore(camp)
            elif branch:
                play = Play(world, probe)
                for event in start.events:
                    play.take(event.tool, event.arguments)
            stroll = start.branch(self.depth)
            play.difference = world.difference()
            while len(stroll.events) < self.breadth + self.depth and not stroll.over:
                stroll.follow()
            yield Walk(probe, stroll.events)


class _Stroll:
    """One walk while it is being made."""

    def __init__(self, explorer: Explorer, play: Play, rng: random.Random, hints: str):
        self.explorer, self.play, self.rng = explorer, play, rng
        self.tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in play.observation.tools}
        self.events: list[Event] = []
        self.seen: dict[str, dict[str, int]] = {}  # kind -> value -> the last event that showed it
        self.hints: dict[str, list[str]] = {}
        for kind, value in explorer.kinds.find(hints):
            if kind not in ("<word>", "<number>"):
                self.hints.setdefault(kind, []).append(value)
        self.window = 0  # how many observations are seen, 0 = all
        self.done: set[tuple[str, str]] = set()
        self.plan: list[tuple[str, dict[str, Any]]] = []
        self.refused: dict[str, int] = {}  # value -> how often in a row calls with it were refused
        self.changed: dict[str, str] = {}  # value -> the last tool that changed something with it
        self.trials: list[tuple[str, str]] = []  # (tool: error, tool tried against it), until the retry tells

    @property
    def over(self) -> bool:
        return not self.tools or bool(self.events and self.events[-1].over)

    def branch(self, window: int) -> _Stroll:
        other = _Stroll(self.explorer, self.play, self.rng, "")
        other.events, other.hints, other.window, other.done = list(self.events), self.hints, window, set(self.done)
        other.refused, other.changed = dict(self.refused), dict(self.changed)
        other.seen = {kind: dict(values) for kind, values in self.seen.items()}
        return other

    def wander(self) -> None:
        """Take a call of a tool drawn by novelty, and of those drawn rather one whose arguments are likely to fit."""
        names = list(self.tools)
        novelty = [self.explorer.knowledge.novelty(name) for name in names]
        drawn = [(name, *self._arguments(name, {})) for name in dict.fromkeys(self.rng.choices(names, novelty, k=6))]
        fits = [(name, arguments, chance) for name, arguments, chance in drawn if arguments is not None]
        if fits:
            name, arguments, _ = self.rng.choices(fits, [chance for _, _, chance in fits])[0]
            self._take(name, arguments)
        else:
            self._take(self.rng.choice(names), {})

    def follow(self) -> None:
        """Take the next call of the plan, or wander; when it is refused, plan a remedy and a retry."""
        if self.plan:
            tool, arguments = self.plan.pop(0)
            self._take(tool, self._renewed(arguments))
        else:
            self.trials.clear()
            self.wander()
        event = self.events[-1]
        if not event.ok and not event.over and len(self.trials) < 3:
            remedy = self._remedy(event)
            if remedy is not None:
                self.plan = [remedy, (event.tool, event.arguments)]

    def _renewed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments with guessed values replaced by what the last call revealed."""
        kinds, last = self.explorer.kinds, self.events[-1]
        shown = kinds.find(last.result) if last.ok else []
        fresh = dict(self.rng.sample(shown, len(shown)))
        renewed = {}
        for name, value in arguments.items():
            kind = kinds(str(value))
            renewed[name] = value if self._known(str(value)) else fresh.get(kind, value)
        return renewed

    def _take(self, tool: str, arguments: dict[str, Any]) -> None:
        knowledge = self.explorer.knowledge
        event = self.play.take(tool, arguments)
        self.events.append(event)
        self.done.add(event.key)
        signature = _signature(event, self.explorer.kinds)
        knowledge.learn(event, signature, self.explorer.kinds, known=self._known)
        for kind, value in self.explorer.kinds.find(event.result) if event.ok else ():
            self.seen.setdefault(kind, {})[value] = len(self.events)
        for value in map(str, leaves(arguments)):
            self.refused[value] = 0 if event.ok else self.refused.get(value, 0) + 1
            if value in self.changed:
                pair = knowledge.spoils.setdefault(self.changed[value], [0, 0])
                pair[0] += not event.ok
                pair[1] += 1
            if event.changed:
                self.changed[value] = tool
        if self.trials and self.trials[-1][0].startswith(f"{tool}: "):
            failure, remedy = self.trials[-1]
            _count(knowledge.enables, failure, remedy, event.ok or f"{tool}: {signature}" != failure)

    def _known(self, value: str) -> bool:
        kind = self.explorer.kinds(value)
        return (
            not self.explorer.kinds.is_entity(kind)
            or value in self.seen.get(kind, ())
            or value in self.hints.get(kind, ())
        )

    def _remedy(self, event: Event) -> tuple[str, dict[str, Any]] | None:
        """A call that may make a refused one work: of tools that helped before, or that the error speaks of."""
        failure = f"{event.tool}: {_signature(event, self.explorer.kinds)}"
        known = self.explorer.knowledge.enables.get(failure, {})
        names = [name for name in self.tools if name != event.tool]
        trials = [known.get(name, (0, 0)) for name in names]
        if not names or self.rng.random() > max((helped + 1) / (tried + 1) for helped, tried in trials) ** 2:
            return None
        said = [10.0 if _spoken_of(name, event.result.lower()) else 1.0 for name in names]
        weights = [times * (helped + 0.5) / (tried + 1) for times, (helped, tried) in zip(said, trials, strict=True)]
        given = {self.explorer.kinds(str(value)): str(value) for value in leaves(event.arguments)}
        for name in dict.fromkeys(self.rng.choices(names, weights, k=4)):
            arguments, chance = self._arguments(name, given)
            if arguments is not None and chance > 0.02:
                self.trials.append((failure, name))
                return name, arguments
        return None

    def _arguments(self, tool: str, given: dict[str, str]) -> tuple[dict[str, Any] | None, float]:
        """Arguments for a call not made yet in this walk, and the chance that they fit; None if there are none.

        Values of `given` (kind -> value) come first.
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
            through, tried = self.explorer.knowledge.kinds.get(place, {}).get(_GUESSED, (0, 0))
            return (None if guess is None else _typed(guess, schema)), (through + 0.05) / (tried + 1)
        kind, share, values = source
        counts = self.explorer.knowledge.values.get(place, {})
        rates = [(through + 0.5) / (tried + 1) for through, tried in (counts.get(v, (0, 0)) for v in values)]
        rates = [rate / (1 + self.refused.get(value, 0)) ** 2 for rate, value in zip(rates, values, strict=True)]
        n = self.rng.choices(range(len(values)), rates)[0]
        return _typed(values[n], schema), weight_of(kind) * share * rates[n]

    def _source(self, weight_of: Callable[[str], float], *, may_guess: bool) -> tuple[str, float, list[str]] | None:
        """(kind, share, values) drawn from what this walk may know: seen or hinted at, or heard of in other worlds.

        None, for a guess, is drawn too: seldom where there is something that fits.
        """
        since = len(self.events) - self.window if self.window else 0
        sources: list[tuple[str, float, list[str]]] = []
        for kind, seen in self.seen.items():
            values = [value for value, n in seen.items() if n >= since]
            sources += [(kind, 1.0, values)] if values else []
        sources += [(kind, 0.5, values) for kind, values in self.hints.items()]
        sources += [(kind, 0.1, list(known)) for kind, known in self.explorer.knowledge.words.items() if known]
        sources += [(kind, 0.1, known) for kind, known in self.explorer.kinds.vocabularies.items()]
        weights = [weight_of(kind) * share for kind, share, _ in sources]
        if may_guess or not sources:
            sources, weights = [*sources, None], [*weights, 0.01]
        return self.rng.choices(sources, weights)[0]

    def _kind_weights(self, place: str, name: str, schema: dict[str, Any]) -> Callable[[str], float]:
        """How likely a parameter takes a value of a kind: what its schema says of entities, else what went through."""
        counts = self.explorer.knowledge.kinds.get(place, {})
        said = self.explorer.arguments.get(place)
        if said is None:
            said = self.explorer.kinds.entities_in(f"{name} {schema.get('description', '')}")
            self.explorer.arguments[place] = said

        def weight(kind: str) -> float:
            if kind in said:
                return 1.0
            through, tried = counts.get(kind, (0, 0))
            return (through + 0.05) / (tried + 1) * (0.01 if said else 1.0)

        return weight

    def _guess(self, schema: dict[str, Any]) -> str | None:
        """A made-up value that looks like the example in a description, such as "like O12"."""
        examples = [
            v for _, v in self.explorer.kinds.find(schema.get("description", "")) if any(c.isdigit() for c in v)
        ]
        if not examples:
            return "1" if schema.get("type") in ("integer", "number") else None
        return re.sub(r"\d", lambda _: str(self.rng.randrange(10)), examples[0])


def _signature(event: Event, kinds: Kinds) -> str:
    """What sort of outcome this is: the error without its values, or the look of the first line and what changed."""
    lines = event.result.splitlines() or [""]
    tokens = [token if kinds(token) == "<word>" else kinds(token) for token in _TOKEN.findall(lines[0])]
    if not event.ok:
        return " ".join(["refused", *tokens[:12]])
    if event.changed:
        return " ".join(["changed", *sorted({f"{row[0]}.{row[2]}" for row in event.changed})])
    return " ".join(["shown", str(min(len(lines), 3)), *(kinds(token) for token in _TOKEN.findall(lines[0])[:8])])


def _spoken_of(tool: str, text: str) -> bool:
    """Whether an error names a tool, in the singular or plural, as "look at the order first" does."""
    return any(
        re.search(rf"\b{re.escape(part.rstrip('s'))}", text) for part in tool.lower().split("_") if len(part) > 2
    )


def _typed(value: str, schema: dict[str, Any]) -> Any:
    kind = schema.get("type", "string")
    try:
        return (
            int(value)
            if kind == "integer"
            else float(value)
            if kind == "number"
            else value
            if kind == "string"
            else None
        )
    except ValueError:
        return None


def _went_through(result: StepResult) -> bool:
    calls = result.info.get("calls") or [{}]
    return bool(calls[0].get("ok", not result.info.get("errors"))) and not result.info.get("parse_error")


def _count(table: dict[str, dict[str, list[int]]], place: str, key: str, ok: bool) -> None:
    pair = table.setdefault(place, {}).setdefault(key, [0, 0])
    pair[0] += ok
    pair[1] += 1


def _snapshot(world: World) -> Any:
    try:
        return world.snapshot()
    except NotImplementedError:
        return None
