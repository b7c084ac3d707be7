"""Tasks from what a walk changed and saw: a goal, the fewest calls that reach it, its verifier and
its words.

A goal is one or two changes of a walk, a question about one answer, or both. It becomes a task if

- the fewest of the walk's calls that still make the changes are a solution that an agent could
  find: it never uses a value that nothing has shown or named;
- without any one of these calls the solution fails, and so does the same solution for another value
  of the same type;
- the query names what the verifier demands, by values that the agent can know (`envs.wording`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.probed import digest, features, judge, new_ids
from envs.world import Task
from evolver.questioning.calls import Event, Events, Json, Key
from evolver.questioning.claims import unnamed_value
from evolver.questioning.phrasing import Option, Phrasing, hidden_ids
from evolver.questioning.start_state import Readings, StartState, is_token, with_needs
from evolver.questioning.tasks import Rejected, source_of, synthetic_task
from evolver.questioning.values import NEW_TEXTS, typed
from evolver.replaying import opening_words
from evolver.transcripts import words

_TYPES = {str: "string", int: "integer", float: "number"}
_FITTING = 0.3  # of the calls with values of a kind have worked, so that it is the argument's type
_OTHERS = 40  # values that an answer could be mistaken for


@dataclass
class Goal:
    """Some calls whose effect may become a task. targets: the changes that it asks for. asked: the
    call that a question is about."""

    events: Events
    targets: list[int]
    asked: int | None

    @property
    def needed(self) -> list[int]:
        """The calls that the query names: the targets, then the one that is asked about."""
        return self.targets if self.asked is None else [*self.targets, self.asked]

    @property
    def name(self) -> str:
        """The sequence of operations, such as "book+?list_orders"."""
        names = [self.events[n].name for n in self.targets]
        return "+".join(
            names if self.asked is None else [*names, f"?{self.events[self.asked].name}"]
        )

    def reached_by(self, kept: Sequence[int], events: Events) -> Goal:
        """Return the same goal where only the calls `kept` were made. events: how they went."""
        asked = None if self.asked is None else kept.index(self.asked)
        return Goal(events, [kept.index(n) for n in self.targets], asked)


def goals_of(walk: Events, start: StartState, *, most: int) -> list[Goal]:
    """Return all goals of a walk. most: changes of a goal."""
    events, roles = useful(walk), start.stats.roles
    # Nothing shows the changes of an operation without witnesses.
    changing = [n for n, e in enumerate(events) if e.changes and roles[e.name].witnesses != []]
    known = start.seen.in_answers()
    asks = [n for n, event in enumerate(events) if _is_question(event, start, known)]
    made = []
    for size in range(1, most + 1):
        for targets in itertools.combinations(changing, size):
            made.append(Goal(events, list(targets), None))
    made += [Goal(events, [], n) for n in asks]
    for target, ask in itertools.product(changing, asks):
        order = list(range(len(events)))
        if ask < target:  # the question is asked last
            order.insert(target, order.pop(ask))
        reordered = [events[n] for n in order]
        made.append(Goal(reordered, [order.index(target)], order.index(ask)))
    return made


def _is_question(event: Event, start: StartState, known: set[str]) -> bool:
    """Return True if a question may be about the answer of a call: a user can ask it, and nothing
    but the call gives the answer. known: values that answers have shown."""
    role = start.stats.roles[event.name]
    return (
        start.takes_answers
        and bool(event.values or start.answering)
        and all(value in known or is_token(value) for value in event.values)
        and role.reads
        and not role.blind
        and not start.stats.says_nothing(event)
    )


def useful(events: Events) -> list[Event]:
    """Return the calls that succeeded; of look-ups repeated with no change in between, only the
    first."""
    kept = []
    seen: set[Key] = set()
    for event in events:
        if event.changes:
            seen.clear()
        if event.accepted and event.key not in seen:
            kept.append(event)
            seen.add(event.key)
    return kept


class Writer:
    """Writes the tasks of one start state."""

    def __init__(self, start: StartState, *, least: int, most: int):
        """least, most: calls of a solution."""
        self.start, self.least, self.most = start, least, most
        self.ids = start.stats.ids()
        self.phrasing = Phrasing(start.operations, self.ids, asks_about_rows=start.code)

    def write(
        self,
        goal: Goal,
        rng: random.Random,
        *,
        common: Mapping[str, int],
        query: str = "",
        answer: str = "",
    ) -> Task:
        """Return the task of a goal. Raises Rejected, with the reason, if there is none.

        common: {operation: times used so far}. Among several ways to a goal, the one with the rarer
        ones is kept. query, answer: those of a language model, "" = worded here. The query has to
        name what the verifier demands.
        """
        kept = self._minimise(goal, rng, common)
        if not self.least <= len(kept) <= self.most:
            raise Rejected("length")
        episode, events = self.start.play([goal.events[n] for n in kept])
        if events is None or not self._informed(events, goal.events):
            raise Rejected("not repeatable")
        solution = goal.reached_by(kept, events)
        worded, option = not query, None
        if worded:
            query, option = self.phrasing.query(solution, rng)
        elif solution.asked is not None:
            shown = events[solution.asked].cells
            option = Option("", answer, [c for c in shown if words(c.value) == words(answer)])
        verifier = self._verifier(events, self.start.read(episode), option)
        changed = [probe for probe in verifier["probes"] if "after" in probe]
        if solution.targets and not changed:  # an answer alone would not show the change
            raise Rejected("nothing to check")
        opening = opening_words(episode.opening)
        if not worded and unnamed_value(query, events, opening, _demanded(changed)):
            raise Rejected("not named in the query")
        closing = option.value if option else None
        meta = {
            **self.start.task.meta,
            "source": source_of(self.start.task),
            "template": goal.name,
            "sibling": self._check(solution, verifier, closing, rng),
        }
        if worded:  # what other words for it have to name and to leave out
            meta["named"] = self.phrasing.named(solution)
            meta["hidden"] = sorted(hidden_ids(events, self.ids))
        return synthetic_task(
            self.start.task,
            query,
            identity=[self.start.task.id, self.start.task.seed, query, verifier],
            reference=[*(event.action for event in events), *self.start.closing_turns(closing)],
            verifier=verifier,
            difficulty=len(events),
            meta=meta,
        )

    # --- the solution -----------------------------------------------------------------------------

    def _minimise(self, goal: Goal, rng: random.Random, common: Mapping[str, int]) -> list[int]:
        """Return the fewest calls that still make the goal's changes and show its answer."""
        events, needed = goal.events, set(goal.needed)
        kept = [n for n in range(max(needed) + 1) if n in needed or not events[n].changes]

        def holds(trial: list[int]) -> bool:
            calls = [events[n] for n in trial]
            if not self._informed(calls, events):
                return False
            _, played = self.start.play(calls)
            if played is None or goal.asked is None:
                return played is not None
            return played[trial.index(goal.asked)].result == events[goal.asked].result

        sliced = _slice(events, kept, needed)
        shorter, code = len(sliced) < len(kept), self.start.code
        fits = code and shorter and holds(sliced)  # tried first, where episodes take long
        if not fits and not holds(kept):
            raise Rejected("not separable")
        if fits or (not code and shorter and holds(sliced)):
            kept = sliced
        rank = {n: (common.get(events[n].name, 0), rng.random()) for n in kept}
        return minimise(kept, needed, holds, key=rank.__getitem__)

    def _informed(self, events: Events, whole: Events) -> bool:
        """Return True if `events` show each id before they use it, where the whole walk did."""
        wanted, found = hidden_ids(whole, self.ids), hidden_ids(events, self.ids)
        used = itertools.chain.from_iterable(event.values for event in events)
        return all(value in found for value in used if value in wanted)

    # --- the verifier -----------------------------------------------------------------------------

    def _verifier(self, events: Events, readings: Readings, option: Option | None) -> Json:
        """Return the verifier of the state after `events`, which `readings` show, and of the
        answer."""
        start, mask = self.start, set(self.start.stats.varies)
        known = start.known_ids()
        for event in events:
            known.update(value for value in event.values if not _is_new(value, events))
        goal = start.effect(readings, known)
        for n in goal:
            start.stats.roles[start.battery[n].event.name].changes_shown += 1
        chosen = self._framed(goal)
        names = new_ids([readings[n] for n in chosen], self.ids, known)
        expected = {}
        for n in chosen:
            now = features(readings[n], self.ids, names, mask)
            before = features(start.initial[n], self.ids, {}, mask)
            changed = {"before": before, "after": now}
            expected[start.battery[n].event.key] = (
                {"digest": digest(now)} if now == before else changed
            )
        probes = []
        for call in with_needs(start.battery[n] for n in chosen):
            probes.append({"tool": call.name, "action": call.action, **expected.get(call.key, {})})
        if not goal and option is None:
            raise Rejected("nothing to check")
        return {
            "start": start.task.verifier,
            "probes": probes,
            "ids": sorted(self.ids),
            "known": sorted(known),
            "mask": sorted(mask),
            "code": start.code,
            "answer": option and self._answer(option),
        }

    def _answer(self, option: Option) -> Json:
        """Return the `answer` of a verifier with the values that it could be mistaken for: of the
        same kinds."""
        others: dict[str, None] = {}
        for cell in option.shown:
            for kind in cell.kinds:
                others |= dict.fromkeys(self.start.seen.values.get(kind, ()))
                others |= dict.fromkeys(self.start.stats.words.get(kind, ()))
        others.pop(option.value, None)
        return {"value": option.value, "others": list(others)[:_OTHERS]}

    def _framed(self, goal: Sequence[int]) -> list[int]:
        """Return the probes to use: those of the goal, and others, most of them of operations that
        show changes."""
        battery = self.start.battery
        frame = [n for n in range(len(battery)) if n not in goal]
        frame.sort(key=lambda n: self.start.dullness(battery[n].event.name))
        return sorted([*goal, *frame[: self.start.frame]])

    def _check(self, goal: Goal, verifier: Json, closing: str | None, rng: random.Random) -> str:
        """Raise Rejected unless the solution passes, and fails without any of its calls or with a
        sibling of a value. Return the query of the sibling, "" if there is none.

        The call that is asked about is needed for the answer, which the verifier cannot see.
        """
        events = goal.events
        if not self._passes(events, verifier, closing)[0]:
            raise Rejected("reference fails")
        for n in range(len(events)):
            rest = [*events[:n], *events[n + 1 :]]
            if rest and n != goal.asked and self._informed(rest, events):
                if self._passes(rest, verifier, closing)[0]:
                    raise Rejected("a call is superfluous")
        played: Events = ()
        for sibling in self._siblings(goal, rng):
            success, calls = self._passes(sibling, verifier, closing)
            if success:
                raise Rejected("a sibling goal passes")
            played = played or calls
        try:
            return self.phrasing.query(replace(goal, events=played), rng)[0] if played else ""
        except Rejected:
            return ""

    def _passes(self, calls: Events, verifier: Json, closing: str | None) -> tuple[bool, Events]:
        """Play calls, and return True if the verifier accepts their effect, with their events."""
        episode, played = self.start.play(calls)
        if not played or played[-1].over:
            return False, ()
        by_action = {event.action: event for event in with_needs(self.start.battery)}
        probes = [by_action[probe["action"]] for probe in verifier["probes"]]
        return judge(verifier, self.start.read_calls(episode, probes), closing).success, played

    def _siblings(self, goal: Goal, rng: random.Random) -> list[list[Event]]:
        """Return solutions with another value in one argument of a change: one of the same type if
        any is known, else a made-up one."""
        places = []
        for n in goal.targets:
            event = goal.events[n]
            places += [(event.name, name, value) for name, value in event.arguments.items()]
        rng.shuffle(places)
        siblings = []
        for operation, name, value in places[: self.start.siblings]:
            other = self._other_value(f"{operation}.{name}", value, rng)
            if type(other) is type(value):
                siblings.append([self._replaced(e, value, other) for e in goal.events])
        return siblings

    def _other_value(self, place: str, value: Any, rng: random.Random) -> Any:
        others = []
        for kind, (worked, tried) in self.start.stats.kinds.get(place, {}).items():
            if worked > _FITTING * tried:
                known = self.start.seen.values.get(kind, ())
                others += [other for other in known if other != str(value)]
        others = others or [text for text in NEW_TEXTS if text != value]
        other = typed(rng.choice(others), {"type": _TYPES.get(type(value), "")})
        if type(value) in (int, float) and other in (None, value):
            return value + 1
        return other

    def _replaced(self, event: Event, value: Any, other: Any) -> Event:
        arguments = {}
        for name, given in event.arguments.items():
            arguments[name] = other if given == value else given
        action = self.start.operations[event.name].render(arguments)
        return Event(event.name, arguments, action, event.result, changes=event.changes)


