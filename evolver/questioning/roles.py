"""The evidence of all walks on one operation of a world: if it changes what others show, if it
shows something itself, and how new another call of it would be."""

import math
from dataclasses import dataclass, field

from envs.probed import Cell

Rate = list[int]  # [times that it was so, trials]

# Of so many tests one may show a change that an earlier call made, so one change in them is none.
TESTS_PER_CHANGE = 3
_CLEAR_TESTS = 4  # tests of an effect with one result, after which a role is clear
CLEAR_SOON = 2  # the same, where a test takes a whole episode
_ENOUGH_TESTS = 10  # after which a role counts as clear whatever the results are
_ECHO_TESTS = 20  # the same of an operation that repeats its arguments, without any effect so far
_ENOUGH_REPETITIONS = 20  # the same for repetitions at once
COMPARISONS = 3  # calls at two starts, by which it is clear that an operation ignores the state
BLANK = "\0"  # in place of an argument that an answer repeats
_PRACTISED = 10  # an operation that has worked as often is well known
_CONTRAST = 3  # refusals, without which a uniform answer does not show that a call was accepted

# --- novelty ---

_WORTH = {"changed": 2.0, "shown": 1.0, "refused": 0.3}  # of an outcome that was not seen before
_REPETITIVE = 0.1  # loss of interest in an operation each time that it follows the same other one
_SURVIVAL = 0.2  # trials by which an operation is believed not to end the episode


def record(rate: Rate, so: bool) -> None:
    """Count a trial."""
    rate[0] += so
    rate[1] += 1


def tally(table: dict[str, Rate], key: str, so: bool) -> None:
    """Count a trial of `key`."""
    record(table.setdefault(key, [0, 0]), so)


def count(table: dict[str, int], key: str, times: int = 1, *, most: float = math.inf) -> None:
    """Add to the count of `key`, unless it is a new one in a table of `most` keys."""
    if key in table or len(table) < most:
        table[key] = table.get(key, 0) + times


def _no_rate() -> Rate:
    return [0, 0]


