"""What a shell or a scheduler may start a run in: each is a function that is called in the process
of a run before it begins."""

import os
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def _without(*numbers):
    """Return a function that closes standard streams, as `>&-` does."""

    def close():
        for number in numbers:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)

    return close


def _in_ascii():
    """As with LC_ALL=C, PYTHONUTF8=0 and PYTHONCOERCECLOCALE=0."""
    for name in ("stdout", "stderr"):
        getattr(sys, name).reconfigure(encoding="ascii", errors="strict")


def _in_a_folder_that_is_gone():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def _in_little_room():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def _on_a_full_device():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _in_another_folder():
    return [f"--workdir={os.fsdecode(os.fsencode(tempfile.gettempdir()) + bytes([47, 255]))}"]


def _of_nobody():
    os.environ.update(HOME="/nowhere", XDG_CACHE_HOME="/nowhere/cache", COLUMNS="x", TERM="none")


# (name, what happens in the process, whether asynchronous runs are played too, how the run ends)
SURROUNDINGS: list[tuple[str, Callable[[], Any], tuple[str, ...], dict[str, Any]]] = [
    ("a locale without UTF-8", _in_ascii, ("sync", "async"), {}),
    ("a closed output", _without(1), ("sync",), {}),
    ("no streams at all", _without(0, 1, 2), ("async",), {}),
    ("a home that does not exist", _of_nobody, ("sync",), {}),
    ("an output on a full device", _on_a_full_device, ("sync",),
     {"code": 1, "said": "No space left"}),
    ("a working directory that is gone", _in_a_folder_that_is_gone, ("sync",),
     {"code": 2, "said": "does not exist any more"}),
    ("an address space of 1 GB", _in_little_room, ("sync",),
     {"code": 2, "said": "limits the address space"}),
    ("a workdir that is not UTF-8", _in_another_folder, ("sync",),
     {"code": 2, "said": "is not UTF-8"}),
]  # fmt: skip
