"""Explorers at work: pools that they fill, and the scripts of those that are language models."""

from types import SimpleNamespace
from unittest import mock

from configs import base
from envs.probed import probed
from evolver.parts import Parts
from evolver.processes.interrupt import Stop
from evolver.questioning import TaskPool, probe_of, synthetic_task
from evolver.questioning.calls import Event
from evolver.questioning.curiosity import Curiosity
from tests.evolver.chat_server import answer, said
from tests.evolver.toy import (
    BLUE,
    BOOKS,
    GREEN,
    LEND,
    LEND_15,
    MARK_11,
    RED,
    Library,
    attempt,
    call,
)


class Questioning:
    """A pool of tasks that an explorer fills from a world."""

    def __init__(
        self, kind, make_world, seeds, client=None, *, overlap=0.8, capacity=512, **options
    ):
        self.make_world = make_world
        self.pool = TaskPool(seeds, overlap=overlap, capacity=capacity)
        parts = Parts(make_world=make_world, client=client, task_pool=self.pool)
        self.explorer = kind(parts, **options)

    def explore(self, seed, budget):
        found = self.pool.grow(self.explorer, self.make_world, budget, seed)
        self.pool.shrink()
        return found


def curious(make_world, seeds=None, **options):
    """Return a pool that the curiosity explorer fills. seeds: None = the world's training tasks."""
    seeds = make_world().tasks("train") if seeds is None else seeds
    return Questioning(Curiosity, make_world, seeds, **options)


def run_of(pool, explorer=None, *, words=None, make_world=Library, stop=None, **questioning):
    """Return what exploring needs of a run. questioning: keys of its config."""
    config = base.get_config()
    config.questioning.update(questioning)
    return SimpleNamespace(
        config=config,
        tasks=SimpleNamespace(pool=pool, explorer=explorer, words=words),
        make_world=make_world,
        progress=mock.Mock(),
        on_first=lambda part, work: work(),
        stop=stop or Stop(),
    )


def learnt(stats, name, arguments, answer, *, ok=True, kinds=()):
    """Teach the statistics one call whose values are of these kinds, and return it."""
    event = Event(name, arguments, "", answer, ok=ok)
    stats.learn(event, "", lambda value: kinds)
    return event


def proposal(query, *steps, answer="", confidence=0.9):
    return {"query": query, "steps": list(steps), "answer": answer, "confidence": confidence}


def walking(actions, *proposals):
    """A script whose explorer takes these actions, and whose writer has these ideas."""

    def script(body, n):
        if "THE RECORD" in body["messages"][-1]["content"]:
            return answer({"tasks": proposals})
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return said(f"Let me see.\n{actions[turn]}" if turn < len(actions) else "done")

    return script


def library_script(*proposals):
    """An explorer that looks at shelves, lends and marks, and a writer with fixed ideas."""
    return walking([RED, BLUE, GREEN, LEND_15, MARK_11, call("mark", "B99")], *proposals)


def solves(world, task, actions):
    """Return True if the actions solve a task that is checked by what the world shows."""
    return attempt(probed(world), task, actions).evaluation.success


def needs(name, world, task):
    """Return True if the solution of a task solves it, and does not without the calls of a tool."""
    without = [action for action in task.reference if f'"{name}"' not in action]
    return solves(world, task, task.reference) and not solves(world, task, without)


class Proposing:
    """An explorer that proposes given tasks."""

    def __init__(self, *tasks):
        self.tasks = tasks

    def explore(self, world, seeds, budget, rng):
        yield from self.tasks


class RandomWalk:
    """An explorer that calls random tools with known values; what a walk changed becomes a task."""

    def explore(self, world, seeds, budget, rng):
        for _ in range(20 * budget):
            start = rng.choice(seeds)
            actions = []
            world.reset(probe_of(start), start.seed)
            for _ in range(6):
                tool = rng.choice(["shelf", "lend", "mark"])
                values = ["red", "blue", "green"] if tool == "shelf" else sorted(BOOKS)
                action = call(tool, rng.choice(values))
                if not world.step(action).info["errors"]:
                    actions.append(action)
            if rows := world.difference():
                wanted = ", ".join(f"set {key} of {BOOKS[id][0]}" for _, id, key, *_ in rows)
                yield synthetic_task(
                    start,
                    f"Please {wanted}.",
                    identity=rows,
                    reference=[*actions, "done"],
                    verifier={"state": rows, "answer": None},
                    difficulty=len(actions),
                )


def pool_of(*tasks, seeds=(LEND,), overlap=0.99, capacity=100):
    return TaskPool(seeds, overlap=overlap, capacity=capacity, tasks=tasks)
