"""One initial state of a world: what it shows to calls that change nothing, and what other calls
change in that.

Nothing but the answers of such calls, the *readings*, is known of a state. Two plays differ in
their effect if the same readings after them differ. All plays start from the beginning of an
episode, so that they do not disturb a walk.
"""

import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from envs import handles
from envs.probed import Cell, digest
from envs.world import Task, World
from evolver.questioning.calls import (
    Episode,
    Event,
    Events,
    Json,
    Key,
    Operation,
    Operations,
    has_digit,
    key_of,
    values_of,
)
from evolver.questioning.operation_stats import GUESSED, NO_TRIALS, OperationStats, is_field
from evolver.questioning.roles import Role, count, tally
from evolver.questioning.tasks import CLOSING
from evolver.questioning.values import SeenValues, guessed, hinted, is_made_up, typed

_GUESSES = 64  # ids of one argument that are made up for the battery
_MOST_CALLS = 80  # values of one operation that are tried for the battery
_WORKED = 2  # calls in which a kind of values has worked, so that others of it are tried
_TIME = re.compile(r"(?<![\d:])(\d\d):(\d\d):(\d\d)(?![\d:])")
_SECONDS = re.compile(r"\d{10}(\d{3}|\.\d+)?")
_NEARLY_NOW = 60.0  # seconds
_TOKEN = 60  # characters of a text without spaces; longer ones are no names of things

Reading = Sequence[Cell]  # the answer to one probe
Readings = Sequence[Reading]


@dataclass
class Probe:
    """A call of the battery. needs: calls before it without which it is refused; None = not yet
    known. awaits: it shows nothing at the start, and is about what walks change. shown: its answer
    at the start, as it was measured last."""

    event: Event
    needs: list[Event] | None = None
    awaits: bool = False
    shown: Reading = ()

    def calls(self) -> list[Event]:
        """Return the call after those that it needs."""
        return [*(self.needs or ()), self.event]


