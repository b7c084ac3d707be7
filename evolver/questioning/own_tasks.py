"""The world's own training tasks as far as walks happen to solve them: what remains to train on
where an explorer can invent nothing that has words, as in a game.

This uses the scores that the world gives to its own training tasks, which inventing tasks does not.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from envs.world import Task, World
from evolver.questioning.goals import minimise
from evolver.questioning.tasks import CLOSING, infeasibility, synthetic_task
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Walker

_BREADTH, _DEPTH, _BRANCHES = 6, 18, 2  # of a walk
_PASSES = 32  # over the tasks that are not solved yet
_SCORED = {"own": True}  # the verifier of a task that the world scores without one


def solved_by_walks(world: World, tasks: Sequence[Task], rng: random.Random) -> Iterator[Task]:
    """Yield those of the world's own tasks that a walk solves, as synthetic tasks whose references
    are the fewest of the walk's calls that still solve them."""
    walker = Walker(breadth=_BREADTH, depth=_DEPTH, branches=_BRANCHES)
    left = list(tasks)
    for _ in range(_PASSES):
        for task in list(left):
            found = _solved(world, walker, task, rng)
            if found is not None:
                left.remove(task)
                yield found


def _solved(world: World, walker: Walker, task: Task, rng: random.Random) -> Task | None:
    """Return a task with a reference if one of a few walks solves it."""
    own = synthetic_task(
        task, task.query, identity="own", meta=task.meta, verifier=task.verifier or _SCORED
    )
    for walk in walker.walks(world, own, rng, SeenValues()):
        actions = [event.action for event in walk]
        if not walk[-1].over:
            actions.append(CLOSING)
        solution = replace(own, reference=actions, difficulty=len(actions))
        if not infeasibility(world, solution):
            return _shortened(world, solution)
    return None


def _shortened(world: World, task: Task) -> Task:
    """Return a task with the fewest actions of its reference that still solve it."""

    def reduced(kept: Sequence[int]) -> Task:
        actions = [task.reference[n] for n in kept]
        return replace(task, reference=actions, difficulty=len(actions))

    def holds(kept: Sequence[int]) -> bool:
        return not infeasibility(world, reduced(kept))

    return reduced(minimise(list(range(task.difficulty)), set(), holds, key=lambda n: n))
