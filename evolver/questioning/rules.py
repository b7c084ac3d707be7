"""Hidden rules: calls that a world refuses unless another call was made before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
        errors = errors_of(world, task, task.reference)
        rules = set()
        for left_out in range(len(names) - 1):
            actions = [*task.reference[:left_out], *task.reference[left_out + 1 :]]
            without = errors_of(world, task, actions)
            later = zip(names[left_out + 1 :], errors[left_out + 1 :], without[left_out:])
            rules |= {(names[left_out], name) for name, fine, now in later if now and not fine}
        found.update(rules)
    return found


def errors_of(world: World, task: Task, actions: Sequence[str]) -> list[int]:
    """Return the number of refused calls of each turn."""
    return [result.info.get("errors", 0) for result in replay(world, task, actions)[1]]
