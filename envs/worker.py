"""The program of a worker process: worlds behind JSON lines on stdin and stdout. Standard library
only.

`envs.process.Worker` starts `python -m envs.worker` under any Python that has the benchmark's
package. A worker may host many worlds; its main thread serves one request at a time.

    request  {"id": 3, "op": "step", "world": "a", "args": ["..."], "deadline": 30.0}
    reply    {"id": 3, "value": ...}   or   {"id": 3, "error": "message", "kind": "ValueError"}

The first request is `start`. `world` names an instance, which is made by the first operation that
names it and dropped by `close`. The environment's own output goes to stderr. When stdin closes, the
process kills itself and everything it started, so that no process outlives a killed parent.
"""

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
from envs.values import Json
from envs.world import Task, World

OPERATIONS = ("tasks", "reset", "step", "evaluate", "snapshot", "restore", "profile")
RECORDS = ("reset", "step", "evaluate")  # operations whose results are records
# Methods of World that `query` calls, besides those that an adapter adds.
QUERIES = ("functions", "call_text")
# CPU seconds beyond the deadline after which a worker ends itself if its parent has not killed it
GRACE_S = 5.0


class Worlds:
    """The worlds of one process by name, and the operations on them. Arguments and results are JSON
    values."""

    def __init__(self, env: str, kwargs: Json):
        self._env, self._kwargs = env, kwargs
        world = make(env, **kwargs)  # loads everything slow before the first episode
        self._kind = type(world)
        self._spare: World | None = world
        self._worlds: dict[str, World] = {}

    def call(self, op: str, name: str, args: list[Any]) -> Any:
        """Run one operation. Raises what the world raises, and ValueError for an unknown
        operation."""
        if op == "close":
            world = self._worlds.pop(name, None)
            return world.close() if world else None
        world = self._world(name)
        if op == "query":
            return self._query(world, *args)
        if op not in OPERATIONS:
            raise ValueError(f"a worker has no operation '{op}'")
        if op == "reset":
            args = [Task.from_dict(args[0]), *args[1:]]
        value = getattr(world, op)(*args)
        if op == "tasks":
            return [task.to_dict() for task in value]
        return value.to_dict() if op in RECORDS else value

    def methods(self) -> list[str]:
        """Return the names of the public methods that the adapter adds to World; `query` can call
        them."""
        return [name for name in dir(self._kind) if _is_extra(self._kind, name)]

    def _world(self, name: str) -> World:
        if name not in self._worlds:
            self._worlds[name], self._spare = self._spare or make(self._env, **self._kwargs), None
        return self._worlds[name]

    def _query(self, world: World, method: str, args: list[Any], kwargs: Json) -> Any:
        if not (method in QUERIES or _is_extra(type(world), method)):
            raise ValueError(f"{type(world).__name__} has no method '{method}' to query")
        return getattr(world, method)(*args, **kwargs)


def _is_extra(kind: type[World], name: str) -> bool:
    public = not name.startswith("_") and not hasattr(World, name)
    return public and callable(getattr(kind, name, None))


def serve(requests: int, replies: int) -> None:
    """Serve requests from one file descriptor and reply on another until the first is closed."""
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    hosted: list[Worlds] = []
    with os.fdopen(requests, "rb") as lines, os.fdopen(replies, "wb") as answers:
        for line in lines:
            request = json.loads(line)
            # The watching thread never runs during a call that holds the interpreter lock; this
            # timer still fires.
            allowed = (request["deadline"] + GRACE_S) * (os.cpu_count() or 1)
            signal.setitimer(signal.ITIMER_PROF, allowed)
            answer = reply(request["id"], functools.partial(_run, hosted, request))
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(answer.encode() + b"\n")
            answers.flush()
    os.killpg(0, signal.SIGKILL)


def reply(id: int, run: Callable[[], Any]) -> str:
    """Return the result of `run`, or the exception it raises, as a line of the protocol."""
    try:
        return json.dumps({"id": id, "value": run()})
    except Exception as error:
        kind = type(error).__name__
        return json.dumps({"id": id, "error": str(error) or kind, "kind": kind})


def _run(hosted: list[Worlds], request: Json) -> Any:
    op, args = request["op"], request["args"]
    if op != "start":
        return hosted[0].call(op, request["world"], args)
    if args["memory_mb"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (args["memory_mb"] << 20,) * 2)
    hosted.append(Worlds(args["env"], args["kwargs"]))
    return {"methods": hosted[0].methods()}


def _end_with_parent(requests: int) -> None:
    """Wait until the other end is closed, then kill this process and everything it started."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve on stdin and stdout, moved to other descriptors which the environment's print and input
    cannot reach."""
    # The parent asks for a traceback before it kills.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    serve(requests, replies)


if __name__ == "__main__":
    main()
