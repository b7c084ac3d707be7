"""The three kinds of worlds, as start states: how the roles of operations are tested there, which
calls become probes, and what is kept for a later visit.

Tool worlds answer in records, and plays cost little: each operation is tested alone. Prose worlds
are told in words what to do and answer in sentences, which may be unmarked refusals. In code worlds
the actions are code, and each play takes long: all operations of a walk are tested together.
"""

import random
from collections.abc import Sequence

from envs.world import Task, World
from evolver.questioning.calls import (
    Episode,
    Event,
    Events,
    Json,
    Key,
    in_prose,
    operations_of,
    values_of,
)
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.roles import CLEAR_SOON, record, tally
from evolver.questioning.start_state import (
    Probe,
    Readings,
    StartState,
    accepted,
    before_changes,
    is_token,
    showing_one_of,
)
from evolver.questioning.values import SeenValues, group_of

_MOST_PROBES = 50  # of a test of an operation
_FEW_PROBES = 8  # of a test of an operation, in slow worlds
_FEW_EFFECTS = 3  # operations of a walk that are tested one by one in a code world
_MOST_WITNESSES = 16  # operations that are tried as witnesses of a change there
_STEM = 4  # letters by which words of operations' names are alike


def start_state(
    task: Task, world: World, stats: OperationStats, rng: random.Random, seen: SeenValues
) -> StartState:
    """Return the start state of a task, which asks for nothing. world: for plays from there only.
    seen: values that it shows, to which more are added."""
    operations = operations_of(world, world.reset(task, task.seed))
    kind: type[StartState] = ToolStart
    if world.functions():
        kind = CodeStart
    elif in_prose(operations):
        kind = ProseStart
    return kind(task, world, stats, rng, seen, operations)


