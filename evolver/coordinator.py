"""The service that the processes of a run meet at, in a process of its own.

jax would keep it inside process 0, and when that one dies abort all the others from C++ before they can say a word.
Here it outlives process 0, which holds the other end of its standard input: from the end of that on it waits for those
who are still connected, who find out by the missing signs of life, and leaves with the last of them.
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
    """Serve `count` processes at host:port for as long as the block lasts. Raises OSError when the port is taken, or
    nothing is served, for `deadline` seconds."""
    port, until = int(address.rpartition(":")[2]), time.monotonic() + deadline
    while _listens(port):  # the service of a run that is ending; two of them would share the port without a word
        if time.monotonic() > until:
            raise OSError(f"no service at {address}: somebody else listens there")
        time.sleep(0.2)
    command = [sys.executable, "-m", "evolver.coordinator", address, str(count), str(2 * deadline)]
    # A session of its own: Ctrl-C and a scheduler's signals are for the run, which needs the service to end in order.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=Path(__file__).parents[1], env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    timer = threading.Timer(deadline, child.kill)
    timer.start()
    said = child.stdout.readline().strip()
    timer.cancel()
    if said != READY:
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
    """Connections to this machine's `port`; -1 where the kernel does not list them."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return -1
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)  # 01: established


def main(address: str, count: str, patience: str) -> None:
    """Serve `count` processes at host:port until standard input ends and, for `patience` seconds at most, they left."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    from jax._src.lib import _jax  # as jax.distributed does

    port = int(address.rpartition(":")[2])
    # Recoverable: it tells nobody to abort because another one is gone.
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", int(count), recoverable=True)
    print(READY, flush=True)
    sys.stdin.read()  # until process 0 is done, or dead
    until = time.monotonic() + float(patience)
    while _clients(port) and time.monotonic() < until:
        time.sleep(0.1)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
