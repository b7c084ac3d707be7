"""Run a command for as long as standard input stays open, and end it, with all its children, when that closes.

    python launch.py vllm serve ...

A trainer that starts servers keeps the other end: however it dies, kill -9 included, its servers go with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0  # seconds between asking and killing


def main() -> int:
    """Run the command in sys.argv; returns its exit code."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=watch, args=(child,), daemon=True).start()
    code = child.wait()
    end(child)  # its children, should it have died without them
    return code if code >= 0 else 128 - code


def watch(child: subprocess.Popen) -> None:
    """Block until standard input closes, then end the child."""
    while os.read(0, 4096):
        pass
    try:
        os.killpg(child.pid, signal.SIGTERM)
        time.sleep(GRACE)
    except ProcessLookupError:
        return
    end(child)


def end(child: subprocess.Popen) -> None:
    """Kill the whole group; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the trainer decides
    sys.exit(main())