class StartState:
    """An initial state of a world. Its subclasses (evolver/questioning/kinds.py) say how roles are
    tested there, and which calls become probes.

    battery: the probes.
    """

    slow = False  # a play takes a hundred times as long as in other worlds
    code = False  # the actions are code
    prose = False  # the answers are sentences
    most_probes = 40  # calls of the battery, without those that they need
    most_offered = 200  # calls that are tried for the battery at a time
    rounds = 3  # of trying calls whose arguments other probes show
    frame = 20  # probes of a task that must not change
    siblings = 4  # of a task, each with another value in one argument

    def __init__(
        self,
        task: Task,
        world: World,
        stats: OperationStats,
        rng: random.Random,
        seen: SeenValues,
        operations: Operations,
    ):
        """task: starts there and asks for nothing. world: used by this object's plays only."""
        self.task = task
        self.world = world
        self.stats = stats
        self.rng = rng
        self.seen = seen
        self.operations = operations
        if stats.handles:
            task.meta[handles.KEY] = stats.handles
        self.battery: list[Probe] = []
        self._offered: set[Key] = set()  # calls that were tried for the battery
        self._impossible: set[Key] = set()  # calls that no change is known to make possible
        self._guesses: dict[str, list[str]] = {}  # argument -> ids that are made up for it
        self._opened: list[Episode] = []  # since `take_steps`
        # True if a turn without a call ends the episode
        self.ends_by_text = world.step(CLOSING).terminated
        self.answering = None if self.ends_by_text else self._answering()

    def _answering(self) -> Operation | None:
        """Return the operation that ends an episode with an answer, None if there is none. It is
        not drawn in walks."""
        for name, operation in self.operations.items():
            if "answer" in operation.properties and {"answer"}.issuperset(operation.required):
                self.world.reset(self.task, self.task.seed)
                if self.world.step(operation.render({"answer": CLOSING})).terminated:
                    return self.operations.pop(name)
        return None

    @property
    def takes_answers(self) -> bool:
        """True if an episode can end with an answer."""
        return self.ends_by_text or self.answering is not None

    def closing_turns(self, answer: str | None) -> list[str]:
        """Return the turns that end an episode: one or none. answer: None = nothing was asked."""
        if self.answering:
            return [self.answering.render({} if answer is None else {"answer": answer})]
        return [answer or CLOSING] if self.ends_by_text else []

    # --- playing ----------------------------------------------------------------------------------

    def open(self) -> Episode:
        """Start an episode."""
        episode = Episode(self.world, self.task, self.stats.refuses, self.operations)
        self._opened.append(episode)
        return episode

    def take_steps(self) -> int:
        """Return the environment steps of all episodes since the last call."""
        steps = sum(len(episode.events) for episode in self._opened)
        self._opened.clear()
        return steps

    def play(self, calls: Events, *, rename: bool = True) -> tuple[Episode, list[Event] | None]:
        """Play calls from the start. Return the episode and its events, None if a call is refused.

        rename: ids that the world hands out may differ, because calls are left out.
        """
        episode = self.open()
        for n, call in enumerate(calls, 1):
            event = episode.repeat(call) if rename else episode.again(call)
            if not event.ok or (event.over and n < len(calls)):
                return episode, None
        return episode, [*episode.events]

    def read(self, episode: Episode) -> Readings:
        """Return what every probe shows in an episode; nothing after its end."""
        calls = with_needs(self.battery)
        shown = dict(zip([call.key for call in calls], self.read_calls(episode, calls)))
        return [shown[probe.event.key] for probe in self.battery]

    def read_calls(self, episode: Episode, probes: Events) -> Readings:
        """Return what calls that read show in an episode.

        If the episode ends during the probes, because a world limits its steps, the others run in a
        repetition of it; after its end they show nothing.
        """
        played = [*episode.events]
        readings: list[Reading] = []
        while len(readings) < len(probes):
            if readings:
                episode, events = self.play(played, rename=False)
                if events is None:
                    break
            read = len(readings)
            for probe in probes[read:]:
                if episode.over:
                    break
                readings.append(episode.again(probe).cells)
            if len(readings) == read:
                break
        return readings + [()] * (len(probes) - len(readings))

    def known_ids(self) -> set[str]:
        """Return the ids that the initial readings show or the probes use."""
        ids = self.stats.ids()
        known = values_of(probe.event for probe in self.battery)
        for probe in self.battery:
            known.update(cell.value for cell in probe.shown if not ids.isdisjoint(cell.kinds))
        return known

    def naming(self, ids: set[str]) -> set[str]:
        """Return the kinds of values that name the rows of an answer without ids: the first ones
        that differ from row to row, if they are words or arguments accept them."""
        found: set[str] = set()
        for reading in self.initial():
            kinds = dict.fromkeys(itertools.chain.from_iterable(cell.kinds for cell in reading))
            if not ids.isdisjoint(kinds):
                continue
            for kind in kinds:
                values = [cell.value for cell in reading if kind in cell.kinds]
                rows = {cell.row for cell in reading if kind in cell.kinds}
                apart = len(rows) > 1 and len(set(values)) == len(values) == len(rows)
                if apart and (all(map(str.isalpha, values)) or self.stats.accepted(kind)):
                    found.add(kind)
                    break
        return found

    def makes_sense(self, operation: str, path: Sequence[str], value: str | float) -> bool:
        """Return False for a value that an argument takes because it takes any text: neither a
        made-up text nor a value of a field with the argument's name; and for the number of a thing
        in an argument that takes other numbers as well. path: its name, and those of the fields
        inside it."""
        place = ".".join([operation, *path])
        known = self.operations[operation]
        if not isinstance(value, str):
            return self.stats.prefers_ids(place)
        schema: Json = {"properties": known.properties}
        for name in path:
            schema = schema.get("items" if name == "*" else "properties") or {}
            schema = schema if name == "*" else schema.get(name, {})
        listed = value in known.listed.get(path[0], ()) or "enum" in schema
        if listed or not self.stats.takes_anything(place) or is_made_up(value):
            return True
        shown = (kind for kind, values in self.seen.values.items() if value in values)
        return any(is_field(kind, place) for kind in shown)

    def visible(self, reading: Reading) -> str:
        """Return a digest of an answer without values that differ by themselves."""
        varying = self.stats.varies.keys()
        cells = [[c.label, c.value] for c in reading if varying.isdisjoint(c.kinds)]
        return digest(cells)

    def mark_varying(self, now: Reading, before: Reading, *, tokens: bool = False) -> None:
        """Remember kinds of values that differ although the same calls were made. tokens: only
        those of access tokens."""
        if len(now) != len(before):
            return
        for a, b in zip(now, before):
            if a.value != b.value and a.kinds == b.kinds and (is_token(a.value) or not tokens):
                self._varies(a)

    def mark_clock(self, reading: Reading) -> None:
        """Remember kinds of values that are the present time, which two plays within a second show
        alike, and in a line of text those of its date."""
        rows = {cell.row for cell in reading if is_clock(cell.value)}
        if not rows:
            return
        form = "%a %A %b %B %d %Y"
        days = f"{time.strftime(form, time.gmtime())} {time.strftime(form, time.localtime())}"
        date = days.lower().split()
        for cell in reading:
            dated = cell.row in rows and not cell.label and cell.value.lower() in date
            if dated or is_clock(cell.value):
                self._varies(cell)

    def _varies(self, cell: Cell) -> None:
        for kind in cell.kinds:
            count(self.stats.varies, kind)

    # --- learning ---------------------------------------------------------------------------------

    def learn_roles(self, events: Events) -> None:
        """Find out, for operations of a walk that were not tested often, which of them change what
        others show."""
        for event in events:  # what is a refusal now may not have looked so when the call was made
            event.ok = event.ok and not self.stats.refuses(event)
            self.mark_clock(event.cells if event.ok else ())
        self.test_roles(events)
        for kind in () if self.code or self.prose else self.stats.find_handles(events):
            # What was seen of these calls and of all that takes the handles has to be seen again.
            self.task.meta[handles.KEY] = self.stats.handles
            self.seen.values.pop(kind, None)
            self.stats.roles.pop(kind.partition(" ")[0], None)
            self.battery = []
            self._offered.clear()
        for event in events:
            event.changes = event.ok and self.stats.is_change(event)

    def compare_handles(self, now: Event, before: Event) -> None:
        """Count which values differ between two calls alike, one right after the other."""
        fresh = self.stats.fresh
        for a, b in zip(now.cells, before.cells) if len(now.cells) == len(before.cells) else ():
            other = a.value != b.value and has_digit(a.value)
            if a.kinds == b.kinds and a.label and (other or a.kinds[0] in fresh):
                tally(fresh, a.kinds[0], other)

    def test_roles(self, events: Events) -> None:
        """Test the operations of a walk."""
        raise NotImplementedError

    # --- the battery ------------------------------------------------------------------------------

    def extend(self, events: Events) -> None:
        """Add to the battery: the walk's calls that only read, and the same operations with other
        known values."""
        self.battery = [probe for probe in self.battery if self.reads(probe.event)]
        for need in itertools.chain.from_iterable(probe.needs or () for probe in self.battery):
            need.changes = not self.reads(need)
        for event in accepted(before_changes(events)):
            self.stats.compare(self.task.id, event)
        self.compare_starts()
        self._offer([event for event in accepted(self.to_offer(events)) if self.reads(event)])
        self._await(events)
        self._enable(events)
        for _ in range(self.rounds):
            self._offer(self._others())
        self.measure()

    def role(self, event: Event) -> Role:
        """Return what is known of the operation of a call."""
        return self.stats.roles[event.name]

    def reads(self, event: Event) -> bool:
        """Return True if a call only shows something, as far as is known of its operation."""
        return self.role(event).reads

    def compare_starts(self) -> None:
        """Repeat some calls of other starts here, to find out which operations answer by their
        arguments alone."""
        calls = [call for call in self.stats.to_compare(self.task.id) if call[0] in self.operations]
        episode = self.open() if calls else None
        for name, arguments in calls:
            if episode and not episode.over:
                event = episode.call(name, arguments)
                if event.ok:
                    self.stats.compare(self.task.id, event)

    def to_offer(self, events: Events) -> Events:
        """Return the calls of a walk that may become probes."""
        return before_changes(events)

    def _others(self) -> list[Event]:
        """Return calls of reading operations that were not offered yet, with values that their
        arguments accept."""
        calls = []
        for name, operation in self.operations.items():
            if self.stats.roles[name].reads and not self.stats.is_silent(name):
                choices = [self._choices(operation, parameter) for parameter in operation.required]
                for values in itertools.islice(itertools.product(*choices), _MOST_CALLS):
                    arguments = dict(zip(operation.required, values))
                    if key_of(name, arguments) not in self._offered:  # as most are
                        calls.append(self.event(name, arguments))
        return calls

    def _choices(self, operation: Operation, parameter: str) -> list[object]:
        """Return values that an argument accepts: those of this world, then words of other
        worlds."""
        place = f"{operation.name}.{parameter}"
        schema = operation.properties.get(parameter, {})
        fits = self.stats.acceptance(place, hinted(schema)).fits
        counts = self.stats.kinds.get(place, {})
        kinds = [kind for kind, (worked, _) in counts.items() if worked >= _WORKED and fits(kind)]
        values: list[str] = []
        for known in (self.seen.values, self.stats.words):
            for kind in kinds:
                values += known.get(kind, ())
        if hinted(schema) and counts.get(GUESSED, NO_TRIALS)[0]:
            # Ids that look like the example may exist. New ones would be made up at each visit.
            if place not in self._guesses:
                self._guesses[place] = [guessed(schema, self.rng) for _ in range(_GUESSES)]
            values += self._guesses[place]
        converted = [typed(value, schema) for value in dict.fromkeys(values)]
        return [value for value in converted if value is not None]

    def _offer(self, calls: Events) -> None:
        """Make the calls after the battery and add those that are not refused."""
        calls = [call for call in calls if call.key not in self._offered]
        if not calls:
            return
        episode = self.open()
        self.read(episode)
        for call in self.first_offers(calls):
            if episode.over:
                episode = self.open()
            self._offered.add(call.key)
            event = episode.again(call)
            if event.ok:
                self.stats.compare(self.task.id, event)
            shows_goal = self.task.query in event.result  # which is another one in each task
            if event.ok and not shows_goal and not self.stats.says_nothing(event):
                self.seen.add(event.usable, event)
                if not event.prose:
                    self.stats.see(event.cells)
                self.battery.append(Probe(event))

    def _await(self, events: Events) -> None:
        """Add calls about a walk's changes that show nothing yet, such as the bookings of somebody
        who has none, or are refused until then, as reading a new file is: there the changes will
        show. In a slow world they are too many."""
        if self.slow:
            return
        known = {probe.event.key for probe in self.battery}
        about: dict[Key, tuple[int, Event]] = {}
        for n, event in enumerate(events):
            if event.accepted and event.changes:
                about |= {call.key: (n, call) for call in self.about(event)}
        calls = [found for key, found in about.items() if key not in known]
        episode = self.open() if calls else None
        tried = []  # all of them first: `_is_made_possible` starts the world again
        for n, call in calls:
            if episode and not episode.over:
                tried.append((n, call, episode.again(call)))
        for n, call, event in tried:
            if event.ok and not event.cells:
                self.battery.append(Probe(event, awaits=True))
            elif not event.ok and self._is_made_possible(call, events, n):
                self.battery.append(Probe(event, needs=[], awaits=True))

    def _is_made_possible(self, call: Event, events: Events, n: int) -> bool:
        """Return True if a call is refused before change n of a walk and not after it."""
        if call.key in self._impossible:
            return False
        self._impossible.add(call.key)
        for end, wanted in ((n, False), (n + 1, True)):
            episode, played = self.play(accepted(events[:end]), rename=False)
            if played is None or episode.over:
                return False
            if episode.again(call).ok != wanted:
                return False
        self._impossible.remove(call.key)
        return True

    def _enable(self, events: Events) -> None:
        """Add calls of a walk that read, and are refused at the start until something was done that
        is not about what they ask for, such as opening a session. That is done before each."""
        known = {probe.event.key for probe in self.battery}
        opened = {probe.event.name for probe in self.battery if changing(probe.needs or ())}
        walked = accepted(events)
        for n, event in enumerate([] if self.code or self.prose else walked):
            refused = event.key in self._offered or event.name in opened
            needs = changing(walked[:n])
            if not (refused and needs and event.key not in known and self.reads(event)):
                continue

            def answers(calls: Events, event: Event = event) -> bool:
                return self.play([*calls, event], rename=False)[1] is not None

            if event.key in self._impossible or answers([]) or not answers(needs):
                self._impossible.add(event.key)
                continue
            for call in needs[::-1]:
                fewer = [other for other in needs if other is not call]
                needs = fewer if answers(fewer) else needs
            if all(set(call.values).isdisjoint(event.values) for call in needs):
                self.battery.append(Probe(event, needs))
                self._offered = known = {*known, event.key}  # the others may now be answered

    def about(self, event: Event) -> list[Event]:
        """Return calls of reading operations with the event's values for their arguments of the
        same names."""
        return [
            self.event_like(event, name)
            for name in self._callable_like(event)
            if self.operations[name].required and self.stats.roles[name].reads
        ]

    def _callable_like(self, event: Event) -> list[str]:
        """Return the other operations that require nothing but arguments that the event has."""
        given = event.arguments.keys()
        operations = self.operations.items()
        return [n for n, op in operations if n != event.name and given >= set(op.required)]

    def first_offers(self, calls: list[Event]) -> Events:
        """Return the calls that are tried first, as many as fit in."""
        if len(calls) > self.most_offered:
            calls = sorted(calls, key=lambda call: self.role(call).vain)
        return calls[: self.most_offered]

    def measure(self) -> None:
        """Read the initial state twice, and keep the probes that answer alike and are most likely
        to show a change.

        Learns what varies by itself, and the needs of each probe.
        """
        whole = self.battery
        for probe, reading in zip(whole, self.read(self.open())):
            probe.shown = reading
            self.mark_clock(reading)
        again = self.second_readings()
        for probe, reading in zip(whole, again):
            self.mark_varying(probe.shown, reading)
        number: Counter[str] = Counter()
        rank = {}
        for n, (probe, reading) in enumerate(zip(whole, again)):
            tells = probe.shown or probe.awaits or not probe.event.arguments
            if tells and self.visible(probe.shown) == self.visible(reading):
                name = probe.event.name
                rank[n] = (*self.dullness(name), number[name])
                number[name] += 1
        kept = sorted(sorted(rank, key=rank.__getitem__)[: self.most_probes])
        self.battery = [whole[n] for n in kept]
        for n, probe in zip(kept, self.battery):
            if probe.needs is None:
                probe.needs = self.needs_of(probe, whole[:n])

    def dullness(self, name: str) -> tuple[bool, bool]:
        """Return how unlikely an operation shows a change, for sorting."""
        role = self.stats.roles[name]
        return not role.changes_shown, role.blind or role.vain

    def initial(self) -> Readings:
        """Return the answers of the probes at the start."""
        return [probe.shown for probe in self.battery]

    def second_readings(self) -> Readings:
        """Return the answers of the probes at the start once more."""
        return self.read(self.open())

    def needs_of(self, probe: Probe, before: Sequence[Probe]) -> list[Event]:
        """Return calls of earlier probes that suffice for a probe: those that show a value it uses,
        else all."""
        showing = showing_one_of(probe.event.values, before)
        for probes in ([], showing[:1], showing):
            needs = with_needs(probes)
            _, events = self.play([*needs, probe.event], rename=False)
            if events is not None and self.visible(events[-1].cells) == self.visible(probe.shown):
                return needs
        return [probe.event for probe in before]

    def state(self) -> Json:
        """Return the battery as JSON values, for a later visit. {}: where plays cost nothing, a new
        battery costs less than a long state."""
        return {}

    def load_state(self, state: Json) -> None:
        """Continue with what `state` returned on an earlier visit."""

    def event(self, name: str, arguments: Json) -> Event:
        """Return a call as an event that was accepted."""
        action = self.operations[name].render(arguments)
        return Event(name, arguments, action, ok=True, prose=self.prose)

    def event_like(self, event: Event, name: str) -> Event:
        """Return a call of another operation with the arguments of an event."""
        required = self.operations[name].required
        return self.event(name, {key: event.arguments[key] for key in required})


