"""Curiosity walks over the operations of a world, which discover its values and what can be done
with them.

A walk has two phases, as in section 3.1 of the AgentEvolver paper: `breadth` steps that may use all
observations, then `depth` steps that use only the last `depth` of them. In both, a refused call is
followed up: by the call that showed its values in an earlier episode, or by one that has helped
before, and a retry. Otherwise the next operation is drawn in proportion to its expected novelty:
the mean over its outcomes of 1/sqrt(times seen), plus a bonus for operations that were rarely tried
(eq. 8, with a count-based bonus in place of a language model). Which values an argument takes, and
which operation makes another one work, is learnt from calls that worked (`OperationStats`).
"""

import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Self

from envs.probed import Cell, tokens
from envs.world import Task, World, snapshot_of
from evolver.questioning.attention import GROUPS, is_grouped
from evolver.questioning.calls import Episode, Event, Json, Key, Operations, key_of
from evolver.questioning.operation_stats import NO_TRIALS, OperationStats, signature
from evolver.questioning.roles import Rate, record, tally
from evolver.questioning.values import Given, SeenValues, Values, group_of, hinted, name_parts

# --- the next operation ---

_WANTED = 20  # most calls that an operation is credited with making possible
_HARDLY_PRACTISED = 3  # bonus of an operation that has hardly ever worked: it may be a change
_DRAWN, _SHARE_DRAWN = 6, 8  # operations whose arguments are compared: so many, or 1/8 of all
_FINALISTS = 6  # of them, in a walk of a few groups
_NOT_READY = 0.05  # weight of a call if what its description names was not called yet
_UNSURE = 0.5  # least chance of a call that has hardly ever worked, so that it gets tried

# --- after a refusal ---

_TRIALS = 3  # remedies for one error
_TRIALS_IN_A_ROW = 9
_REMEDIES = 4  # whose arguments are compared
_HELPED, _HELPED_ALIKE, _NAMED = 30, 5, 10  # weight of what helps mostly, takes the same, is named
_CHANGES = 0.1  # weight of a remedy that changes something: it would become part of the task
_HALF = 0.5  # a trial that half helped, by which remedies that were not tried are estimated
_LEAST_CHANCE, _LEAST_CHANCE_IF_FOCUSED = 0.02, 0.2  # that the arguments of a remedy fit
_KEPT = 0.5  # how often a retry keeps a value that was shown, although another was shown since
_TOKENS = 40  # of an error, that may be values

Call = tuple[str, Json]
Draw = tuple[str, Json, float]  # a call, and the chance that its arguments fit


class Walker:
    """Makes walks. One instance accumulates statistics across the worlds of one environment."""

    def __init__(self, *, breadth: int, depth: int, branches: int):
        """branches: walks that share one breadth phase; their depth phases start from a snapshot,
        or from a replay."""
        self.stats = OperationStats()
        self.breadth = breadth
        self.depth = depth
        self.branches = branches
        self.beside: dict[str, set[str]] = {}  # value -> the values in its row, in lower case
        self._needed: dict[tuple[str, ...], dict[str, set[str]]] = {}

    def needed(self, operations: Operations) -> dict[str, set[str]]:
        """Return {operation: others that the descriptions of its required arguments name}, such as
        "spotify.login" by "token obtained from spotify app login". Names of a single word are too
        common to count."""
        key = tuple(operations)
        if key not in self._needed:
            self._needed[key] = {}
            parts = {name: set(name_parts(name)) for name in operations}
            for name, operation in operations.items():
                words: set[str] = set()
                for parameter in operation.required:
                    about = operation.properties.get(parameter, {}).get("description", "")
                    words.update(name_parts(str(about)))
                named = {other for other, own in parts.items() if len(own) > 1 and own <= words}
                self._needed[key][name] = named - {name}
        return self._needed[key]

    def walks(
        self,
        world: World,
        task: Task,
        rng: random.Random,
        seen: SeenValues,
        first: Sequence[Call] = (),
        operations: Operations | None = None,
    ) -> Iterator[list[Event]]:
        """Explore one world from the start of `task`, and yield the calls of each branch.

        seen: values that may be tried; the walk adds what it sees. first: calls to begin with.
        operations: those to draw, None = all. The caller may use the world for something else
        between two walks.
        """
        episode = Episode(world, task, self.stats.refuses, operations)
        kind = FocusedWalk if is_grouped(episode.operations) else Walk
        trunk = kind(self, episode, rng, seen)
        for name, arguments in first:
            if not trunk.over:
                trunk.call(name, arguments)
        trunk.follow_up(len(first) + self.breadth)
        snapshot = snapshot_of(world)
        for number in range(self.branches):
            if number and snapshot is not None:
                world.restore(snapshot)
            elif number:
                replay = Episode(world, task, self.stats.refuses, trunk.operations)
                for event in trunk.events:
                    replay.again(event)
            branch = trunk.branch(self.depth)
            branch.follow_up(len(trunk.events) + self.depth)
            yield branch.events