@dataclass
class Role:
    """The evidence on one operation, and what follows from it."""

    outcomes: dict[str, int] = field(default_factory=dict)  # signature of an outcome -> times
    followed: dict[str, int] = field(default_factory=dict)  # the next operation -> times
    answers: dict[str, int] = field(default_factory=dict)  # short answer -> times, without values
    # short answer -> the arguments of all calls that got it, None = they differ
    askers: dict[str, str | None] = field(default_factory=dict)
    repeated: Rate = field(default_factory=_no_rate)  # at once: the same answer
    effects: Rate = field(default_factory=_no_rate)  # made between two readings: they differ
    effects_by_form: dict[str, Rate] = field(default_factory=dict)  # the same per form of answers
    compared: Rate = field(default_factory=_no_rate)  # the same call at two starts: answers differ
    blocked: Rate = field(default_factory=_no_rate)  # later call with a value it changed: refused
    # label of a cell -> its value in all answers so far, "" = one of the arguments, None = several
    told: dict[str, str | None] = field(default_factory=dict)
    # the texts, with blanks for its arguments, that all answers so far have; None = no answer yet
    forms: list[str] | None = None
    tested: list[str] = field(default_factory=list)  # starts and arguments of tests of an echo
    changes_shown: int = 0  # by its answers
    visits: int = 0  # that attended to it, of a world with very many tools
    witnesses: list[str] | None = None  # operations that have shown its changes; None = not sought

    @property
    def changes(self) -> bool:
        """True if the operation changes what others show.

        Once may be the effect of an operation that was not yet known to change something, hence
        twice, but for one that shows nothing itself: it sets what mostly is set already.
        """
        differ, tested = self.effects
        same, repeated = self.repeated
        return (
            differ >= (1 if self.is_echo else 2)
            or differ > tested / TESTS_PER_CHANGE
            or same < repeated / 2
        )

    @property
    def reads(self) -> bool:
        """True if the operation shows something and changes nothing, as far as was tested."""
        return self.repeated[1] > 0 and not self.changes

    @property
    def blind(self) -> bool:
        """True if the operation answers by its arguments alone, whatever the state of the world is.

        It computes something, or it repeats what it was told while it changes a state that nothing
        shows. Both look like readers, but no verifier can tell that they were called.
        """
        differ, compared = self.compared
        return not self.changes_shown and not differ and compared >= COMPARISONS

    @property
    def repeatable(self) -> bool:
        """True if repeating the operation at once gives the same answer: a change would show
        elsewhere only."""
        same, repeated = self.repeated
        return repeated > 0 and same >= repeated / 2

    def is_clear(self, tests: int = _CLEAR_TESTS) -> bool:
        """Return True if the role is clear from `tests` tests, or was tested often enough."""
        differ, tested = self.effects
        same, repeated = self.repeated
        # "Done" is said of changes, which may need a condition, and an echo of what was asked for,
        # too: to set the light to what it is changes nothing.
        if not differ and self.is_echo and self.repeatable:
            return tested >= _ECHO_TESTS
        if not differ and (self.is_uniform or self.blind):
            tests = _ENOUGH_TESTS
        return (
            (tested >= tests and differ != 1)
            or tested >= _ENOUGH_TESTS
            or (repeated >= tests and same < repeated / 2)
            or repeated >= _ENOUGH_REPETITIONS
        )

    @property
    def calls(self) -> int:
        """The number of calls."""
        return sum(self.outcomes.values())

    @property
    def refusals(self) -> int:
        """The number of refused calls."""
        return sum(n for outcome, n in self.outcomes.items() if outcome.startswith("refused"))

    @property
    def practised(self) -> bool:
        """True if the operation has worked more than a few times."""
        return self.calls - self.refusals >= _PRACTISED

    @property
    def hopeless(self) -> bool:
        """True if every call so far, and more than a few, was refused."""
        return _CONTRAST <= self.refusals == self.calls

    @property
    def is_uniform(self) -> bool:
        """True if the operation answers every call that it does not refuse alike."""
        accepted = [name for name in self.outcomes if not name.startswith("refused")]
        return len(self.answers) == len(accepted) == 1

    @property
    def is_echo(self) -> bool:
        """True if its answers repeat what it was given, and what else they show is always the
        same."""
        return "" in self.told.values() and None not in self.told.values()

    def always_tells(self, cell: Cell) -> bool:
        """Return True if every answer so far, of more than a few, had this value there."""
        return self.practised and self.told.get(cell.label) == cell.value

    @property
    def is_monotonous(self) -> bool:
        """True if its answers are one text but for the arguments in it, and nothing was refused."""
        return bool(self.forms) and not self.refusals

    @property
    def repeats(self) -> bool:
        """True if its answers are one text with its arguments in it, and nothing was refused: it
        confirms nothing that it is given."""
        return self.is_monotonous and all(BLANK in form for form in self.forms or ())

    @property
    def vain(self) -> bool:
        """True if nothing that it has answered depends on the world."""
        same = self.is_monotonous and self.calls >= _CLEAR_TESTS
        return not self.changes and (same or self.blind or self.hopeless)

    @property
    def kind(self) -> str:
        """The verb phrase for a message about operations like this one."""
        if self.changes:
            return "change something"
        if self.refusals == self.calls:
            return "were always refused"
        return "answer by their arguments alone" if self.vain else "show something"

    @property
    def only_confirms(self) -> bool:
        """True if the operation says no more than "ok", as far as its refusals show."""
        return self.is_uniform and self.refusals >= _CONTRAST

    def novelty(self, followed: int) -> float:
        """Return the expected novelty of another call. followed: how often the operation has
        followed the last one.

        Changes are worth most and refusals least. An operation after which nothing more can be
        done, such as a cancellation, is worth less.
        """
        calls = self.calls
        refused = self.refusals
        # An operation is refused many times before its remedies are known, which says little about
        # it later.
        share = min(1.0, (2 * (calls - refused) + _PRACTISED) / max(refused, 1))
        gain = 0.0
        for outcome, times in self.outcomes.items():
            worth = _WORTH[outcome.partition(" ")[0]]
            gain += times**0.5 * worth * (share if outcome.startswith("refused") else 1)
        tries = calls - refused * (1 - share)
        interest = (1 + _REPETITIVE * followed) ** -0.5
        ended = self.outcomes.get("refused and over", 0)
        interest *= (calls - ended + _SURVIVAL) / (calls + _SURVIVAL)
        blocked, later = self.blocked
        novelty = gain / max(tries, 1) + (1 + tries) ** -0.5
        return interest * novelty * (later - blocked + 1) / (later + 1)
