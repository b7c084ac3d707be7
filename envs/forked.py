"""Copies of a Python program that was started once: its imports and its tools take most of a start.

`copying` gives a command line that behaves like `python program.py ARGUMENTS`, or like `python -m
program ARGUMENTS`, in a fraction of the time. The first one starts a process that imports what the
program imports at its top, and forks for each command that connects to it. The copy has the
streams, arguments, directory and environment of the command and ends when the command is ended.

A program that defines its tools and then calls `asyncio.run` or `anyio.run`, as servers do, is
copied where it does: all copies begin there. Another one, and one that first opens files or
connections, starts threads or prints, is copied before its first line.

Many servers import most of what they need when the first request comes. What the first copies of a
program import of the installed packages, the later ones begin with.

This file also runs by itself, in the program's interpreter, which may lack this package and all
others: it imports the standard library alone.
"""

from __future__ import annotations

import array
import ast
import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import os
import random
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOIN = Path(__file__).with_name("fork_client.py")
_CODE = (".py", ".pyc", ".so", os.sep)  # ends of the paths that an import opens
_UNSAFE = (
    "socket.bind", "socket.connect", "subprocess.", "os.fork", "os.posix_spawn", "os.system",
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.",
)  # fmt: skip
BEGINS_S = 10.0  # until the program begins its event loop
STARTS_S = 60.0  # until the imports are done
MODULE = "-m "  # begins a program that is the name of a module
LEARNT = ".learnt"  # ends the name of the file of what the first copies import
LEARNT_FROM = 2  # of them
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_INSTALLED = re.compile(r"built-in|frozen|.*[/\\](site|dist)-packages[/\\].*")
_running: dict[str, tuple[subprocess.Popen[bytes], str] | None] = {}
_copied: Counter[str] = Counter()  # commands that were given
_lock = threading.Lock()


# --- where commands are started -------------------------------------------------------------------


def copying(words: list[str], env: dict[str, str], *, here: bool = True) -> list[str]:
    """Return a command line that runs `words` as a copy, or `words` where that is not possible: the
    program is neither a Python file nor an installed command of Python, this system cannot fork, or
    its imports start threads.

    env: the environment of the command. here: it will be run in this directory.
    """
    found = _script(words, env) if hasattr(os, "fork") else None
    if found is None:
        return words
    python, program, *arguments = found
    asked = {"arguments": arguments, "folder": os.getcwd(), "env": env} if here else None
    key = json.dumps([python, program, env, asked], sort_keys=True)
    with _lock:
        running = _running.get(key)
        lost = running and (running[0].poll() is not None or not Path(running[1]).exists())
        if running and lost and running[0].stdin:
            running[0].stdin.close()
        if lost or key not in _running:
            running = _running[key] = _started(python, program, env, asked)
        elif running and _copied[key] == LEARNT_FROM:
            if better := _started(python, program, env, asked, f"{running[1]}{LEARNT}"):
                # Somebody may be about to connect to the first one.
                _running[f"first {key}"], _running[key] = running, better
                running = better
        _copied[key] += 1
        if running is None:
            return words
    return [python, "-I", "-S", str(JOIN), running[1], *arguments]


def _script(words: list[str], env: dict[str, str]) -> list[str] | None:
    """Return a command line that runs a Python file, as interpreter, file and arguments, None if
    it runs none. In the place of the file, "-m name" stands for a module. The first line of an
    installed command, such as that of uvicorn, names its interpreter."""
    if words[1:2] == ["-m"] and len(words) > 2 and _PYTHON.fullmatch(Path(words[0]).name):
        return [words[0], MODULE + words[2], *words[3:]]
    if len(words) > 1 and words[1].endswith(".py") and Path(words[1]).is_file():
        python, path = words[0], words[1]
    elif words and (path := shutil.which(words[0], path=env.get("PATH")) or ""):
        with open(path, "rb") as file:
            python = file.readline(1000).decode(errors="replace").rstrip()
        python, words = python.removeprefix("#!"), [python, *words]
    else:
        return None
    if not _PYTHON.fullmatch(Path(python).name):
        return None
    return [python, str(Path(path).resolve()), *words[2:]]


