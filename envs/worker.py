"""The inside of a worker process: worlds behind JSON lines on stdin and stdout. Standard library only.

A worker runs under any Python that has the benchmark's package: `python -m envs.worker`, started by
`envs.process.Worker`. It may hold many worlds; the main thread serves one request at a time.

    request  {"id": 3, "op": "step", "world": "a", "args": ["..."], "deadline": 30.0}
    reply    {"id": 3, "value": ...}   or   {"id": 3, "error": "what happened", "kind": "ValueError"}

The first request is `start`. `world` names an instance: it is made by the first operation that names it and
forgotten by `close`. What the environment prints goes to stderr. The process ends, with whatever it started,
when its stdin closes: a parent that was killed leaves nothing behind.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

from envs import make
from envs.world import Task, World

GRACE_S = 5.0  # the parent kills at the deadline; this much processor time later the worker ends by itself


class Worlds:
    """The worlds of one process by name, and the operations on them. Everything in and out is a JSON value."""

    def __init__(self, env: str, kwargs: dict[str, Any]):
        self._env, self._kwargs = env, kwargs
        self._spare: World | None = make(env, **kwargs)  # what is slow to load is loaded here
        self._worlds: dict[str, World] = {}

    def call(self, op: str, name: str, args: list[Any]) -> Any:
        """Run one operation. Raises what the world raises, and ValueError on an unknown operation."""
        if op == "close":
            world = self._worlds.pop(name, None)
            return world.close() if world else None
        world = self._world(name)
        if op in ("tasks", "reset", "step", "evaluate", "snapshot", "restore", "profile"):
            return getattr(self, "_" + op)(world, *args)
        if op == "query":
            return self._query(world, *args)
        raise ValueError(f"a worker has no operation '{op}'")

    def methods(self) -> list[str]:
        """What `query` may ask: the public methods that the adapter has beyond the interface."""
        kind = type(self._spare)
        return sorted(name for name in dir(kind) if not name.startswith("_") and _is_extra(kind, name))

    def close(self) -> None:
        for world in [*self._worlds.values(), *([self._spare] if self._spare else [])]:
            world.close()
        self._worlds, self._spare = {}, None

    def _world(self, name: str) -> World:
        if name not in self._worlds:
            self._worlds[name], self._spare = self._spare or make(self._env, **self._kwargs), None
        return self._worlds[name]

    def _tasks(self, world: World, split: str) -> list[dict[str, Any]]:
        return [task.to_dict() for task in world.tasks(split)]

    def _reset(self, world: World, task: dict[str, Any], seed: int) -> dict[str, Any]:
        return world.reset(Task.from_dict(task), seed).to_dict()

    def _step(self, world: World, action: str) -> dict[str, Any]:
        return world.step(action).to_dict()

    def _evaluate(self, world: World) -> dict[str, Any]:
        return world.evaluate().to_dict()

    def _snapshot(self, world: World) -> Any:
        return world.snapshot()

    def _restore(self, world: World, snapshot: Any) -> None:
        world.restore(snapshot)

    def _profile(self, world: World) -> dict[str, Any]:
        return world.profile()

    def _query(self, world: World, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if method.startswith("_") or not _is_extra(type(world), method):
            raise ValueError(f"{type(world).__name__} has no method '{method}' to ask")
        return getattr(world, method)(*args, **kwargs)


def _is_extra(kind: type[World], name: str) -> bool:
    return callable(getattr(kind, name, None)) and not hasattr(World, name)


def serve(requests: int, replies: int) -> None:
    """Serve requests from one file descriptor and reply on another until the first closes."""
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    hosted: list[Worlds] = []
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            # A parent that was killed cannot kill a call that never lets another thread run; this timer can.
            signal.setitimer(signal.ITIMER_PROF, (request["deadline"] + GRACE_S) * (os.cpu_count() or 1))
            answer = reply(request["id"], functools.partial(_run, hosted, request))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(replies, answer.encode() + b"\n")
    os.killpg(0, signal.SIGKILL)


def reply(id: int, run: Callable[[], Any]) -> str:
    """What `run` gives or raises, as a line of the protocol. What is raised is the caller's to judge."""
    try:
        return json.dumps({"id": id, "value": run()})
    except Exception as error:
        return json.dumps({"id": id, "error": str(error) or type(error).__name__, "kind": type(error).__name__})


def _run(hosted: list[Worlds], request: dict[str, Any]) -> Any:
    if request["op"] != "start":
        return hosted[0].call(request["op"], request["world"], request["args"])
    hosted.append(_start(**request["args"]))
    return {"methods": hosted[0].methods()}


def _start(env: str, kwargs: dict[str, Any], memory_mb: int | None) -> Worlds:
    if memory_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    return Worlds(env, kwargs)


def _end_with_parent(requests: int) -> None:
    """Wait until the other end is closed, then end this process and all that it started, whatever it is doing."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _write(replies: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(replies, view) :]


def main() -> None:
    """Keep the pipes to ourselves, so that no print and no input() of the environment touches them."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks where we hang before it kills
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    serve(requests, replies)


if __name__ == "__main__":
    main()