class ToolStart(StartState):
    """The start of a world whose plays cost little: each call is tested alone."""

    def test_roles(self, events: Events) -> None:
        """Test each operation of a walk, of answers in sentences each form.

        A call is repeated at once: if it then fails or answers differently, it has changed
        something. Otherwise it is made between two readings, which consist of the walk's calls that
        passed this test.
        """
        kept = accepted(events)
        tested = {}
        for n, event in enumerate(kept):
            form = event.name, self.stats.form_of(event)
            changed = [earlier.key for earlier in kept[:n] if earlier.changes]
            if form in tested or self.stats.is_clear(event):
                continue
            role = self.role(event)
            if self.stats.crowded and role.vain and role.effects[1] >= CLEAR_SOON:
                continue
            confirms = role.is_echo or role.is_uniform or not event.arguments
            if confirms and role.repeatable:
                # What is set already for one thing may not be for another, or after a change.
                start = self.task.id if event.arguments else ""
                given = " ".join([start, event.key[1], *map(repr, changed)])
                if given in role.tested:
                    continue
                role.tested.append(given)
            tested[form] = n
            self._test_repetition(kept[:n], event)
        left = [n for n in tested.values() if self.role(kept[n]).repeatable]
        if self.stats.crowded:
            left = self._test_silent(left, kept)
        for n in left:
            self.test_effect(kept[:n], kept[n], kept)
        self._test_refusals(events)

    def _test_refusals(self, events: Events) -> None:
        """Test if answers that may be unmarked refusals change something after all."""
        kept = accepted(events)
        suspects = {
            self.stats.sentence_of(event): n
            for n, event in enumerate(events)
            if self.stats.refuses(event)
        }
        for sentence, n in suspects.items():
            if not self.stats.is_clear_refusal(sentence) and not self.reads(events[n]):
                self.test_effect([event for event in events[:n] if event.ok], events[n], kept)

    def _test_repetition(self, before: Events, event: Event) -> None:
        episode, events = self.play([*before, event])
        if events is None or events[-1].over:
            return
        *earlier, now = events
        if [call.result for call in earlier] == [call.result for call in before]:
            self.mark_varying(now.cells, event.cells)
        self.repeats(episode, now)

    def repeats(self, episode: Episode, event: Event) -> bool:
        """Repeat the last call of an episode at once, count it, and return True if it answers
        alike."""
        again = episode.again(event)
        self.mark_varying(again.cells, event.cells, tokens=True)
        if again.ok:
            self.compare_handles(again, event)
        same = again.ok and self.visible(again.cells) == self.visible(event.cells)
        record(self.role(event).repeated, same)
        return same

    def _test_silent(self, numbers: list[int], kept: Events) -> list[int]:
        """Test those of the calls `numbers` of a walk together that have always answered alike, of
        which there may be hundreds. Return the calls that are left: all if they change something.
        """
        silent = [n for n in numbers if self.role(kept[n]).is_monotonous]
        if not silent or self._effect_of([], [kept[n] for n in silent], kept) is not False:
            return numbers
        for n in silent:
            self.stats.add_effect(kept[n], False)
        return [n for n in numbers if n not in silent]

    def test_effect(self, before: Events, event: Event, candidates: Events) -> None:
        """Compare what calls that read show after `before` with what they show after the event
        too. A refused event is tested for having changed something after all."""
        differ = self._effect_of(before, [event], candidates)
        if differ is None:
            return
        if event.ok:
            self.stats.add_effect(event, differ)
        else:
            tally(self.stats.quiet, self.stats.sentence_of(event), differ)

    def _effect_of(self, before: Events, events: Events, candidates: Events) -> bool | None:
        """Return True if calls that read show something else after the events; None if that cannot
        be told."""
        names = {event.name for event in events}
        probes = [p for p in self.probes_for(events[0], candidates) if p.name not in names]
        answers: list[list[str | None]] = [[], []]
        if not probes:
            return None
        for tested in (False, True):
            episode, played = self.play(before)
            if played is None:
                return None
            for event in events if tested else ():
                again = episode.repeat(event)
                if again.ok != event.ok or not (event.ok or again.result == event.result):
                    return None  # after fewer calls it is refused for another reason, or not at all
            for probe in probes:
                if not episode.over:
                    shown = episode.again(probe)
                    answers[tested].append(self.visible(shown.cells) if shown.ok else None)
        # A refusal that turns into an answer is no change: look-ups make other look-ups possible. A
        # world that limits its steps answers fewer calls after the event.
        return any(a is not None and a != b for a, b in zip(*answers))

    def probes_for(self, event: Event, candidates: Events) -> list[Event]:
        """Return the calls that may show an effect of an event, those with long answers first: a
        short one may confirm a change that is not known as one yet, and would undo the effect."""
        battery = [probe.event for probe in self.battery]
        known: dict[Key, Event] = {}
        for call in (*candidates, *battery, *self.about(event), *self._looking_around()):
            if call.name != event.name and self.reads(call):
                known.setdefault(call.key, call)
        probes = list(known.values())
        if len(probes) > _MOST_PROBES:
            probes = sorted(probes, key=lambda call: self.role(call).vain)
        return sorted(probes[:_MOST_PROBES], key=lambda call: -len(call.result))

    def _looking_around(self) -> list[Event]:
        """Return the calls without arguments: a walk may not have looked around since it learnt how
        to."""
        free = [name for name, operation in self.operations.items() if not operation.required]
        return [self.event(name, {}) for name in free]


