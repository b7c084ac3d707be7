"""One initial state of a world: what it shows to calls that change nothing, and what other calls
change in that.

Nothing but the answers of such calls, the *readings*, is known of a state. Two plays differ in
their effect if the same readings after them differ. All plays start from the beginning of an
episode, so that they do not disturb a walk.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.probed import Cell, digest, features, new_ids
from envs.world import Task, World
from evolver.questioning.calls import Episode, Event, Operation
from evolver.questioning.knowledge import GUESSED, Knowledge, tally
from evolver.questioning.tasks import CLOSING
from evolver.questioning.walks import Known, guessed, hinted, typed
from evolver.replaying import renaming

MOST_PROBES = 40  # calls of a battery, without those that they need
_MOST_CALLS = 48  # values of one operation that are tried for the battery
_MOST_OFFERED = 200  # calls that are tried at a time
_GUESSES = 32  # ids of one operation that are made up for the battery
_ROUNDS = 3
FEW_PROBES = 8  # of a test of an operation, in slow worlds
MOST_SLOW_PROBES = 12  # of a battery, in worlds whose actions are code
_FEW_EFFECTS = 3  # operations of a walk that are tested one by one there
_MOST_WITNESSES = 16  # operations that are tried as witnesses of a change there
MOST_PROBES_IN_PROSE = 16  # a text describes more at once, and such worlds are slower


@dataclass
class Probe:
    """A call of the battery. needs: calls before it without which it is refused; None = not yet
    known."""

    event: Event
    needs: list[Event] | None = None


@dataclass
class Site:
    """An initial state. task: a task that starts there and asks for nothing. world: used by this
    site's plays."""

    task: Task
    world: World
    knowledge: Knowledge
    rng: random.Random
    known: Known = field(default_factory=Known)
    battery: list[Probe] = field(default_factory=list)
    initial: list[Sequence[Cell]] = field(
        default_factory=list
    )  # the answer of each probe at the start
    steps: int = 0  # environment steps of all plays
    tried: set[tuple[str, str]] = field(
        default_factory=set
    )  # calls that were offered to the battery
    measured: list[tuple[str, str]] = field(
        default_factory=list, init=False
    )  # the calls that `initial` answers
    operations: dict[str, Operation] = field(default_factory=dict, init=False)
    code: bool = field(init=False)  # its actions are code
    slow: bool = field(
        init=False
    )  # simulators and interpreters take a hundred times as long as other worlds
    ends_by_text: bool = field(init=False)  # a turn without a call ends the episode
    answering: Operation | None = field(
        init=False
    )  # a call of it, with the argument "answer", ends the episode

    def __post_init__(self):
        self.operations = self.open().operations
        self.ends_by_text = self.world.step(CLOSING).terminated
        self.code = bool(self.world.functions())
        self._prose = any(operation.slots for operation in self.operations.values())
        self.slow = self._prose or self.code
        self.answering = None if self.ends_by_text else self._answering()

    def _answering(self) -> Operation | None:
        """Return the operation that ends an episode with an answer, None if there is none. It is
        not drawn in walks."""
        for name, operation in self.operations.items():
            if "answer" in operation.properties and {"answer"}.issuperset(operation.required):
                self.open()
                if self.world.step(operation.render({"answer": CLOSING})).terminated:
                    return self.operations.pop(name)
        return None

    @property
    def takes_answers(self) -> bool:
        return self.ends_by_text or self.answering is not None

    # --- playing ----------------------------------------------------------------------------------

    def open(self) -> Episode:
        return Episode(self.world, self.task, self.knowledge.refuses, operations=self.operations)

    def play(
        self, calls: Sequence[Event], *, rename: bool = True
    ) -> tuple[Episode, list[Event] | None]:
        """Play calls from the start. Return the episode and their events, None if one is refused.

        Ids that the world hands out may differ from the recorded ones because calls are left out,
        so they are renamed.
        """
        episode, renamed, events = self.open(), {}, []
        for n, call in enumerate(calls):
            arguments = _renamed(call.arguments, renamed) if rename else call.arguments
            event = episode.call(call.name, arguments)
            event.changes = event.ok and call.changes
            events.append(event)
            if not event.ok or (event.over and n < len(calls) - 1):
                self.steps += episode.steps
                return episode, None
            if event.result != call.result:
                before, after = [c.value for c in call.cells], [c.value for c in event.cells]
                renamed |= renaming(before, after, _are_ids)
        self.steps += episode.steps
        return episode, events

    def read(self, episode: Episode) -> list[Sequence[Cell]]:
        """Return what every probe shows in an episode; [] after its end."""
        calls = with_needs(self.battery)
        shown = dict(
            zip([call.key for call in calls], self.read_calls(episode, calls), strict=True)
        )
        return [shown[probe.event.key] for probe in self.battery]

    def read_calls(self, episode: Episode, probes: Sequence[Event]) -> list[Sequence[Cell]]:
        """Return what calls that read show in an episode.

        If the episode ends during the probes, because a world limits its steps, the others run in a
        repetition of it; after its end they show [].
        """
        played, readings = list(episode.events), []
        while len(readings) < len(probes):
            if readings:
                episode, events = self.play(played, rename=False)
                if events is None:
                    break
            before = episode.steps
            for probe in probes[len(readings) :]:
                if episode.over:
                    break
                readings.append(episode.call(probe.name, probe.arguments).cells)
            self.steps += episode.steps - before
            if episode.steps == before:
                break
        return readings + [[] for _ in range(len(probes) - len(readings))]

    def effect(self, readings: Sequence[Sequence[Cell]], known: set[str]) -> list[int]:
        """Return the probes whose answers differ from the start."""
        ids, mask = self.knowledge.ids(), self.knowledge.mask()
        names = new_ids(readings, ids, known)
        return [
            n
            for n, (now, before) in enumerate(zip(readings, self.initial, strict=True))
            if features(now, ids, names, mask) != features(before, ids, {}, mask)
        ]

    def known_ids(self) -> set[str]:
        """Return the ids that the initial readings show or the probes use."""
        ids = self.knowledge.ids()
        shown = {
            cell.value
            for reading in self.initial
            for cell in reading
            if not ids.isdisjoint(cell.kinds)
        }
        return shown | {value for probe in self.battery for value in probe.event.values}

    # --- learning roles ---------------------------------------------------------------------------

    def learn_roles(self, events: Sequence[Event]) -> None:
        """Find out, for operations of a walk that were not tested often, which of them change what
        others show.

        An operation is repeated at once: if it then fails or answers differently, it has changed
        something. Otherwise it is made between two readings, which consist of the walk's calls that
        passed this test.
        """
        for (
            event
        ) in events:  # what looks like a refusal now may not have looked so when the call was made
            event.ok = event.ok and not self.knowledge.refuses(event.result)
        kept = [event for event in events if event.ok and not event.over]
        if self.code:
            self._test_together(kept)
            self._seek_witnesses(kept)
            for event in events:
                event.changes = event.ok and self.knowledge.is_change(event)
            return
        tested = {}
        for n, event in enumerate(kept):
            if self.knowledge.answer_of(event) not in tested and not self.knowledge.is_known(event):
                tested[self.knowledge.answer_of(event)] = n
                self._test_repetition(kept[:n], event)
        for n in tested.values():
            if self.knowledge.is_repeatable(kept[n].name):
                self._test_effect(kept[:n], kept[n], kept)
        self._test_refusals(events)
        for event in events:
            event.changes = event.ok and self.knowledge.is_change(event)

    def _test_together(self, kept: Sequence[Event]) -> None:
        """Find out the same in two episodes for all operations of a walk, where each episode takes
        long.

        In the first, each call is repeated at once. In the second, those that answered alike are
        made once in another
        order and then again: if no answer differs, none of them has an effect, and otherwise some
        are tested alone.
        """
        chosen = {}
        for n, event in enumerate(kept):
            if not self.knowledge.is_tested(event.name, least=2):
                chosen.setdefault(event.name, n)
        if not chosen:
            return
        self._repeat_each(kept, set(chosen.values()))
        for event in kept:
            event.changes = self.knowledge.changes(event.name)
        tested = [n for name, n in chosen.items() if self.knowledge.is_repeatable(name)]
        if not self._differs(kept, tested):
            for n in tested:
                tally(self.knowledge.effects, kept[n].name, False)
            return
        for n in self.rng.sample(tested, min(_FEW_EFFECTS, len(tested))):
            self._test_effect(_leading_to(kept[:n], kept[n]), kept[n], kept)

    def _repeat_each(self, kept: Sequence[Event], chosen: set[int]) -> None:
        """Make the calls in one episode, and those of `chosen` twice in a row."""
        episode, renamed = self.open(), {}
        for n, event in enumerate(kept):
            if episode.over:
                break
            now = self._call_again(episode, event, renamed)
            if n in chosen and now.ok and not episode.over:
                again = episode.call(now.name, now.arguments)
                self._mark_varying(again.cells, now.cells, only=is_token)
                tally(
                    self.knowledge.repeats,
                    now.name,
                    again.ok and self._shown(again.cells) == self._shown(now.cells),
                )
        self.steps += episode.steps

    def _call_again(self, episode: Episode, event: Event, renamed: dict[str, str]) -> Event:
        """Make a call of another episode and return it. renamed: the ids that differ, to which it
        adds."""
        now = episode.call(event.name, _renamed(event.arguments, renamed))
        if now.ok and now.result != event.result:
            renamed |= renaming(
                [c.value for c in event.cells], [c.value for c in now.cells], _are_ids
            )
        return now

    def _differs(self, kept: Sequence[Event], tested: Sequence[int]) -> bool:
        """Return True if one of the calls `tested` answers differently after the others than before
        them.

        The calls that show what the others use come first, the others in reverse order: a call is
        made once before each of the others, here or in the walk.
        """
        used = {value for event in kept for value in event.values}
        quiet = [event for event in kept if not event.changes]
        leading = [
            e
            for e in quiet
            if e.values and any(c.value in used and is_token(c.value) for c in e.cells)
        ]
        rest = [kept[n] for n in reversed(sorted(tested)) if kept[n] not in leading]
        unchanged = list(itertools.takewhile(lambda event: not event.changes, kept))
        episode, renamed, answers = self.open(), {}, {}
        for event in (*leading, *rest, *rest):
            if episode.over:
                break
            now = self._call_again(episode, event, renamed)
            if now.ok:
                answers.setdefault(
                    event.key, {self._shown(event.cells)} if event in unchanged else set()
                )
                answers[event.key].add(self._shown(now.cells))
        self.steps += episode.steps
        return any(len(shown) > 1 for shown in answers.values())

    def _seek_witnesses(self, kept: Sequence[Event]) -> None:
        """Find operations that show what a change of the walk has changed, once for each operation
        that changes.

        Where a world has hundreds of operations, a walk that makes a change seldom looks at it too.
        """
        for n, event in enumerate(kept):
            if self.knowledge.is_change(event) and event.name not in self.knowledge.witnesses:
                before = _leading_to(kept[:n], event, changes=True)
                found = self._witnesses_among(self._candidates(event), before, event)
                self.knowledge.witnesses[event.name] = [call.name for call in found]
                tally(self.knowledge.effects, event.name, bool(found))

    def _candidates(self, event: Event) -> list[Event]:
        """Return calls with the event's own arguments that may show its change, those with names
        like its own first."""
        stems = {word[:4] for word in event.name.lower().replace(".", "_").split("_")}

        def alike(name: str) -> int:
            words = name.lower().replace(".", "_").split("_")
            return len(stems.intersection(word[:4] for word in words))

        names = [
            name
            for name, operation in self.operations.items()
            if name != event.name and name.split(".")[0] == event.name.split(".")[0]
            if event.arguments.keys() >= set(operation.required)
            and not self.knowledge.changes(name)
        ]
        names.sort(key=lambda name: (-alike(name), not self.knowledge.reads(name)))
        return [self._with_arguments_of(event, name) for name in names[:_MOST_WITNESSES]]

    def _with_arguments_of(self, event: Event, name: str) -> Event:
        return self._event(
            name, {key: event.arguments[key] for key in self.operations[name].required}
        )

    def _witnesses_among(
        self, candidates: Sequence[Event], before: Sequence[Event], event: Event
    ) -> list[Event]:
        """Return the candidates that answer alike when repeated, and differently after the event.

        before: calls that lead to the event. Candidates that do not answer alike change something
        themselves, as logging out does, so that the others are tried again without them.
        """
        episode, renamed, shown, changing = self.open(), {}, {}, []
        ready = all(self._call_again(episode, call, renamed).ok for call in before)
        for call in candidates if ready else ():
            now, again = (
                episode.call(call.name, _renamed(call.arguments, renamed)) for _ in range(2)
            )
            if not now.ok:
                continue
            if again.ok and self._shown(now.cells) == self._shown(again.cells):
                shown[call.key] = self._shown(now.cells)
            else:
                changing.append(call)
            tally(self.knowledge.repeats, call.name, call.key in shown)
        found = []
        if not changing and ready and self._call_again(episode, event, renamed).ok:
            for call in (call for call in candidates if call.key in shown):
                now = episode.call(call.name, _renamed(call.arguments, renamed))
                found += [call] if now.ok and self._shown(now.cells) != shown[call.key] else []
        self.steps += episode.steps
        if changing:
            return self._witnesses_among(
                [call for call in candidates if call not in changing], before, event
            )
        return found

    def _test_refusals(self, events: Sequence[Event]) -> None:
        """Find out, for answers that look like refusals, if such a call changes anything after
        all."""
        if not any(event.prose for event in events):
            return
        kept = [event for event in events if event.ok and not event.over]
        suspects = {
            event.result: n
            for n, event in enumerate(events)
            if self.knowledge.refuses(event.result)
        }
        for result, n in suspects.items():
            if not self.knowledge.is_tested_refusal(result) and not self.knowledge.reads(
                events[n].name
            ):
                self._test_effect([event for event in events[:n] if event.ok], events[n], kept)

    def _test_repetition(self, before: Sequence[Event], event: Event) -> None:
        episode, events = self.play([*before, event])
        if events is None or events[-1].over:
            return
        if _values(events[-1]) != _values(event) and [e.result for e in events[:-1]] == [
            e.result for e in before
        ]:
            self._mark_varying(events[-1].cells, event.cells)
        again = episode.call(event.name, events[-1].arguments)
        self.steps += 1
        self._mark_varying(again.cells, events[-1].cells, only=is_token)
        same = again.ok and self._shown(again.cells) == self._shown(events[-1].cells)
        tally(self.knowledge.repeats, event.name, same)

    def _test_effect(
        self, before: Sequence[Event], event: Event, candidates: Iterable[Event]
    ) -> None:
        made = [*candidates, *(probe.event for probe in self.battery), *self._about(event)]
        if event.prose:  # a walk may not have looked around since it learnt how to
            made += [
                Event(name, {}, "", prose=True)
                for name, op in self.operations.items()
                if not op.required
            ]
        probes = {c.key: c for c in made if self.knowledge.reads(c.name) and c.name != event.name}
        if not probes:
            return
        # a probe that changes something after all would hide the event's effect from the next ones
        if self.slow:
            effects = self.knowledge.effects
            ranked = sorted(
                probes,
                key=lambda key: (not _related(probes[key], event), probes[key].name not in effects),
            )
            probes = {key: probes[key] for key in ranked[:FEW_PROBES]}
        answers = []
        for calls in ([*before], [*before, event]):
            episode, events = self.play(calls if event.ok else before)
            if events is None:
                return
            if not event.ok and len(calls) > len(before):
                self.steps += 1
                if episode.call(event.name, event.arguments).result != event.result:
                    return  # the same call, after fewer others, was not refused
            shown = []
            for probe in probes.values():
                if not episode.over:
                    shown.append(episode.call(probe.name, probe.arguments))
            answers.append([self._shown(e.cells) if e.ok else None for e in shown])
            self.steps += len(shown)
        # A refusal that turns into an answer is no change: look-ups make other look-ups possible. A
        # world that limits its steps answers fewer calls after the event.
        differ = any(a is not None and a != b for a, b in zip(*answers, strict=False))
        if event.ok:
            self.knowledge.tested(event, differ)
        else:
            tally(self.knowledge.quiet, event.result, differ)

    def _about(self, event: Event) -> list[Event]:
        """Return calls of reading operations with the event's values for their arguments of the
        same names."""
        operations = {
            name: op for name, op in self.operations.items() if op.required and name != event.name
        }
        return [
            Event(name, arguments, operation.render(arguments))
            for name, operation in operations.items()
            if self.knowledge.reads(name) and event.arguments.keys() >= set(operation.required)
            for arguments in [{key: event.arguments[key] for key in operation.required}]
        ]

    def _mark_varying(
        self,
        now: Sequence[Cell],
        before: Sequence[Cell],
        only: Callable[[str], bool] = lambda value: True,
    ) -> None:
        """Remember kinds of values that differ although the same calls were made. only: returns
        True for a value that counts."""
        if len(now) == len(before):
            for a, b in zip(now, before, strict=True):
                if a.value != b.value and a.kinds == b.kinds and only(a.value):
                    for kind in a.kinds:
                        self.knowledge.varies[kind] = self.knowledge.varies.get(kind, 0) + 1

    def _shown(self, shown: Sequence[Cell]) -> str:
        mask = self.knowledge.mask()
        return digest([[cell.label, cell.value] for cell in shown if mask.isdisjoint(cell.kinds)])

    # --- the battery ------------------------------------------------------------------------------

    def extend(self, events: Sequence[Event]) -> None:
        """Add to the battery: the walk's calls that only read, and the same operations with other
        known values."""
        self.battery = [probe for probe in self.battery if self.knowledge.reads(probe.event.name)]
        for event in _before_changes(events):
            if event.ok and not event.over:
                self.knowledge.compare(self.task.id, event)
        self._compare()
        made = [*events, *self._witnesses(events)] if self.code else _before_changes(events)
        self._offer([e for e in made if e.ok and not e.over and self.knowledge.reads(e.name)])
        for _ in range(
            0 if self.code else _ROUNDS
        ):  # what some of them show is an argument of others
            self._offer(self._others())
        if not (
            self.slow
            and self.initial
            and [probe.event.key for probe in self.battery] == self.measured
        ):
            self._measure()

    def _witnesses(self, events: Sequence[Event]) -> list[Event]:
        """Return the calls that show the changes of a walk, with the arguments of the changes."""
        return [
            self._with_arguments_of(event, name)
            for event in events
            for name in self.knowledge.witnesses.get(event.name, ())
            if event.changes and name in self.operations
        ]

    def _compare(self) -> None:
        """Repeat some calls of other starts here, to find out which operations answer by their
        arguments alone."""
        calls = [
            (name, given)
            for name, given in self.knowledge.to_compare(self.task.id)
            if name in self.operations
        ]
        if self.slow or not calls:
            return
        episode = self.open()
        for name, given in calls:
            if not episode.over and (event := episode.call(name, given)).ok:
                self.knowledge.compare(self.task.id, event)
        self.steps += episode.steps

    def _others(self) -> list[Event]:
        """Return calls of reading operations that no walk has made, with values that their
        arguments accept: those of this world, then words of other worlds."""
        calls = []
        for name, operation in self.operations.items():
            if not self.knowledge.reads(name):
                continue
            if not operation.required:
                calls.append(self._event(name, {}))
                continue
            choices = []
            for parameter in operation.required:
                place, schema = f"{name}.{parameter}", operation.properties.get(parameter, {})
                fits, counts = (
                    self.knowledge.fits(place, hinted(schema)),
                    self.knowledge.kinds.get(place, {}),
                )
                kinds = [kind for kind, (worked, _) in counts.items() if worked >= 2 and fits(kind)]
                values = dict.fromkeys(v for kind in kinds for v in self.known.values.get(kind, ()))
                values |= dict.fromkeys(
                    v for kind in kinds for v in self.knowledge.words.get(kind, ())
                )
                if (
                    hinted(schema) and counts.get(GUESSED, (0, 0))[0]
                ):  # ids that look like the example may exist
                    values |= dict.fromkeys(guessed(schema, self.rng) for _ in range(_GUESSES))
                choices.append(
                    [v for v in (typed(value, schema) for value in values) if v is not None]
                )
            for values in itertools.islice(itertools.product(*choices), _MOST_CALLS):
                calls.append(self._event(name, dict(zip(operation.required, values, strict=True))))
        return calls

    def _offer(self, calls: Sequence[Event]) -> None:
        """Make the calls after the battery and add those that are not refused."""
        calls = [call for call in calls if call.key not in self.tried]
        if not calls:
            return
        episode = self.open()
        self.read(episode)
        most = _MOST_OFFERED
        if self._prose:  # few fit in, so first what shows the whole place, and what has most to say
            most = MOST_PROBES_IN_PROSE - len(self.battery)
            calls.sort(key=lambda call: (bool(call.arguments), -len(call.result)))
        for call in calls[: max(most, 0)]:
            if episode.over:
                episode = self.open()
            self.tried.add(call.key)
            event = episode.call(call.name, call.arguments)
            self.steps += 1
            if event.ok:
                self.knowledge.compare(self.task.id, event)
            if (
                self.task.query in event.result
            ):  # it shows the goal of the episode, which is another one in each task
                continue
            if event.ok and not self.knowledge.says_nothing(event):
                self.known.add(event.shown, event)
                if not event.prose:
                    self.knowledge.see(event.cells)
                self.battery.append(Probe(event))

    def _measure(self) -> None:
        """Read the initial state twice, and keep the probes that answer alike and are most likely
        to show a change.

        Learns what varies by itself, and the needs of each probe.
        """
        first = self.read(self.open())
        if self.code:
            second = [probe.event.cells for probe in self.battery]
        elif self.slow and all(probe.needs is not None for probe in self.battery):
            second = first  # they answered alike when they were measured first
        else:
            second = self.read(self.open())
        for now, before in zip(first, second, strict=True):
            self._mark_varying(now, before)
        kept = [
            n
            for n, (a, b) in enumerate(zip(first, second, strict=True))
            if a and self._shown(a) == self._shown(b)
        ]
        number, rank = Counter(), {}
        for n in kept:
            name = self.battery[n].event.name
            rank[n] = (not self.knowledge.shows(name), self.knowledge.is_blind(name), number[name])
            number[name] += 1
        kept = sorted(
            sorted(kept, key=rank.__getitem__)[: MOST_SLOW_PROBES if self.code else MOST_PROBES]
        )
        whole = self.battery
        self.battery, self.initial = [whole[n] for n in kept], [first[n] for n in kept]
        for n, probe in zip(kept, self.battery, strict=True):
            if probe.needs is None:
                probe.needs = self._needs(probe.event, first[n], whole[:n], first)
        self.measured = [probe.event.key for probe in self.battery]

    def memory(self) -> dict[str, Any]:
        """Return the battery and what was offered to it as JSON values, for a later visit.

        Only of a slow site: where plays cost nothing, a new battery costs less than a long
        state."""
        if not self.slow:
            return {}
        call = lambda event: [event.name, event.arguments]  # noqa: E731
        battery = [
            [call(p.event), None if p.needs is None else [call(e) for e in p.needs]]
            for p in self.battery
        ]
        return {"battery": battery, "tried": sorted(map(list, self.tried))}

    def recall(self, memory: dict[str, Any]) -> None:
        """Continue with what `memory` returned on an earlier visit. Calls that no longer exist are
        left out."""
        for (name, arguments), needs in memory.get("battery", ()):
            calls = [(name, arguments), *(needs or ())]
            if all(other in self.operations for other, _ in calls):
                event, *before = [self._event(other, given) for other, given in calls]
                self.battery.append(Probe(event, None if needs is None else before))
        self.tried = {(name, arguments) for name, arguments in memory.get("tried", ())}

    def _event(self, name: str, arguments: dict[str, Any]) -> Event:
        operation = self.operations[name]
        return Event(name, arguments, operation.render(arguments), ok=True, prose=self._prose)

    def _needs(
        self,
        event: Event,
        shown: Sequence[Cell],
        before: Sequence[Probe],
        readings: Sequence[Sequence[Cell]],
    ) -> list[Event]:
        """Return calls of earlier probes that suffice for a probe: those that show a value it uses,
        else all."""
        showing = [
            probe for probe, reading in zip(before, readings) if _shows(reading, event.values)
        ]
        if self.code:  # not tried, which would take an episode each
            given = [value for value in event.values if is_token(value)]
            showing = [probe for probe, reading in zip(before, readings) if _shows(reading, given)]
            return [e for probe in showing[:1] for e in (*(probe.needs or ()), probe.event)]
        for probes in ([], showing[:1], showing):
            needs = {e.key: e for probe in probes for e in (*(probe.needs or ()), probe.event)}
            _, events = self.play([*needs.values(), event], rename=False)
            if events is not None and self._shown(events[-1].cells) == self._shown(shown):
                return list(needs.values())
        return [probe.event for probe in before]


