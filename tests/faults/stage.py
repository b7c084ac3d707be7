"""The stage of a fault: a folder, namespace and process of its own, real runs there, and what holds
after each run.

Whatever the fault: the run ends in time, with the expected code and message and without a
traceback; each rollout that its steps asked for is accounted for; no step takes longer than the
deadlines of what hung in it; and the run leaves no process, shared memory, lock or temporary file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import run
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir

FATES = ("trained", "no_signal", "overlong", "stale", "parse_error", "env_error", "cancelled")
STEPS, ROLLOUTS = 3, 12  # of a run; rollouts of each step
SHORT = (
    f"--config.steps={STEPS}",
    "--config.eval.tasks=2",
    "--config.eval.rollouts=1",
    "--config.eval.greedy=False",
)
MODES = {"sync": (), "async": ("--config.rollout.async_depth=1",)}
RESULTS = ("trajectories/*", "eval/*", "experience/*", "tasks.jsonl", "policy/*.safetensors")
NEW_NAMESPACE, PRIVATE, READ_ONLY, REMOUNT, SUBREAPER = (
    0x20000,
    0x44000,
    1,
    32,
    36,
)  # as Linux numbers them

LATE = (
    "evolver.loop",
    "evolver.plan.preflight",
    "rl.engines.jax.engine",
    "matplotlib.backends.backend_agg",
)
for late in LATE:  # or each fork would import them again
    importlib.import_module(late)
# What Python says of objects that could not be cleared away, and goes on.
IGNORED = re.compile(r"^Exception ignored .*\nTraceback .*\n(?: +.*\n)*.*\n", re.MULTILINE)


class Broken(AssertionError):
    """Something that should hold under every fault does not."""


class Run:
    """A run in a process of its own, forked from this one, which has imported everything and
    started no device."""

    def __init__(self, words: list[str], log: Path, inside: Callable[[], Any] | None):
        self.log, self.code = log, None
        log.touch()
        self._seen = log.stat().st_size
        self.pid = os.fork()
        if not self.pid:
            self._play(words, inside)

    def _play(self, words: list[str], inside: Callable[[], Any] | None) -> None:
        """End as the interpreter would at the end of run.py."""
        code = 70
        try:
            file = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            more = inside() if inside else None
            code = run.main(["run.py", *words, *(more or [])])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            with contextlib.suppress(OSError):  # nobody may read it
                traceback.print_exc()
        try:
            threading._shutdown()  # waits for threads that are not daemons
            atexit._run_exitfuncs()
        except BaseException:
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            os._exit(code)

    @property
    def said(self) -> str:
        with open(self.log, errors="replace") as file:
            file.seek(self._seen)
            return file.read()

    def cpu(self) -> float:
        """Return the seconds of processor time that it has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def children(self) -> list[int]:
        """Return the processes that it has started."""
        found = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for path in found for pid in path.read_text().split()]

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def until(self, condition: str | Callable[[], bool], limit: float = 300.0) -> None:
        """Wait until it has said a text, or a condition holds. Raises Broken if it ends before, or
        takes too long."""
        holds = (lambda: condition in self.said) if isinstance(condition, str) else condition
        began = time.monotonic()
        while not holds():
            if self.ended():
                raise Broken(f"the run ended with {self.code} before {condition!r}")
            if time.monotonic() - began > limit:
                raise Broken(f"{condition!r} did not happen within {limit:.0f} s")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def wait(self, limit: float) -> int:
        """Return the exit code. Raises Broken, and kills the run, if it does not end within `limit`
        seconds."""
        began = time.monotonic()
        while not self.ended():
            if time.monotonic() - began > limit:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -signal.SIGKILL
                raise Broken(f"it did not end within {limit:.0f} s")
            time.sleep(0.01)
        return self.code