class SlowStart(ToolStart):
    """The start of a world whose plays take long: its tests use fewer calls, and its battery is
    kept for a later visit."""

    slow = True
    siblings = 1
    _measured: Sequence[Key] = ()  # the probes that `initial` answers

    def probes_for(self, event: Event, candidates: Events) -> list[Event]:
        """Return few calls: those related to the event, and those that were tested themselves.
        One that changes something after all would hide the event's effect from the next ones."""

        def rank(probe: Event) -> tuple[bool, bool]:
            return not _related(probe, event), not self.role(probe).effects[1]

        return sorted(super().probes_for(event, candidates), key=rank)[:_FEW_PROBES]

    def compare_starts(self) -> None:
        """Compare no calls of other starts, which would take an episode."""

    def measure(self) -> None:
        """Measure a battery that was not measured yet."""
        if not self.battery or self._keys() != self._measured:
            super().measure()
            self._measured = self._keys()

    def _keys(self) -> list[Key]:
        return [probe.event.key for probe in self.battery]

    def state(self) -> Json:
        battery = []
        for probe in self.battery:
            calls = [[call.name, call.arguments] for call in probe.calls()]
            battery.append([calls, probe.needs is not None])
        return {"battery": battery, "offered": sorted(map(list, self._offered))}

    def load_state(self, state: Json) -> None:
        """Continue with what `state` returned. Calls that no longer exist are left out."""
        for calls, needs_known in state.get("battery", ()):
            if all(name in self.operations for name, _ in calls):
                *needs, event = [self.event(name, arguments) for name, arguments in calls]
                self.battery.append(Probe(event, needs if needs_known else None))
        self._offered = {(name, arguments) for name, arguments in state.get("offered", ())}


class ProseStart(SlowStart):
    """The start of a world that answers in sentences, of which one describes a whole place."""

    prose = True
    most_probes = 16

    def about(self, event: Event) -> list[Event]:
        return super().about(event) + self._looking_around()

    def first_offers(self, calls: list[Event]) -> Events:
        """Return first what shows the whole place, and what has most to say, because few fit in."""
        most = max(self.most_probes - len(self.battery), 0)
        return sorted(calls, key=lambda call: (bool(call.arguments), -len(call.result)))[:most]

    def second_readings(self) -> Readings:
        """Return the first ones if all probes were measured before and answered alike."""
        if all(probe.needs is not None for probe in self.battery):
            return self.initial()
        return super().second_readings()


