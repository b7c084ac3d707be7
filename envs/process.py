"""Worlds in worker processes: any interpreter, a deadline on every call, and a dead worker replaced.

A worker is spawned with a fresh interpreter, never forked from this process (which may hold jax).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

from envs.world import Evaluation, Observation, StepResult, Task, World, WorldError, WorldTimeout

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_MESSAGE = 16 << 20  # bytes of one reply
MAX_NOISE = 1 << 20  # bytes that are no reply, while one is awaited
STDERR_KEPT = 4096


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each kind of call. `start` is for spawning, importing and constructing; the rest takes `step`."""

    start: float = 60.0
    reset: float = 60.0
    step: float = 30.0

    def of(self, op: str) -> float:
        return {"start": self.start, "reset": self.reset, "restore": self.reset, "tasks": self.start}.get(op, self.step)


DEADLINES = Deadlines()


class Worker:
    """One worker process and the pipes to it. One call at a time; the caller keeps other threads away.

    After WorldTimeout, or a WorldError of a worker that died or talked nonsense, `alive` is False and the
    process is gone with everything it started.
    """

    def __init__(
        self,
        env: str,
        kwargs: dict[str, Any] | None = None,
        *,
        python: str | None = None,
        memory_mb: int | None = None,
        max_message: int = MAX_MESSAGE,
        deadline: float = 60.0,
    ):
        """Spawn and construct the world. Raises ValueError on its arguments, WorldError on any other failure."""
        self.env, self._max_message = env, max_message
        self._ids = itertools.count()
        self._buffer = bytearray()
        self._stderr: collections.deque[bytes] = collections.deque(maxlen=64)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-u", "-m", "envs.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            raise WorldError(f"cannot start {python or sys.executable} for {env}: {error.strerror}") from error
        self._kill = weakref.finalize(self, _kill, self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._process.stdout, select.POLLIN)
        self._poll.register(self._process.stderr, select.POLLIN)
        start = {"env": env, "kwargs": kwargs or {}, "memory_mb": memory_mb}
        try:
            self.methods: list[str] = self._call("start", "", start, deadline)["methods"]
        except (ValueError, WorldError):
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._kill.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: str, world: str = "", args: list[Any] | None = None, *, deadline: float = 30.0) -> Any:
        """Run one operation (see envs/worker.py). Raises ValueError where the world did, WorldError otherwise."""
        if not self.alive:
            raise WorldError(f"the worker of {self.env} is not running")
        return self._call(op, world, args or [], deadline)

    def close(self) -> None:
        """End the process and everything it started, now."""
        self._kill()

    def kill(self) -> None:
        """Send the end and return, from any thread: whoever waits for a reply learns that the worker died."""
        if self._kill.alive:
            _signal(self._process)

    def _call(self, op: str, world: str, args: Any, deadline: float) -> Any:
        until = time.monotonic() + deadline
        id = next(self._ids)
        request = {"id": id, "op": op, "world": world, "args": args, "deadline": deadline}
        try:
            self._send(json.dumps(request).encode() + b"\n", until)
            reply = self._receive(id, until)
        except TimeoutError:
            os.kill(self.pid, signal.SIGUSR1)  # it writes where it hangs to stderr
            time.sleep(0.05)
            raise WorldTimeout(f"{self.env} did not answer {op} within {deadline:g} s{self._end()}") from None
        except EOFError:
            code = self._exit_code()
            raise WorldError(f"the worker of {self.env} died in {op} ({code}){self._end()}") from None
        except OverflowError as error:
            self.close()
            raise WorldError(f"{self.env} answered {op} with {error}") from None
        except BaseException:  # interrupted: what the pipes hold now belongs to no call
            self.close()
            raise
        return unpack(reply, self.env, op)

    def _send(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        stdin = self._process.stdin.fileno()
        while view:
            try:
                view = view[os.write(stdin, view) :]
            except BlockingIOError:
                self._poll.register(stdin, select.POLLOUT)
                try:
                    self._wait(until)
                finally:
                    self._poll.unregister(stdin)
            except BrokenPipeError:
                raise EOFError from None

    def _receive(self, id: int, until: float) -> dict[str, Any]:
        """The reply to `id`. Other lines (a print that found the pipe, a second answer) are noise, within limits."""
        noise = searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                searched = 0
                reply = _read_json(line)
                if isinstance(reply, dict) and reply.get("id") == id:
                    return reply
                noise += len(line) + 1
                if noise > MAX_NOISE:
                    raise OverflowError("noise instead of a reply")
                continue
            searched = len(self._buffer)
            if searched > self._max_message:
                raise OverflowError(f"more than {self._max_message >> 20} MB")
            self._wait(until)

    def _wait(self, until: float) -> None:
        """Wait for the pipes and read what they hold. Raises TimeoutError, or EOFError where stdout is closed."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        for descriptor, _ in self._poll.poll(left * 1000):
            if descriptor == self._process.stdin.fileno():
                continue
            try:
                data = os.read(descriptor, 1 << 20)
            except BlockingIOError:
                continue
            if descriptor == self._process.stdout.fileno():
                if not data:
                    raise EOFError
                self._buffer += data
            elif data:
                self._stderr.append(data[-STDERR_KEPT:])
            else:
                self._poll.unregister(descriptor)

    def _exit_code(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _end(self) -> str:
        """Kill the worker. Returns the end of its stderr, for an error message."""
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._stderr.append(data[-STDERR_KEPT:])
        self.close()
        text = b"".join(self._stderr)[-STDERR_KEPT:].decode(errors="replace").strip()
        return f"; the end of its stderr:\n{text}" if text else ""


def unpack(reply: dict[str, Any], env: str, op: str) -> Any:
    """The value of a reply, or the error it tells: ValueError and NotImplementedError as they are, else WorldError."""
    if "error" not in reply:
        return reply.get("value")
    if reply["kind"] == "NotImplementedError":
        raise NotImplementedError(reply["error"])
    if reply["kind"] == "ValueError" and op not in ("step", "evaluate"):  # what was asked for was wrong
        raise ValueError(reply["error"])
    raise WorldError(f"{reply['kind']} in {env} {op}: {reply['error']}")


def _signal(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill(process: subprocess.Popen) -> None:
    _signal(process)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def _read_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class ProcessWorld(World):
    """A world in a worker process of its own. Raises WorldError or WorldTimeout where the worker fails.

    A worker that failed is replaced at the next `reset`, `restore` or `tasks`. Methods that the adapter has
    beyond the interface can be called too: their arguments and results cross as JSON.
    """

    def __init__(
        self,
        env: str,
        kwargs: dict[str, Any] | None = None,
        *,
        python: str | None = None,
        memory_mb: int | None = None,
        max_message: int = MAX_MESSAGE,
        deadlines: Deadlines = DEADLINES,
    ):
        self.name = env
        self._spawn = lambda: Worker(
            env, kwargs, python=python, memory_mb=memory_mb, max_message=max_message, deadline=deadlines.start
        )
        self._deadlines = deadlines
        self._worker: Worker | None = None

    def tasks(self, split: str) -> list[Task]:
        return [Task.from_dict(task) for task in self._call("tasks", split)]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        return Observation.from_dict(self._call("reset", task.to_dict(), seed))

    def step(self, action: str) -> StepResult:
        return StepResult.from_dict(self._call("step", action))

    def evaluate(self) -> Evaluation:
        return Evaluation.from_dict(self._call("evaluate"))

    def snapshot(self) -> Any:
        return self._call("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._call("restore", snapshot)

    def profile(self) -> dict[str, Any]:
        return self._call("profile")

    def close(self) -> None:
        if self._worker:
            self._worker.close()
            self._worker = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._running().methods:
            raise AttributeError(f"{self.name} has no method '{name}'")
        return lambda *args, **kwargs: self._call("query", name, args, kwargs)

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = self._spawn()
        return self._worker

    def _call(self, op: str, *args: Any) -> Any:
        if (self._worker is None or not self._worker.alive) and op in ("step", "evaluate", "snapshot", "query"):
            raise WorldError(f"{self.name} has no episode: reset it first")
        return self._running().call(op, "", list(args), deadline=self._deadlines.of(op))
