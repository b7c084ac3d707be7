"""Verified tasks from actions that were played, whoever played them: an explorer, the policy, a
person."""

import random
from collections.abc import Sequence
from itertools import chain

from envs.world import Task, World
from evolver.questioning.calls import Event, calls_of
from evolver.questioning.goals import Writer, goals_of
from evolver.questioning.kinds import start_state
from evolver.questioning.start_state import StartState
from evolver.questioning.tasks import Rejected, probe_of
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Walker

_GOALS = 2  # most changes that a task asks for
_MOST = 8  # calls of its solution
_TRIES = 6  # goals that are written, at most, until one gives a task


def replayer() -> Walker:
    """Return a walker that repeats calls and explores nothing. It learns how the world works from
    what it repeats, so keep it for the next actions in the same world."""
    return Walker(breadth=0, depth=0, branches=1)


def verified_task(
    world: World,
    task: Task,
    actions: Sequence[str],
    rng: random.Random,
    *,
    walker: Walker | None = None,
) -> Task:
    """Return a task that asks for what some actions changed or found out, in the world where `task`
    starts, with its shortest solution and a verifier.

    The actions are assistant turns, as a rollout records them. Of all that they did, the task asks
    for as much as can be verified. It went through the tests of the explorer's own tasks
    (evolver/questioning/goals.py): the solution passes, and fails without any of its calls.

    Args:
      world: probed (`envs.probed`), and used by nothing else meanwhile.
      task: the original task that starts there; what it asks for does not matter.
      walker: see `replayer`; None = a new one.

    Raises Rejected, with the reason, if nothing that the actions did can be asked for.
    """
    walker = walker or replayer()
    start = start_state(probe_of(task), world, walker.stats, rng, SeenValues())
    events = list(chain.from_iterable(repeated(start, actions, walker)))
    found = goals_of(events, start, most=_GOALS)
    found.sort(key=lambda goal: -len(goal.needed))
    writer = Writer(start, least=1, most=_MOST)
    reason = Rejected("nothing to check")
    for goal in found[:_TRIES]:
        try:
            return writer.write(goal, common={})
        except Rejected as error:
            reason = error
    raise reason


def repeated(start: StartState, actions: Sequence[str], walker: Walker) -> list[list[Event]]:
    """Return the calls of each action after repeating them all from a start and finding out what
    they change. Fewer, if the episode ends before."""
    made = [calls_of(action, start.operations) for action in actions]
    calls = list(chain.from_iterable(made))
    rng = start.rng
    (events,) = walker.walks(start.world, start.task, rng, start.seen, calls, start.operations)
    start.learn_roles(events)
    start.extend(events)
    rest = iter(events)
    return [[event for _, event in zip(calls, rest)] for calls in made]
