"""Playing episodes of the worlds of tools in tests."""

import random

from envs.desk.plans import LEVELS, WORLDS, Unfit
from envs.toolcalls import parse
from envs.travel import Travel, plain


def play(world, task, actions):
    """Return the evaluation after the actions, or those that end the episode."""
    world.reset(task)
    for action in actions:
        if world.step(action).terminated:
            break
    return world.evaluate()


def without(actions, n):
    """Return the actions but the one numbered n."""
    return [*actions[:n], *actions[n + 1 :]]


def calls_of(task):
    return [call for action in task.reference for call in parse(action).calls]


def plain_plans(world, n):
    """Yield plans of a desk world with plain queries."""
    rng = random.Random(2)
    while n:
        level = rng.choice(LEVELS)
        try:
            if world is Travel:
                yield plain.plan(rng.randrange(WORLDS), rng, rng.choice(plain.templates(level)))
            else:
                template = rng.choice(world.desk.planner.templates(level, plain=True))
                yield world.desk.planner.any_plan("train", rng, template, plain=True)
            n -= 1
        except Unfit:
            continue
