"""Explorers at work: pools that they fill, and the scripts of those that are language models."""

from envs.probed import probed
from evolver.parts import Parts
from evolver.questioning import TaskPool
from tests.evolver.chat_server import answer, said
from tests.evolver.toy import BLUE, GREEN, LEND_15, MARK_11, RED, attempt, call


class Questioning:
    """A pool of tasks that an explorer fills from a world."""

    def __init__(self, kind, make_world, seeds, client=None, *, capacity=512, **options):
        self.make_world, self.pool = make_world, TaskPool(seeds, overlap=0.8, capacity=capacity)
        parts = Parts(make_world=make_world, client=client, task_pool=self.pool)
        self.explorer = kind(parts, **options)

    def explore(self, seed, budget):
        found = self.pool.grow(self.explorer, self.make_world, budget, seed)
        self.pool.shrink()
        return found


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
