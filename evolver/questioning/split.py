"""The split of invented tasks into those that are trained on and those that are held out."""

import random
from collections import Counter
from collections.abc import Sequence

from envs.world import Task
from rl.seeds import seed_of


def split(tasks: Sequence[Task], share: float, seed: int) -> tuple[list[Task], list[Task]]:
    """Return (training tasks, held-out tasks).

    A task is held out if its start is, or its combination of goals. What one goal alone asks for is
    always trained on, and so is a combination of very many tasks: it would be most of what is
    evaluated, and most of what training is without. With a single start and too few combinations,
    whole goals are held out: what the verifier demands, never the words alone. share: of the starts
    and of the combinations, each of at most half as large a share of the tasks.
    """
    rng = random.Random(seed_of(seed, "held out"))
    held = set[str]()  # ids of tasks
    for group in (start_of, combination_of):
        sizes = Counter(map(group, tasks))
        names = sorted(sizes.keys() - {""})
        if len(names) > 2:
            fit = [name for name in names if sizes[name] <= share / 2 * len(tasks)]
            fit = fit or [min(names, key=lambda name: sizes[name])]
            chosen = rng.sample(fit, min(len(fit), max(1, round(share * len(names)))))
            held.update(task.id for task in tasks if group(task) in chosen)
    out = [task for task in tasks if task.id in held]
    if not 2 <= len(out) <= 0.7 * len(tasks):
        out = rng.sample(list(tasks), max(2, round(share * len(tasks))))
        held = {task.id for task in out}
    return [task for task in tasks if task.id not in held], out


def start_of(task: Task) -> str:
    """Return the original task in whose world a task starts, and its seed."""
    return f"{task.meta.get('source', '')} {task.seed}"


def combination_of(task: Task) -> str:
    """Return the combination of goals of a task, "" for a single goal."""
    name = str(task.meta.get("template", ""))
    return name if "+" in name else ""
