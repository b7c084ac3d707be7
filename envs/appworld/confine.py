"""Confinement of the process that runs a model's code: no files but the interpreter's own, no
programs, no network.

`confine` cannot be undone by the process. The kernel enforces what it can (resource limits,
Landlock); audit hooks (PEP 578) refuse the rest, and everything where the kernel has no Landlock.
The hooks stop accidents and simple tricks: code that changes the interpreter's memory gets past
them, and then still holds nothing but a socket (engine.py).
"""

import ctypes
import os
import platform
import resource
import sqlite3
import sys
import sysconfig
from typing import Any

# Audit events. Imports read the interpreter's own folders, where these are allowed.
READ = frozenset(("open", "os.listdir", "os.scandir"))
_REFUSED = """
    subprocess.Popen os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.kill os.killpg
    os.putenv os.unsetenv os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate
    os.chmod os.chown resource.setrlimit resource.prlimit shutil.rmtree pty.spawn
    signal.pthread_kill socket.__new__ socket.connect socket.bind socket.sendto socket.getaddrinfo
    urllib.Request ctypes.dlopen ctypes.dlsym gc.get_objects gc.get_referrers gc.get_referents
"""
REFUSED = frozenset(_REFUSED.split())
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def own_folders() -> tuple[str, ...]:
    """Return the folders of the interpreter and of its packages."""
    found = (*sysconfig.get_paths().values(), os.path.dirname(os.__file__))
    return tuple(sorted({os.path.realpath(path) for path in found if path}))


def confine(memory_mb: int) -> None:
    """Confine this process and everything that it may start, for good. `memory_mb` bounds its
    address space."""
    limit_resources(memory_mb)
    restrict_files(own_folders())
    sys.addaudithook(_hook(own_folders()))


def limit_resources(memory_mb: int) -> None:
    """Bound the address space, and allow no core files and no writing of files."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


# ----------------------------------------------------------------------------------------- Landlock

# System calls, which are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = (13, 14, 15, 15, 16)  # number of rights of each version of the interface, from 1
_NO_NEW_PRIVILEGES = 38


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    if platform.system() != "Linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict_files(folders: tuple[str, ...]) -> bool:
    """Let the kernel refuse all files but reading these folders, running programs, TCP, and signals
    to others.

    Return False if the kernel has no Landlock. Raises OSError if it refuses the rules.
    """
    version = landlock_version()
    if version == 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    files = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    ruleset = _Ruleset(files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))
    for path in folders:
        if os.path.isdir(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            beneath = _Beneath(_READ_FILE | _READ_DIR, folder)
            _checked(libc.syscall(_ADD_RULE, rules, 1, ctypes.byref(beneath), 0))
            os.close(folder)
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)
    return True


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result


# -------------------------------------------------------------------------------------- audit hooks


def _hook(own: tuple[str, ...]) -> Any:
    """Return the hook. It has no switch, and looks up nothing in modules that code may change."""
    folders = tuple(folder + os.sep for folder in own)
    refused, reading, writing, separator = REFUSED, READ, WRITING, os.sep
    realpath, fsdecode, pathlike = os.path.realpath, os.fsdecode, os.PathLike
    connection, error = sqlite3.Connection, PermissionError

    def hook(event: str, args: tuple) -> None:
        if event in refused:
            raise error(f"not allowed here: {event}")
        if event == "sqlite3.connect":
            if not isinstance(args[0], str | connection) or not (
                "memory" in str(args[0]) or args[0] == ""
            ):
                raise error("not allowed here: a database on disk")
        elif event in reading:
            path, flags = args[0], args[2] if len(args) > 2 else 0
            if isinstance(path, int):
                return  # the file is already open
            allowed = isinstance(path, str | bytes | pathlike)
            if isinstance(flags, int) and flags & writing:
                allowed = False
            if not allowed or not (realpath(fsdecode(path)) + separator).startswith(folders):
                raise error(f"not allowed here: {event} {path!r}")

    return hook
