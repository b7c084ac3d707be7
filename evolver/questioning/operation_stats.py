"""Statistics of the operations of a world over all walks: their roles, and the values that their
arguments accept. They are kept as JSON values."""

import copy
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.probed import Cell, digest
from evolver.questioning.calls import Event, has_digit, inner_values
from evolver.questioning.roles import (
    BLANK,
    COMPARISONS,
    TESTS_PER_CHANGE,
    Rate,
    Role,
    count,
    record,
    tally,
)

Table = dict[str, dict[str, Rate]]
NO_TRIALS: Sequence[int] = (0, 0)
GUESSED = "<guessed>"  # the kind of a made-up value
LISTED = "<listed>"  # the kind of a word that a description offers

# --- roles ---

_CALLS_COMPARED = 200  # calls of one operation whose first answers are kept
_FRESH, _TAKEN = 2, 4  # repetitions with another value, and calls that took it, of a handle
_NEARLY_ALL = 0.95  # a walk may write a handle anywhere, from where it is shown
_MEASURE = re.compile(r"-?\d+(\.\d+)?|[Tt]rue|[Ff]alse")  # an answer that is one value
_SAME_ANSWERS = 3  # calls with one answer, after which a reader says nothing by it
_STATES = 2  # answers that different calls get, by which a reader tells states apart

# --- answers ---

_SENTENCE = re.compile(r"[A-Z][\w'-]*(?: [^\n ]+)+[.!]")
_SHORT = 120  # characters of a sentence that may be a refusal
_CONFIRMATION = 60  # characters of an answer that may be given whatever is asked
_MOST_BLANKS = 6  # in place of arguments that an answer repeats
_ANSWERS_KEPT = 200  # of one operation
_SENTENCES_KEPT = 2000
_CALLERS = 2  # operations that may give an answer that is no refusal, with one call each
_REFUSAL_TESTS = 3  # after which it is clear whether a sentence is a refusal
_FORM = 6  # words of the form of a sentence
_FORMS_TESTED = 12  # of one operation
_WORDS_KEPT = 300  # per kind, over all worlds
_ERROR_WORDS = 14  # of an error, which tell it from others
_ROWS_TOLD_APART = 3  # of an answer: none, one, two, or more
_LABELS_TOLD_APART = 8  # values of an answer whose places tell it from others

# --- arguments: how likely one accepts a kind of values that was not tried ---

UNTRIED = 0.05  # if nothing speaks for it
_NAMED_PHRASE = 4 * UNTRIED  # the name of a thing, after an article
_BELIEVED = 6 * UNTRIED  # if the schema names it: calls may have been refused for other reasons
_SAME_NAME_ELSEWHERE = 0.3  # it comes from a field of the argument's name in another group
_DESCRIBED = 0.5  # from a field whose name is in the argument's description
_TELLING = 3  # characters of a field's name; longer ones are no accident in a description
_ENOUGH, _AS_OFTEN = 4, 0.5  # values that worked, and their share of the best rate, if any will do
_NEARLY = 0.75  # of the rate of ids, from which other numbers do as well
_AS_GOOD = 0.3  # of the best rate: kinds above are accepted about as likely as the best one

_ARTICLES = ("a _", "an _", "the _")
_ID = re.compile(
    r"(?:^|[._\W])(?:\w*_)?(?:id|uuid|token|password|key|number)$|[a-z]I[dD]$", re.IGNORECASE
)


class Acceptance(dict[str, float]):
    """{kind: how likely one argument accepts its values}, of any kind."""

    def __init__(self, place: str, about: str, rates: Mapping[str, float]):
        """place, about: the argument and its description. rates: of the kinds for which something
        speaks."""
        super().__init__(rates)
        self._place = place
        self._about = about
        best = max((rate for kind, rate in rates.items() if kind != GUESSED), default=1.0)
        self._least = _AS_GOOD * best

    def __missing__(self, kind: str) -> float:
        return self.setdefault(kind, _likely(kind, self._place, self._about))

    def fits(self, kind: str) -> bool:
        """Return True if the kind is accepted about as likely as the best one that is known."""
        return self[kind] >= self._least


