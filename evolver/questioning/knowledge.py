"""Knowledge about the operations of a world, learnt over all episodes and kept as JSON values."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from envs.probed import Cell, digest
from evolver.questioning.calls import Event

GUESSED = "<guessed>"
_ARTICLES = ("a _", "an _", "the _")
UNTRIED = 0.05  # how likely an argument accepts a kind that nothing speaks for
_SHORT = 120  # characters of an answer that may be a refusal
_TEXTS_KEPT = 2000
_FEW = 10  # times that an operation has worked, so that it counts as hardly known
_CONTRAST = (
    3  # refusals of an operation without which an answer does not show that a call was accepted
)
_CALLS_KEPT = 200  # of one operation
_COMPARED = 3  # calls at two starts that suffice
_FORM = 6  # words of a form of answers
_FORMS_TESTED = 12  # of one operation
_WORDS_KEPT = 300  # per kind, over all worlds
_ID = re.compile(
    r"(?:^|[._\W])(?:\w*_)?(?:id|uuid|token|password|key|number)$|[a-z]I[dD]$", re.IGNORECASE
)

Table = dict[str, dict[str, list[int]]]


class Knowledge:
    """Counts over all walks so far.

    An argument is named by its operation and path ("book.flight"), a value by the kinds of
    `envs.probed.Cell`. Kinds whose values are accepted by the same argument are of the same type;
    the tool schemas do not say this.
    """

    def __init__(self):
        self.outcomes: dict[
            str, dict[str, int]
        ] = {}  # operation -> signature of the outcome -> times
        self.kinds: Table = {}  # argument -> kind -> [worked, tried]
        # like `kinds`, by the last name of the argument, for all operations together
        self.names: Table = {}
        self.values: Table = {}  # argument -> word or name -> [worked, tried]
        self.enables: Table = {}  # operation: error -> operation before a retry -> [helped, tried]
        self.blocks: dict[
            str, list[int]
        ] = {}  # operation -> later calls with a value it changed: [refused, all]
        self.after: dict[str, dict[str, int]] = {}  # last operation -> next operation -> times
        self.words: dict[str, dict[str, int]] = {}  # kind -> value without digits -> times shown
        self.repeats: dict[str, list[int]] = {}  # operation -> repeated at once: [same answer, all]
        self.effects: dict[
            str, list[int]
        ] = {}  # operation -> made between two readings: [they differ, all]
        self.answers: dict[
            str, dict[str, int]
        ] = {}  # operation -> short answer -> times, with other arguments each
        self._weights: dict[
            tuple, dict[str, float]
        ] = {}  # results of `weights` that are still valid
        self.shown_changes: dict[str, int] = {}  # operation -> changes that its answers have shown
        # short answer -> operation -> the values of some calls that gave it, which it does not
        # mention
        self.texts: dict[str, dict[str, list[str]]] = {}
        self.quiet: dict[
            str, list[int]
        ] = {}  # such an answer given between two readings: [they differ, all]
        self.answered: Table = {}  # operation -> form of its answer in prose -> like `effects`
        self.first: dict[
            str, dict[str, list[Any]]
        ] = {}  # operation -> call -> [start, its answer there, arguments]
        self.worlds: dict[
            str, list[int]
        ] = {}  # operation -> same call at two starts: [answers differ, all]
        self.witnesses: dict[
            str, list[str]
        ] = {}  # operation that changes -> operations that have shown it
        self.varies: dict[str, int] = {}  # kind -> times it differed between two identical plays

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {key: value for key, value in vars(self).items() if not key.startswith("_")}
        )

    def load_state(self, state: dict[str, Any]) -> None:
        for key in state:
            setattr(self, key, copy.deepcopy(state[key]))
        self._weights.clear()

    # --- roles ------------------------------------------------------------------------------------

    def changes(self, name: str) -> bool:
        """Return True if the operation changes what others show.

        Once may be the effect of an operation that was not yet known to change something, hence
        twice.
        """
        same, repeated = self.repeats.get(name, (0, 0))
        differ, tested = self.effects.get(name, (0, 0))
        return differ >= 2 or differ > tested / 3 or same < repeated / 2

    def reads(self, name: str) -> bool:
        """Return True if the operation shows something and changes nothing, as far as was
        tested."""
        return bool(self.repeats.get(name)) and not self.changes(name)

    def shows(self, name: str) -> bool:
        """Return True if the operation's answers have shown a change."""
        return self.shown_changes.get(name, 0) > 0

    def compare(self, start: str, event: Event) -> None:
        """Compare the answer of a call at the beginning of an episode with that of the same call at
        another start."""
        seen, key, now = self.first.setdefault(event.name, {}), event.key[1], digest(event.result)
        if key not in seen and len(seen) < _CALLS_KEPT:
            seen[key] = [start, now, event.arguments]
        where, before, _ = seen.get(key, (start, now, {}))
        if where != start:
            tally(self.worlds, event.name, now != before)

    def to_compare(self, start: str) -> list[tuple[str, dict[str, Any]]]:
        """Return calls of readers, made at other starts, to be repeated at this one to see if they
        answer alike."""
        calls = []
        for name, seen in self.first.items():
            differ, compared = self.worlds.get(name, (0, 0))
            if self.reads(name) and not differ and compared < _COMPARED:
                calls += [(name, given) for where, _, given in seen.values() if where != start][
                    : _COMPARED - compared
                ]
        return calls

    def is_blind(self, name: str) -> bool:
        """Return True if an operation answers by its arguments alone, whatever the state of the
        world, as far as known.

        It computes something, or it changes a state that nothing shows and repeats what it was
        told: both look like a reader, and of neither could be checked that it was called."""
        differ, compared = self.worlds.get(name, (0, 0))
        return not self.shows(name) and not differ and compared >= _COMPARED

    def is_repeatable(self, name: str) -> bool:
        """Return True if repeating the operation at once gives the same answer: a change would show
        elsewhere only."""
        same, repeated = self.repeats.get(name, (0, 0))
        return bool(repeated) and same >= repeated / 2

    def is_tested(self, name: str, least: int = 4) -> bool:
        """Return True if the role of an operation is clear from `least` tests, or has been tested
        often enough."""
        same, repeated = self.repeats.get(name, (0, 0))
        differ, tested = self.effects.get(name, (0, 0))
        clear = tested >= least and (not differ or differ >= 2)
        return (
            clear or tested >= 10 or (repeated >= least and same < repeated / 2) or repeated >= 20
        )

    def is_change(self, event: Event) -> bool:
        """Return True if the call changed what others show, as far as is known of its operation.

        In prose the same operation may do something or nothing ("You open the box.", "It is already
        open."), and the form of the answer tells which.
        """
        differ, tested = self.answered.get(event.name, {}).get(self.answer_of(event)[1], (0, 0))
        return self.changes(event.name) and (not event.prose or bool(differ) or tested < 2)

    def is_known(self, event: Event) -> bool:
        """Return True if the role of a call's operation, in prose also of this form of its answer,
        is tested enough."""
        forms = self.answered.get(event.name, {})
        if (
            event.prose
            and forms.get(self.answer_of(event)[1], (0, 0))[1] < 2
            and len(forms) < _FORMS_TESTED
        ):
            return False
        return self.is_tested(event.name)

    def tested(self, event: Event, differ: bool) -> None:
        """Count a test of an operation's effect. differ: what others show did."""
        tally(self.effects, event.name, differ)
        if event.prose:
            tally(self.answered.setdefault(event.name, {}), self.answer_of(event)[1], differ)

    def answer_of(self, event: Event) -> tuple[str, str]:
        """Return the operation and, in prose, the form of its answer: the first words without the
        call's values."""
        if not event.prose:
            return event.name, ""
        given = {word for value in event.values for word in value.lower().split()}
        words = re.findall(r"[^\W\d]+", event.result.lower()[: 2 * _SHORT])
        return event.name, " ".join([word for word in words if word not in given][:_FORM])

    # --- values -----------------------------------------------------------------------------------

    def ids(self) -> set[str]:
        """Return the kinds of ids: accepted as arguments, and looking like ids (letters with
        digits, or named so)."""
        accepted = {
            kind for counts in self.kinds.values() for kind, (worked, _) in counts.items() if worked
        }
        return {kind for kind in accepted if _looks_like_id(kind)}

    def mask(self) -> set[str]:
        """Return the kinds of values that differ between two identical plays, such as the time."""
        return set(self.varies)

    def weights(
        self, place: str, hints: Collection[str] = (), about: str = ""
    ) -> Callable[[str], float]:
        """Return a function from a kind to how likely the argument accepts its values.

        Before it was tried, a kind is likely if the schema names it (`hints`), if a field of a JSON
        answer has the argument's name or is mentioned in its description (`about`), or if arguments
        of this name accept it elsewhere.
        """
        name, asked = _last(place), (place, frozenset(hints), about)
        if asked not in self._weights:
            counts, alike = self.kinds.get(place, {}), self.names.get(name, {})
            table = self._weights[asked] = {}
            unproven = not any(worked for worked, _ in counts.values())
            for kind in {*counts, *alike, *hints}:
                worked, tried = counts.get(kind, (0, 0))
                elsewhere, times = alike.get(kind, (0, 0))
                prior = max((elsewhere - worked) / (times - tried + 1), UNTRIED)
                table[kind] = (
                    worked + (1.0 if kind in hints else max(prior, _likely(kind, place, about)))
                ) / (tried + 1)
                if (
                    unproven and kind in hints
                ):  # refusals may have had other reasons: believe the schema
                    table[kind] = max(table[kind], 6 * UNTRIED)
        known = self._weights[asked]
        return lambda kind: known[kind] if kind in known else _likely(kind, place, about)

    def fits(
        self, place: str, hints: Collection[str] = (), about: str = ""
    ) -> Callable[[str], bool]:
        """Return a function that tells which kinds an argument accepts about as likely as the best
        one it was given."""
        weight = self.weights(place, hints, about)
        tried = self._weights[place, frozenset(hints), about]
        least = 0.3 * max((rate for kind, rate in tried.items() if kind != GUESSED), default=1.0)
        return lambda kind: weight(kind) >= least

    def says_nothing(self, event: Event) -> bool:
        """Return True if a reading operation gives this answer whatever it is asked, such as "no
        results"."""
        return self.answers.get(event.name, {}).get(event.result, 0) >= 3 and self.reads(event.name)

    def refuses(self, result: str) -> bool:
        """Return True if an answer in sentences means that the call was refused, although the world
        does not mark it.

        Such an answer is given to different calls whatever their values ("You can't see any such
        thing."), and has changed nothing where that was tested.
        """
        calls = self.texts.get(result)
        if calls is None or not (
            len(calls) > 2 or any(len(values) > 1 for values in calls.values())
        ):
            return False
        differ, tested = self.quiet.get(result, (0, 0))
        return differ <= tested / 3

    def is_tested_refusal(self, result: str) -> bool:
        return self.quiet.get(result, (0, 0))[1] >= 3

    def helpers(self, failure: str) -> set[str]:
        """Return the operations that mostly help against the same error of other operations.
        failure: "operation: signature", as in `enables`."""
        error = failure.partition(": ")[2]
        alike = [
            counts
            for key, counts in self.enables.items()
            if key != failure and key.partition(": ")[2] == error
        ]
        return {
            name
            for counts in alike
            for name, (helped, tried) in counts.items()
            if helped > max(1, tried / 2)
        }

    def is_practised(self, name: str) -> bool:
        """Return True if an operation has worked more than a few times."""
        outcomes = self.outcomes.get(name, {})
        return sum(outcomes.values()) - sum(_refusals(outcomes).values()) >= _FEW

    def _only_confirms(self, event: Event) -> bool:
        """Return True if an operation answers every call that it does not refuse alike, such as
        with "ok"."""
        outcomes = self.outcomes.get(event.name, {})
        refusals = _refusals(outcomes)
        alike = len(self.answers[event.name]) == 1 and len(outcomes) == len(refusals) + 1
        return alike and sum(refusals.values()) >= _CONTRAST

    # --- learning ---------------------------------------------------------------------------------

    def novelty(self, name: str, last: str) -> float:
        """Return the expected novelty of an operation after the operation `last`.

        Changes are worth most and refusals least. An operation after which nothing more can be
        done, such as a cancellation, is worth less, and so is one that often followed `last`.
        """
        outcomes = self.outcomes.get(name, {})
        times = sum(outcomes.values())
        over = outcomes.get("refused and over", 0)
        worth = {"changed": 2.0, "shown": 1.0, "refused": 0.3}
        gains = {
            signature: n**0.5 * worth[signature.split(" ", 1)[0]]
            for signature, n in outcomes.items()
        }
        refused = sum(_refusals(outcomes).values())
        # An operation is refused many times before its remedies are known, which says little about
        # it later.
        share = min(1.0, (2 * (times - refused) + _FEW) / max(refused, 1))
        bonus = sum(
            gain * (share if signature.startswith("refused") else 1)
            for signature, gain in gains.items()
        )
        tries = times - refused * (1 - share)
        blocked, later = self.blocks.get(name, (0, 0))
        again = (1 + 0.1 * self.after.get(last, {}).get(name, 0)) ** -0.5
        again *= (times - over + 0.2) / (times + 0.2)
        return (
            again
            * (bonus / max(tries, 1) + (1 + tries) ** -0.5)
            * (later - blocked + 1)
            / (later + 1)
        )

    def learn(self, event: Event, last: str, kinds_of: Callable[[str], Sequence[str]]) -> None:
        """Count an outcome. last: the operation before it. kinds_of: returns the kinds of a value,
        none for a guess."""
        self._learn_text(event)
        outcomes = self.outcomes.setdefault(event.name, {})
        outcomes[signature(event)] = outcomes.get(signature(event), 0) + 1
        after = self.after.setdefault(last, {})
        after[event.name] = after.get(event.name, 0) + 1
        answers = self.answers.setdefault(event.name, {})
        if (
            event.ok
            and event.arguments
            and len(event.result) <= 60
            and (event.result in answers or len(answers) < 200)
        ):
            answers[event.result] = answers.get(event.result, 0) + (
                not any(v in event.result for v in event.values)
            )
        worked = event.ok and (not self.says_nothing(event) or self._only_confirms(event))
        for place, value in places(event.name, event.arguments):
            for asked in [asked for asked in self._weights if _last(asked[0]) == _last(place)]:
                del self._weights[asked]
            for kind in kinds_of(value) or (GUESSED,):
                count(self.kinds, place, kind, worked)
                count(self.names, _last(place), kind, worked)
            if not any(c.isdigit() for c in value):
                count(self.values, place, value, worked)
        if worked and not event.prose:
            self.see(event.cells)

    def see(self, shown: Sequence[Cell]) -> None:
        """Remember the words of an answer, for arguments in other worlds."""
        for cell in shown:
            if not any(c.isdigit() for c in cell.value):
                for kind in cell.kinds:
                    shown = self.words.setdefault(kind, {})
                    if cell.value in shown or len(shown) < _WORDS_KEPT:
                        shown[cell.value] = shown.get(cell.value, 0) + 1

    def _learn_text(self, event: Event) -> None:
        if (
            not event.prose
            or len(event.result) > _SHORT
            or any(v.lower() in event.result.lower() for v in event.values)
        ):
            return
        if event.result in self.texts or len(self.texts) < _TEXTS_KEPT:
            values = self.texts.setdefault(event.result, {}).setdefault(event.name, [])
            if " / ".join(event.values) not in values and len(values) < 2:
                values.append(" / ".join(event.values))


