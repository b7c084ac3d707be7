"""Tasks from walks: what a walk changed or found out becomes a goal, the fewest calls that reach it its reference.

A proposal picks calls of a walk that changed something (one sub-goal each), a question about something it saw, or both.
The calls around them are replayed without the other changes and dropped, as in delta debugging, for as long as the rest
still makes the same difference and shows the same answer. What is left is worded with the phrases of the profile:

    profile["operations"]  {"name", "tool", "arguments": {argument: entity}, "if": {"argument.attribute": value},
                            "phrases": [text with {argument} slots]}
    profile["questions"]   {"name", "entity", "attribute", "tools", "phrases", "questions"}
    profile["preference"]  {"calls": [fewest, most], "operations": most, "answers": most}
    world.describe(entity, id, arguments) -> {attribute: text, ..., "phrases": [{"text", "via": [tools]}]}
    world.difference() -> rows [table, key, column, before, after] since the start
    verifier               {"state": rows of the difference, "answer": text or None}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.world import Task, World
from evolver.questioning.explore import Event, Kinds, Play, Walk
from evolver.traces import opening_words, text_of, values_used, words

CLOSING = "done"


class Unfit(Exception):
    """A proposal that makes no task; the text says why, for the counts."""


@dataclass
class Ask:
    """A question about something that an event of the walk showed."""

    question: dict[str, Any]
    id: str
    event: int


@dataclass
class Proposal:
    """`targets` and `ask.event` are places in `events`, the calls of the walk that went through."""

    name: str
    probe: Task
    events: list[Event]
    targets: list[int]
    ask: Ask | None = None

    @property
    def size(self) -> str:
        """What sort of task this is: proposals of all sorts get their turn."""
        return f"{len(self.targets)} operations{' and an answer' if self.ask else ''}"


@dataclass
class _Part:
    """One sub-goal in words; `mentions` are the (entity, id) it names, `names` the names and numbers it says."""

    text: str
    mentions: set[tuple[str, str]] = field(default_factory=set)
    names: list[set[str]] = field(default_factory=list)


class Writer:
    """Writes tasks for worlds of one profile."""

    def __init__(self, profile: dict[str, Any], kinds: Kinds):
        self.profile, self.kinds = profile, kinds
        self.operations: dict[str, list[dict[str, Any]]] = {}
        for operation in profile["operations"]:
            self.operations.setdefault(operation["tool"], []).append(operation)
        preference = profile.get("preference", {})
        self.calls = preference.get("calls", [1, 10])
        self.most = preference.get("operations", 2)
        self.answers = preference.get("answers", 1)
        users: dict[str, set[str]] = {}
        for operation in profile["operations"]:
            for entity in operation["arguments"].values():
                users.setdefault(entity, set()).add(operation["tool"])
        self._pronoun = {entity for entity, tools in users.items() if len(tools) > 1}

    # What a walk offers.

    def proposals(self, world: World, walk: Walk) -> list[Proposal]:
        """Everything that this walk might be made into. Starts an episode of the walk's probe in `world`."""
        events = _useful(walk.events)
        changing = [n for n, event in enumerate(events) if event.changed and event.tool in self.operations]
        asks = self._asks(world, walk.probe, events) if self.answers else []
        found = []
        for size in range(1, self.most + 1):
            for targets in itertools.combinations(changing, size):
                name = "+".join(self.operations[events[n].tool][0]["name"] for n in targets)
                found.append(Proposal(name, walk.probe, events, list(targets)))
        found += [Proposal(f"?{ask.question['name']}", walk.probe, events, [], ask) for ask in asks]
        for target, ask in itertools.product(changing, asks):
            name = f"{self.operations[events[target].tool][0]['name']}+?{ask.question['name']}"
            found.append(Proposal(name, walk.probe, events, [target], ask))
        return found

    def _asks(self, world: World, probe: Task, events: Sequence[Event]) -> list[Ask]:
        world.reset(probe, probe.seed)
        asks, used = [], set()
        for n, event in enumerate(events):
            used.add(event.tool)
            shown = self.kinds.find(" ".join(map(str, event.arguments.values())) + "\n" + event.result)
            for question, (kind, id) in itertools.product(self.profile["questions"], shown):
                if kind == question["entity"] and not event.changed:
                    phrases = world.describe(kind, id, event.arguments).get("phrases", [])
                    routes = [phrase["via"] + question["tools"] for phrase in phrases]
                    if any(route and route[-1] == event.tool and used.issuperset(route) for route in routes):
                        asks.append(Ask(question, id, n))
        return asks

    # One task.

    def write(self, world: World, proposal: Proposal, rng: random.Random, *, common: Mapping[str, int]) -> Task:
        """The task of a proposal. Raises Unfit with the reason where there is none.

        Of two ways to the same goal the one is kept whose tools are less `common` (tool -> times used so far).
        """
        expected = self._answer_shown(world, proposal)
        kept, played = self._minimise(world, proposal, expected, rng, common)
        fewest, most = self.calls
        if not fewest <= len(kept) <= most:
            raise Unfit("length")
        targets = [kept.index(n) for n in proposal.targets]
        parts = [self._operation(world, played, n, rng) for n in targets]
        answer = None
        state = world.difference()
        if proposal.ask is not None:
            part, answer = self._question(world, proposal.ask, played, rng, alone=not targets)
            parts.append(part)
            self._check_asked_last(world, played[kept.index(proposal.ask.event)], expected, answer)
        query = self._query(parts, rng)
        if answer is not None and words(answer) in words(query):
            raise Unfit("answer in the query")
        task = _task(proposal, query, [event.action for event in played], {"state": state, "answer": answer})
        self._check_told(world, task, played, proposal.ask and played[kept.index(proposal.ask.event)])
        return task

    def _answer_shown(self, world: World, proposal: Proposal) -> str | None:
        """What the asked event shows when nothing was changed before."""
        if proposal.ask is None:
            return None
        before = [n for n in range(proposal.ask.event + 1) if not proposal.events[n].changed]
        played = self._play(world, proposal, before)
        if played is None:
            raise Unfit("depends on a change")
        return played[-1].result

    def _minimise(self, world: World, proposal: Proposal, expected: str | None, rng: random.Random, common):
        """The fewest of the proposal's calls that have its effect, and their events, just played in `world`."""
        needed = set(proposal.targets) | ({proposal.ask.event} if proposal.ask else set())
        kept = [n for n in range(max(needed) + 1) if n in needed or not proposal.events[n].changed]
        difference: list[Any] = []

        def holds(trial: list[int]) -> bool:
            played = self._play(world, proposal, trial)
            if played is None or (difference and world.difference() != difference[0]):
                return False
            fine = all(played[trial.index(n)].changed for n in proposal.targets)
            return fine and (proposal.ask is None or played[trial.index(proposal.ask.event)].result == expected)

        if not holds(kept):
            raise Unfit("not separable")
        difference.append(world.difference())
        rank = {n: (common.get(proposal.events[n].tool, 0), rng.random()) for n in kept}
        kept = minimise(kept, needed, holds, key=lambda n: rank[n])
        played = self._play(world, proposal, kept)
        final = world.difference()
        if any(row not in final for n in proposal.targets for row in played[kept.index(n)].changed):
            raise Unfit("undone by a later call")
        return kept, played

    def _play(self, world: World, proposal: Proposal, kept: Sequence[int]) -> list[Event] | None:
        """Play some of the calls from the start; None once one is refused.

        An id that the world gives out may differ from the walk's where calls were left out, so it is renamed.
        """
        play, renamed, played = Play(world, proposal.probe), {}, []
        for n in kept:
            event = proposal.events[n]
            arguments = {name: renamed.get(value, value) for name, value in event.arguments.items()}
            played.append(play.take(event.tool, arguments, watch=bool(event.changed)))
            if not played[-1].ok or (played[-1].over and n != kept[-1]):
                return None
            if played[-1].result != event.result:
                renamed |= self._renaming(event.result, played[-1].result)
        return played

    def _renaming(self, before: str, after: str) -> dict[str, str]:
        old, new = self.kinds.find(before), self.kinds.find(after)
        if len(old) != len(new):
            return {}
        pairs = zip(old, new, strict=True)
        return {a: b for (kind, a), (other, b) in pairs if a != b and kind == other and self.kinds.is_entity(kind)}

    # Its words.

    def _operation(self, world: World, played: Sequence[Event], n: int, rng: random.Random) -> _Part:
        event = played[n]
        before = played[:n]
        for operation in rng.sample(self.operations[event.tool], len(self.operations[event.tool])):
            described = {
                name: world.describe(entity, str(event.arguments[name]), event.arguments)
                for name, entity in operation["arguments"].items()
            }
            wanted = [(key.split(".", 1), value) for key, value in operation.get("if", {}).items()]
            if any(described[name].get(attribute) != value for (name, attribute), value in wanted):
                continue
            part, slots = _Part(""), {}
            for name, entity in operation["arguments"].items():
                id = str(event.arguments[name])
                slots[name] = self._phrase(described[name], entity, id, before, rng)
                part.mentions.add((entity, id))
                part.names.append(_names(slots[name]))
            part.text = rng.choice(operation["phrases"]).format(**slots)
            return part
        raise Unfit("no operation fits")

    def _phrase(self, described: dict, entity: str, id: str, before: Sequence[Event], rng: random.Random) -> str:
        """A phrase for an entity that the calls before can follow: its "via" are among their tools, the last shows it.

        What the previous operation was about, or made, is "it".
        """
        changes = [e for e in before if e.changed]
        if changes and entity in self._pronoun and id in map(str, changes[-1].arguments.values()):
            return "it"
        making = {e.tool for e in changes}
        last = {changes[-1].tool} if changes else set()
        phrases = []
        for phrase in described.get("phrases", []):
            via = phrase["via"]
            told = not via or any(e.tool == via[-1] and _mentions(e, id) for e in before)
            if told and {e.tool for e in before}.issuperset(via) and last.issuperset(making.intersection(via)):
                phrases.append(phrase["text"])
        if not phrases:
            raise Unfit("nothing names it")
        return rng.choice(phrases)

    def _question(self, world: World, ask: Ask, played: Sequence[Event], rng: random.Random, *, alone: bool):
        question = ask.question
        described = world.describe(question["entity"], ask.id, {})
        answer = described.get(question["attribute"])
        if not answer:
            raise Unfit("no answer")
        it = self._phrase(described, question["entity"], ask.id, played, rng)
        text = rng.choice(question["questions" if alone else "phrases"]).format(it=it)
        return _Part(text, {(question["entity"], ask.id)}, [_names(it)]), str(answer)

    def _check_asked_last(self, world: World, asked: Event, expected: str, answer: str) -> None:
        """The question comes last in the text, so its answer must be the same then. Moves the episode on."""
        result = world.step(asked.action)
        shown = text_of(result.messages)
        if shown != expected and (answer.isdigit() or words(answer) not in words(shown)):
            raise Unfit("answer changes")

    def _query(self, parts: Sequence[_Part], rng: random.Random) -> str:
        """Join the parts, unless the words of one could mean what another is about."""
        for one, other in itertools.permutations(parts, 2):
            shared = one.mentions & other.mentions
            if not shared and any(names and names <= set().union(*other.names) for names in one.names):
                raise Unfit("ambiguous")
        text = parts[0].text
        for part in parts[1:]:
            text += rng.choice((" and ", ", then ")) + part.text
        return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")

    def _check_told(self, world: World, task: Task, played: Sequence[Event], asked: Event | None) -> None:
        """Every value of the reference is in the query or shown before it is used, and so is the answer."""
        opening = opening_words(world.reset(task, task.seed))
        shown = ""
        for event in played:
            if any(value not in opening and value not in shown for value in values_used(event.action)):
                raise Unfit("not told")
            shown += words(event.result)
        answer = task.verifier["answer"]
        if asked is not None and words(answer) not in shown and answer != str(len(asked.result.splitlines())):
            raise Unfit("answer not shown")