class Stage:
    """Plays the runs of one fault.

    config: file of the tiny config. mode: "sync" or "async". straight: workdir of an undisturbed
    synchronous run.
    limit: seconds within which any run has to end. pace: seconds of the slowest step of the
    undisturbed run, which compiles in it; None for that run itself. A step may take ten seconds and
    five times as long, besides its deadlines.
    kills, pause: how often a run is killed, and for how many seconds it is stopped. `note` is shown
    beside the result. `own` are processes that the fault started itself, `paused` the seconds for
    which it stopped a run.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        mode: str,
        straight: Path,
        *,
        limit: float,
        kills: int,
        pause: float,
        pace: float | None = None,
    ):
        self.folder, self.config, self.mode, self.straight = folder, config, mode, straight
        self.limit, self.kills, self.pause = limit, kills, pause
        self.slack = limit if pace is None else 10 + 5 * pace
        self.note, self.own, self.paused = "", set(), 0.0
        self.workdir, self.log = folder / "run", folder / "log"
        self.isolated = isolate()
        self._shared = set(os.listdir("/dev/shm"))
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        os.environ["TMPDIR"] = str(self._temporary)

    def words(self, *words: str) -> list[str]:
        return [
            f"--config={self.config}",
            f"--workdir={self.workdir}",
            *SHORT,
            *MODES[self.mode],
            *words,
        ]

    def start(self, *words: str, inside: Callable[[], Any] | None = None) -> Run:
        """Start a run. inside: called in its process before it begins; it may return further
        words."""
        return Run(self.words(*words), self.log, inside)

    def run(
        self,
        *words: str,
        inside: Callable[[], Any] | None = None,
        code: int = 0,
        said: str = "",
        steps: int | None = STEPS,
        once: bool = True,
        books: bool = True,
    ) -> Stage:
        """Play a run to its end and check what holds after it. code, said: its exit code and a part
        of its message, which it may say `once` only. steps: those of a run that completes, None =
        any number. books: False where they cannot be read."""
        run = self.start(*words, inside=inside)
        return self.end(run, code=code, said=said, steps=steps, once=once, books=books)

    def end(
        self,
        run: Run,
        *,
        code: int = 0,
        said: str = "",
        steps: int | None = STEPS,
        once: bool = True,
        killed: bool = False,
        books: bool = True,
    ) -> Stage:
        """Wait for a run and check what holds after it. killed: it may leave its lock and temporary
        files in the workdir, which the next run has to cope with."""
        run.wait(self.limit)
        self.left_nothing(killed=killed)
        if run.code != code:
            raise Broken(f"exit code {run.code} instead of {code}: {run.said.strip()[-600:]}")
        told = IGNORED.sub("", run.said)
        if "Traceback" in told:
            raise Broken(f"a traceback: {told.partition('Traceback')[2][:2000]}")
        if said not in run.said:
            raise Broken(f"it did not say {said!r}, but {run.said.strip()[-600:]!r}")
        if code and said and once and run.said.count(said) != 1:
            raise Broken(f"it said {said!r} {run.said.count(said)} times")
        if books and (code == 0 or (self.workdir / "metrics.jsonl").exists()):
            self.adds_up(steps if code == 0 else None)
        return self

    def skip(self, why: str) -> None:
        self.note = f"skipped: {why}"

    def adds_up(self, steps: int | None) -> None:
        """Check the books: one line per step, and one fate and one end of every rollout in all of
        them. Check that no step took longer than its deadlines allow."""
        lines = self.metrics()
        done = [line["step"] for line in lines]
        if done != list(range(len(done))) or (steps is not None and len(done) != steps + 1):
            raise Broken(f"the steps of metrics.jsonl are {done}")
        for line in lines[1:]:
            fates, stops = sum(line[f"ledger/{fate}"] for fate in FATES), total(line, "stop/")
            if not line["ledger/rollouts"] == line["rollout/count"] == fates == stops == ROLLOUTS:
                raise Broken(
                    f"step {line['step']}: {line['ledger/rollouts']} rollouts, {fates} fates, {stops} ends"
                )
            path = self.workdir / f"trajectories/step_{line['step']:06d}.jsonl.gz"
            written = [record["fate"] for record in read_rollouts(path)]
            if {fate: written.count(fate) for fate in FATES} != {
                fate: line[f"ledger/{fate}"] for fate in FATES
            }:
                raise Broken(
                    f"step {line['step']}: the trajectories have other fates than the ledger"
                )
        if late := overdue(
            lines, Workdir(self.workdir).config()["config"], self.paused + self.slack
        ):
            raise Broken(late)

    def left_nothing(self, *, killed: bool = False) -> None:
        """Check that no process, shared memory, lock or temporary file is left, a moment after the
        end of a run. Ends what is."""
        left, until = self._left(killed), time.monotonic() + 15
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = self._left(killed)
        for pid in self._orphans():
            os.kill(pid, signal.SIGKILL)
        if left:
            raise Broken(f"left behind: {', '.join(sorted(left))}")

    def _orphans(self) -> dict[int, str]:
        return {pid: command for pid, command in orphans() if pid not in self.own}

    def _left(self, killed: bool) -> set[str]:
        left = {f"process {pid} ({command})" for pid, command in self._orphans().items()}
        left |= {
            f"/dev/shm/{name}"
            for name in set(os.listdir("/dev/shm")) - self._shared
            if self.isolated
        }
        if not killed:
            left |= {f"TMPDIR/{path.name}" for path in self._temporary.iterdir()}
            left |= {
                path.name for path in [*self.workdir.glob("lock"), *self.workdir.glob("**/*.tmp")]
            }
        return left

    def metrics(self) -> list[dict[str, Any]]:
        return Workdir(self.workdir).metrics()

    def counted(self, *names: str, least: int = 1) -> Stage:
        """Check that the metrics of all steps together count each of these at least so often."""
        for name in names:
            found = sum(line.get(name, 0) for line in self.metrics())
            if found < least:
                raise Broken(f"{name} is {found}, not at least {least}")
        return self

    def resumes(self, *words: str, same: bool = False, steps: int | None = STEPS) -> Stage:
        """Check that the same command, with the cause of the fault removed, completes the run;
        `same`: as if nothing had happened."""
        self.run(*words, steps=steps)
        return self.same_as_straight() if same else self

    def same_as_straight(self) -> Stage:
        """Check that a synchronous run has the figures and rollouts of one that was never
        disturbed, bit for bit. Those of an asynchronous one depend on when its rollouts end."""
        differs = list(differences(self.straight, self.workdir)) if self.mode == "sync" else []
        if differs:
            raise Broken(f"other than an undisturbed run: {', '.join(differs[:9])}")
        return self

    def mount(self, size: str) -> bool:
        """Give the workdir a file system of its own. Returns False where this is not permitted."""
        self.workdir.mkdir()
        return self.isolated and not _libc().mount(
            b"tmpfs", _bytes(self.workdir), b"tmpfs", 0, b"size=" + size.encode()
        )

    def remount(self, *, size: str = "", read_only: bool = False) -> bool:
        """Change the size of the file system of the workdir, or forbid to write to it. Returns
        False while a file there is open for writing."""
        flags, data = (
            REMOUNT | (READ_ONLY if read_only else 0),
            f"size={size}".encode() if size else None,
        )
        return not _libc().mount(b"tmpfs", _bytes(self.workdir), b"tmpfs", flags, data)


def total(line: dict[str, Any], prefix: str) -> float:
    return sum(value for name, value in line.items() if name.startswith(prefix))


def durations(lines: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each step."""
    return [
        line["time/elapsed"] - before["time/elapsed"] for before, line in itertools.pairwise(lines)
    ]


