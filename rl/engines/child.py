"""A server process that ends with the process that started it, also by kill -9."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.http import listen

# code that runs under vLLM's interpreter, and a launcher that runs under any
PLUGIN = Path(__file__).parent / "vllm" / "vllm_plugin"
GRACE_S = 20.0  # until a process that was told to end is killed
SHOWN = 200_000  # bytes at the end of a log that are searched for an error


class Child:
    """A process, started at once, whose output is appended to a log."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._begins = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, str(PLUGIN / "launch.py"), *command],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        """True once the process has ended."""
        return self._process.poll() is not None

    def fault(self, what: str) -> str:
        """Return what happened, with the first error that the process wrote and its log's path."""
        log = self._log.read_bytes()[self._begins :][-SHOWN:].decode(errors="replace")
        return f"{what}: {first_error(log)}\n  log: {self._log}"

    def end(self) -> None:
        """End the process and all that it started, and wait until they are gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # launch.py then ends the server
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def first_error(log: str) -> str:
    """Return the likely fault in a server's log: the last line of the first traceback, else the
    first error line."""
    lines = [
        re.sub(r"^(\([^)]*\) )?(ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?", "", line)
        for line in log.splitlines()
    ]
    exception = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*: ?\S").match
    for found in (exception, re.compile(r"\berror\b", re.IGNORECASE).search):
        for number, line in enumerate(lines):
            if found(line):
                # pydantic gives the details on the next lines
                more = 3 if found is exception and "validation error" in line else 1
                return " ".join(" ".join(lines[number : number + more]).split())[:400]
    return next(
        (line.strip()[:400] for line in reversed(lines) if line.strip()), "its log is empty"
    )


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(count)]
        return [held.getsockname()[1] for held in sockets]