def minimise(
    kept: list[int],
    needed: set[int],
    holds: Callable[[list[int]], bool],
    *,
    key: Callable[[int], Any],
) -> list[int]:
    """Return `kept` without what `holds` does not need. Drops chunks of decreasing size, highest
    `key` first, but no `needed` item, until no single other item can be dropped.
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


def _slice(events: Events, kept: Sequence[int], needed: set[int]) -> list[int]:
    """Return the calls that show a value which a needed call, or one of these, uses; and those with
    such a value."""
    chosen, values = set(needed), set[str]()
    for n in needed:
        values.update(events[n].values)
    for n in reversed(kept):
        event = events[n]
        if n in needed or event.shows(values) or not values.isdisjoint(event.values):
            chosen.add(n)
            values.update(event.values)
    return sorted(chosen)


def _is_new(value: str, events: Events) -> bool:
    """Return True if a change of `events` showed the value first: an id that the solution
    creates."""
    first = next((event for event in events if event.shows([value])), None)
    used = next((event for event in events if value in event.values), None)
    return first is not None and first.changes and used is not first


def _demanded(changed: Sequence[Json]) -> list[Any]:
    """Return the features that the wanted change adds or removes. changed: probes of a verifier."""
    demanded = []
    for probe in changed:
        before, after = probe["before"], probe["after"]
        demanded += [f for f in (*before, *after) if (f in before) != (f in after)]
    return demanded