class OperationStats:
    """Counts over all walks so far.

    An argument is named by its operation and path ("book.flight"), a value by the kinds of
    `envs.probed.Cell`. Kinds whose values are accepted by the same argument are of the same type;
    the tool schemas do not say this.
    """

    def __init__(self) -> None:
        self.roles: defaultdict[str, Role] = defaultdict(Role)  # operation -> role
        self.kinds: Table = {}  # argument -> kind -> its values worked
        self.names: Table = {}  # the same by the last name of the argument, for all operations
        self.values: Table = {}  # argument -> word or name -> it worked
        self.remedies: Table = {}  # "operation: error" -> operation before a retry -> it helped
        self.words: dict[str, dict[str, int]] = {}  # kind -> value without digits -> times shown
        # sentence -> operation -> the values of some calls that gave it
        self.sentences: dict[str, dict[str, list[str]]] = {}
        self.crowded = False  # very many tools, of which most may tell nothing
        self.marked = 0  # refusals that a world of tools marked as such
        self.quiet: dict[str, Rate] = {}  # sentence given between two readings: they differ
        # operation -> call -> [start, its answer there, arguments]
        self.first: dict[str, dict[str, list[Any]]] = {}
        self.varies: dict[str, int] = {}  # kind -> times it differed between two identical plays
        self.handles: list[str] = []  # kinds of what a call hands out anew (envs/handles.py)
        # kind -> whether it was the other one when its call was repeated at once
        self.fresh: dict[str, Rate] = {}
        self.passed_on: dict[str, Rate] = {}  # kind -> whether a call took it or another showed it
        # last name of an argument -> what was asked -> what was derived from the counts above
        self._acceptances: defaultdict[str, dict[Any, Acceptance]] = defaultdict(dict)

    def state(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        state = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        state["roles"] = {name: vars(role) for name, role in self.roles.items() if role != Role()}
        return copy.deepcopy(state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        state = copy.deepcopy(state)
        roles = {name: Role(**role) for name, role in state["roles"].items()}
        vars(self).update(state, roles=defaultdict(Role, roles))
        self._acceptances.clear()

    def find_handles(self, events: Sequence[Event]) -> list[str]:
        """Return new kinds of values that a call hands out, each time another one, and that others
        take and nothing shows: what a call creates stands in some list."""
        answered = [event for event in events if event.ok]
        for n, event in enumerate(answered):
            handed = [c for c in event.cells if c.kinds[0] in self.fresh]
            for cell in handed:
                for later in answered[n + 1 :] if cell.value not in event.values else ():
                    takes = cell.value in later.values
                    if takes or (later.name != event.name and later.shows([cell.value])):
                        tally(self.passed_on, cell.kinds[0], takes)
        found = []
        for kind, (other, repeated) in self.fresh.items():
            taken, met = self.passed_on.get(kind, NO_TRIALS)
            rarely_shown = taken >= _TAKEN and taken >= _NEARLY_ALL * met
            if other == repeated >= _FRESH and rarely_shown and kind not in self.handles:
                found.append(kind)
        self.handles += found
        return found

    # --- roles ------------------------------------------------------------------------------------

    def is_change(self, event: Event) -> bool:
        """Return True if the call changed what others show, as far as is known of its operation.

        In prose the same operation may do something or nothing ("You open the box.", "It is already
        open."), and the form of the answer tells which.
        """
        role = self.roles[event.name]
        differ, tested = role.effects_by_form.get(self.form_of(event), NO_TRIALS)
        return role.changes and (differ > 0 or tested < 2)

    def is_clear(self, event: Event) -> bool:
        """Return True if the role of a call's operation, in prose also of this form of its answer,
        is tested enough."""
        role = self.roles[event.name]
        forms = role.effects_by_form
        tested = forms.get(self.form_of(event), NO_TRIALS)[1]
        is_new_form = self.tells(event) and len(forms) < _FORMS_TESTED and tested < 2
        return not is_new_form and role.is_clear()

    def add_effect(self, event: Event, differ: bool) -> None:
        """Count a test of an operation's effect. differ: what others show did."""
        role = self.roles[event.name]
        record(role.effects, differ)
        if self.tells(event):
            tally(role.effects_by_form, self.form_of(event), differ)

    def tells(self, event: Event) -> bool:
        """Return True if an answer is in sentences of which some may be refusals: in prose, and
        where a world of tools has marked no refusal."""
        return event.prose or (not self.marked and bool(_SENTENCE.fullmatch(event.result.strip())))

    def form_of(self, event: Event) -> str:
        """Return the form of an answer in sentences, "" elsewhere: the first words without the
        call's values."""
        if not self.tells(event):
            return ""
        given = " ".join(event.values).lower().split()
        words = re.findall(r"[^\W\d]+", event.result.lower()[: 2 * _SHORT])
        return " ".join([word for word in words if word not in given][:_FORM])

    def compare(self, start: str, event: Event) -> None:
        """Compare the answer of a call at the beginning of an episode with that of the same call at
        another start."""
        calls = self.first.setdefault(event.name, {})
        key = event.key[1]
        answer = digest(event.result)
        if key in calls:
            where, before, _ = calls[key]
            if where != start:
                record(self.roles[event.name].compared, answer != before)
        elif len(calls) < _CALLS_COMPARED:
            calls[key] = [start, answer, event.arguments]

    def to_compare(self, start: str) -> list[tuple[str, dict[str, Any]]]:
        """Return calls of readers, made at other starts, to be repeated at this one to see if they
        answer alike."""
        chosen = []
        for name, calls in self.first.items():
            differ, compared = self.roles[name].compared
            if self.roles[name].reads and not differ and compared < COMPARISONS:
                elsewhere = [(name, given) for where, _, given in calls.values() if where != start]
                chosen += elsewhere[: COMPARISONS - compared]
        return chosen

    def says_nothing(self, event: Event) -> bool:
        """Return True if a reading operation gives this answer whatever it is asked, such as "no
        results".

        What is asked nothing shows the state, also that there is nothing yet. A number, "true" or
        "false" tells something however often it comes, and so does each answer where different
        calls get the same one of several, such as "open" and "closed".
        """
        role = self.roles[event.name]
        if not event.arguments or _MEASURE.fullmatch(event.result):
            return False
        if self.is_silent(event.name):
            return True
        often = role.answers.get(event.result, 0) >= _SAME_ANSWERS
        return often and role.reads and list(role.askers.values()).count(None) < _STATES

    def is_silent(self, name: str) -> bool:
        """Return True if the answers of an operation say nothing but what it was given; of very
        many tools also if it has given one answer only."""
        role = self.roles[name]
        return role.repeats or (self.crowded and role.is_monotonous)

    def sentence_of(self, event: Event) -> str:
        """Return the sentence that was remembered for such an answer, or would be."""
        if event.result in self.sentences:
            return event.result
        return next((s for s in event.sentences if s in self.sentences), event.sentences[0])

    def refuses(self, event: Event) -> bool:
        """Return True if an answer in sentences means that the call was refused, although the world
        does not mark it.

        Such an answer is given to different calls whatever their values ("You can't see any such
        thing."), made-up ones among them where it names them, and has changed nothing where that
        was tested.
        """
        answer = self.sentence_of(event)
        calls = self.sentences.get(answer, {})
        differ, tested = self.quiet.get(answer, NO_TRIALS)
        often = len(calls) > _CALLERS or any(len(values) > 1 for values in calls.values())
        return often and differ <= tested / TESTS_PER_CHANGE

    def is_clear_refusal(self, answer: str) -> bool:
        """Return True if it was tested often enough whether the answer goes with a change."""
        return self.quiet.get(answer, NO_TRIALS)[1] >= _REFUSAL_TESTS

    def helpers(self, failure: str) -> set[str]:
        """Return the operations that mostly help against the same error of other operations.
        failure: "operation: signature", as in `remedies`."""
        error = failure.partition(": ")[2]
        found = set()
        for other, counts in self.remedies.items():
            if other != failure and other.partition(": ")[2] == error:
                found |= {name for name, (n, tried) in counts.items() if n > max(1, tried / 2)}
        return found

    def summary(self) -> str:
        """Return how many of the operations that were called do what, in one sentence."""
        kinds: dict[str, list[str]] = {}
        for name, role in self.roles.items():
            if role.calls:
                kinds.setdefault(role.kind, []).append(name)
        parts = [f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in kinds.items()]
        called = sum(map(len, kinds.values()))
        return f"of {called} operations that were called, {', '.join(parts) or 'none answered'}"

    # --- values -----------------------------------------------------------------------------------

    def ids(self) -> set[str]:
        """Return the kinds of ids: accepted as arguments, and looking like ids (letters with
        digits, or named so)."""
        rates = itertools.chain.from_iterable(counts.items() for counts in self.kinds.values())
        return {kind for kind, (worked, _) in rates if worked and _looks_like_id(kind)}

    def takes_anything(self, place: str) -> bool:
        """Return True if an argument of a change has accepted made-up values, and words of the
        prompt, about as often as any others, as the text of a note does."""
        operation = place
        while operation and operation not in self.roles:
            operation = operation.rpartition(".")[0]
        if not operation or not self.roles[operation].changes:
            return False
        counts = self.kinds.get(place, {})
        anything = [r for kind, r in counts.items() if kind.startswith((GUESSED, "opening@"))]
        worked, tried = (sum(column) for column in zip(NO_TRIALS, *anything))
        best = max((won / times for won, times in counts.values() if times >= _ENOUGH), default=1.0)
        return worked >= _ENOUGH and worked > _AS_OFTEN * best * tried

    def prefers_ids(self, place: str) -> bool:
        """Return True for an argument that is named like the field of an id, or has accepted ids
        more often than other shown numbers."""
        ids = self.ids()
        best = 0.0
        best_other = 0.0
        if any(is_field(kind, place) for kind in ids):
            return True
        for kind, (worked, tried) in self.kinds.get(place, {}).items():
            if worked >= _ENOUGH and not kind.startswith(("!", GUESSED)):
                if kind in ids:
                    best = max(best, worked / tried)
                elif not is_field(kind, place):
                    best_other = max(best_other, worked / tried)
        return best_other < _NEARLY * best if best else bool(_ID.search(place))

    def has_field(self, place: str) -> bool:
        """Return True if an argument has accepted values of a field with its name."""
        return any(
            worked > 1 and worked > _AS_GOOD * tried
            for kind, (worked, tried) in self.kinds.get(place, {}).items()
            if is_field(kind, place)
        )

    def accepted(self, kind: str) -> bool:
        """Return True if some argument has accepted values of a kind, and mostly does."""
        rates = [counts[kind] for counts in self.kinds.values() if kind in counts]
        return any(worked > _AS_GOOD * tried for worked, tried in rates)

    def acceptance(
        self, place: str, hints: frozenset[str] = frozenset(), about: str = ""
    ) -> Acceptance:
        """Return how likely an argument accepts the values of a kind.

        Before it was tried, a kind is likely if the schema names it (`hints`), if a field of a JSON
        answer has the argument's name or is mentioned in its description (`about`), or if arguments
        of this name accept it elsewhere.
        """
        asked = (place, hints, about)
        known = self._acceptances[_last(place)]
        if asked not in known:
            counts = self.kinds.get(place, {})
            alike = self.names.get(_last(place), {})
            proven = any(worked for worked, _ in counts.values())
            rates = {}
            for kind in alike.keys() | hints:
                worked, tried = counts.get(kind, NO_TRIALS)
                if kind in hints:
                    rates[kind] = max((worked + 1) / (tried + 1), 0 if proven else _BELIEVED)
                else:
                    elsewhere, times = alike[kind]
                    prior = (elsewhere - worked) / (times - tried + 1)
                    prior = max(prior, _likely(kind, place, about))
                    rates[kind] = (worked + prior) / (tried + 1)
            known[asked] = Acceptance(place, about, rates)
        return known[asked]

    # --- learning ---------------------------------------------------------------------------------

    def learn(self, event: Event, last: str, kinds_of: Callable[[str], Sequence[str]]) -> None:
        """Count an outcome. last: the operation before it. kinds_of: returns the kinds of a value,
        none for a guess."""
        role = self.roles[event.name]
        count(role.outcomes, signature(event))
        count(self.roles[last].followed, event.name)
        if event.ok and event.arguments:
            self._learn_answer(event, role)
        if not (event.ok or event.prose or self.refuses(event)):
            self.marked += 1
            self.sentences.clear()
        if self.tells(event):
            self._learn_sentence(event, made_up=any(not kinds_of(v) for v in event.values))
        worked = event.ok and (not self.says_nothing(event) or role.only_confirms)
        given = inner_values(event.arguments, [event.name])  # items of a list share one argument
        places = [(".".join(path), str(leaf)) for path, leaf in given]
        doubtful = {place for place, value in places if not self._is_likely(place, kinds_of(value))}
        for place, value in places:
            self._acceptances.pop(_last(place), None)
            for kind in kinds_of(value) or (GUESSED,):
                # A date is no wrong date because somebody who was invited does not exist.
                if not worked and is_field(kind, place) and doubtful - {place}:
                    continue
                tally(self.kinds.setdefault(place, {}), kind, worked)
                tally(self.names.setdefault(_last(place), {}), kind, worked)
            if not has_digit(value):
                tally(self.values.setdefault(place, {}), value, worked)
        if worked and not event.prose:
            self.see(event.cells)

    def _is_likely(self, place: str, kinds: Sequence[str]) -> bool:
        """Return True if an argument has accepted a kind, or it is a field with its name."""
        counts = self.kinds.get(place, {})
        return any(counts.get(kind, NO_TRIALS)[0] or is_field(kind, place) for kind in kinds)

    def _learn_answer(self, event: Event, role: Role) -> None:
        """Count an answer that may be given whatever is asked, as it names none of the values, and
        remember which of its values are always the same or repeat the arguments."""
        answer = event.result
        if len(answer) <= _CONFIRMATION:
            named = any(value in answer for value in event.values)
            count(role.answers, answer, int(not named), most=_ANSWERS_KEPT)
            asked = " / ".join(event.values)
            if not named and role.askers.setdefault(answer, asked) != asked:
                role.askers[answer] = None
        for cell in event.cells:
            value = "" if cell.value in event.values else cell.value
            same = role.told.get(cell.label, value) == value
            role.told[cell.label] = value if same else None
        if role.forms != []:
            forms = _forms(answer, event.values)
            role.forms = [form for form in forms if role.forms is None or form in role.forms]

    def _learn_sentence(self, event: Event, *, made_up: bool) -> None:
        """Remember which calls gave an answer that may be a refusal. One that names a value may
        tell of it, unless it tells the same of a made-up one."""
        answer = self.sentence_of(event)
        told = answer != event.result and not made_up and answer not in self.sentences
        if len(answer) > _SHORT or told:
            return
        if answer in self.sentences or len(self.sentences) < _SENTENCES_KEPT:
            given = " / ".join(event.values)
            values = self.sentences.setdefault(answer, {}).setdefault(event.name, [])
            if given not in values and len(values) < 2:
                values.append(given)

    def see(self, shown: Sequence[Cell]) -> None:
        """Remember the words of an answer, for arguments in other worlds."""
        for cell in shown:
            if not has_digit(cell.value):
                for kind in cell.kinds:
                    count(self.words.setdefault(kind, {}), cell.value, most=_WORDS_KEPT)


def _last(place: str) -> str:
    return place.rpartition(".")[2].lower()


def is_field(kind: str, place: str) -> bool:
    """Return True for the kind of a field of a JSON answer that has the name of an argument."""
    shown, _, label = kind.lower().rpartition(".")
    return bool(shown) and label == _last(place)


@functools.lru_cache(100_000)  # about the pairs of kinds and arguments in the largest worlds
def _likely(kind: str, place: str, about: str) -> float:
    """Return how likely an argument accepts a kind that was never tried for it."""
    if kind == LISTED:
        return _DESCRIBED
    if kind.startswith(_ARTICLES):
        return _NAMED_PHRASE
    shown, _, label = kind.lower().rpartition(".")
    if not shown:
        return UNTRIED
    if label == _last(place):
        # "spotify.play.token" rather takes a token of "spotify.login" than of "phone.login".
        group = shown.split(".")[0]
        function = shown.split()[0]
        grouped = place.count(".") > 1 and "." in function
        return _SAME_NAME_ELSEWHERE if grouped and group != place.split(".")[0] else 1.0
    name = re.escape(label.replace("_", " "))
    named = re.search(rf"\b{name}\b", about.lower().replace("_", " "))
    return _DESCRIBED if len(label) > _TELLING and named else UNTRIED


def _forms(answer: str, values: Sequence[str]) -> list[str]:
    """Return an answer with blanks for some of the values in it, in every way."""
    pattern = "|".join(map(re.escape, filter(None, values))) or BLANK
    found = list(re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", answer))[-_MOST_BLANKS:]
    forms = [answer]
    for match in reversed(found):
        forms += [form[: match.start()] + BLANK + form[match.end() :] for form in forms]
    return forms


def signature(event: Event) -> str:
    """Return the class of an outcome: a change, the error without its values, or the kinds that
    were shown."""
    if event.over:
        return "refused and over"
    if not event.ok:
        words = re.findall(r"[^\W\d]+", event.result.lower())[:_ERROR_WORDS]
        given = {value.lower() for value in event.values}
        return " ".join(["refused", *(word for word in words if word not in given)])
    if event.changes:
        return "changed"
    shown = event.cells
    rows = min(len({cell.row for cell in shown}), _ROWS_TOLD_APART)
    labels = {cell.label or cell.kinds[0] for cell in shown[:_LABELS_TOLD_APART]}
    return " ".join(["shown", str(rows), *sorted(labels)])


def _looks_like_id(kind: str) -> bool:
    if " " in kind:  # a place in a JSON answer
        return bool(_ID.search(kind))
    return not set("@#") & set(kind) and has_digit(kind) and any(c.isalpha() for c in kind)
