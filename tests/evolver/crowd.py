"""Worlds with very many tools, of which most say nothing."""

from dataclasses import replace

from envs.bfcl import Bfcl
from envs.bfcl.data import docs_of
from envs.toolcalls import parse, run_calls
from envs.world import Proxy, StepResult, tool_of

ANSWERS = {
    "echo": lambda name, given: (f"{name} of {given.get('key', '')}: nothing", True),
    "record": lambda name, given: (f'{{"key": "{given.get("key", "")}", "found": 0}}', True),
    "constant": lambda name, given: ("nothing", True),
    "refuse": lambda name, given: ("error: no such key", False),
}


class Crowded(Proxy):
    """A world with extra tools whose answers depend on nothing in it."""

    def __init__(self, world, answer, extra):
        self.world = world
        self.name = world.name
        self.answer = answer
        names = [f"{'abcdefghij'[n % 10] * 3}_{n}" for n in range(extra)]
        self.extra = [
            tool_of(name, f"Report {name}.", {"key": {"type": "string"}}, ["key"]) for name in names
        ]

    def _playing(self):
        return self.world

    def reset(self, task, seed=0):
        seen = self.world.reset(task, seed)
        return replace(seen, tools=[*self.extra, *seen.tools])

    def step(self, action):
        turn = parse(action)
        if turn.calls and turn.calls[0].name in [tool["function"]["name"] for tool in self.extra]:
            messages, info = run_calls(turn, self.answer, 1)
            return StepResult(messages, info=info)
        return self.world.step(action)


class Huge(Bfcl):
    """BFCL in which every conversation offers the functions of all API classes, and 500 tools that
    answer "nothing"."""

    def __init__(self):
        super().__init__()
        names = self._classes()
        docs = [doc for name in names for doc in docs_of(name)]
        changed = {"classes": names, "docs": docs}
        self._entries = {id: replace(entry, **changed) for id, entry in self._entries.items()}
        self._crowd = Crowded(super(), ANSWERS["constant"], 500)

    def reset(self, task, seed=0):
        return self._crowd.reset(task, seed)

    def step(self, action):
        return self._crowd.step(action)
