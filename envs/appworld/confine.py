"""Confinement of model-written code in AppWorld: no files but the interpreter's own, no processes, no network.

AppWorld itself blocks a list of functions by name. Code that evades the list still has to open files and sockets, which
Python reports as audit events (PEP 578), and a hook can refuse those. This keeps a policy from reading the answers from
disk and from damaging the machine by accident. It does not stop an attacker; that takes a container.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import sysconfig
from collections.abc import Iterator

READ = {"open", "os.listdir", "os.scandir"}  # allowed in the interpreter's own folders, because imports read them
REFUSED = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.killpg",
    "os.putenv",
    "os.unsetenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
    "pty.spawn",
    "signal.pthread_kill",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "urllib.Request",
    "ctypes.dlopen",
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OWN = tuple(
    {os.path.realpath(p) + os.sep for p in (*sysconfig.get_paths().values(), os.path.dirname(os.__file__)) if p}
)
_armed = False
_installed = False


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """Refuse the events above with PermissionError during the block, in all threads of the process."""
    global _armed, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    _armed = True
    try:
        yield
    finally:
        _armed = False


def _hook(event: str, args: tuple) -> None:
    if not _armed:
        return
    if event in REFUSED:
        raise PermissionError(f"not allowed here: {event}")
    if event == "sqlite3.connect" and not _in_memory(args[0]):
        raise PermissionError("not allowed here: a database on disk")
    if event in READ and not _readable(args):
        raise PermissionError(f"not allowed here: {event} {args[0]!r}")


def _in_memory(database: object) -> bool:
    return isinstance(database, str | sqlite3.Connection) and ("memory" in str(database) or database == "")


def _readable(args: tuple) -> bool:
    path, flags = args[0], args[2] if len(args) > 2 else 0
    if isinstance(path, int):
        return True  # the file is already open
    if not isinstance(path, str | bytes | os.PathLike) or (isinstance(flags, int) and flags & _WRITING):
        return False
    return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(_OWN)
