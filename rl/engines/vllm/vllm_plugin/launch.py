"""Run a command and kill it, with all its children, when standard input closes.

    python launch.py vllm serve ...

The trainer holds the other end of the pipe, so its servers end with it, even after kill -9.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def main() -> int:
    """Run the command in sys.argv and return its exit code."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=watch, args=(child,), daemon=True).start()
    code = child.wait()
    end(child)  # kill children that survived it
    return code if code >= 0 else 128 - code


def watch(child: subprocess.Popen) -> None:
    """Wait until standard input closes, then stop the child."""
    while os.read(0, 4096):
        pass
    try:
        os.killpg(child.pid, signal.SIGTERM)
        time.sleep(GRACE)
    except ProcessLookupError:
        return
    end(child)


def end(child: subprocess.Popen) -> None:
    """Kill the child's process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches this process too; the trainer decides
    sys.exit(main())
