"""How the tests of this folder play a world."""

import itertools
import random

from envs import conformance
from envs.desk.plans import LEVELS, WORLDS, Unfit
from envs.toolcalls import Call, call_text, parse
from envs.travel import Travel, plain
from envs.world import Observation, World, text_of


def assert_conforms(make_world, **options):
    """Assert that the worlds pass every check of the contract."""
    names, problems = conformance.run(make_world, **options)
    assert not problems, "\n".join(map(str, problems))
    assert len(names) == len(conformance.CHECKS)


def begin(world: World, number: int = 0, split: str = "train", seed: int = 0) -> Observation:
    """Start the episode of a task of the world."""
    return world.reset(world.tasks(split)[number], seed)


def told(world: World, action: str) -> str:
    """Return the text that answers an action."""
    return text_of(world.step(action).messages)


def used(world: World, tool: str, **arguments) -> str:
    """Return the text that answers a call."""
    return told(world, call_text(tool, arguments))


def take_all(world: World, actions) -> list[str]:
    """Return the texts that answer some actions."""
    return [told(world, action) for action in actions]


def solve(world: World) -> float:
    """Return the score of the reference of the first task."""
    begin(world)
    take_all(world, world.tasks("train")[0].reference)
    return world.evaluate().score


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


def calls_in(turns) -> list[Call]:
    return list(itertools.chain(*(parse(turn).calls for turn in turns)))


def calls_of(task) -> list[Call]:
    return calls_in(task.reference)


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
