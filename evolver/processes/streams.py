"""The standard streams, the working directory and the address space, as a run needs them."""

import contextlib
import io
import os
import resource
import sys
from collections.abc import Iterator

ADDRESS_SPACE = 9 << 28  # bytes that a run with the smallest policy reserves on two cores


def open_streams() -> None:
    """Give this process the standard streams that it lacks, and let them take any text.

    The number of a closed one would go to the next file that is opened, into which prints would
    then go. A character that the locale cannot encode is written as "?".
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(number, "r" if name == "stdin" else "w", closefd=False)
            setattr(sys, name, stream)
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence(number: int) -> None:
    """Send to /dev/null what is still written to a file descriptor that nobody reads."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def until_unread() -> Iterator[None]:
    """End the block once nobody reads what it prints, as in `run.py --help | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout.fileno())


def surroundings_problems() -> list[str]:
    """Return why no run can start in this shell, before anything else can fail because of it."""
    found = []
    try:
        os.getcwd()
    except OSError:
        found.append(
            "the working directory does not exist any more: change to one that does, and start"
            " again"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        found.append(
            f"this shell limits the address space to {limit / 2**30:.1f} GiB (ulimit -v), and jax"
            f" reserves {ADDRESS_SPACE / 2**30:.2f} GiB and more: start with `ulimit -v unlimited`"
        )
    return found
