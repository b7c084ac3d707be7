"""Numbers of evaluations, checkpoints, episodes and tasks of a run."""

import math
from typing import Any

EPISODE = 1 / 3  # assumed mean length of an episode, as a share of rollout.context


def checkpoints(config: Any) -> int:
    """Return the number of checkpoints that are written, with that of step 0."""
    return 1 + math.ceil(config.steps / config.checkpoint.every)


def evaluations(config: Any) -> int:
    """Return how often the held-out tasks are evaluated: at step 0, and after the last step."""
    every = config.eval.every
    return 1 + math.ceil(config.steps / every) if every else 0


def evaluated_tasks(config: Any, held_out: int) -> int:
    """Return the number of tasks of an evaluation, 0 = unknown. held_out: the number of those that
    the config selects, 0 = unknown."""
    wanted = 0 if config.eval.worlds else config.eval.tasks
    return min(wanted or held_out, held_out or wanted)


def evaluated_episodes(config: Any, held_out: int) -> int:
    """Return the number of episodes of all evaluations; that of step 0 sweeps
    `eval.temperatures`."""
    c = config.eval
    rounds = evaluations(config)
    others = [t for t in c.temperatures if t != c.temperature] if rounds else []
    of_a_task = rounds * (c.rollouts + c.greedy) + len(others) * c.rollouts
    return evaluated_tasks(config, held_out) * of_a_task


def first_tasks(config: Any, originals: int) -> float:
    """Return the most tasks that are attempted for the first pool of experience, inf = unknown.
    originals: the number of original tasks, 0 = unknown."""
    q = config.questioning
    n = config.navigating
    if not n.enabled or not n.rollouts or n.pool:
        return 0
    share = q.share if q.enabled else 0.0
    unknown = (share < 1 and not originals) or (share > 0 and q.tasks)
    if n.tasks or unknown:
        return n.tasks or math.inf
    invented = min(q.budget, q.capacity) if share > 0 else 0
    return (originals if share < 1 else 0) + invented
