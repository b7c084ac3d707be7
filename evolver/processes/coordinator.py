"""JAX's coordination service in a process of its own.

JAX would run it inside process 0; when that process dies, JAX aborts all others from C++ before
they can report why. Here the service outlives process 0, which holds the other end of its standard
input. When that closes, the service stays until the remaining processes have noticed the missing
heartbeats and disconnected.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

READY = "ready"


@contextlib.contextmanager
def serving(address: str, count: int, deadline: float) -> Iterator[None]:
    """Serve `count` processes at host:port during the block.

    Raises OSError if the port is still taken, or the service has not started, after `deadline`
    seconds.
    """
    port, until = int(address.rpartition(":")[2]), time.monotonic() + deadline
    while _listens(
        port
    ):  # perhaps the service of a run that is ending; two services would silently share the port
        if time.monotonic() > until:
            raise OSError(f"no service at {address}: another process listens there")
        time.sleep(0.2)
    command = [
        sys.executable,
        "-m",
        "evolver.processes.coordinator",
        address,
        str(count),
        str(2 * deadline),
    ]
    # In its own session: Ctrl-C and a scheduler's signals end the run, which needs the service
    # until the end.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=Path(__file__).parents[2], env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    timer = threading.Timer(deadline, child.kill)
    timer.start()
    line = child.stdout.readline().strip()
    timer.cancel()
    if line != READY:
        child.kill()
        why = (child.communicate()[1].strip().splitlines() or ["no answer"])[-1]
        raise OSError(f"no service at {address}: {why}")
    threading.Thread(target=_pass_on, args=(child.stderr,), daemon=True).start()
    try:
        yield
    finally:
        child.stdin.close()


def _pass_on(lines) -> None:
    for line in lines:
        sys.stderr.write(line)


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1.0)
        return s.connect_ex(("127.0.0.1", port)) == 0


def _clients(port: int) -> int:
    """Return the number of connections to this machine's `port`; -1 if the kernel does not list
    them."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return -1
    rows = [
        row.split()
        for table in tables
        if table.exists()
        for row in table.read_text().splitlines()[1:]
    ]
    return sum(
        row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows
    )  # 01: established


def main(address: str, count: str, patience: str) -> None:
    """Serve `count` processes at host:port until standard input closes and they disconnect, or
    `patience` s later."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    from jax._src.lib import _jax  # as in jax.distributed

    port = int(address.rpartition(":")[2])
    # recoverable: do not abort other processes when one dies.
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", int(count), recoverable=True)
    print(READY, flush=True)
    sys.stdin.read()  # returns when process 0 is done or dead
    until = time.monotonic() + float(patience)
    while _clients(port) and time.monotonic() < until:
        time.sleep(0.1)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
