"""Hidden rules: calls that a world refuses unless another call was made before."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from envs.world import Task, World
from evolver.replaying import calls_of, replay


def rules_of(world: World, tasks: Sequence[Task]) -> Counter[tuple[str, str]]:
    """Return {(first call, later call): solutions in which the later one is refused without the
    first}."""
    found: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        names = [call.name for call in calls_of(task)]
        if len(names) < 2 or len(names) < len(task.reference) - 1:
            continue  # several calls in a turn cannot be told apart here
        rules = refused_without(world, task, task.reference, range(len(names) - 1))
        # A closing turn, which has no name, is never refused.
        found.update({(names[first], names[later]) for first, later in rules if later < len(names)})
    return found


def refused_without(
    world: World, task: Task, actions: Sequence[str], left_out: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Yield (first, later), numbers of actions of which the later one is refused without the first.
    left_out: the actions that are tried as the first one."""
    errors = _errors(world, task, actions)
    for first in left_out:
        without = _errors(world, task, [*actions[:first], *actions[first + 1 :]])
        for later, (fine, now) in enumerate(zip(errors[first + 1 :], without[first:]), first + 1):
            if now and not fine:
                yield first, later


def _errors(world: World, task: Task, actions: Sequence[str]) -> list[int]:
    """Return the number of refused calls of each turn."""
    return [result.info.get("errors", 0) for result in replay(world, task, actions)[1]]
