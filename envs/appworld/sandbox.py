"""The other side of envs/appworld/session.py: starts the processes that run a model's code and
answers them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from envs.process import Piped
from envs.values import Json

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_LINE = 16 << 20  # bytes of one message of a session
START_S = 240.0
GRACE_S = 10.0  # beyond the time that code may take, for the session to say so itself
Handler = Callable[[str, str, Json], tuple[int, str]]


class SessionEnded(Exception):
    """A session ended, was silent for too long, or wrote something else than messages."""


class Sandbox:
    """The parent of the sessions. Sessions inherit no variables of this process's environment."""

    def __init__(self) -> None:
        """Start the process, which imports the package. Raises RuntimeError if it ends."""
        self._folder = tempfile.TemporaryDirectory(prefix="evolver-appworld-")
        ours, theirs = socket.socketpair()
        environment = {"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        folders = dict.fromkeys(("HOME", "IPYTHONDIR", "APPWORLD_ROOT"), self._folder.name)
        with theirs:
            self._process = Piped(
                [sys.executable, "-s", "-m", "envs.appworld.session", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=environment | folders, cwd=self._folder.name,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        self._control = ours
        ours.settimeout(START_S)
        if ours.recv(6) != b"ready\n":
            text = self._process.communicate()[1][-2000:].decode(errors="replace")
            raise RuntimeError(f"the process for a model's code did not start:\n{text}")
        self._process.stderr.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def session(self, task: Json, handler: Handler) -> Session:
        """Start a session: task as in envs/appworld/session.py; `handler` answers its requests."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps({"task": task}).encode()], [theirs.fileno()])
        pid = json.loads(self._control.recv(100))["pid"]
        return Session(ours, pid, handler, task["timeout_s"] + GRACE_S)


class Session:
    """The process of one episode. What it sends is data of whoever wrote the code, and is taken for
    no more."""

    def __init__(self, connection: socket.socket, pid: int, handler: Handler, seconds: float):
        self._connection, self._pid, self._handler = connection, pid, handler
        connection.settimeout(START_S)
        self._buffer = bytearray()
        self._guarded(limit=0)  # it is ready
        connection.settimeout(seconds)

    def run(self, code: str, limit: int) -> str:
        """Return what the code prints, or its error. Raises SessionEnded; then the session is
        closed.

        limit: maximum number of requests, after which the session is ended.
        """
        return self._guarded(limit, json.dumps({"code": code}).encode() + b"\n")

    def close(self) -> None:
        """Kill the process and what it may have started."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _guarded(self, limit: int, message: bytes = b"") -> str:
        """Return the output that answers a message. Closes the session if it ends."""
        try:
            if message:
                self._connection.sendall(message)
            return self._output(limit)
        except TimeoutError:
            reason = "it timed out"
        except OSError:
            reason = "its process died"
        except SessionEnded as error:
            reason = str(error)
        self.close()
        raise SessionEnded(reason)

    def _output(self, limit: int) -> str:
        for _ in range(limit + 1):
            message = self._message()
            if isinstance(message, dict) and isinstance(output := message.get("output"), str):
                return output
            try:
                method, url, options = message["request"]
                answer = self._handler(method, url, options)
            except (KeyError, TypeError, ValueError) as error:
                raise SessionEnded(
                    f"it wrote something else than a message ({type(error).__name__})"
                ) from None
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
        raise SessionEnded(f"it made more than {limit} requests")

    def _message(self) -> Any:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise SessionEnded(f"it wrote more than {MAX_LINE >> 20} MB")
            data = self._connection.recv(1 << 20)
            if not data:
                raise SessionEnded("its process died, perhaps for lack of memory")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise SessionEnded("it wrote something else than a message") from None