def with_needs(probes: Iterable[Probe]) -> list[Event]:
    """Return the calls of probes, each after those that it needs, without repetitions but of those
    that change something, which another one may have undone."""
    calls: list[Event] = []
    keys: set[Key] = set()
    last_change: Key | None = None
    for call in itertools.chain.from_iterable(probe.calls() for probe in probes):
        key = call.key
        if key == last_change if call.changes else key in keys:
            continue
        calls.append(call)
        keys.add(key)
        if call.changes:
            last_change = key
    return calls


def accepted(events: Events) -> list[Event]:
    """Return the events that were not refused and did not end the episode."""
    return [event for event in events if event.accepted]


def changing(events: Events) -> list[Event]:
    """Return the events that change something."""
    return [event for event in events if event.changes]


def showing_one_of(values: Collection[str], probes: Sequence[Probe]) -> list[Probe]:
    """Return the probes whose answers at the start have one of the values."""
    found = []
    for probe in probes:
        if any(cell.value in values for cell in probe.shown):
            found.append(probe)
    return found


def is_token(value: str) -> bool:
    """Return True for a text that no user would read, such as an access token, of which each call
    gives a new one."""
    return len(value) > _TOKEN and " " not in value


def is_clock(value: str) -> bool:
    """Return True for a time of day with seconds, or a number of seconds since 1970, within a
    minute of the present."""
    now = time.time()
    if _SECONDS.fullmatch(value):
        return abs(float(value[:10]) - now) < _NEARLY_NOW
    found = _TIME.search(value) if ":" in value else None
    if found is None or found[3] == "00":  # a round time is an appointment
        return False
    hours, minutes, seconds = map(int, found.groups())
    clocks = [time.gmtime(now), time.localtime(now)]
    said = 3600 * hours + 60 * minutes + seconds
    apart = [abs(3600 * c.tm_hour + 60 * c.tm_min + c.tm_sec - said) for c in clocks]
    return min(min(n, 86400 - n) for n in apart) < _NEARLY_NOW


def before_changes(events: Events) -> list[Event]:
    """Return the calls of an episode up to its first change."""
    return list(itertools.takewhile(lambda event: not event.changes, events))
