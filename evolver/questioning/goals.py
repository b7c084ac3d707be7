"""Tasks from what a walk changed and saw: a goal, the fewest calls that reach it, its verifier and
its words.

A goal is one or two changes of a walk, a question about one answer, or both. It becomes a task if

- the fewest of the walk's calls that still make the changes are a solution that an agent could
  find: it never uses a value that nothing has shown or named;
- without any one of these calls the solution fails, and so does the same solution for another value
  of the same type;
- the query names what the verifier demands, by values that the agent can know (`envs.wording`).

Calls without which a later one is refused are *prerequisites*. The query never asks for them, even
if they change something themselves, and the verifier accepts what they change: an agent has to find
out that they are needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs import handles
from envs.probed import Feature, answered, digest, features, judge, new_ids
from envs.world import Task
from evolver.questioning.calls import Event, Events, Json, Key, values_of
from evolver.questioning.claims import unnamed_value
from evolver.questioning.phrasing import Nameless, Option, Phrasing
from evolver.questioning.start_state import Readings, StartState, is_token, with_needs
from evolver.questioning.tasks import Rejected, source_of, synthetic_task
from evolver.questioning.values import NEW_TEXTS, typed
from evolver.replaying import leaves, opening_words
from evolver.transcripts import words

_TYPES = {str: "string", int: "integer", float: "number"}
_FITTING = 0.3  # of the calls with values of a kind have worked, so that it is the argument's type
_OTHERS = 40  # values that an answer could be mistaken for
_OFTEN = 6  # times that two words were shown in one place, so that no third one is to be expected


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
        if self.asked is not None:
            names.append(f"?{self.events[self.asked].name}")
        return "+".join(names)

    def calls(self, chosen: Iterable[int]) -> list[Event]:
        """Return some of its calls, by number."""
        return [self.events[n] for n in chosen]

    def without_showing(self, value: str) -> Goal:
        """Return the same goal without the look-ups whose answers show a value."""
        kept = [
            n
            for n, event in enumerate(self.events)
            if n in self.needed or event.changes or not event.shows([value])
        ]
        return self.reached_by(kept)

    def reached_by(self, kept: Sequence[int], events: Events | None = None) -> Goal:
        """Return the same goal where only the calls `kept` were made, in that order. events: how
        they went, if otherwise than here."""
        events = events or self.calls(kept)
        asked = None if self.asked is None else kept.index(self.asked)
        return Goal(events, [kept.index(n) for n in self.targets], asked)


def goals_of(walk: Events, start: StartState, *, most: int) -> list[Goal]:
    """Return all goals of a walk. most: changes of a goal."""
    events = useful(walk)
    roles = start.stats.roles
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
        made.append(Goal(events, [target], ask).reached_by(order))
    return made


def _is_question(event: Event, start: StartState, known: set[str]) -> bool:
    """Return True if a question may be about the answer of a call: a user can ask it, and nothing
    but the call gives the answer. known: values that answers have shown."""
    role = start.role(event)
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
        self.start = start
        self.least = least
        self.most = most
        self.ids = start.stats.ids()
        self.phrasing = Phrasing(
            start.operations,
            self.ids,
            asks_about_rows=start.code,
            handles=start.stats.handles,
            makes_sense=start.makes_sense,
        )

    def write(
        self,
        goal: Goal,
        *,
        common: Mapping[str, int],
        guesses: Collection[str] = (),
        query: str = "",
        answer: str = "",
    ) -> Task:
        """Return the task of a goal. Raises Rejected, with the reason, if there is none.

        common: {operation: times used so far}. Among several ways to a goal, the one with the rarer
        ones is kept. guesses: answers that must not be right. query, answer: those of a language
        model, "" = worded here. The query has to name what the verifier demands.

        Where nothing else names an id, the query has it, as that of a user who reads it off a label
        would, and the look-ups that show it are left out.
        """
        start = self.start
        rng = self.start.rng
        fits = functools.partial(self._fits, goal, guesses)
        worded = not query
        option = None
        if worded and goal.asked is not None:
            self.phrasing.question(goal.events[goal.asked], "", rng, fits)
        kept = self._minimise(goal, common)
        if not self.least <= len(kept) <= self.most:
            raise Rejected("length")
        episode, events = start.play(goal.calls(kept))
        if events is None or not self._informed(events, goal.events):
            raise Rejected("not repeatable")
        solution = goal.reached_by(kept, events)
        if worded:
            try:
                query, option = self.phrasing.query(solution, rng, fits)
            except Nameless as error:
                rest = goal.without_showing(error.value)
                if is_token(error.value) or len(rest.events) == len(goal.events):
                    raise
                return self.write(rest, common=common, guesses=guesses)
        elif solution.asked is not None:
            shown = events[solution.asked].cells
            option = Option("", answer, [c for c in shown if words(c.value) == words(answer)])
        verifier = self._verifier(solution, start.read(episode), option)
        changed = [probe for probe in verifier["probes"] if "after" in probe]
        if solution.targets and not changed:  # an answer alone would not show the change
            raise Rejected("nothing to check")
        opening = opening_words(episode.opening)
        demanded = [_difference(probe["before"], probe["after"]) for probe in changed]
        if not worded and unnamed_value(query, events, opening, demanded):
            raise Rejected("not named in the query")
        meta = self._meta(goal.name, solution, verifier, worded)
        closing = start.closing_turns(option.value if option else None)
        return synthetic_task(
            start.task,
            query,
            identity=[start.task.id, start.task.seed, query, verifier],
            reference=[*(event.action for event in events), *closing],
            verifier=verifier,
            difficulty=len(events),
            meta=meta,
        )

    def _meta(self, name: str, goal: Goal, verifier: Json, worded: bool) -> Json:
        """Return what is known of a task. name: of the goal that its solution reaches. Raises
        Rejected if its verifier is too strict or too lax."""
        meta = {
            **self.start.task.meta,
            "source": source_of(self.start.task),
            "template": name,
            "prerequisites": self._prerequisites(goal, verifier),
            "sibling": self._sibling(goal, verifier),
        }
        if handles.KEY in meta:  # those known now: later ones would change the task
            meta[handles.KEY] = list(meta[handles.KEY])
        if worded:  # what other words for it have to name and to leave out
            meta["named"] = self.phrasing.named(goal)
            meta["hidden"] = sorted(self.phrasing.hidden(goal.events))
            meta["undescribed"] = self.phrasing.undescribed(goal)
        return meta

    # --- the solution -----------------------------------------------------------------------------

    def _minimise(self, goal: Goal, common: Mapping[str, int]) -> list[int]:
        """Return the fewest calls that still make the goal's changes and show its answer. Other
        changes are among them only if a call of the goal is refused without them."""
        events = goal.events
        needed = set(goal.needed)
        # Changes whose arguments an agent cannot know are no part of any solution.
        every = range(max(needed) + 1)
        whole = [
            n
            for n in every
            if n in needed or not events[n].changes or self._found_out(goal, every, n)
        ]
        alone = [n for n in whole if n in needed or not events[n].changes]

        def holds(trial: Sequence[int]) -> bool:
            if not self._known(goal, trial):
                return False
            _, played = self.start.play(goal.calls(trial))
            if played is None or goal.asked is None:
                return played is not None
            return played[trial.index(goal.asked)].result == events[goal.asked].result

        kept = next(filter(holds, (_slice(events, alone, needed), alone)), whole)
        if kept is whole:
            calls = goal.calls(alone)
            refused = self._informed(calls, events) and self.start.play(calls)[1] is None
            if not (refused and holds(whole)):
                raise Rejected("not separable")
        rng = self.start.rng
        rank = {n: (common.get(events[n].name, 0), rng.random()) for n in kept}
        return minimise(kept, needed, holds, key=rank.__getitem__)

    def _known(self, goal: Goal, kept: Sequence[int]) -> bool:
        """Return True if an agent that makes the calls `kept` can know all their arguments."""
        return self._informed(goal.calls(kept), goal.events) and all(
            self._found_out(goal, kept, n)
            for n in kept
            if goal.events[n].changes and n not in goal.needed
        )

    def _informed(self, events: Events, whole: Events) -> bool:
        """Return True if `events` show each id before they use it, where the whole walk did."""
        wanted = self.phrasing.hidden(whole)
        found = self.phrasing.hidden(events)
        return all(value in found for value in values_of(events) if value in wanted)

    def _found_out(self, goal: Goal, kept: Sequence[int], n: int) -> bool:
        """Return True if an agent can know the arguments of call n, which the query does not name:
        the goal has them, one of the calls `kept` has shown them, or the schema lists them."""
        named = values_of(goal.calls(goal.needed))
        operation = self.start.operations[goal.events[n].name]
        before = [goal.events[m] for m in kept if m < n]
        for name, value in goal.events[n].arguments.items():
            listed = value in operation.properties.get(name, {}).get("enum", ())
            listed |= value in operation.listed.get(name, ())
            texts = {str(leaf) for leaf in leaves(value)} - named
            if not listed and not all(any(e.shows([t]) for e in before) for t in texts):
                return False
        return True

    # --- the verifier -----------------------------------------------------------------------------

    def _verifier(self, goal: Goal, readings: Readings, option: Option | None) -> Json:
        """Return the verifier of the state after the calls of `goal`, which `readings` show, and of
        the answer. What the calls before those of the query change does not count."""
        start = self.start
        events = goal.events
        ids = self.ids
        used = {value for value in values_of(events) if not _is_new(value, events)}
        known = start.known_ids() | used
        mask = set(start.stats.varies)
        naming = start.naming(ids)

        def shown(readings: Readings, chosen: Sequence[int]) -> list[list[Feature]]:
            names = new_ids([readings[n] for n in chosen], ids, known)
            return [features(readings[n], ids, names, mask, naming) for n in chosen]

        every = range(len(start.battery))
        before, after, aside = (
            shown(seen, every) for seen in (start.initial(), readings, self._aside(goal))
        )
        free = [_difference(*pair) for pair in zip(before, aside)]
        given = values_of(event for n, event in enumerate(events) if n not in goal.needed)
        wanted = []
        watched = []
        for n in every:
            if _without(after[n], free[n]) != _without(before[n], free[n]):
                wanted.append(n)
            elif after[n] == before[n] == aside[n]:
                watched.append(n)
        for n in wanted:
            start.role(start.battery[n].event).changes_shown += 1
        watched.sort(key=lambda n: start.dullness(start.battery[n].event.name))
        chosen = sorted([*wanted, *watched[: start.frame]])
        expected: dict[Key, Json] = {}
        for n, now in zip(chosen, shown(readings, chosen)):
            kept = {"digest": digest(now)}
            demand = _change(before[n], now, free[n], given) if n in wanted else kept
            expected[start.battery[n].event.key] = demand
        calls = with_needs(start.battery[n] for n in chosen)
        probes = [{"tool": c.name, "action": c.action, **expected.get(c.key, {})} for c in calls]
        return {
            "start": start.task.verifier,
            "probes": probes,
            "ids": sorted(ids),
            "known": sorted(known),
            "mask": sorted(mask),
            "code": start.code,
            "answer": option and self._answer(option),
            **({"naming": sorted(naming)} if naming else {}),
        }

    def _aside(self, goal: Goal) -> Readings:
        """Return what the probes show after the calls that the query does not name."""
        before = [event for n, event in enumerate(goal.events) if n not in goal.needed]
        if not any(event.changes for event in before):
            return self.start.initial()
        episode, played = self.start.play(before)
        if played is None:
            raise Rejected("not separable")
        return self.start.read(episode)

    def _fits(self, goal: Goal, guesses: Iterable[str], option: Option) -> bool:
        """Return True for a question that is worth asking: its answer is not always the same and,
        where nothing else is asked for, cannot be guessed."""
        role = self.start.role(goal.events[goal.asked or 0])
        says = not option.shown or not all(map(role.always_tells, option.shown))
        return says and (bool(goal.targets) or not self._guessable(option, guesses))

    def _guessable(self, option: Option, guesses: Iterable[str]) -> bool:
        """Return True if a guess answers a question, or if its answer is one of two words that the
        world shows again and again."""
        for kind in itertools.chain.from_iterable(cell.kinds for cell in option.shown):
            times = self.start.stats.words.get(kind, {})
            if option.value in times and len(times) == 2 and sum(times.values()) >= _OFTEN:
                return True
        answer = self._answer(option)
        return any(answered(guess, answer) for guess in guesses)

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

    def _prerequisites(self, goal: Goal, verifier: Json) -> list[str]:
        """Return the calls of a solution without which another one is refused. Raises Rejected
        unless the solution passes, also where such a call is made with another value that the world
        accepts, and fails without any of its calls.

        The call that is asked about is needed for the answer, which the verifier cannot see.
        """
        events = goal.events
        prerequisites = []
        if not self._passes(events, verifier)[0]:
            raise Rejected("reference fails")
        for n, event in enumerate(events):
            kept = [m for m in range(len(events)) if m != n]
            if event.changes and n not in goal.needed and goal.needed[1:]:
                made = {cell.value for cell in event.cells if _is_new(cell.value, events)}
                rest = [m for m in kept if made.isdisjoint(events[m].values)]
                if self._passes(self._accepted(goal, rest), verifier)[0]:
                    raise Rejected("a call is superfluous")  # one undoes the other
            if not kept or n == goal.asked or not self._known(goal, kept):
                continue
            success, played = self._passes(goal.calls(kept), verifier)
            if success:
                raise Rejected("a call is superfluous")
            if played:
                continue
            if n in goal.targets:
                raise Rejected("asks for a prerequisite")
            prerequisites.append(event.name)
            if event.changes:
                self._check_other_ways(events, n, verifier)
        return prerequisites

    def _accepted(self, goal: Goal, kept: list[int]) -> list[Event]:
        """Return the calls `kept` without those that are refused then."""
        while True:
            episode, played = self.start.play(goal.calls(kept))
            if played is not None:
                return played
            del kept[len(episode.events) - 1]

    def _check_other_ways(self, events: Events, n: int, verifier: Json) -> None:
        """Raise Rejected if the verifier rejects another value of an argument of call n with which
        the world does all that follows, such as another person to whom a ticket is assigned."""
        for name, value in events[n].arguments.items():
            other = self._other_value(events[n], name)
            if other is not None:
                way = [*events[:n], _replaced(events[n], value, other), *events[n + 1 :]]
                # Its answer names the other value, which is no new name for the first one: all
                # that follows would be done to the other.
                success, played = self._passes(way, verifier, rename=False)
                if played and not success:
                    raise Rejected("another way fails")

    def _sibling(self, goal: Goal, verifier: Json) -> str:
        """Return the query of the same goal with another value in one argument of a change, "" if
        none is found. Raises Rejected if the verifier accepts such a sibling."""
        places: list[tuple[Event, str]] = []
        for event in goal.calls(goal.targets):
            places += [(event, name) for name in event.arguments]
        self.start.rng.shuffle(places)
        siblings = []
        for event, name in places[: self.start.siblings]:
            other = self._other_value(event, name)
            value = event.arguments[name]
            if other is not None:
                siblings.append([_replaced(e, value, other) for e in goal.events])
        made: Events = ()
        for sibling in siblings:
            success, played = self._passes(sibling, verifier)
            if success:
                raise Rejected("a sibling goal passes")
            made = made or played
        try:
            return self.phrasing.query(replace(goal, events=made), self.start.rng)[0]
        except (Rejected, IndexError):
            return ""

    def _passes(self, calls: Events, verifier: Json, *, rename: bool = True) -> tuple[bool, Events]:
        """Play calls, and return True if the verifier accepts their effect, with their events.
        rename: see `StartState.play`."""
        episode, played = self.start.play(calls, rename=rename)
        if not played or played[-1].over:
            return False, ()
        by_action = {event.action: event for event in with_needs(self.start.battery)}
        probes = [by_action[probe["action"]] for probe in verifier["probes"]]
        closing = verifier["answer"] and verifier["answer"]["value"]
        return judge(verifier, self.start.read_calls(episode, probes), closing).success, played

    def _other_value(self, event: Event, name: str) -> Any:
        """Return another value for an argument of a call: of the same kind if any is known, else a
        made-up one. None: there is none of the same type."""
        others = []
        value = event.arguments[name]
        counts = self.start.stats.kinds.get(f"{event.name}.{name}", {})
        for kind, (worked, tried) in counts.items():
            if worked > _FITTING * tried:
                known = self.start.seen.values.get(kind, ())
                others += [other for other in known if other != str(value)]
        others = others or [text for text in NEW_TEXTS if text != value]
        other = typed(self.start.rng.choice(others), {"type": _TYPES.get(type(value), "")})
        if type(value) in (int, float) and other in (None, value):
            return value + 1
        return other if type(other) is type(value) else None


def _change(
    before: Sequence[Feature], after: Sequence[Feature], free: list[Feature], given: set[str]
) -> Json:
    """Return what a verifier demands of a probe that shows the wanted change. free: features that
    do not count. given: the arguments of calls that the query does not name."""
    demand = {"before": _without(before, free), "after": _without(after, free)}
    if free:
        demand["free"] = free
    # Another value there would have done as well, such as whom a ticket is assigned to.
    fixed = [feature[:2] for feature in (*demand["before"], *demand["after"])]
    places = [feature[:2] for feature in free if feature[2] in given]
    if places := [place for place in places if place not in fixed]:
        demand["places"] = places
    return demand


def _replaced(event: Event, value: Any, other: Any) -> Event:
    """Return a call with another value in place of a value of its arguments."""
    given = event.arguments.items()
    return replace(event, arguments={name: other if v == value else v for name, v in given})


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
                kept = trial
                dropped = True
        if size == 1 and not dropped:
            return kept
        size = max(size // 2, 1)


def _slice(events: Events, kept: Sequence[int], needed: set[int]) -> list[int]:
    """Return the calls that show a value which a needed call, or one of these, uses; and those with
    such a value."""
    chosen = set(needed)
    values = values_of(events[n] for n in needed)
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


def _difference(a: Sequence[Feature], b: Sequence[Feature]) -> list[Feature]:
    """Return the features of either answer that the other does not have."""
    return [f for f in (*a, *b) if (f in a) != (f in b)]


def _without(shown: Sequence[Feature], free: Sequence[Feature]) -> list[Feature]:
    return [feature for feature in shown if feature not in free]
