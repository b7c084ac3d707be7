"""Tasks from what a walk changed and saw: a goal, the fewest calls that reach it, its verifier and
its words.

A proposal is one or two changes of a walk, a question about one answer, or both. It becomes a task
if

- the fewest of the walk's calls that still make the changes are a solution that an agent could
  find: it never uses a value that nothing has shown or named;
- without any one of these calls the solution fails, and so does the same solution for another value
  of the same type;
- the query names what the verifier demands, by values that the agent can know (`envs.wording`).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.probed import Cell, digest, features, judge, new_ids
from envs.wording import distinguishing, goal_text, joined, spaced, summaries
from envs.world import Observation, Task
from evolver.questioning.calls import Event
from evolver.questioning.checks import Played, shown_answer, unnamed_value
from evolver.questioning.start_state import Site, is_token, with_needs
from evolver.questioning.tasks import CLOSING, Unfit, synthetic_task
from evolver.questioning.walks import NEW_TEXTS, typed
from evolver.replaying import leaves, opening_words
from evolver.transcripts import words

FRAME = 20  # probes of a task that must not change
FEW_FRAMED = 5  # in worlds whose actions are code
_SIBLINGS = 4  # of a task, each with another value in one argument
_TYPES = {str: "string", int: "integer", float: "number"}
_ROWS_ASKED = 3  # values of rows that a question may be about
_OTHERS = 40  # values that an answer could be mistaken for


@dataclass
class Proposal:
    """Some calls of a walk whose effect may become a task. targets: changes. ask: the call that a
    question is about."""

    events: list[Event]
    targets: list[int]
    ask: int | None

    @property
    def name(self) -> str:
        """The sequence of goals, such as "book+?list_orders"."""
        asked = [] if self.ask is None else [f"?{self.events[self.ask].name}"]
        return "+".join([*(self.events[n].name for n in self.targets), *asked])

    @property
    def needed(self) -> list[int]:
        return sorted({*self.targets, *([] if self.ask is None else [self.ask])})


def proposals(events: Sequence[Event], site: Site, *, goals: int) -> list[Proposal]:
    """Return all proposals of a walk. goals: most changes of a task."""
    events, known = _useful(events), site.known.all()
    unseen = [
        name for name, found in site.knowledge.witnesses.items() if not found
    ]  # nothing shows their changes
    changing = [n for n, event in enumerate(events) if event.changes and event.name not in unseen]
    asks = [
        n
        for n, event in enumerate(events)
        if site.takes_answers and (event.values or site.answering)
        if all(value in known or is_token(value) for value in event.values)
        if site.knowledge.reads(event.name) and not site.knowledge.is_blind(event.name)
        if not site.knowledge.says_nothing(event)
    ]
    made = []
    for size in range(1, goals + 1):
        made += [
            Proposal(events, list(targets), None)
            for targets in itertools.combinations(changing, size)
        ]
    made += [Proposal(events, [], n) for n in asks]
    for target, ask in itertools.product(changing, asks):
        order = list(range(len(events)))
        if ask < target:  # the question is asked last
            order.insert(target, order.pop(ask))
        made.append(Proposal([events[n] for n in order], [order.index(target)], order.index(ask)))
    return made


def claimed(
    events: Sequence[Event], chosen: Sequence[Event], query: str, answer: str
) -> tuple[Proposal, str]:
    """Return the proposal of some calls of a walk that a language model chose, and the answer as
    one of them showed it, "" if nothing is asked. events: all calls of the walk. Raises Unfit, with
    the reason.
    """
    if not all(event.ok for event in chosen):
        raise Unfit("reference fails")
    useful = _useful(events)
    last = {event.key: n for n, event in enumerate(useful) if not event.changes}
    places = {id(event): n for n, event in enumerate(useful)}
    chosen = [
        event for event in chosen if id(event) in places or event.key in last
    ]  # not those that end the episode
    targets = sorted({places[id(event)] for event in chosen if event.changes})
    shown, ask = "", None
    for event in reversed(chosen):
        if answer and not shown and (shown := shown_answer(query, answer, _played([event]))):
            ask = places.get(id(event), last.get(event.key))
    if answer and ask is None:
        raise Unfit("answer not shown")
    if not targets and ask is None:
        raise Unfit("nothing to check")
    return Proposal(useful, targets, ask), shown


class Writer:
    """Writes the tasks of one site."""

    def __init__(self, site: Site, *, least: int, most: int):
        """least, most: calls of a solution."""
        self.site, self.least, self.most = site, least, most
        self.operations = site.operations
        self.code = site.code
        self.summaries = summaries(
            {name: operation.description for name, operation in self.operations.items()}
        )
        self.ids = site.knowledge.ids()

    def write(
        self,
        proposal: Proposal,
        rng: random.Random,
        *,
        common: Mapping[str, int],
        query: str = "",
        answer: str = "",
    ) -> Task:
        """Return the task of a proposal. Raises Unfit, with the reason, if there is none.

        common: {operation: times used so far}. Among several ways to a goal, the one with the rarer
        ones is kept.
        query, answer: those of a language model, "" = worded here. The query has to name what the
        verifier demands.
        """
        kept = self._minimise(proposal, rng, common)
        if not self.least <= len(kept) <= self.most:
            raise Unfit("length")
        episode, events = self.site.play([proposal.events[n] for n in kept])
        if events is None or not _informed(events, proposal.events, self.ids):
            raise Unfit("not repeatable")
        targets = [kept.index(n) for n in proposal.targets]
        asked = None if proposal.ask is None else kept.index(proposal.ask)
        written, wanted, closing = bool(query), None, answer
        if not written:
            query, wanted, closing = self._words(events, targets, asked, rng)
        elif asked is not None:
            wanted = self._answer(
                answer, [cell for cell in events[asked].cells if words(cell.value) == words(answer)]
            )
        readings = self.site.read(episode)
        verifier = self._verifier(events, readings, wanted)
        if targets and not any("after" in probe for probe in verifier["probes"]):
            raise Unfit(
                "nothing to check"
            )  # an answer alone would not show that the change was made
        if written and unnamed_value(query, _played(events, episode.opening), _demanded(verifier)):
            raise Unfit("not named in the query")
        sibling = self._check(events, targets, asked, verifier, closing, rng)
        meta = _start_meta(self.site.task) | {"template": proposal.name, "sibling": sibling}
        if not written:  # what other words for it have to name and to leave out
            meta["named"] = self._named(events, [*targets, *([] if asked is None else [asked])])
            meta["hidden"] = sorted(_hidden(events, self.ids))
        return synthetic_task(
            self.site.task,
            query,
            identity=[self.site.task.id, self.site.task.seed, query, verifier],
            reference=[*(event.action for event in events), *self._closing_turn(closing, asked)],
            verifier=verifier,
            difficulty=len(events),
            meta=meta,
        )

    def _closing_turn(self, closing: str, asked: int | None) -> list[str]:
        """Return the turn that ends the episode."""
        if self.site.answering:
            return [self.site.answering.render({"answer": closing} if asked is not None else {})]
        return (
            []
            if self.code or not self.site.ends_by_text
            else [closing if asked is not None else CLOSING]
        )

    # --- the solution -----------------------------------------------------------------------------

    def _minimise(
        self, proposal: Proposal, rng: random.Random, common: Mapping[str, int]
    ) -> list[int]:
        """Return the fewest calls that still make the proposal's changes and show its answer."""
        needed = set(proposal.needed)
        kept = [n for n in range(max(needed) + 1) if n in needed or not proposal.events[n].changes]
        asked = None if proposal.ask is None else proposal.events[proposal.ask].result

        def holds(trial: list[int]) -> bool:
            if not _informed([proposal.events[n] for n in trial], proposal.events, self.ids):
                return False
            _, events = self.site.play([proposal.events[n] for n in trial])
            return events is not None and (
                asked is None or events[trial.index(proposal.ask)].result == asked
            )

        sliced = _slice(proposal.events, kept, needed)
        if (
            self.code and len(sliced) < len(kept) and holds(sliced)
        ):  # the first of two long episodes
            kept = sliced
        elif not holds(kept):
            raise Unfit("not separable")
        elif not self.code and len(sliced) < len(kept) and holds(sliced):
            kept = sliced
        rank = {n: (common.get(proposal.events[n].name, 0), rng.random()) for n in kept}
        return minimise(kept, needed, holds, key=lambda n: rank[n])

    # --- the words --------------------------------------------------------------------------------

    def _words(
        self, events: Sequence[Event], targets: Sequence[int], asked: int | None, rng: random.Random
    ) -> tuple[str, dict[str, Any] | None, str]:
        """Return the query, the `answer` of the verifier, and the closing text that gives it."""
        hidden = _hidden(events, self.ids)
        goals = [self._goal(events, n, hidden) for n in targets]
        wanted, answer, closing = "", None, ""
        if asked is not None:
            goals.append(self._goal(events, asked, hidden))
            wanted, answer = self._question(events[asked], words(" ".join(goals)), rng)
            closing = answer["value"]
        query = joined(goals, wanted, rng)
        if any(words(value) in words(query) for value in hidden):
            raise Unfit("names a hidden value")
        if len(set(goals)) < len(goals):
            raise Unfit("same words twice")
        return query, answer, closing

    def _goal(self, events: Sequence[Event], n: int, hidden: Mapping[str, int]) -> str:
        operation, stated, phrases = self.operations[events[n].name], [], {}
        for name, value in events[n].arguments.items():
            if _is_own_token(value, events):
                continue
            parts = [
                part for leaf in leaves(value) for part in self._phrase(events, str(leaf), hidden)
            ]
            phrases[name] = " ".join(
                part for part in dict.fromkeys(parts) if part not in stated
            ) or " ".join(parts)
            stated += parts
        return goal_text(self.summaries[operation.name], phrases)

    def _named(self, events: Sequence[Event], wanted: Sequence[int]) -> list[str]:
        """Return the values that the query names, those of the calls `wanted`."""
        hidden = _hidden(events, self.ids)
        values = [
            value for n in wanted for value in events[n].values if not _is_own_token(value, events)
        ]
        return list(
            dict.fromkeys(part for value in values for part in self._phrase(events, value, hidden))
        )

    def _phrase(self, events: Sequence[Event], value: str, hidden: Mapping[str, int]) -> list[str]:
        """Return the words for a value: itself, or the values that lead to a hidden one."""
        if value not in hidden:
            return [value]
        event = events[hidden[value]]
        parts = [part for inner in event.values for part in self._phrase(events, inner, hidden)]
        found = distinguishing(event.cells, value, list(hidden))
        if found is not None and not (
            parts or found
        ):  # the only row of an answer to a call without arguments
            found = [
                spaced(cell.label.rpartition(".")[2])
                for cell in event.cells
                if cell.label and cell.value == value
            ]
        if not (parts or found) or found is None:
            raise Unfit("nothing names it")
        return list(dict.fromkeys([*parts, *found]))

    def _question(self, event: Event, query: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Return what to reply with, in words, and the answer with the values that it could be
        mistaken for.

        query: the `words` of the question so far, which must not hold the answer.
        """
        shown = event.cells
        rows = list(dict.fromkeys(cell.row for cell in shown))
        labels = Counter(cell.label for cell in shown)
        options: list[Option] = []
        for cell in shown:
            if cell.label and labels[cell.label] == 1 and "[*]" not in cell.label:
                options.append((f"the {spaced(cell.label.removeprefix('$.'))}", cell.value, cell))
        if shown and not shown[0].label and len(rows) == 1 and len(shown) > 1:
            options += [
                ("the first word", shown[0].value, shown[0]),
                ("the last word", shown[-1].value, shown[-1]),
            ]
        lists = {cell.label.partition("[*]")[0] for cell in shown if "[*]" in cell.label}
        if len(lists) == 1:
            (name,) = lists
            count = len({cell.row.partition("]")[0] for cell in shown if "[*]" in cell.label})
            entries = spaced(name.removeprefix("$").strip(".")) or "entries"
            options.append((f"the number of {entries}", str(count), None))
        if not any(cell.label for cell in shown) and len(rows) > 1:
            options.append(("the number of lines", str(len(rows)), None))
        options = _askable(options, query)
        if not options or self.code:
            options += _askable(_of_rows(shown, rng), query)
        if not options:
            raise Unfit("no question")
        wanted, value, cell = rng.choice(options)
        return wanted, self._answer(value, [cell] if cell else [])

    def _answer(self, value: str, shown: Sequence[Cell]) -> dict[str, Any]:
        """Return the `answer` of a verifier with the values that it could be mistaken for: of the
        kinds of `shown`."""
        others: dict[str, None] = {}
        for kind in (kind for cell in shown for kind in cell.kinds):
            others |= dict.fromkeys(self.site.known.values.get(kind, ()))
            others |= dict.fromkeys(self.site.knowledge.words.get(kind, ()))
        return {"value": value, "others": [v for v in others if v != value][:_OTHERS]}

    # --- the verifier -----------------------------------------------------------------------------

    def _verifier(
        self,
        events: Sequence[Event],
        readings: Sequence[Sequence[Cell]],
        answer: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the verifier of the state after `events`, which `readings` show, and of the
        answer."""
        site, ids, mask = self.site, self.site.knowledge.ids(), self.site.knowledge.mask()
        known = site.known_ids() | {
            value for event in events for value in event.values if not _is_new(value, events)
        }
        goal = site.effect(readings, known)
        for n in goal:
            name = site.battery[n].event.name
            site.knowledge.shown_changes[name] = site.knowledge.shown_changes.get(name, 0) + 1
        chosen = self._chosen(goal)
        names = new_ids([readings[n] for n in chosen], ids, known)
        expected: dict[tuple[str, str], dict[str, Any]] = {}
        for n in chosen:
            now, before = (
                features(readings[n], ids, names, mask),
                features(site.initial[n], ids, {}, mask),
            )
            same = {"digest": digest(now)}
            expected[site.battery[n].event.key] = (
                same if now == before else {"before": before, "after": now}
            )
        calls = with_needs([site.battery[n] for n in chosen])
        probes = [{"tool": e.name, "action": e.action} | expected.get(e.key, {}) for e in calls]
        if not goal and answer is None:
            raise Unfit("nothing to check")
        return {
            "start": site.task.verifier,
            "probes": probes,
            "ids": sorted(ids),
            "known": sorted(known),
            "mask": sorted(mask),
            "code": self.code,
            "answer": answer,
        }

    def _chosen(self, goal: Sequence[int]) -> list[int]:
        """Return the probes to use: those of the goal, and others, most of them of operations that
        show changes."""
        battery, shows = self.site.battery, self.site.knowledge.shows
        names, blind = [probe.event.name for probe in battery], self.site.knowledge.is_blind
        frame = sorted(
            set(range(len(battery))) - set(goal),
            key=lambda n: (not shows(names[n]), blind(names[n]), n),
        )
        return sorted([*goal, *frame[: FEW_FRAMED if self.code else FRAME]])

    def _check(
        self,
        events: Sequence[Event],
        targets: Sequence[int],
        asked: int | None,
        verifier: dict[str, Any],
        closing: str,
        rng: random.Random,
    ) -> str:
        """Raise Unfit unless the solution passes, and fails without any of its calls or with a
        sibling of a value.

        The call that is asked about is needed for the answer, which the verifier cannot see. Return
        the query of the sibling, "" if there is none.
        """

        def passes(calls: Sequence[Event]) -> tuple[bool, list[Event] | None]:
            episode, played = self.site.play(calls)
            if not played or played[-1].over:
                return False, None
            readings = self._readings(verifier, episode)
            return judge(
                verifier, readings, closing if verifier["answer"] else None
            ).success, played

        if not passes(events)[0]:
            raise Unfit("reference fails")
        for n in range(len(events)):
            rest = [*events[:n], *events[n + 1 :]]
            if rest and n != asked and _informed(rest, events, self.ids) and passes(rest)[0]:
                raise Unfit("a call is superfluous")
        played = None
        for sibling in self._siblings(events, targets, rng):
            success, calls = passes(sibling)
            if success:
                raise Unfit("a sibling goal passes")
            played = played or calls
        try:
            return self._words(played, targets, asked, rng)[0] if played else ""
        except Unfit:
            return ""

    def _readings(self, verifier: dict[str, Any], episode: Any) -> list[Sequence[Cell]]:
        by_action = {event.action: event for event in with_needs(self.site.battery)}
        return self.site.read_calls(
            episode, [by_action[probe["action"]] for probe in verifier["probes"]]
        )

    def _siblings(
        self, events: Sequence[Event], targets: Sequence[int], rng: random.Random
    ) -> list[list[Event]]:
        """Return solutions with another value in one argument of a change: one of the same type if
        any is known, else a made-up one. Slow worlds get one of them only."""
        places = [(n, name, value) for n in targets for name, value in events[n].arguments.items()]
        rng.shuffle(places)
        siblings = []
        for n, name, value in places[: 1 if self.site.slow else _SIBLINGS]:
            kinds = self.site.knowledge.kinds.get(f"{events[n].name}.{name}", {})
            fitting = [kind for kind, (worked, tried) in kinds.items() if worked > 0.3 * tried]
            others = [
                v
                for kind in fitting
                for v in self.site.known.values.get(kind, ())
                if v != str(value)
            ]
            others = others or [text for text in NEW_TEXTS if text != value]
            other = typed(rng.choice(others), {"type": _TYPES.get(type(value), "")})
            if type(value) in (int, float) and (other is None or other == value):
                other = value + 1
            if type(other) is type(value):
                siblings.append(
                    [_replaced(e, value, other, self.operations[e.name].render) for e in events]
                )
        return siblings


def _is_own_token(value: Any, events: Sequence[Event]) -> bool:
    """Return True for an access token, if each of the operations that show tokens was called once:
    no user would mention it, as long as the account is clear."""
    showing = [event.name for event in events if any(is_token(cell.value) for cell in event.cells)]
    return isinstance(value, str) and is_token(value) and len(showing) == len(set(showing))


Option = tuple[
    str, str, Cell | None
]  # what to reply with, in words; the answer; where it was shown


def _askable(options: Sequence[Option], query: str) -> list[Option]:
    """Return the options whose answer is short and not in the query."""
    return [
        option for option in options if words(option[1]) not in query and 0 < len(option[1]) <= 40
    ]


def _of_rows(shown: Sequence[Cell], rng: random.Random) -> list[Option]:
    """Return questions about a few values of the rows of a JSON list, by words that tell each row
    from the others."""
    inner = [
        cell for cell in shown if cell.label.count("[*]") == 1 and not cell.label.endswith("[*]")
    ]
    options: list[Option] = []
    for cell in rng.sample(inner, min(_ROWS_ASKED, len(inner))):
        found = distinguishing(shown, cell.value, ())
        if found:
            name = spaced(cell.label.rpartition(".")[2])
            options.append((f"the {name} of {' '.join(found)}", cell.value, cell))
    return options


def _replaced(
    event: Event, value: Any, other: Any, render: Callable[[dict[str, Any]], str]
) -> Event:
    arguments = {
        name: other if given == value else given for name, given in event.arguments.items()
    }
    return Event(event.name, arguments, render(arguments), event.result, changes=event.changes)


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


def _slice(events: Sequence[Event], kept: Sequence[int], needed: set[int]) -> list[int]:
    """Return the calls that show a value which a needed call, or one of these, uses; and those with
    such a value."""
    chosen, values = set(needed), {value for n in needed for value in events[n].values}
    for n in reversed(kept):
        shown = {cell.value for cell in events[n].cells}
        if n in needed or not values.isdisjoint(shown) or not values.isdisjoint(events[n].values):
            chosen.add(n)
            values.update(events[n].values)
    return sorted(chosen)


def _useful(events: Sequence[Event]) -> list[Event]:
    """Return the calls that succeeded; of look-ups repeated with no change in between, only the
    first."""
    kept, seen = [], set()
    for event in events:
        if event.changes:
            seen.clear()
        if event.ok and not event.over and event.key not in seen:
            kept.append(event)
            seen.add(event.key)
    return kept


def _hidden(events: Sequence[Event], ids: Collection[str]) -> dict[str, int]:
    """Return {id: the call that shows it} of the ids that are used after a call has shown them.

    An id that a call takes before any has shown it has to be named in the query, and is not hidden.
    So is any other value, because a user would name it.
    """
    shown: dict[str, int] = {}
    hidden: dict[str, int] = {}
    named: set[str] = set()
    for n, event in enumerate(events):
        for value in event.values:
            if value in shown and value not in named:
                hidden[value] = shown[value]
            else:
                named.add(value)
        for cell in event.cells:
            if not ids.isdisjoint(cell.kinds):
                shown.setdefault(cell.value, n)
    return hidden


def _informed(events: Sequence[Event], whole: Sequence[Event], ids: Collection[str]) -> bool:
    """Return True if `events` show each id before they use it, where the whole walk did."""
    wanted, found = _hidden(whole, ids), _hidden(events, ids)
    return all(value in found for event in events for value in event.values if value in wanted)


def _is_new(value: str, events: Sequence[Event]) -> bool:
    """Return True if a change of `events` showed the value first: an id that the solution
    creates."""
    first = next(
        (event for event in events if any(cell.value == value for cell in event.cells)), None
    )
    used = next((event for event in events if value in event.values), None)
    return first is not None and first.changes and used is not first


def _played(events: Sequence[Event], opening: Observation | None = None) -> Played:
    """Return calls as the checks of a language model's claims take them."""
    known = opening_words(opening) if opening else ""
    return Played([event.action for event in events], known, [event.result for event in events])


def _demanded(verifier: dict[str, Any]) -> list[Any]:
    """Return the features that the wanted change adds or removes."""
    changed = [(p["before"], p["after"]) for p in verifier["probes"] if "after" in p]
    return [
        f for before, after in changed for f in (*before, *after) if (f in before) != (f in after)
    ]


def _start_meta(task: Task) -> dict[str, Any]:
    return task.meta | {"source": task.id.removeprefix("probe/")}
