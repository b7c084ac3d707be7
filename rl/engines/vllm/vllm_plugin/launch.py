"""Run a command and kill it, with all its children, when standard input closes.

    python launch.py vllm serve ...

The trainer holds the other end of the pipe, so its servers end with it, even after kill -9.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of sys/prctl.h


def main() -> int:
    """Run the command in sys.argv and return its exit code."""
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=follow
    )
    threading.Thread(target=watch, args=(child,), daemon=True).start()
    code = child.wait()
    end(child)  # children that survived it
    return code if code >= 0 else 128 - code


def follow() -> None:
    """Ask Linux to end this process if the launcher is killed, which can then end nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def watch(child: subprocess.Popen) -> None:
    """Wait until standard input closes, then end the child."""
    while os.read(0, 4096):
        pass
    end(child)


def end(child: subprocess.Popen) -> None:
    """End the child's process group, if it still exists.

    Its last process is Python's resource tracker, which ignores SIGTERM and removes the shared
    memory of the others once they are gone. If it were killed with them, the buffers of the server,
    two sparse files of 400 MB together, would stay in /dev/shm.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            os.killpg(child.pid, 0)
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    # What ends the trainer's process group reaches this process too: the trainer decides. A server
    # that is told to end while it starts may hang, and then nobody would be left to kill it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the server does not inherit that
    sys.exit(main())