class CodeStart(SlowStart):
    """The start of a world whose actions are code. It may have hundreds of operations."""

    code = True
    most_probes = 12
    rounds = 0
    frame = 5

    def test_roles(self, events: Events) -> None:
        """Test all operations of a walk in two episodes.

        In the first, each call is repeated at once. In the second, those that answered alike are
        made once in another order and then again: if no answer differs, none of them has an effect,
        and otherwise some are tested alone.
        """
        kept = accepted(events)
        chosen: dict[str, int] = {}
        for n, event in enumerate(kept):
            if not self.role(event).is_clear(CLEAR_SOON):
                chosen.setdefault(event.name, n)
        if chosen:
            self._test_together(kept, chosen)
        for n, event in enumerate(kept):
            role = self.role(event)
            if role.witnesses is None and self.stats.is_change(event):
                before = _leading_to(kept[:n], event, changes=True)
                found = self._witnesses(self._candidates(event), before, event)
                role.witnesses = [call.name for call in found]
                record(role.effects, bool(found))

    def _test_together(self, kept: Events, chosen: dict[str, int]) -> None:
        episode = self.open()
        for n, event in enumerate(kept):
            if episode.over:
                break
            now = episode.repeat(event)
            if n == chosen.get(event.name) and now.accepted:
                self.repeats(episode, now)
        roles = self.stats.roles
        for event in kept:
            event.changes = roles[event.name].changes
        tested = [n for name, n in chosen.items() if roles[name].repeatable]
        if not self._differs(kept, tested):
            for n in tested:
                record(roles[kept[n].name].effects, False)
            return
        for n in self.rng.sample(tested, min(_FEW_EFFECTS, len(tested))):
            self.test_effect(_leading_to(kept[:n], kept[n]), kept[n], kept)

    def _differs(self, kept: Events, tested: Sequence[int]) -> bool:
        """Return True if one of the calls `tested` answers differently after the others than before
        them.

        The calls that show what the others use come first, the others in reverse order: a call is
        made once before each of the others, here or in the walk.
        """
        used = set(filter(is_token, values_of(kept)))
        leading = [e for e in kept if not e.changes and e.values and e.shows(used)]
        rest = [kept[n] for n in sorted(tested, reverse=True) if kept[n] not in leading]
        unchanged = before_changes(kept)
        episode = self.open()
        answers: dict[Key, set[str]] = {}
        for event in (*leading, *rest, *rest):
            if episode.over:
                break
            now = episode.repeat(event)
            if now.ok:
                first = {self.visible(event.cells)} if event in unchanged else set()
                answers.setdefault(event.key, first).add(self.visible(now.cells))
        return any(len(shown) > 1 for shown in answers.values())

    def _candidates(self, event: Event) -> list[Event]:
        """Return calls of the same group with the event's own arguments that may show its change,
        those with names like its own first."""
        stems = _stems(event.name)
        names = []
        for name in self._callable_like(event):
            if group_of(name) == group_of(event.name) and not self.stats.roles[name].changes:
                names.append(name)

        def rank(name: str) -> tuple[int, bool]:
            return -len(stems & _stems(name)), not self.stats.roles[name].reads

        return [self.event_like(event, name) for name in sorted(names, key=rank)[:_MOST_WITNESSES]]

    def _witnesses(self, candidates: Events, before: Events, event: Event) -> list[Event]:
        """Return the candidates that answer alike when repeated, and differently after the event.
        A walk that makes one of hundreds of changes seldom looks at it too.

        before: calls that lead to the event. Candidates that do not answer alike change something
        themselves, as logging out does, so that the others are tried again without them.
        """
        episode = self.open()
        shown = {}
        quiet = []
        if not all(episode.repeat(call).ok for call in before):
            return []
        for call in candidates:
            now = episode.repeat(call)
            if not now.ok or self.repeats(episode, now):
                quiet.append(call)
            if now.ok:
                shown[call.key] = self.visible(now.cells)
        if len(quiet) < len(candidates):
            return self._witnesses(quiet, before, event)
        found = []
        if episode.repeat(event).ok:
            for call in candidates:
                if call.key in shown:
                    now = episode.repeat(call)
                    if now.ok and self.visible(now.cells) != shown[call.key]:
                        found.append(call)
        return found

    def to_offer(self, events: Events) -> Events:
        """Return all calls of a walk, and those that have shown changes like its own."""
        calls = [*events]
        for event in events:
            for name in self.role(event).witnesses or ():
                if event.changes and name in self.operations:
                    calls.append(self.event_like(event, name))
        return calls

    def second_readings(self) -> Readings:
        """Return the answers by which the probes were found."""
        return [probe.event.cells for probe in self.battery]

    def needs_of(self, probe: Probe, before: Sequence[Probe]) -> list[Event]:
        """Return the calls that show an access token of the probe. That is not tried, which would
        take an episode."""
        tokens = list(filter(is_token, probe.event.values))
        showing = showing_one_of(tokens, before)
        return showing[0].calls() if showing else []


def _leading_to(events: Events, event: Event, *, changes: bool = False) -> list[Event]:
    """Return the calls that show a value which the event, or one of these, uses. changes: also
    those that change."""
    chosen = []
    values = set(event.values)
    for before in reversed(events):
        if (changes or not before.changes) and before.shows(values):
            chosen.append(before)
            values.update(before.values)
    return chosen[::-1]


def _related(a: Event, b: Event) -> bool:
    """Return True if calls have a value in common, or their operations a group ("notes.add",
    "notes.list"). In prose, looking around is related to everything."""
    return (
        not set(a.values).isdisjoint(b.values)
        or group_of(a.name) == group_of(b.name)
        or (a.prose and not a.arguments)
    )


def _stems(name: str) -> set[str]:
    """Return the beginnings of the words of an operation's name."""
    return {word[:_STEM] for word in name.lower().replace(".", "_").split("_")}
