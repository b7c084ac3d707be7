"""Tasks from walks: what a walk changed or showed becomes the goal, a minimal list of its calls the reference.

A proposal picks calls of a walk that changed something (one sub-goal each), a question about something that it showed,
or both. The calls around them are replayed without the other changes. Calls are then dropped, as in delta debugging, as
long as the rest makes the same difference and shows the same answer. The phrases of the profile word the result:

    profile["operations"]  {"name", "tool", "arguments": {argument: entity}, "if": {"argument.attribute": value},
                            "phrases": [text with {argument} slots]}
    profile["questions"]   {"name", "entity", "attribute", "tools", "phrases", "questions"}
    profile["preference"]  {"calls": [fewest, most], "operations": most, "answers": most}
    world.describe(entity, id, arguments) -> {attribute: text, ..., "phrases": [{"text", "via": [tools]}]}
    world.difference() -> rows [table, key, column, before, after] since the start
    verifier               {"state": rows of the difference, "answer": text or None}
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.world import Task, World
from evolver.questioning.tasks import CLOSING, Unfit, synthetic_task
from evolver.questioning.walks import Episode, Event, Kinds, Walk
from evolver.traces import opening_words, renaming, text_of, values_used, words


@dataclass
class Ask:
    """A question about an entity. event: index of the call that showed it."""

    question: dict[str, Any]
    id: str
    event: int


@dataclass
class Proposal:
    """A possible task. events: the useful calls of the walk. targets: indices of the calls that are sub-goals."""

    name: str
    probe: Task
    events: list[Event]
    targets: list[int]
    ask: Ask | None = None

    @property
    def size(self) -> str:
        return f"{len(self.targets)} operations{' and an answer' if self.ask else ''}"


@dataclass
class _Part:
    """One sub-goal in words. mentions: (entity, id) pairs it is about. names: for each of them, its names and numbers
    in the text."""

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
        self.most_operations = preference.get("operations", 2)
        self.answers = preference.get("answers", 1)
        users: dict[str, set[str]] = {}
        for operation in profile["operations"]:
            for entity in operation["arguments"].values():
                users.setdefault(entity, set()).add(operation["tool"])
        self._pronoun = {entity for entity, tools in users.items() if len(tools) > 1}  # may be called "it"

    # --- proposals ----------------------------------------------------------------------------------------------------

    def proposals(self, world: World, walk: Walk) -> list[Proposal]:
        """Return all proposals of a walk. Starts an episode of the walk's probe in `world`."""
        events = _useful(walk.events)
        changing = [n for n, event in enumerate(events) if event.changed and event.tool in self.operations]
        asks = self._asks(world, walk.probe, events) if self.answers else []
        proposals = []
        for size in range(1, self.most_operations + 1):
            for targets in itertools.combinations(changing, size):
                name = "+".join(self.operations[events[n].tool][0]["name"] for n in targets)
                proposals.append(Proposal(name, walk.probe, events, list(targets)))
        proposals += [Proposal(f"?{ask.question['name']}", walk.probe, events, [], ask) for ask in asks]
        for target, ask in itertools.product(changing, asks):
            name = f"{self.operations[events[target].tool][0]['name']}+?{ask.question['name']}"
            proposals.append(Proposal(name, walk.probe, events, [target], ask))
        return proposals

    def _asks(self, world: World, probe: Task, events: Sequence[Event]) -> list[Ask]:
        """Return the questions that the events answer, about entities that a phrase can name."""
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

    # --- one task -----------------------------------------------------------------------------------------------------

    def write(self, world: World, proposal: Proposal, rng: random.Random, *, common: Mapping[str, int]) -> Task:
        """Return the task of a proposal. Raises Unfit, with the reason, if there is none.

        common: {tool: times used so far}. Among several ways to a goal, the one with the rarer tools is kept.
        """
        expected = self._answer_without_changes(world, proposal)
        kept, events = self._minimise(world, proposal, expected, rng, common)
        fewest, most = self.calls
        if not fewest <= len(kept) <= most:
            raise Unfit("length")
        targets = [kept.index(n) for n in proposal.targets]
        parts = [self._operation(world, events, n, rng) for n in targets]
        asked = events[kept.index(proposal.ask.event)] if proposal.ask else None
        answer = None
        state = world.difference()
        if proposal.ask is not None:
            part, answer = self._question(world, proposal.ask, events, rng, alone=not targets)
            parts.append(part)
            self._check_final_answer(world, asked, expected, answer)
        query = self._query(parts, rng)
        if answer is not None and words(answer) in words(query):
            raise Unfit("answer in the query")
        verifier, source = {"state": state, "answer": answer}, proposal.probe.id.removeprefix("probe/")
        task = synthetic_task(
            proposal.probe,
            query,
            identity=[proposal.probe.seed, query, verifier],
            reference=[*(event.action for event in events), answer or CLOSING],
            verifier=verifier,
            difficulty=len(events),
            meta={"template": proposal.name, "size": proposal.size, "source": source},
        )
        self._check_information(world, task, events, asked)
        return task

    def _answer_without_changes(self, world: World, proposal: Proposal) -> str | None:
        """Return the result of the call asked about if nothing is changed before it; None if nothing is asked."""
        if proposal.ask is None:
            return None
        unchanging = [n for n in range(proposal.ask.event + 1) if not proposal.events[n].changed]
        events = self._play(world, proposal, unchanging)
        if events is None:
            raise Unfit("depends on a change")
        return events[-1].result

    def _minimise(
        self, world: World, proposal: Proposal, expected: str | None, rng: random.Random, common: Mapping[str, int]
    ) -> tuple[list[int], list[Event]]:
        """Return a minimal list of calls that have the proposal's effect, and their events, just played in `world`."""
        needed = set(proposal.targets) | ({proposal.ask.event} if proposal.ask else set())
        kept = [n for n in range(max(needed) + 1) if n in needed or not proposal.events[n].changed]
        difference: list[Any] = []  # [the difference to reach] once it is known

        def holds(trial: list[int]) -> bool:
            events = self._play(world, proposal, trial)
            if events is None or (difference and world.difference() != difference[0]):
                return False
            changes = all(events[trial.index(n)].changed for n in proposal.targets)
            return changes and (proposal.ask is None or events[trial.index(proposal.ask.event)].result == expected)

        if not holds(kept):
            raise Unfit("not separable")
        difference.append(world.difference())
        rank = {n: (common.get(proposal.events[n].tool, 0), rng.random()) for n in kept}
        kept = minimise(kept, needed, holds, key=lambda n: rank[n])
        events = self._play(world, proposal, kept)
        final = world.difference()
        if any(row not in final for n in proposal.targets for row in events[kept.index(n)].changed):
            raise Unfit("undone by a later call")
        return kept, events

    def _play(self, world: World, proposal: Proposal, kept: Sequence[int]) -> list[Event] | None:
        """Play some of the calls from the start. Return their events, None if one is refused.

        Ids that the world hands out may differ from the walk's because calls are left out, so they are renamed.
        """
        episode, renamed, events = Episode(world, proposal.probe), {}, []
        for n in kept:
            event = proposal.events[n]
            arguments = {name: renamed.get(value, value) for name, value in event.arguments.items()}
            events.append(episode.call(event.tool, arguments, watch=bool(event.changed)))
            if not events[-1].ok or (events[-1].over and n != kept[-1]):
                return None
            if events[-1].result != event.result:
                before, after = ([value for _, value in self.kinds.find(e.result)] for e in (event, events[-1]))
                renamed |= renaming(before, after, self._are_ids)
        return events

    def _are_ids(self, old: str, new: str) -> bool:
        return self.kinds(old) == self.kinds(new) and self.kinds.is_entity(self.kinds(old))

    # --- wording ------------------------------------------------------------------------------------------------------

    def _operation(self, world: World, events: Sequence[Event], n: int, rng: random.Random) -> _Part:
        """Word the change that call n makes."""
        event, before = events[n], events[:n]
        for operation in rng.sample(self.operations[event.tool], len(self.operations[event.tool])):
            described = {
                name: world.describe(entity, str(event.arguments[name]), event.arguments)
                for name, entity in operation["arguments"].items()
            }
            conditions = [(key.split(".", 1), value) for key, value in operation.get("if", {}).items()]
            if any(described[name].get(attribute) != value for (name, attribute), value in conditions):
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
        """Return a phrase for an entity that an agent can resolve after the calls `before`.

        All tools in its "via" must have been called, and the last of them must have shown the entity. An
        entity that several tools take is "it" if it is an argument of the previous change.
        """
        changes = [e for e in before if e.changed]
        if changes and entity in self._pronoun and id in map(str, changes[-1].arguments.values()):
            return "it"
        changing = {e.tool for e in changes}
        last = {changes[-1].tool} if changes else set()
        phrases = []
        for phrase in described.get("phrases", []):
            via = phrase["via"]
            shown = not via or any(e.tool == via[-1] and _mentions(e, id) for e in before)
            if shown and {e.tool for e in before}.issuperset(via) and last.issuperset(changing.intersection(via)):
                phrases.append(phrase["text"])
        if not phrases:
            raise Unfit("nothing names it")
        return rng.choice(phrases)

    def _question(
        self, world: World, ask: Ask, events: Sequence[Event], rng: random.Random, *, alone: bool
    ) -> tuple[_Part, str]:
        """Return the question in words and its answer. alone: the task is nothing but this question."""
        question = ask.question
        described = world.describe(question["entity"], ask.id, {})
        answer = described.get(question["attribute"])
        if not answer:
            raise Unfit("no answer")
        it = self._phrase(described, question["entity"], ask.id, events, rng)
        text = rng.choice(question["questions" if alone else "phrases"]).format(it=it)
        return _Part(text, {(question["entity"], ask.id)}, [_names(it)]), str(answer)

    def _check_final_answer(self, world: World, asked: Event, expected: str, answer: str) -> None:
        """Raise Unfit if the sub-goals change the answer, since the query asks last. Continues the episode."""
        result = world.step(asked.action)
        shown = text_of(result.messages)
        if shown != expected and (answer.isdigit() or words(answer) not in words(shown)):
            raise Unfit("answer changes")

    def _query(self, parts: Sequence[_Part], rng: random.Random) -> str:
        """Join the parts. Raises Unfit if the names in one part could also refer to an entity of another part."""
        for part, other in itertools.permutations(parts, 2):
            shared = part.mentions & other.mentions
            if not shared and any(names and names <= set().union(*other.names) for names in part.names):
                raise Unfit("ambiguous")
        text = parts[0].text
        for part in parts[1:]:
            text += rng.choice((" and ", ", then ")) + part.text
        return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")

    def _check_information(self, world: World, task: Task, events: Sequence[Event], asked: Event | None) -> None:
        """Raise Unfit unless the opening or earlier calls show each value of the reference, and calls the answer."""
        opening = opening_words(world.reset(task, task.seed))
        shown = ""
        for event in events:
            if any(value not in opening and value not in shown for value in values_used(event.action)):
                raise Unfit("value not shown")
            shown += words(event.result)
        answer = task.verifier["answer"]
        if asked is not None and words(answer) not in shown and answer != str(len(asked.result.splitlines())):
            raise Unfit("answer not shown")


def minimise(
    kept: list[int], needed: set[int], holds: Callable[[list[int]], bool], *, key: Callable[[int], Any]
) -> list[int]:
    """Return `kept` without what `holds` does not need. Drops chunks of decreasing size, highest `key` first, but no
    `needed` item, until no single other item can be dropped.
    """
    size = max(len(kept) // 2, 1)
    while True:
        removable = sorted((n for n in kept if n not in needed), key=key, reverse=True)
        dropped = False
        for start in range(0, len(removable), size):
            chunk = set(removable[start : start + size])
            trial = [n for n in kept if n not in chunk]
            if holds(trial):
                kept, dropped = trial, True
        if size == 1 and not dropped:
            return kept
        size = max(size // 2, 1)


def _useful(events: Sequence[Event]) -> list[Event]:
    """Return the calls that succeeded; of look-ups repeated with no change in between, only the first."""
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
    """Return the words that distinguish entities: those with a capital letter or a digit."""
    return {word for word in re.findall(r"\w+", text) if word != word.lower() or any(c.isdigit() for c in word)}