def with_needs(probes: Sequence[Probe]) -> list[Event]:
    """Return the calls of probes, each after those that it needs, without repetitions."""
    return list(
        {e.key: e for probe in probes for e in (*(probe.needs or ()), probe.event)}.values()
    )


def _leading_to(events: Sequence[Event], event: Event, *, changes: bool = False) -> list[Event]:
    """Return the calls that show a value which the event, or one of these, uses. changes: also
    those that change."""
    chosen, values = [], set(event.values)
    for before in reversed(events):
        if (changes or not before.changes) and not values.isdisjoint(
            cell.value for cell in before.cells
        ):
            chosen.append(before)
            values.update(before.values)
    return chosen[::-1]


def _related(a: Event, b: Event) -> bool:
    """Return True if calls have a value in common, or their operations a first word ("notes.add",
    "notes.list")."""
    return (
        not set(a.values).isdisjoint(b.values)
        or a.name.split(".")[0] == b.name.split(".")[0]
        or (a.prose and not a.arguments)
    )


def is_token(value: str) -> bool:
    """Return True for a text that no user would read, such as an access token, of which each call
    gives a new one."""
    return len(value) > 60 and " " not in value


def _before_changes(events: Sequence[Event]) -> list[Event]:
    return list(itertools.takewhile(lambda event: not event.changes, events))


def _shows(shown: Sequence[Cell], values: Sequence[str]) -> bool:
    return not {cell.value for cell in shown}.isdisjoint(values)


def _values(event: Event) -> list[str]:
    return [cell.value for cell in event.cells]


def _are_ids(old: str, new: str) -> bool:
    return any(c.isdigit() for c in old) and any(c.isdigit() for c in new)


def _renamed(arguments: Any, renamed: dict[str, str]) -> Any:
    if isinstance(arguments, dict):
        return {name: _renamed(value, renamed) for name, value in arguments.items()}
    if isinstance(arguments, list):
        return [_renamed(value, renamed) for value in arguments]
    if isinstance(arguments, bool) or arguments is None:
        return arguments
    text = renamed.get(str(arguments), str(arguments))
    return text if isinstance(arguments, str) else type(arguments)(text)
