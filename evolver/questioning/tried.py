"""Solutions in the order in which an agent without foreknowledge finds them.

The explorer's solutions are as short as possible and in the order of its walk: what a later call
will be refused without comes early, for no reason that anything shown gives. A policy that imitates
them learns to guess. Here the look-ups that the goals need come first, then one goal follows the
other, and a call that will be refused is made, so that its error is the reason for the remedy.
"""

from dataclasses import dataclass
from functools import cached_property

from envs.toolcalls import parse
from envs.world import Task, World, text_of
from evolver.questioning.rules import refused_without
from evolver.replaying import opening_words, play, replay, values_needed
from evolver.transcripts import words

TRIED = "tried"  # key of `Task.meta`: the solution in this order


def solution_of(task: Task) -> list[str]:
    """Return the actions that are imitated."""
    return list(task.meta.get(TRIED, task.reference))


def as_tried(world: World, task: Task) -> list[str]:
    """Return the actions of a task's solution as they are tried, or the solution itself where its
    turns are not one call each, or where the other order does not solve the task."""
    solution = task.reference
    if "prerequisites" not in task.meta:  # not of the explorer
        return solution
    if not task.meta["prerequisites"] and len(solution) < 4:  # one goal, without detours
        return solution
    if [len(parse(action).calls) for action in solution] != [1] * (len(solution) - 1) + [0]:
        return solution
    tried = _Order(world, task).actions()
    if tried is None or not play(world, task, task.seed, tried)["success"]:
        return solution
    return tried


@dataclass(frozen=True)
class _Played:
    """The beginning of an episode: its actions, and which calls of the solution it has made."""

    actions: tuple[str, ...] = ()
    calls: frozenset[int] = frozenset()


class _Order:
    """The calls of one solution, by number, and what each of them needs.

    Look-ups just before the call that uses them would be as natural. But then few solutions have
    one between two goals, and there a small policy mixes the goals up (docs/results.md).
    """

    def __init__(self, world: World, task: Task):
        self.world = world
        self.task = task
        *self.calls, self.closing = task.reference

    def actions(self) -> list[str] | None:
        """Return the actions of the solution as they are tried, None if no order is found."""
        needed = set[int]().union(*self.shown_by, *self.refused_without)
        goals = [call for call in range(len(self.calls)) if call not in needed]
        played: _Played | None = _Played()
        for call in [*self.look_ups(goals), *goals]:
            if played is not None and call not in played.calls:
                played = self.made(call, played)
        return [*played.actions, self.closing] if played else None

    def look_ups(self, goals: list[int]) -> list[int]:
        """Return the calls that show what the goals use, in order, without those of remedies."""
        found = set[int]()
        calls = list(goals)
        while calls:
            new = self.shown_by[calls.pop()] - found
            found |= new
            calls += new
        return sorted(found)

    def made(self, call: int, played: _Played) -> _Played | None:
        """Return the episode after a call and what it needs, None if nothing remedies a refusal."""
        for look_up in sorted(self.shown_by[call] - played.calls):
            found = self.made(look_up, played)
            if found is None:
                return None
            played = found
        while said := self.answer(call, played):
            refused = _Played((*played.actions, self.calls[call]), played.calls)
            remedies = sorted(self.refused_without[call] - played.calls)
            after = (self.made(remedy, refused) for remedy in remedies)
            found = next((now for now in after if now and self.answer(call, now) != said), None)
            if found is None:
                return None
            played = found
        return _Played((*played.actions, self.calls[call]), played.calls | {call})

    def answer(self, call: int, played: _Played) -> str:
        """Return the text of the refusal with which a call is answered, "" if it is not refused."""
        actions = [*played.actions, self.calls[call]]
        results = replay(self.world, self.task, actions)[1]
        if len(results) < len(actions):
            return "the episode has ended"
        refused = results[-1].info.get("errors", 0)
        return (text_of(results[-1].messages) or "refused") if refused else ""

    @cached_property
    def shown_by(self) -> list[set[int]]:
        """The calls whose answers were the first to show a value that each call uses."""
        opening, results = replay(self.world, self.task, self.calls)
        texts = [words(text_of(result.messages)) for result in results]
        needed = values_needed(self.calls[: len(texts)], texts, opening_words(opening))
        first = [set[int]() for _ in self.calls]
        for call, values in enumerate(needed):
            for value in values:
                first[call].update([i for i, text in enumerate(texts) if value in text][:1])
        return first

    @cached_property
    def refused_without(self) -> list[set[int]]:
        """The calls that the query does not name and without which each call is refused."""
        unnamed = self.task.meta["prerequisites"]
        names = [parse(action).calls[0].name for action in self.calls]
        chosen = [call for call, name in enumerate(names) if name in unnamed]
        without = [set[int]() for _ in self.calls]
        for call, later in refused_without(self.world, self.task, self.calls, chosen):
            without[later].add(call)
        return without
