"""A server that a run starts on its machine: waited for before it is used, started again if it
dies, and ended with the run, also by kill -9."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rl
from rl.engines import EngineFault
from rl.engines.child import Child, free_ports

CHECKS_S = 0.5  # between two looks at a server
RUNNING: list[Server] = []  # those of this process, for whoever shows them


class NotServed(EngineFault):
    """The server did not start; the message has its first error and the path of its log."""


@dataclass
class Server:
    """A server that answers on a port of 127.0.0.1.

    name: what it serves, in messages. command: its command line for a port. log: its output is
    appended. health: the path that answers once it is ready. environment: further variables.
    start_timeout: seconds until it has to answer. restarts: how often it is started again while
    `progress` returns the same: a server that dies between two steps of a run never ends it.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    log: Path
    say: Callable[[str], None]
    health: str
    start_timeout: float
    restarts: int
    progress: Callable[[], object]
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        (self.port,) = free_ports(1)
        self._closed = threading.Event()
        self._child: Child | None = None
        self._started = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    @contextlib.contextmanager
    def running(self, check: Callable[[], None]) -> Iterator[str]:
        """Serve while the context lasts, and yield the address.

        check: called while the server starts; raises what ends the run. Raises NotServed.
        """
        RUNNING.append(self)
        try:
            self._start(check)
            self._watcher.start()
            yield f"http://127.0.0.1:{self.port}"
        finally:
            RUNNING.remove(self)
            self._close()

    def figures(self) -> dict[str, object]:
        """Return its name, its state and how often it was started again."""
        up = self._child is not None and not self._child.ended
        return {"name": self.name, "state": "up" if up else "down", "restarts": self._started - 1}

    def _start(self, check: Callable[[], None]) -> None:
        """Start the process and wait until it answers. Raises NotServed and what `check` raises."""
        self.say(f"serving {self.name}; log: {self.log}")
        self._started += 1
        environment = {**os.environ, **self.environment}
        child = self._child = Child(self.command(self.port), self.log, environment)
        ends = time.monotonic() + self.start_timeout
        while not self._answers():
            check()
            if child.ended:
                raise NotServed(self._fault(child, "it ended while starting"))
            if time.monotonic() > ends:
                late = f"it was not ready after {self.start_timeout:g} s"
                raise NotServed(self._fault(child, late))
            time.sleep(CHECKS_S)

    def _watch(self) -> None:
        """Start the process again whenever it ends by itself, as often as it may be. Say so, also
        when it is gone for good."""
        left = self.restarts
        reached = self.progress()
        while left >= 0:
            while (child := self._child) is not None and not child.ended:
                if self._closed.wait(CHECKS_S):
                    return
            if (now := self.progress()) != reached:
                left = self.restarts
                reached = now
            if child is not None:
                then = "and is started again" if left else "and is not started again"
                self.say(self._fault(child, f"it ended, {then}"))
            try:
                if left:
                    self._start(self._unless_closed)
            except NotServed as error:
                self.say(str(error))
            except InterruptedError:
                return
            left -= 1

    def _close(self) -> None:
        """End the process."""
        self._closed.set()
        if self._watcher.is_alive():  # it may be starting another process
            self._watcher.join()
        if self._child is not None:
            self._child.end()

    def _unless_closed(self) -> None:
        if self._closed.is_set():
            raise InterruptedError

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", self.health)
            return connection.getresponse().status == http.HTTPStatus.OK
        return False

    def _fault(self, child: Child, what: str) -> str:
        return child.fault(f"the server of {self.name}: {what}")


def own_code() -> dict[str, str]:
    """Return the variable by which another process finds this project's code."""
    paths = (str(Path(rl.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