def overdue(lines: list[dict[str, Any]], config: dict[str, Any], slack: float) -> str:
    """Return which step took longer than its deadlines allow, "" if none did.

    Each call into the world that hung may take `env.timeout`, twice if it was that of a reset,
    which is tried again. If any rollout was cancelled, all of them may have taken
    `rollout.timeout`. A question that timed out may take `llm.deadline`. slack: seconds of a step
    besides its deadlines.
    """
    for took, line in zip(durations(lines), lines[1:]):
        hung = total(line, "stop/env_timeout") + line.get("eval/broken", 0)
        unanswered = sum(
            n for name, n in line.items() if name.startswith("llm/") and name.endswith("/timeout")
        )
        allowed = (
            slack + 2 * hung * config["env"]["timeout"] + unanswered * config["llm"]["deadline"]
        )
        if line["stop/cancelled"] or line.get("eval/broken"):
            allowed += 2 * config["rollout"]["timeout"]
        if took > allowed:
            return f"step {line['step']} took {took:.0f} s, and its deadlines allow {allowed:.0f} s"
    return ""


def differences(first: Path, second: Path) -> Iterable[str]:
    """Yield what differs between two runs, apart from what a clock had a part in."""
    ours, theirs = (
        [
            {k: v for k, v in line.items() if not k.startswith("time/")}
            for line in Workdir(path).metrics()
        ]
        for path in (first, second)
    )
    for one, other in zip(ours, theirs):
        yield from (
            f"{name} of step {one['step']}"
            for name in one | other
            if one.get(name) != other.get(name)
        )
    if len(ours) != len(theirs):
        yield f"{len(theirs)} lines instead of {len(ours)}"
    for pattern in RESULTS:
        names = {
            path.relative_to(folder) for folder in (first, second) for path in folder.glob(pattern)
        }
        for name in sorted(names):
            if not all((folder / name).is_file() for folder in (first, second)):
                yield f"{name}, which only one has"
            elif (first / name).read_bytes() != (second / name).read_bytes():
                yield str(name)


# --- processes and namespaces ---------------------------------------------------------------------


def isolate() -> bool:
    """Adopt the orphans of this process. Give it a /dev/shm of its own, and return whether that was
    permitted."""
    libc = _libc()
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    if libc.unshare(NEW_NAMESPACE) or libc.mount(None, b"/", None, PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1g")


def orphans() -> list[tuple[int, str]]:
    """Return the (pid, command) of every process directly below this one."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            if os.waitpid(pid, os.WNOHANG)[0]:  # it has ended, too
                continue
            found.append((pid, command.strip()[:100]))
    return found


def play(fault: Callable[[Stage], Any], folder: Path, **stage: Any) -> tuple[int, Path]:
    """Play a fault in a process of its own. Return its pid and the file that will hold [what does
    not hold, a note]."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = folder / "result.json"
    pid = os.fork()
    if pid:
        return pid, result
    problem, place = "", None
    try:
        place = Stage(folder, **stage)
        fault(place)
    except Broken as broken:
        problem = str(broken)
    except BaseException:
        problem = traceback.format_exc()
    for child, _ in orphans():
        os.kill(child, signal.SIGKILL)
    result.write_text(json.dumps([problem, place.note if place else ""]))
    os._exit(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _bytes(path: Path) -> bytes:
    return str(path).encode()
