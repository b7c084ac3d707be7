"""Worlds that break the World contract, each in one way, for the checks that find them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

from envs.toolcalls import call_text, parse
from envs.world import Evaluation, Observation, StepResult, Task, World, message, tool_of

FIELDS = {"key": {"type": "string"}, "value": {"type": "number"}}
PUT = tool_of("put", "Put a value.", FIELDS, ["key", "value"])


class Store(World):
    """A correct world: numbers are put under keys, and a turn without a call ends the episode."""

    name = "store"
    keys = ("a", "b", "c")

    def tasks(self, split: str) -> list[Task]:
        numbers = {"train": range(3), "dev": range(3, 6)}
        if split not in numbers:
            raise ValueError(f"store has no split {split}; it has train and dev")
        return [self._task(split, n) for n in numbers[split]]

    def _task(self, split: str, n: int) -> Task:
        key = self.keys[n % 3]
        goal = {"key": key, "value": n}
        solution = [call_text("put", goal), "Done."]
        query = f"Put {n} under {key}."
        return Task(f"{split}-{n}", self.name, query, split, reference=solution, verifier=goal)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self.goal, self.state = task.verifier, {}
        return Observation([message("user", task.query)], [PUT])

    def step(self, action: str) -> StepResult:
        turn = parse(action)
        texts = [
            self.put(call.arguments) if call.name == "put" else "no such tool"
            for call in turn.calls
        ] + turn.errors
        return StepResult([message("tool", text) for text in texts], terminated=not texts)

    def put(self, arguments: dict[str, Any]) -> str:
        key, value = arguments.get("key"), arguments.get("value")
        known = isinstance(key, str) and key in self.keys
        if not known or isinstance(value, bool | list | dict | str | None):
            return f"error: put a number under one of {', '.join(self.keys)}"
        self.state[key] = value
        return f"{key} = {value}"

    def evaluate(self) -> Evaluation:
        done = self.state.get(self.goal["key"]) == self.goal["value"]
        return Evaluation(float(done), done)


# ----------------------------------------------------------------------------------------- state and processes


class SharedState(Store):
    """Keeps its state in the class."""

    shared: dict[str, float] = {}

    def reset(self, task, seed=0):
        observation = super().reset(task, seed)
        self.state = SharedState.shared
        self.state.clear()
        return observation


class SharedGoal(Store):
    """Keeps its goal in the class, which only another task shows."""

    def reset(self, task, seed=0):
        observation = super().reset(task, seed)
        type(self).goal = self.__dict__.pop("goal")
        return observation


class SharedLog(Store):
    """Appends to a list of the class, and shows its length."""

    log: list[str] = []

    def put(self, arguments):
        self.log.append("put")
        return f"{super().put(arguments)} ({len(self.log)})"

    def reset(self, task, seed=0):
        self.log.clear()
        return super().reset(task, seed)


class HashOrder(Store):
    """Shows a set in its order."""

    def reset(self, task, seed=0):
        super().reset(task, seed)
        words = {f"word{i}" for i in range(20)}
        return Observation([message("user", f"{task.query} {' '.join(words)}")], [PUT])


class HashTasks(Store):
    """Numbers its tasks by hash."""

    def _task(self, split, n):
        return dataclasses.replace(super()._task(split, n), seed=hash(f"{split}-{n}") % 1000)


class ProcessStart(Store):
    """Shows when its process has started."""

    started = time.time_ns()

    def put(self, arguments):
        return f"{super().put(arguments)} at {self.started}"


# --------------------------------------------------------------------------------- odd arguments of its own tools


class KeyErrorOnMissing(Store):
    def put(self, arguments):
        return super().put({"key": arguments["key"], "value": arguments["value"]})


class Unhashable(Store):
    def put(self, arguments):
        if arguments.get("key") not in {"a": 1, "b": 1, "c": 1}:
            return "error: no such key"
        return super().put(arguments)


class Overflow(Store):
    """Reads calls by itself, and computes with whatever number it finds."""

    def step(self, action):
        body = action.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        try:
            call = json.loads(body)
            arguments = call["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return super().step(action)
        if isinstance(arguments, dict) and type(arguments.get("value")) is int:
            float(arguments["value"])
        return super().step(action)


class TypeErrorOnNone(Store):
    def put(self, arguments):
        key = arguments.get("key", "")
        return super().put({**arguments, "key": str(key) + key[:0]})


class UnexpectedArgument(Store):
    def put(self, arguments):
        return self._put(**arguments) if {"key", "value"} <= set(arguments) else "error: missing"

    def _put(self, key, value):
        return super().put({"key": key, "value": value})


class AnswersNothing(Store):
    """Returns None for an odd argument."""

    def step(self, action):
        calls = parse(action).calls
        if calls and calls[0].arguments.get("key") == []:
            return None
        return super().step(action)


# -------------------------------------------------------------------------------------- ends of the process, hangs


class SysExit(Store):
    end = staticmethod(sys.exit)

    def put(self, arguments):
        return self.end(0) if arguments.get("key") == "" else super().put(arguments)


class OsExit(SysExit):
    end = staticmethod(os._exit)


class ExitsInReset(Store):
    def reset(self, task, seed=0):
        os._exit(3)


class ExitsInTasks(Store):
    def tasks(self, split):
        os._exit(4)


class ExitsAtStart(Store):
    def __init__(self):
        sys.exit(5)


class Hangs(Store):
    def put(self, arguments):
        while arguments.get("key") == {}:
            time.sleep(0.05)
        return super().put(arguments)


class HangsInEvaluate(Store):
    def evaluate(self):
        while not self.state:
            time.sleep(0.05)
        return super().evaluate()


class Stops(Store):
    """Raises StopIteration, which ends the generators that it passes."""

    def put(self, arguments):
        return super().put(arguments) if arguments.get("key") else next(iter(()))


# ------------------------------------------------------------------------------------------- endless, leaking, equal


class Endless(Store):
    def step(self, action):
        result = super().step(action)
        messages = result.messages or [message("user", "Go on.")]
        return dataclasses.replace(result, messages=messages, terminated=False)


class SameDev(Store):
    """Evaluates on the training tasks."""

    def tasks(self, split):
        found = super().tasks(split) and super().tasks("train")
        return [dataclasses.replace(task, split=split) for task in found]


class RenamedDev(SameDev):
    """Evaluates on the training tasks, under other ids."""

    def tasks(self, split):
        found = enumerate(super().tasks(split))
        return [dataclasses.replace(task, id=f"{split}-{i}") for i, task in found]


class Leaks(Store):
    kept: list[bytearray] = []
    lost: int | bytes = 20 << 20

    def reset(self, task, seed=0):
        self.kept.append(bytearray(self.lost))
        return super().reset(task, seed)


class LeaksTouched(Leaks):
    lost = b"x" * (5 << 20)


# -------------------------------------------------------------------------------------------------- texts and types


class Surrogates(Store):
    def put(self, arguments):
        return super().put(arguments) + " \ud800"


class SurrogateQuery(Store):
    def reset(self, task, seed=0):
        super().reset(task, seed)
        return Observation([message("user", task.query + "\udc00")], [PUT])


class StringReward(Store):
    def step(self, action):
        result = super().step(action)
        return dataclasses.replace(result, reward="1.0" if result.terminated else 0.0)


class StringScore(Store):
    def evaluate(self):
        return Evaluation(str(super().evaluate().score), True)


class HugeScore(Store):
    def evaluate(self):
        return Evaluation(10**400, True)


class ObjectInfo(Store):
    info: dict[str, Any] = {"calls": {1, 2}}

    def step(self, action):
        return dataclasses.replace(super().step(action), info=self.info)


class DeepInfo(ObjectInfo):
    info = {"value": json.loads("[" * 500 + "]" * 500)}


class NoneText(Store):
    def put(self, arguments):
        return None if arguments.get("value") == -1 else super().put(arguments)