def _refusals(outcomes: dict[str, int]) -> dict[str, int]:
    return {signature: n for signature, n in outcomes.items() if signature.startswith("refused")}


def _last(place: str) -> str:
    return place.rpartition(".")[2].lower()


@functools.lru_cache(100_000)
def _likely(kind: str, place: str, about: str) -> float:
    """Return how likely an argument accepts a kind that was never tried for it."""
    if kind.startswith(_ARTICLES):  # a phrase
        return 4 * UNTRIED
    shown, _, label = kind.lower().rpartition(".")
    if not shown:
        return UNTRIED
    if label == _last(
        place
    ):  # "spotify.play.token" rather takes a token of "spotify.login" than of "phone.login"
        elsewhere = (
            place.count(".") > 1
            and "." in shown.split()[0]
            and shown.split(".")[0] != place.split(".")[0]
        )
        return 0.3 if elsewhere else 1.0
    named = re.search(rf"\b{re.escape(label.replace('_', ' '))}\b", about.lower().replace("_", " "))
    return 0.5 if len(label) > 3 and named else UNTRIED


def places(name: str, arguments: Any) -> list[tuple[str, str]]:
    """Return (argument, value as text) of every value of a call; items of a list share one
    argument."""
    if isinstance(arguments, dict):
        return [pair for key, inner in arguments.items() for pair in places(f"{name}.{key}", inner)]
    if isinstance(arguments, list):
        return [pair for inner in arguments for pair in places(f"{name}.*", inner)]
    return [] if arguments is None or isinstance(arguments, bool) else [(name, str(arguments))]


def signature(event: Event) -> str:
    """Return the class of an outcome: a change, the error without its values, or the kinds that
    were shown."""
    if event.over:
        return "refused and over"
    if not event.ok:
        words = re.findall(r"[^\W\d]+", event.result.lower())
        given = {value.lower() for value in event.values}
        return " ".join(["refused", *(word for word in words[:14] if word not in given)])
    if event.changes:
        return "changed"
    shown = event.cells
    rows = len({cell.row for cell in shown})
    return " ".join(
        ["shown", str(min(rows, 3)), *sorted({cell.label or cell.kinds[0] for cell in shown[:8]})]
    )


def count(table: Table, place: str, key: str, ok: bool) -> None:
    """Count a trial of `key` at `place`, and if it worked."""
    tally(table.setdefault(place, {}), key, ok)


def tally(table: dict[str, list[int]], key: str, ok: bool) -> None:
    """Count a trial of `key`, and if it worked."""
    pair = table.setdefault(key, [0, 0])
    pair[0] += ok
    pair[1] += 1


def _looks_like_id(kind: str) -> bool:
    if " " in kind:  # a place in a JSON answer
        return bool(_ID.search(kind))
    return "@" not in kind and any(c.isdigit() for c in kind) and any(c.isalpha() for c in kind)