class Walk:
    """A walk that is being made. It draws all operations."""

    least_chance = _LEAST_CHANCE
    focused = False  # True if it draws a few groups of operations only

    def __init__(self, walker: Walker, episode: Episode, rng: random.Random, seen: SeenValues):
        self.walker = walker
        self.stats = walker.stats
        self.episode = episode
        self.rng = rng
        self.operations = episode.operations
        self.drawn = list(self.operations)
        self.needed = walker.needed(self.operations)
        needed = set[str]().union(*self.needed.values()) if self.focused else None
        self.values = Values(walker.stats, rng, seen, walker.beside, needed)
        self.events: list[Event] = []
        self.done: set[Key] = set()  # calls made
        self.plan: list[Call] = []  # calls to make next
        self.trials: list[tuple[str, str]] = []  # ("operation: error", remedy), until the retry
        self.changed: dict[str, str] = {}  # value -> the operation that changed something with it
        self._see(episode.shown_first)

    @property
    def over(self) -> bool:
        """True if nothing can be called any more."""
        return not self.operations or bool(self.events and self.events[-1].over)

    @property
    def last(self) -> str:
        """The operation that was called last."""
        return self.events[-1].name if self.events else ""

    def branch(self, window: int) -> Self:
        """Return a copy that continues independently and uses the last `window` observations."""
        other = type(self)(self.walker, self.episode, self.rng, self.values.seen)
        other.values = self.values.copy()
        other.drawn = self.drawn
        other.values.window = window
        other.events = [*self.events]
        other.done = {*self.done}
        other.changed = dict(self.changed)
        return other

    # --- the next operation -----------------------------------------------------------------------

    def explore(self) -> None:
        """Draw several operations by novelty, then one of them by the chance that its arguments
        fit, and call it."""
        names = self.drawn
        done = {event.name for event in self.events if event.ok}
        wanted: Counter[str] = Counter()
        for others in self.needed.values():
            wanted.update(others - done)
        novelty = []
        roles = self.stats.roles
        for name in names:
            expected = roles[name].novelty(roles[self.last].followed.get(name, 0))
            novelty.append(expected * (1 + min(wanted[name], _WANTED)))
        k = max(_DRAWN, len(names) // _SHARE_DRAWN)
        several = self.rng.choices(names, self._weighed(names, novelty), k=k)
        draws = self._with_arguments(several, {})
        if draws:
            ready = {name for name in names if self.needed[name] <= done}
            draws, weights = self._finalists(draws, ready)
            name, arguments, _ = self.rng.choices(draws, weights)[0]
        else:  # everything was tried: repeat a call
            name = self.rng.choice(names)
            arguments = self.values.arguments(self.operations[name], {}, set())[0] or {}
        self.call(name, arguments)

    def _weighed(self, names: Sequence[str], novelty: Sequence[float]) -> list[float]:
        """Return the weights of operations, given their novelty."""
        bonus = [1 if self.stats.roles[n].practised else _HARDLY_PRACTISED for n in names]
        return [expected * times for expected, times in zip(novelty, bonus)]

    def _with_arguments(self, names: Sequence[str], given: Given) -> list[Draw]:
        """Return calls, each operation once, with the chances that their arguments fit."""
        draws = []
        for name in dict.fromkeys(names):
            arguments, chance = self.values.arguments(self.operations[name], given, self.done)
            if arguments is not None:
                draws.append((name, arguments, chance))
        return draws

    def _finalists(
        self, draws: list[Draw], ready: Collection[str]
    ) -> tuple[list[Draw], list[float]]:
        """Return the calls of which one is made, with their weights. ready: operations whose
        descriptions name nothing that was not called yet."""
        weights = []
        for name, _, chance in draws:
            weight = chance * (1 if name in ready else _NOT_READY)
            # What works already would be called again and again.
            practised = self.stats.roles[name].practised
            weights.append(weight**0.5 if practised else max(weight, _UNSURE))
        return draws, weights

    # --- a call -----------------------------------------------------------------------------------

    def follow_up(self, length: int) -> None:
        """Make planned calls, and explore, until the walk has `length` calls. If a call is refused,
        plan a remedy and a retry."""
        while len(self.events) < length and not self.over:
            if self.plan:
                name, arguments = self.plan.pop(0)
                self.call(name, self._refreshed(name, arguments))
            else:
                self.trials.clear()
                self.explore()
            event = self.events[-1]
            if not event.ok and not event.over and self._may_try(event):
                remedy = self._remedy(event)
                if remedy is not None:
                    self.plan = [remedy, (event.name, event.arguments), *self.plan]

    def call(self, name: str, arguments: Json) -> None:
        """Make a call and learn from it."""
        event = self.episode.call(name, arguments)
        if len(self.operations) > len(self.needed):  # the world offers more tools
            self.drawn += [other for other in self.operations if other not in self.needed]
            self.needed = self.walker.needed(self.operations)
        event.changes = event.ok and self.stats.is_change(event)
        self.stats.learn(event, self.last, lambda value: self.values.kinds.get(value, ()))
        self.events.append(event)
        self.values.time += 1
        self.done.add(event.key)
        if event.ok and not self.stats.says_nothing(event):
            self._see(event.usable, event)
        elif not event.ok and not event.prose:
            found = tokens(event.result)[:_TOKENS]
            self._see([Cell("", "", token, (f"!{name}",)) for token in found])
        for value in event.values:
            refused = self.values.refused
            refused[value] = 0 if event.ok else refused.get(value, 0) + 1
            if value in self.changed:
                record(self.stats.roles[self.changed[value]].blocked, not event.ok)
            if event.changes:
                self.changed[value] = name
        self._learn_remedy(event)

    def _learn_remedy(self, event: Event) -> None:
        """Count the last remedy for an error of this operation: it helped if another error came."""
        for failure, remedy in reversed(self.trials):
            if failure.startswith(f"{event.name}: "):
                helped = event.ok or _failure(event) != failure
                tally(self.stats.remedies.setdefault(failure, {}), remedy, helped)
                return

    def _see(self, shown: Sequence[Cell], event: Event | None = None) -> None:
        # Values that were shown after a change may not exist at the start of another walk.
        self.values.add(shown, event, lasting=not self.changed)

    # --- after a refusal --------------------------------------------------------------------------

    def _may_try(self, event: Event) -> bool:
        """Return True if few remedies were tried for this error, and few in a row.

        The first limit is per error, because a remedy that leads to another error is progress: some
        calls need four or five others.
        """
        failures = [failure for failure, _ in self.trials]
        return len(failures) < _TRIALS_IN_A_ROW and failures.count(_failure(event)) < _TRIALS

    def _refreshed(self, operation: str, arguments: Json) -> Json:
        """Return the arguments, some of them replaced by values that the last call showed: those
        that were guessed, and now and then another, which the last call did not confirm."""
        last = self.events[-1]
        refreshed = dict(arguments)
        shown = {cell.value: cell.kinds for cell in (last.usable if last.ok else ())}
        for name, value in arguments.items():
            schema = self.operations[operation].properties.get(name, {})
            kept = str(value) in self.values.kinds and self.rng.random() < _KEPT
            if kept or "enum" in schema or not isinstance(value, str):
                continue
            if value in shown or value in last.values:
                continue
            fits = self.stats.acceptance(f"{operation}.{name}", hinted(schema)).fits
            fitting = [
                other
                for other, kinds in shown.items()
                if any(map(fits, kinds)) and other not in last.values
            ]
            if fitting:
                refreshed[name] = self.rng.choice(fitting)
        return refreshed

    def _remedy(self, event: Event) -> Call | None:
        """Return a call after which a refused one may work, or None.

        First come the calls that showed its values in an earlier episode, then a draw that prefers
        operations that helped, are named in the error, or take the same arguments as one that
        helped against this error elsewhere.
        """
        failure = _failure(event)
        call = self._showing_its_values(event) or self._drawn_remedy(event, failure)
        if call is not None:
            self.trials.append((failure, call[0]))
        return call

    def _showing_its_values(self, event: Event) -> Call | None:
        for value in event.values:
            name, arguments = self.values.seen.shown_by.get(value, ("", {}))
            if name in self.operations and not self.values.knows(value):
                if key_of(name, arguments) not in self.done:
                    return name, arguments
        return None

    def _drawn_remedy(self, event: Event, failure: str) -> Call | None:
        counts = self.stats.remedies.get(failure, {})
        names = self._possible_remedies(event, counts)
        trials = [counts.get(name, NO_TRIALS) for name in names]
        hope = max(((helped + 1) / (tried + 1) for helped, tried in trials), default=0)
        if not names or self.rng.random() > hope**2:
            return None
        helpers = self.stats.helpers(failure) & self.operations.keys()
        alike = [self.operations[name].properties for name in helpers]
        weights = []
        error = event.result.lower()
        for name, (helped, tried) in zip(names, trials):
            weight = 1.0
            if 2 * helped > tried:
                weight = _HELPED
            elif self.operations[name].properties in alike:
                weight = _HELPED_ALIKE
            if _is_named(name, error):
                weight = max(weight, _NAMED)
            apart = _CHANGES if self.stats.roles[name].changes else 1
            weights.append(apart * weight * (helped + _HALF) / (tried + 1))
        several = self.rng.choices(names, weights, k=_REMEDIES)
        drawn = self._with_arguments(several, self._given(event))
        drawn = [call for call in drawn if call[2] > self.least_chance]
        if not drawn:
            return None
        return self.rng.choices(drawn, [chance for _, _, chance in drawn])[0][:2]

    def _possible_remedies(self, event: Event, counts: dict[str, Rate]) -> list[str]:
        return [name for name in self.operations if name != event.name]

    def _given(self, event: Event) -> Given:
        """Return the values of a refused call that its remedy may take too."""
        given: Given = {}
        for value in event.values:
            given |= dict.fromkeys(self.values.kinds.get(value, ()), value)
        return given


class FocusedWalk(Walk):
    """A walk of a world with very many operations, such as the functions of several apps. It draws
    those of a few groups, and those that require nothing: others would fail for want of what their
    group needs, such as a login."""

    least_chance = _LEAST_CHANCE_IF_FOCUSED
    focused = True

    def __init__(self, walker: Walker, episode: Episode, rng: random.Random, seen: SeenValues):
        # groups that an answer has named, such as the apps that have an account
        self.named: set[str] = set()
        super().__init__(walker, episode, rng, seen)
        self._draw_groups()

    def _draw_groups(self) -> None:
        groups = sorted(set(map(group_of, self.operations)))
        groups = [group for group in groups if group in self.named] or groups
        chosen = self.rng.sample(groups, min(GROUPS, len(groups)))
        operations = self.operations.items()
        self.drawn = [n for n, op in operations if not op.required or group_of(n) in chosen]

    def branch(self, window: int) -> Self:
        """Return a copy that continues independently. It uses all observations: a login may be
        long ago."""
        other = super().branch(0)
        other.named = self.named
        return other

    def _weighed(self, names: Sequence[str], novelty: Sequence[float]) -> list[float]:
        # What one group refuses without arguments, the others do too.
        refused: Counter[str] = Counter()
        for event in self.events:
            if not event.ok and not event.arguments:
                refused[_within(event.name)] += 1
        return [n / (1 + refused[_within(name)]) ** 2 for name, n in zip(names, novelty)]

    def _finalists(
        self, draws: list[Draw], ready: Collection[str]
    ) -> tuple[list[Draw], list[float]]:
        # The improbable calls of many operations would together outweigh the probable ones.
        draws = [draw for draw in draws if draw[0] in ready] or draws
        draws = sorted(draws, key=lambda draw: -draw[2])[:_FINALISTS]
        return draws, [chance * (1 if name in ready else _NOT_READY) for name, _, chance in draws]

    def _see(self, shown: Sequence[Cell], event: Event | None = None) -> None:
        super()._see(shown, event)
        if event is not None and event.ok and not self.named:
            self.named = {cell.value for cell in shown} & set(map(group_of, self.operations))
            if self.named:
                self._draw_groups()

    def _showing_its_values(self, event: Event) -> None:
        return None

    def _possible_remedies(self, event: Event, counts: dict[str, Rate]) -> list[str]:
        # Of so many operations, one that nothing speaks for helps too rarely.
        done = {event.name for event in self.events if event.ok}
        hopeful = self.needed[event.name] - done
        hopeful.update(name for name, (helped, _) in counts.items() if helped)
        return [name for name in self.operations if name in hopeful and name != event.name]

    def _given(self, event: Event) -> Given:
        return {}  # a refused token is no password


def _failure(event: Event) -> str:
    """Return the operation and the error of a refused call, as a key of `remedies`."""
    return f"{event.name}: {signature(event)}"


def _is_named(name: str, error: str) -> bool:
    """Return True if an error contains a word of an operation: "look at the order first" names
    `list_orders`."""
    return any(re.search(rf"\b{re.escape(part.rstrip('s'))}", error) for part in name_parts(name))


def _within(name: str) -> str:
    """Return an operation's name without that of its group."""
    return name.partition(".")[2]
