"""A process for tests of grids: it counts its starts and steps, resumes, and waits, fails or ends
as it is told.

It takes --workdir and --config.KEY=VALUE: `steps` to do, `wait` for a file before the last step,
`code` to exit with.
"""

import signal
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    values = dict(word.lstrip("-").split("=", 1) for word in argv[1:] if "=" in word)
    workdir = Path(values["workdir"])
    workdir.mkdir(parents=True, exist_ok=True)
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    with open(workdir / "starts", "a") as file:
        file.write(".")
    done = workdir / "steps"
    for step in range(len(done.read_text()) if done.exists() else 0, int(values["config.steps"])):
        if step == int(values["config.steps"]) - 1 and (wait := values.get("config.wait")):
            until = time.monotonic() + 60
            while not Path(wait).exists() and not stopped and time.monotonic() < until:
                time.sleep(0.02)
        if stopped:
            return 130
        with open(done, "a") as file:
            file.write(".")
    return int(values.get("config.code", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