def _started(
    python: str, program: str, env: dict[str, str], asked: dict[str, Any] | None, learnt: str = ""
) -> tuple[subprocess.Popen[bytes], str] | None:
    """Start the process that is copied, and return it with the path of its socket. learnt: a file
    of the modules that earlier copies have imported."""
    folder = tempfile.mkdtemp(prefix="copies-")
    place = str(Path(folder) / "socket")
    process = subprocess.Popen(
        [python, __file__, place, program, json.dumps(asked), learnt],
        stdin=subprocess.PIPE,  # closed with this process, and the other one ends with it
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env | {"PYTHONSAFEPATH": "1"},  # what lies beside this file is nobody's package
        start_new_session=True,  # a group that is killed leaves it the time to clean up
    )
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], STARTS_S)
    if ready and process.stdout.readline() == b"ready\n":
        return process, place
    process.kill()
    process.wait()
    shutil.rmtree(folder)
    return None


@atexit.register
def _end() -> None:
    """End the processes that are copied. Where this one is killed, they end by themselves."""
    for running in _running.values():
        if running is not None and running[0].stdin:
            running[0].stdin.close()
            running[0].wait()
    _running.clear()


# --- the process that is copied -------------------------------------------------------------------


def serve(place: str, program: str, asked: dict[str, Any] | None, learnt: str = "") -> None:
    """Import what the program imports and run a copy for each command until standard input ends.

    asked: what all commands ask for, None if they differ. learnt: see `_started`.
    """
    preload(program)
    if not learnt:
        note_imports(place + LEARNT)
    elif _import_learnt(learnt):
        return
    if _threads() > 1:
        return  # threads are not copied
    # A program that sets up logging finds it done: tracebacks in colour take 0.3 s each.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the user ends the commands
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(64)
        can_begin = asked and sys.platform == "linux"  # elsewhere, open files cannot be listed
        begun, told = begin(program, asked, listening) if asked and can_begin else (0, 0)
        os.write(1, b"ready\n")
        if begun:
            select.select([0, told], [], [])
            with contextlib.suppress(ProcessLookupError):
                os.kill(begun, signal.SIGKILL)
        elif copied := copies(listening, 0):
            os._exit(ended(lambda: run(program, **copied)))
    shutil.rmtree(os.path.dirname(place), ignore_errors=True)


