"""Worker processes that host worlds: under any interpreter, with a deadline on every call.

A worker is spawned with a fresh interpreter. It is never forked from this process, which may have
loaded jax.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from typing import IO, Any

from envs.values import Json, parsed
from envs.world import WorldError, WorldTimeout

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_MESSAGE = 16 << 20  # bytes of one reply
MAX_NOISE = 1 << 20  # bytes of other output while a reply is awaited
STDERR_KEPT = 4096  # bytes of stderr quoted in an error message
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of sys/prctl.h
OURS = ("configs", "envs", "evolver", "experiments", "models", "rl", "run.py")


@functools.cache
def code_folder() -> str:
    """Return a folder that holds this code and no other package, for the module search path of
    another interpreter.

    It is the clone. For an installed package it is a temporary folder of links, because
    `site-packages` also holds what was installed for this interpreter alone.
    """
    if ROOT.name not in ("site-packages", "dist-packages"):
        return str(ROOT)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="evolver-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in OURS:
        (folder / name).symlink_to(ROOT / name)
    return str(folder)


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process that finds this code, and more variables."""
    path = filter(None, [code_folder(), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


@dataclass(frozen=True)
class Deadlines:
    """Seconds allowed per kind of call. `start` covers spawning, importing, constructing and
    listing tasks."""

    start: float = 60.0
    reset: float = 60.0
    step: float = 30.0

    def of(self, op: str) -> float:
        """Return the deadline of an operation; those without one of their own get `step`."""
        if op in ("start", "tasks"):
            return self.start
        return self.reset if op in ("reset", "restore") else self.step


DEADLINES = Deadlines()


class Piped(subprocess.Popen[bytes]):
    """A process with pipes. Only the streams that were asked for with PIPE may be used: the base
    class cannot tell which ones those are, and declares that any may be None."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


class Worker:
    """One worker process and the pipes to it. Not thread-safe: the caller makes one call at a time.

    A call that times out, or whose worker dies or writes garbage, ends the process and everything
    it started; `alive` is False afterwards.
    """

    def __init__(
        self,
        env: str,
        kwargs: Json | None = None,
        *,
        python: str | None = None,
        memory_mb: int | None = None,
        deadline: float = 60.0,
    ):
        """Start the process and construct the world. Raises ValueError for wrong arguments, else
        WorldError."""
        self.env = env
        self._ids = itertools.count()
        self._buffer = bytearray()
        self._stderr: collections.deque[bytes] = collections.deque(maxlen=64)
        python, pipe = python or sys.executable, subprocess.PIPE
        try:
            self._process = Piped(
                [python, "-u", "-m", "envs.worker"], stdin=pipe, stdout=pipe, stderr=pipe,
                bufsize=0, env=child_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise WorldError(f"cannot start {python} for {env}: {error.strerror}") from error
        self._kill = weakref.finalize(self, kill, self._process)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)
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

    def call(
        self, op: str, world: str = "", args: list[Any] | None = None, *, deadline: float = 30.0
    ) -> Any:
        """Run one operation of envs/worker.py. Raises ValueError if the world does, WorldError for
        other failures."""
        if not self.alive:
            raise WorldError(f"the worker of {self.env} is not running")
        return self._call(op, world, args or [], deadline)

    def close(self) -> None:
        """Kill the process and everything it started, and wait for its end."""
        self._kill()

    def kill(self) -> None:
        """Send SIGKILL and return at once. Safe from any thread: a waiting call fails with
        WorldError."""
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
            os.kill(self.pid, signal.SIGUSR1)  # makes the worker write its traceback to stderr
            time.sleep(0.05)
            late = f"{self.env} did not answer {op} within {deadline:g} s{self._end()}"
            raise WorldTimeout(late) from None
        except EOFError:
            how = self._exit_code()
            died = f"the worker of {self.env} died in {op} ({how}){self._end()}"
            raise WorldError(died) from None
        except OverflowError as error:
            self.close()
            raise WorldError(f"{self.env} answered {op} with {error}") from None
        except BaseException:
            # Interrupted: the pipes may hold half a message, so the worker cannot be used again.
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

    def _receive(self, id: int, until: float) -> Json:
        """Return the reply to `id`. Skips up to MAX_NOISE bytes of other lines, such as stray
        prints."""
        noise = searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                searched = 0
                reply = parsed(line)
                if isinstance(reply, dict) and reply.get("id") == id:
                    return reply
                noise += len(line) + 1
                if noise > MAX_NOISE:
                    raise OverflowError("noise instead of a reply")
                continue
            searched = len(self._buffer)
            if searched > MAX_MESSAGE:
                raise OverflowError(f"more than {MAX_MESSAGE >> 20} MB")
            self._wait(until)

    def _wait(self, until: float) -> None:
        """Wait for the pipes and read their content. Raises TimeoutError, and EOFError if stdout
        was closed."""
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
        """Kill the worker and return the end of its stderr for an error message."""
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._stderr.append(data[-STDERR_KEPT:])
        self.close()
        text = b"".join(self._stderr)[-STDERR_KEPT:].decode(errors="replace").strip()
        return f"; the end of its stderr:\n{text}" if text else ""


def unpack(reply: Json, env: str, op: str) -> Any:
    """Return the value of a reply. Raises its error: ValueError and NotImplementedError unchanged,
    else WorldError."""
    if "error" not in reply:
        return reply.get("value")
    if reply["kind"] == "NotImplementedError":
        raise NotImplementedError(reply["error"])
    if reply["kind"] == "ValueError" and op not in ("step", "evaluate"):
        raise ValueError(reply["error"])  # the request itself was wrong
    raise WorldError(f"{reply['kind']} in {env} {op}: {reply['error']}")


def end_with_parent(parent: int) -> None:
    """Ask Linux to terminate this process, which was just forked, when its parent dies, also if
    that is killed. parent: the parent's process id, as it may have died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate a process and wait for its end, and kill it if that takes too long."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _signal(process: Piped) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill(process: Piped) -> None:
    """Kill a process with everything that it started, wait for its end, and close its pipes."""
    _signal(process)
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        pipe.close()
