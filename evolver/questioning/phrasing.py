"""The words of a goal: the query that asks for its changes and its answer."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.probed import NUMBER, Cell
from envs.wording import distinguishing, goal_text, joined, spaced, summaries
from evolver.questioning.calls import Event, Events, Operation, inner_values
from evolver.questioning.start_state import is_token
from evolver.questioning.tasks import GUESSABLE, Rejected
from evolver.transcripts import words

if TYPE_CHECKING:
    from evolver.questioning.goals import Goal

_ROWS_ASKED = 3  # values of rows that a question may be about
_LONGEST_ANSWER = 40  # characters


class Nameless(Rejected):
    """Raised where nothing but the id itself names what a call takes. value: the id."""

    def __init__(self, value: str):
        super().__init__("nothing names it")
        self.value = value


class Option(NamedTuple):
    """A question. wanted: what to reply with, in words. value: the answer. shown: where it was."""

    wanted: str
    value: str
    shown: Sequence[Cell]


class Phrasing:
    """Words goals of one world."""

    def __init__(
        self,
        operations: Mapping[str, Operation],
        ids: set[str],
        *,
        asks_about_rows: bool = False,
        handles: Collection[str] = (),
        makes_sense: Callable[[str, Sequence[str], Any], bool] = lambda operation, path, value: (
            True
        ),
    ):
        """ids: kinds of values that are ids. asks_about_rows: also where something else can be
        asked. handles: kinds of what each call hands out anew. makes_sense: returns False for a
        value that an argument, such as "add.text", takes like any other, although it is none of its
        kind."""
        self.ids = ids
        self.asks_about_rows = asks_about_rows
        self.handles = frozenset(handles)
        self.makes_sense = makes_sense
        self.forms = {name: op.form for name, op in operations.items()}
        self.summaries = summaries({name: op.description for name, op in operations.items()})

    def query(
        self, goal: Goal, rng: random.Random, fits: Callable[[Option], bool] = bool
    ) -> tuple[str, Option | None]:
        """Return the query of a goal, and its question if it has one. fits: returns False for
        questions that are not to be asked. Raises Rejected, with the reason, if there are no words
        for it."""
        hidden = self.hidden(goal.events)
        goals = [self._goal(goal.events, n, hidden) for n in goal.needed]
        option = None
        if goal.asked is not None:
            option = self.question(goal.events[goal.asked], words(" ".join(goals)), rng, fits)
        query = joined(goals, option.wanted if option else "", rng)
        if any(words(value) in words(query) for value in hidden):
            raise Rejected("names a hidden value")
        if len(set(goals)) < len(goals):
            raise Rejected("same words twice")
        return query, option

    def named(self, goal: Goal) -> list[str]:
        """Return the values that the query of a goal names."""
        hidden = self.hidden(goal.events)
        named: dict[str, None] = {}
        for n in goal.needed:
            for path, leaf in inner_values(goal.events[n].arguments):
                if not _is_own_token(leaf, goal.events):
                    parts = self._told(goal.events, goal.events[n].name, path, leaf, hidden)
                    named |= dict.fromkeys(_with_field(path[1:], leaf, parts))
        return list(named)

    def hidden(self, events: Events) -> dict[str, int]:
        """Return {id: the call that shows it} of the ids that are used after a call has shown them.

        An id that a call takes before any has shown it has to be named in the query, and is not
        hidden. So is any other value, because a user would name it.
        """
        shown: dict[str, int] = {}
        hidden: dict[str, int] = {}
        named: set[str] = set()
        for n, event in enumerate(events):
            for path, leaf in inner_values(event.arguments):
                value = str(leaf)
                if self._is_plain(event.name, path, leaf):
                    continue
                if value in shown and value not in named:
                    hidden[value] = shown[value]
                else:
                    named.add(value)
            for cell in event.cells:
                if not self.ids.isdisjoint(cell.kinds):
                    shown.setdefault(cell.value, n)
        return hidden

    def _is_plain(self, operation: str, path: Sequence[str], value: Any) -> bool:
        """Return True for a number that is no id, although some id may be the same number."""
        return not (isinstance(value, str) or self.makes_sense(operation, path, value))

    def _goal(self, events: Events, n: int, hidden: Mapping[str, int]) -> str:
        stated: list[str] = []
        phrases = {}
        operation = events[n].name
        for name, value in events[n].arguments.items():
            if isinstance(value, list) and any(value.count(item) > 1 for item in value):
                raise Rejected("same words twice")
            if not _is_own_token(value, events):
                parts = []
                for path, leaf in inner_values(value, [name]):
                    if isinstance(leaf, str) and not self.makes_sense(operation, path, leaf):
                        raise Rejected("an odd value")
                    found = self._told(events, operation, path, leaf, hidden)
                    parts += _with_field(path[1:], leaf, found)
                new = [part for part in dict.fromkeys(parts) if part not in stated]
                negation = "not " if value is False else ""  # "true" is the name alone
                called = negation + self._called(name, value, events, hidden)
                phrases[called] = " ".join(new or parts)
                stated += parts
        return goal_text(self.summaries[operation], phrases)

    def _called(self, name: str, value: Any, events: Events, hidden: Mapping[str, int]) -> str:
        """Return the name of an argument, for the token of a login that of whose it is."""
        if not isinstance(value, str) or value not in hidden:
            return name
        showing = events[hidden[value]]
        kinds = itertools.chain(*(cell.kinds for cell in showing.cells if cell.value == value))
        return name if self.handles.isdisjoint(kinds) else next(iter(showing.arguments), name)

    def _told(
        self,
        events: Events,
        operation: str,
        path: Sequence[str],
        taken: Any,
        hidden: Mapping[str, int],
    ) -> list[str]:
        """Return the words for a value that an operation takes: itself, or the values that lead to
        a hidden one."""
        value = str(taken)
        if value not in hidden or self._is_plain(operation, path, taken):
            return [value]
        event = events[hidden[value]]
        parts = []
        for path, leaf in inner_values(event.given):
            told = self._told(events, event.name, path, leaf, hidden)
            parts += _with_field(path if told == [str(leaf)] else [], leaf, told)
        # The number of another thing may be the same.
        shown = [c for c in event.cells if c.value != value or not self.ids.isdisjoint(c.kinds)]
        found = distinguishing(shown, value, list(hidden))
        if found == [] and not parts:
            # The only entry of a list is named as it would be among others. Where nothing else is
            # known of it, and in an answer that is no list, the field is its name.
            fields = [cell.label for cell in shown if cell.label and cell.value == value]
            if any("[*]" in field for field in fields):
                found = distinguishing(shown, value, list(hidden), least=1) or []
            fields = ["the new one"] if event.changes else fields
            found = found or [spaced(field.rpartition(".")[2]) for field in fields]
        if found is None or not (parts or found):
            raise Nameless(value)
        return list(dict.fromkeys([*parts, *found]))

    def undescribed(self, goal: Goal) -> bool:
        """Return True if an operation of the goal has no words of its own but its name."""
        names = [goal.events[n].name for n in goal.needed]
        return any(self.summaries[n] == spaced(n) and not self.forms[n] for n in names)

    def question(
        self, event: Event, query: str, rng: random.Random, fits: Callable[[Option], bool] = bool
    ) -> Option:
        """Return a question about the answer of a call.

        query: the `words` of the query so far, which must not hold the answer. fits: returns False
        for questions that are not to be asked.
        """
        shown = [cell for cell in event.cells if self.handles.isdisjoint(cell.kinds)]
        options = _askable(_about_answer(shown), query)
        if not options or self.asks_about_rows:
            options += _askable(about_rows(shown, rng), query)
        if not options:
            raise Rejected("no question")
        options = list(filter(fits, options))
        if not options:
            raise Rejected(GUESSABLE)
        return rng.choice(options)


def _about_answer(shown: Sequence[Cell]) -> Iterator[Option]:
    """Yield questions about a whole answer: its fields, its first and last word, its number, and
    the number of its entries or lines."""
    rows = dict.fromkeys(cell.row for cell in shown)
    labels = Counter(cell.label for cell in shown)
    for cell in shown:
        if cell.label and labels[cell.label] == 1 and "[*]" not in cell.label:
            name = spaced(cell.label.removeprefix("$."))
            yield Option(f"the {name}", cell.value, [cell])
    if shown and not shown[0].label and len(rows) == 1 and len(shown) > 1:
        yield Option("the first word", shown[0].value, shown[:1])
        yield Option("the last word", shown[-1].value, shown[-1:])
    if len(shown) == 1 and not shown[0].label and NUMBER.fullmatch(shown[0].value):
        yield Option("the number", shown[0].value, shown)
    entries = [cell for cell in shown if "[*]" in cell.label]
    lists = {cell.label.partition("[*]")[0] for cell in entries}
    if len(lists) == 1:
        name = spaced(lists.pop().removeprefix("$").strip(".")) or "entries"
        count = len({cell.row.partition("]")[0] for cell in entries})
        yield Option(f"the number of {name}", str(count), [])
    if not any(labels) and len(rows) > 1:
        yield Option("the number of lines", str(len(rows)), [])


def _askable(options: Iterable[Option], query: str) -> list[Option]:
    """Return the options whose answer is short and not in the query."""
    short = [option for option in options if 0 < len(option.value) <= _LONGEST_ANSWER]
    return [option for option in short if words(option.value) not in query]


def about_rows(shown: Sequence[Cell], rng: random.Random) -> Iterator[Option]:
    """Yield questions about a few values of the rows of a JSON list, by words that tell each row
    from the others."""
    inner = [
        cell for cell in shown if cell.label.count("[*]") == 1 and not cell.label.endswith("[*]")
    ]
    for cell in rng.sample(inner, min(_ROWS_ASKED, len(inner))):
        found = distinguishing(shown, cell.value, ())
        if found:
            name = spaced(cell.label.rpartition(".")[2])
            yield Option(f"the {name} of {' '.join(found)}", cell.value, [cell])


def _with_field(path: Sequence[str], value: Any, parts: list[str]) -> list[str]:
    """Return the words for a value with the field that it is in, if it is a number, which says
    nothing without."""
    field = next((name for name in reversed(path) if name != "*"), "")
    if not field or isinstance(value, str):
        return parts
    return [f"{spaced(field)} {part}" for part in parts]


def _is_own_token(value: Any, events: Events) -> bool:
    """Return True for an access token, if each of the operations that show tokens was called once:
    no user would mention it, as long as the account is clear."""
    if not isinstance(value, str) or not is_token(value):
        return False
    showing = [event.name for event in events if any(is_token(cell.value) for cell in event.cells)]
    return len(showing) == len(set(showing))
