"""Worlds for tests: one that counts, and one that fails on request in every way that a worker
can."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from envs.world import Evaluation, Observation, StepResult, Task, Tool, World, message, tool_of


class Counter(World):
    """A world that counts the actions "+" up to a goal. A step's info holds the pid of its
    process."""

    name = "counter"

    def __init__(self, goal: int = 3):
        self._goal, self._count = goal, 0

    def tasks(self, split: str) -> list[Task]:
        if split != "train":
            raise ValueError(f"counter has no split '{split}'; it has train")
        return [
            Task(f"count-{i}", self.name, f"Count to {self._goal}.", reference=["+"] * self._goal)
            for i in range(5)
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if not task.id.startswith("count"):
            raise ValueError(f"counter has no task '{task.id}'")
        self._count = 0
        return Observation([message("user", task.query)])

    def step(self, action: str) -> StepResult:
        self._count += action == "+"
        over = self._count == self._goal or action == "stop"
        answer = message("tool", str(self._count))
        return StepResult([answer], terminated=over, info={"pid": os.getpid()})

    def evaluate(self) -> Evaluation:
        done = self._count == self._goal
        return Evaluation(float(done), done, {"progress": min(1.0, self._count / self._goal)})

    def snapshot(self) -> int:
        return self._count

    def restore(self, snapshot: int) -> None:
        self._count = snapshot

    def spell(self, word: str, upper: bool = False) -> list[str]:
        return list(word.upper() if upper else word)


class SlowStart(Counter):
    """A counter whose user ends the run while it starts, which takes longer than anybody waits."""

    def reset(self, task: Task, seed: int = 0) -> Observation:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        return super().reset(task, seed)


class Twins(Counter):
    """A counter whose tasks share ids: two goals under each of three, or one goal twice."""

    def __init__(self, goals: tuple[int, int] = (3, 4), split: str = "train"):
        super().__init__()
        self._goals, self._split = goals, split

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "dev"):
            raise ValueError(f"there is no split '{split}'; there are train and dev")
        goals = self._goals if split == self._split else self._goals[:1]
        return [
            Task(f"count-{split}-{i}", self.name, f"Count to {goal}.", split, seed=i)
            for i, goal in itertools.product(range(3), goals)
        ]


class Coder(Counter):
    """A counter with a function `add`, as if its actions were code."""

    def functions(self) -> list[Tool]:
        return [tool_of("add", "", {"n": {"type": "integer"}}, ["n"])]

    def call_text(self, name: str, arguments: dict[str, Any]) -> str:
        if name != "add":
            raise ValueError(f"there is no function {name!r}")
        return f"add({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


class Faulty(Counter):
    """A counter with a `fault` in the call `at`: start, reset, evaluate, or step with the action
    "break"."""

    def __init__(self, fault: str = "", at: str = "step", goal: int = 3):
        super().__init__(goal)
        self._fault, self._at = fault, at
        if at == "start":
            self._break()

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if self._at == "reset":
            self._break()
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        if action == "break" and self._at == "step":
            result = self._break()
            if result is not None:
                return result
        return super().step(action)

    def evaluate(self) -> Evaluation:
        if self._at == "evaluate":
            self._break()
        return super().evaluate()

    def _break(self) -> Any:
        return getattr(self, "_" + self._fault)()

    def _raise(self) -> None:
        raise KeyError("lost")

    def _exit(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)

    def _sys_exit(self) -> None:
        sys.exit(0)

    def _segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _hang(self) -> None:
        while True:
            time.sleep(1)

    def _hang_in_c(self) -> None:
        9 ** (10**9)  # holds the interpreter's lock

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _child(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
        self._hang()

    def _huge(self) -> StepResult:
        return StepResult([message("tool", "x" * (50 << 20))])

    def _grow(self) -> None:
        kept = []
        while True:
            kept.append(bytearray(100 << 20))

    def _not_json(self) -> StepResult:
        return StepResult([message("tool", "")], info={"object": object()})

    def _noise(self) -> None:
        _write(b"hello\n{}\n[1]\n\xff\xfe\n" + b'{"id": -1, "value": 7}\n')

    def _flood(self) -> None:
        while True:
            _write(b"x" * 65536 + b"\n")

    def _unending_line(self) -> None:
        while True:
            _write(b"x" * 65536)

    def _twice(self) -> None:
        early = StepResult([message("tool", "early")], info={"pid": os.getpid()})
        reply = {"id": _local("request")["id"], "value": early.to_dict()}
        _write(json.dumps(reply).encode() + b"\n")

    def _close_pipe(self) -> None:
        os.close(_local("replies"))
        self._hang()

    def _print(self) -> None:
        print("x" * 500_000)
        sys.stdout.flush()
        os.write(1, b'{"id": 0, "value": null}\n')
        assert sys.stdin.read() == ""


def _local(name: str) -> Any:
    frame = sys._getframe()
    while name not in frame.f_locals or frame.f_code.co_name != "serve":
        frame = frame.f_back
    return frame.f_locals[name]


def _write(data: bytes) -> None:
    os.write(_local("replies"), data)


class Late(Counter):
    """A counter whose reset waits for a file to appear. `hosted` counts the episodes that its
    process has open."""

    hosted = 0

    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def reset(self, task: Task, seed: int = 0) -> Observation:
        while task.query != "now" and not os.path.exists(self._path):
            time.sleep(0.01)
        Late.hosted += 1
        return super().reset(task, seed)

    def close(self) -> None:
        Late.hosted -= 1

    def count(self) -> int:
        return Late.hosted


class Forgetful(Counter):
    """A counter that is not deterministic: in each process it counts from another number."""

    def __init__(self, at: str = "step"):
        super().__init__(goal=100)
        self._at = at

    def reset(self, task: Task, seed: int = 0) -> Observation:
        observation = super().reset(task, seed)
        if self._at == "reset":
            observation.messages[0]["content"] += f" {os.getpid()}"
        return observation

    def step(self, action: str) -> StepResult:
        if action == "exit":
            os._exit(1)
        result = super().step(action)
        if self._at == "step":
            result.messages[0]["content"] += f" {os.getpid()}"
        return result