def copies(listening: socket.socket, watched: int) -> dict[str, Any]:
    """Fork for each command that connects, and return in the copy what the command asks for. In
    this process, return {} when the stream `watched` ends."""
    while watched not in select.select([watched, listening.fileno()], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            return attend(connection)
        connection.close()
    return {}


def begin(program: str, asked: dict[str, Any], listening: socket.socket) -> tuple[int, int]:
    """Start a process that runs the program until it begins its event loop and is copied there.
    Return its number, 0 if the program cannot be copied there, and a stream that ends with it."""
    told, tell = os.pipe()
    begun = os.fork()
    if begun:
        os.close(tell)
        if select.select([told], [], [], BEGINS_S)[0] and os.read(told, 1):
            return begun, told
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(begun, signal.SIGKILL)
        return 0, told
    os.close(told)
    watched, written, log = os.dup(0), os.memfd_create("stdout"), os.memfd_create("stderr")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(log, 2)
    unsafe: list[str] = []
    known, here = set(os.listdir("/proc/self/fd")), (home_of(program), asked["folder"])
    sys.addaudithook(functools.partial(_note_unsafe, unsafe, here))
    is_copy: list[bool] = []
    loops: list[Any] = [sys.modules[name] for name in ("asyncio", "anyio") if name in sys.modules]
    originals = [(module, module.run) for module in loops]

    def stop(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        sys.stdout.flush()
        if unsafe or _threads() > 1 or os.fstat(written).st_size:
            os._exit(1)
        if set(os.listdir("/proc/self/fd")) - known:
            os._exit(1)
        for module, run in originals:
            module.run = run
        os.write(tell, b"y")
        copied = copies(listening, watched)
        if not copied:
            os._exit(0)
        os.close(tell)
        os.write(2, os.pread(log, os.fstat(log).st_size, 0))
        is_copy.append(True)
        settle(program, **copied)
        return original(*arguments, **named)

    for module, original in originals:
        module.run = functools.partial(stop, original)
    code = ended(lambda: run(program, **asked))
    os._exit(code & 255 if is_copy else 1)


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _note_unsafe(
    unsafe: list[str], here: tuple[str, ...], event: str, about: tuple[Any, ...]
) -> None:
    """Note what a copy would share with the others, or find done: files that are written or lie
    beside the program, connections, processes."""
    if event == "open" and isinstance(about[0], str):
        path, _, flags = about
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        whole = os.path.abspath(path)
        beside = any(_is_beside(whole, folder) for folder in here)
        if writes or (beside and not path.endswith(_CODE)):
            unsafe.append(path)
    elif event.startswith(_UNSAFE) or (event == "sqlite3.connect" and about[0] != ":memory:"):
        unsafe.append(event)


def file_of(program: str) -> Path:
    """Return the file of a program. That of a module is found without an import of its package.
    Raises FileNotFoundError."""
    if not program.startswith(MODULE):
        return Path(program)
    names = program.removeprefix(MODULE).split(".")
    for folder in (os.getcwd(), *sys.path):
        place = Path(folder, *names)
        for file in (place / "__main__.py", place.with_name(f"{names[-1]}.py")):
            if file.is_file():
                return file
    raise FileNotFoundError(program)


def home_of(program: str) -> str:
    """Return the folder in which a program finds its own code: that of its file, or the current one
    where a module is run."""
    return os.getcwd() if program.startswith(MODULE) else str(file_of(program).parent)


def _is_beside(path: str, folder: str) -> bool:
    """Return True for a path in a folder, but not in an environment of Python that is there. A
    program may itself lie below Python's own folder, as in /usr/src."""
    installed = sys.prefix.startswith(folder + os.sep) and path.startswith(sys.prefix + os.sep)
    return path.startswith(folder + os.sep) and not installed


def preload(program: str) -> None:
    """Import the installed packages that a program imports at its top. What lies beside it may have
    state, and is imported by each copy."""
    beside = home_of(program)
    sys.path.insert(0, beside)
    for node in ast.parse(file_of(program).read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            with contextlib.suppress(Exception):
                spec = importlib.util.find_spec(name.partition(".")[0])
                if spec and not _is_beside(str(spec.origin), beside):
                    importlib.import_module(name)


def note_imports(path: str) -> None:
    """Append to a file the names of the modules that this process and its copies import."""
    known, file = set(sys.modules), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, about: tuple[Any, ...]) -> None:
        if event == "import" and about[0] not in known:
            known.add(about[0])
            os.write(file, f"{about[0]}\n".encode())

    sys.addaudithook(note)


def _import_learnt(path: str) -> set[str]:
    """Import the installed modules among those that a file names. Return the files and connections
    that this has opened, which copies must not share."""
    known = set(os.listdir("/dev/fd"))
    standard = sysconfig.get_path("stdlib") + os.sep
    for name in Path(path).read_text().splitlines():
        with contextlib.suppress(Exception):
            origin = str(getattr(importlib.util.find_spec(name.partition(".")[0]), "origin", ""))
            if origin.startswith(standard) or _INSTALLED.fullmatch(origin):
                importlib.import_module(name)
    return set(os.listdir("/dev/fd")) - known


def attend(connection: socket.socket) -> dict[str, Any]:
    """Return in a further copy, which has the streams of a command, what it asks for. In this
    process, end the copy if the command is ended, and tell the command of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i", ancillary[0][2])
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 16)
    alive, held = os.pipe()  # the copy holds one end, whose closing tells of its end
    copy = os.fork()
    if copy == 0:
        connection.close()
        os.close(alive)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        asked: dict[str, Any] = json.loads(text)
        return asked
    for stream in (0, 1, 2, held, *streams):
        os.close(stream)
    if connection.fileno() in select.select([connection.fileno(), alive], [], [])[0]:
        os.kill(copy, signal.SIGKILL)  # the command was ended
    _, status = os.waitpid(copy, 0)
    with contextlib.suppress(OSError):
        connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
    os._exit(0)


def settle(program: str, arguments: list[str], folder: str, env: dict[str, str]) -> None:
    """Give this process what a command asks for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    random.seed()  # or chance would be the same in each copy
    sys.argv = [program, *arguments]


def run(program: str, arguments: list[str], folder: str, env: dict[str, str]) -> None:
    """Run the program in this process."""
    settle(program, arguments, folder, env)
    if program.startswith(MODULE):
        sys.path[0] = folder
        runpy.run_module(program.removeprefix(MODULE), run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def ended(run: Callable[[], None]) -> int:
    """Run a program, and return its exit code once its threads and exit handlers are done.

    The interpreter's own end is left out, which takes as long as all else: it frees every module.
    """
    code = 0
    try:
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code & 255


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
