"""JAX's coordination service in a process of its own.

JAX would run it inside process 0; when that process dies, JAX aborts all others from C++ before
they can report why. Here the service outlives process 0, which holds the other end of its standard
input. When that closes, the service stays until the remaining processes have noticed the missing
heartbeats and disconnected.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

READY = "ready\n"
# Seconds of silence after which JAX itself aborts processes, from C++ and with an exit code of its
# own: never before `hosts.Watch` ends them with a message and the code that starts them again.
SILENCE = 24 * 3600


@contextlib.contextmanager
def serving(address: str, count: int, deadline: float) -> Iterator[None]:
    """Serve `count` processes at host:port during the block.

    Raises OSError if the port is still taken, or the service has not started, after `deadline`
    seconds; the service itself prints why it did not.
    """
    port = _port(address)
    until = time.monotonic() + deadline
    # Perhaps the service of a run that is ending; two services would silently share the port.
    while _listens(port):
        if time.monotonic() > until:
            raise OSError(f"no service at {address}: another process listens there")
        time.sleep(0.2)
    # In its own session: Ctrl-C and a scheduler's signals end the run, which needs the service
    # until the end.
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, address, str(count), str(2 * deadline)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert child.stdin and child.stdout
    timer = threading.Timer(deadline, child.kill)
    timer.start()
    started = child.stdout.readline() == READY
    timer.cancel()
    if not started:
        child.kill()
        raise OSError(f"no service at {address}: it ended, or did not start within {deadline:g} s")
    try:
        yield
    finally:
        child.stdin.close()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1.0)
        return s.connect_ex(("127.0.0.1", port)) == 0


def _has_clients(port: int) -> bool:
    """Return True if anything is connected to this machine's `port`, also if the kernel does not
    list connections."""
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    text = "".join(table.read_text() for table in tables)
    # A row holds a number, the local address, the remote address and the state; 01 = established.
    return not tables or bool(re.search(rf"^ *\d+: \w+:{port:04X} \S+ 01 ", text, re.MULTILINE))


def main(address: str, count: str, patience: str) -> None:
    """Serve `count` processes at host:port until standard input closes and they disconnect, or
    `patience` s later."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    from jax._src.lib import _jax  # as in jax.distributed

    port = _port(address)
    # recoverable: do not abort other processes when one dies.
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", int(count), heartbeat_timeout=SILENCE, recoverable=True
    )
    print(READY, end="", flush=True)
    sys.stdin.read()  # returns when process 0 is done or dead
    until = time.monotonic() + float(patience)
    while _has_clients(port) and time.monotonic() < until:
        time.sleep(0.1)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