def minimise(
    kept: list[int], needed: set[int], holds: Callable[[list[int]], bool], *, key: Callable[[int], Any]
) -> list[int]:
    """Drop what is not needed in ever smaller chunks, highest `key` first; in the end no single call can be dropped."""
    size = max(len(kept) // 2, 1)
    while True:
        loose = sorted((n for n in kept if n not in needed), key=key, reverse=True)
        dropped = False
        for start in range(0, len(loose), size):
            chunk = set(loose[start : start + size])
            trial = [n for n in kept if n not in chunk]
            if holds(trial):
                kept, dropped = trial, True
        if size == 1 and not dropped:
            return kept
        size = max(size // 2, 1)


def _useful(events: Sequence[Event]) -> list[Event]:
    """The calls that went through; of look-ups made twice with no change in between, the first."""
    kept, seen = [], set()
    for event in events:
        if event.changed:
            seen.clear()
        if event.ok and not event.over and event.key not in seen:
            kept.append(event)
            seen.add(event.key)
    return kept


def _mentions(event: Event, id: str) -> bool:
    return words(id) in words(" ".join(map(str, event.arguments.values())) + "\n" + event.result)


def _names(text: str) -> set[str]:
    """Words that tell one entity from others: with a capital letter or a digit."""
    return {word for word in re.findall(r"\w+", text) if word != word.lower() or any(c.isdigit() for c in word)}


def _task(proposal: Proposal, query: str, actions: list[str], verifier: dict[str, Any]) -> Task:
    probe = proposal.probe
    digest = hashlib.blake2b(
        json.dumps([probe.seed, query, verifier], sort_keys=True).encode(), digest_size=8
    ).hexdigest()
    return Task(
        id=f"syn/{digest}",
        env=probe.env,
        query=query,
        split=probe.split,
        origin="synthetic",
        seed=probe.seed,
        reference=[*actions, verifier["answer"] or CLOSING],
        verifier=verifier,
        difficulty=len(actions),
        meta={"template": proposal.name, "size": proposal.size, "source": probe.id.removeprefix("probe/")},
    )
