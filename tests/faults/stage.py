"""The stage of a fault: a folder, namespace and process of its own, real runs there, and what holds
after each run.

Whatever the fault: the run ends in time, with the expected code and message and without a
traceback; each rollout that its steps asked for is accounted for; no step takes longer than the
deadlines of what hung in it; and the run leaves no process, shared memory, lock or temporary file.
"""

import atexit
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import matplotlib.backends.backend_agg
import numpy as np

import evolver.loop
import evolver.plan.preflight
import run
from evolver.files.workdir import Workdir
from tests.evolver.runs import figures, flags, rollouts_of
from tests.tiny import config_file, tiny_policy

# Not used here: each fork would import them again.
IMPORTED = (matplotlib.backends.backend_agg, evolver.loop, evolver.plan.preflight)
FATES = ("trained", "no_signal", "overlong", "stale", "parse_error", "env_error", "cancelled")
STEPS, ROLLOUTS = 3, 12  # of a run; rollouts of each step
SHORT = f"steps={STEPS} eval.tasks=2 eval.rollouts=1 eval.greedy=False"
MODES = {"sync": "", "async": "rollout.async_depth=1"}
RESULTS = ("trajectories/*", "eval/*", "experience/*", "tasks.jsonl", "policy/*.safetensors")
# As Linux numbers them.
NEW_NAMESPACE, PRIVATE, READ_ONLY, REMOUNT, SUBREAPER = 0x20000, 0x44000, 1, 32, 36
# What Python says of objects that could not be cleared away, and goes on.
IGNORED = re.compile(r"^Exception ignored .*\nTraceback .*\n(?: +.*\n)*.*\n", re.MULTILINE)


class Broken(AssertionError):
    """Something that should hold under every fault does not."""


class Run:
    """A run in a process of its own, forked from this one, which has imported everything and
    started no device."""

    def __init__(self, words, log, inside):
        self.log, self.code = log, None
        log.touch()
        self._seen = log.stat().st_size
        self.pid = os.fork()
        if not self.pid:
            self._play(words, inside)

    def _play(self, words, inside):
        """End as the interpreter would at the end of run.py."""
        code = 70
        try:
            file = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            more = (inside() if inside else None) or []
            code = run.main(["run.py", *flags(*words, *more)])
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
    def said(self):
        with open(self.log, errors="replace") as file:
            file.seek(self._seen)
            return file.read()

    def cpu(self):
        """Return the seconds of processor time that it has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def until(self, text):
        """Wait until it has said a text. Raises Broken if it ends before, or takes too long."""
        until = time.monotonic() + 300
        while text not in self.said:
            if self.ended():
                raise Broken(f"the run ended with {self.code} before {text!r}")
            if time.monotonic() > until:
                raise Broken(f"{text!r} did not happen within 300 s")
            time.sleep(0.01)

    def signal(self, number):
        if not self.ended():
            os.kill(self.pid, number)

    def wait(self, limit):
        """Return the exit code. Raises Broken, and kills the run, if it does not end within `limit`
        seconds."""
        until = time.monotonic() + limit
        while not self.ended():
            if time.monotonic() > until:
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

    def __init__(self, folder, config, mode, straight, *, limit, kills, pause, pace=None):
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

    def words(self, *words):
        place = (f"--config={self.config}", f"--workdir={self.workdir}")
        return [*place, SHORT, MODES[self.mode], *words]

    def start(self, *words, inside=None):
        """Start a run. inside: called in its process before it begins; it may return further
        words."""
        return Run(self.words(*words), self.log, inside)

    def started(self, *words, after="step 1/"):
        """Start a run and wait until it has said this."""
        run = self.start(*words)
        run.until(after)
        return run

    def run(self, *words, inside=None, **ends):
        """Play a run to its end and check what holds after it. ends: see `end`."""
        return self.end(self.start(*words, inside=inside), **ends)

    def end(self, run, *, code=0, said="", steps=STEPS, once=True, killed=False, books=True):
        """Wait for a run and check what holds after it.

        code, said: its exit code and a part of its message, which it may say `once` only. steps:
        those of a run that completes, None = any number. killed: it may leave its lock and
        temporary files in the workdir, which the next run has to cope with. books: False where they
        cannot be read.
        """
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

    def kill(self, run):
        """Kill a run."""
        run.signal(signal.SIGKILL)
        run.wait(self.limit)
        self.left_nothing(killed=True)

    def skip(self, why):
        self.note = f"skipped: {why}"

    def adds_up(self, steps):
        """Check the books: one line per step, and one fate and one end of every rollout in all of
        them. Check that no step took longer than its deadlines allow."""
        lines = self.metrics()
        done = [line["step"] for line in lines]
        if done != list(range(len(done))) or (steps is not None and len(done) != steps + 1):
            raise Broken(f"the steps of metrics.jsonl are {done}")
        for line in lines[1:]:
            fates, stops = sum(line[f"ledger/{fate}"] for fate in FATES), total(line, "stop/")
            step, rollouts = line["step"], line["ledger/rollouts"]
            if not rollouts == line["rollout/count"] == fates == stops == ROLLOUTS:
                raise Broken(f"step {step}: {rollouts} rollouts, {fates} fates, {stops} ends")
            written = [record["fate"] for record in rollouts_of(self.workdir, step)]
            if any(written.count(fate) != line[f"ledger/{fate}"] for fate in FATES):
                raise Broken(f"step {step}: the trajectories have other fates than the ledger")
        config = Workdir(self.workdir).config()["config"]
        if late := overdue(lines, config, self.paused + self.slack):
            raise Broken(late)

    def left_nothing(self, *, killed=False):
        """Check that no process, shared memory, lock or temporary file is left, a moment after the
        end of a run. Ends what is."""
        until = time.monotonic() + 15
        while (left := self._left(killed)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in self._orphans():
            os.kill(pid, signal.SIGKILL)
        if left:
            raise Broken(f"left behind: {', '.join(sorted(left))}")

    def _orphans(self):
        return {pid: command for pid, command in orphans() if pid not in self.own}

    def _left(self, killed):
        left = {f"process {pid} ({command})" for pid, command in self._orphans().items()}
        if self.isolated:
            shared = set(os.listdir("/dev/shm")) - self._shared
            left |= {f"/dev/shm/{name}" for name in shared}
        if not killed:
            left |= {f"TMPDIR/{path.name}" for path in self._temporary.iterdir()}
            files = [*self.workdir.glob("lock"), *self.workdir.glob("**/*.tmp")]
            left |= {path.name for path in files}
        return left

    def metrics(self):
        return Workdir(self.workdir).metrics()

    def saved(self):
        """Return the step of the newest checkpoint."""
        return max(int(path.name) for path in (self.workdir / "checkpoints").glob("[0-9]*"))

    def counted(self, *names):
        """Check that the metrics of all steps together count each of these."""
        for name in names:
            found = sum(line.get(name, 0) for line in self.metrics())
            if found < 1:
                raise Broken(f"{name} is {found}, not at least 1")
        return self

    def resumes(self, *words, same=False, steps=STEPS):
        """Check that the same command, with the cause of the fault removed, completes the run;
        `same`: as if nothing had happened."""
        self.run(*words, steps=steps)
        return self.same_as_straight() if same else self

    def resumes_for_a_step(self):
        """Check that a run that was to be long can be resumed and completed."""
        self.resumes(f"--config.steps={max(STEPS, len(self.metrics()))}", steps=None)

    def same_as_straight(self):
        """Check that a synchronous run has the figures and rollouts of one that was never
        disturbed, bit for bit. Those of an asynchronous one depend on when its rollouts end."""
        differs = list(differences(self.straight, self.workdir)) if self.mode == "sync" else []
        if differs:
            raise Broken(f"other than an undisturbed run: {', '.join(differs[:9])}")
        return self

    def mount(self, size):
        """Give the workdir a file system of its own. Returns False where this is not permitted."""
        self.workdir.mkdir()
        return self.isolated and self._mount(0, f"size={size}".encode())

    def forbid_writing(self):
        """Forbid to write to the file system that `mount` gave."""
        self._mount(REMOUNT | READ_ONLY, None)

    def _mount(self, flags, options):
        place = os.fsencode(self.workdir)
        return not _libc().mount(b"tmpfs", place, b"tmpfs", flags, options)


def total(line, prefix):
    return sum(value for name, value in line.items() if name.startswith(prefix))


def durations(lines):
    """Return the seconds of each step."""
    return list(np.diff([line["time/elapsed"] for line in lines]))


def overdue(lines, config, slack):
    """Return which step took longer than its deadlines allow, "" if none did.

    Each call into the world that hung may take `env.timeout`, twice if it was that of a reset,
    which is tried again. If any rollout was cancelled, all of them may have taken
    `rollout.timeout`. A question that timed out may take `llm.deadline`. slack: seconds of a step
    besides its deadlines.
    """
    for took, line in zip(durations(lines), lines[1:]):
        hung = total(line, "stop/env_timeout") + line.get("eval/broken", 0)
        timeouts = {n: v for n, v in line.items() if n.endswith("/failures/timeout")}
        allowed = slack + 2 * hung * config["env"]["timeout"]
        allowed += total(timeouts, "llm/") * config["llm"]["deadline"]
        if line["stop/cancelled"] or line.get("eval/broken"):
            allowed += 2 * config["rollout"]["timeout"]
        if took > allowed:
            return f"step {line['step']} took {took:.0f} s, and its deadlines allow {allowed:.0f} s"
    return ""


def differences(first, second):
    """Yield what differs between two runs, apart from what a clock had a part in."""
    ours, theirs = figures(first), figures(second)
    for one, other in zip(ours, theirs):
        names = [name for name in one | other if one.get(name) != other.get(name)]
        yield from (f"{name} of step {one['step']}" for name in names)
    if len(ours) != len(theirs):
        yield f"{len(theirs)} lines instead of {len(ours)}"
    left, right = results(first), results(second)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            yield f"{name}, which only one has"
        elif left[name] != right[name]:
            yield str(name)


def results(workdir):
    """Return the content of the files that a run is made for."""
    found = [path for pattern in RESULTS for path in workdir.glob(pattern)]
    return {path.relative_to(workdir): path.read_bytes() for path in found}


# --- processes and namespaces ---------------------------------------------------------------------


def isolate():
    """Adopt the orphans of this process. Give it a /dev/shm of its own, and return whether that was
    permitted."""
    libc = _libc()
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    if libc.unshare(NEW_NAMESPACE) or libc.mount(None, b"/", None, PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1g")


def orphans():
    """Return the (pid, command) of every process directly below this one."""
    found = []
    for pid in children(os.getpid()):
        command = command_of(pid)
        if not os.waitpid(pid, os.WNOHANG)[0]:  # else it has ended, too
            found.append((pid, command.strip()[:100]))
    return found


def children(pid):
    """Return the processes that a process has started."""
    found: list[int] = []
    for path in sorted(Path(f"/proc/{pid}/task").glob("*/children")):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, path.read_text().split())
    return found


def descendants(pid):
    """Return the processes that a process has started, and those that they have started."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def command_of(pid):
    """Return the command line of a process, "" if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace")


def play(fault, folder, **stage):
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


def make_config(folder):
    """Write a policy and its config, in a process of its own, because this one must start no device
    before it forks. Return the config's path."""
    pid = os.fork()
    if not pid:
        tiny_policy(folder / "policy")
        os._exit(0)
    os.waitpid(pid, 0)
    return config_file(folder, folder / "policy")


def _libc():
    return ctypes.CDLL(None, use_errno=True)
