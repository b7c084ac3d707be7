"""Kill each part of a small flagship run in turn: does the run go on, and do the counts add up?

It plays `configs/rehearsal.py` with a smaller model in the roles, whose answers do not
matter here. It needs what `make rehearsal` installs.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from evolver.files.workdir import Workdir
from evolver.processes.hosts import LOST
from tests.evolver.runs import command
from tests.faults.long import steps_done
from tests.faults.stage import command_of, descendants, isolate

ROOT = Path(__file__).parents[2]
SHARED = "all room in /dev/shm"
BALLAST = Path("/dev/shm/ballast")
LEARNER = "a learner process, while servers sleep"
ASLEEP = ("log-probabilities", "update")  # phases in which they do
# {what is killed after the step of its place: (process of the run that has it, words of its
# command line)}; None: not killed, but taken until the next step is done
PARTS = {
    "a worker of AppWorld": (0, "envs.worker"),
    "the service of AppWorld": (0, "envs.service"),
    "a vLLM server": (1, "vllm.entrypoints"),
    "the judge": (0, "rl.engines.serve"),
    LEARNER: (1, "run.py"),
}
# Then a start in which a vLLM server cannot start again, and may end the run; and one to the end.
STARTS = (PARTS, {SHARED: None}, {})
LAUNCHER = "launch.py"  # of a server, which ends when it is killed itself
STEPS = len(PARTS) + 3
ROLLOUTS = 16  # in a step
LIMIT = 3600.0  # seconds of a step on a busy machine
GONE = 120.0  # seconds within which everything has ended


def rehearsal(folder):
    """Play the run, kill its parts, start it again, and return the exit code."""
    # Nobody else's /dev/shm is filled.
    starts = STARTS if isolate() else (PARTS, {})
    workdir, faults = folder / "run", []
    for number, kills in enumerate(starts):
        log = folder / f"log_{number}"
        code, left = played(workdir, log, kills)
        said = log.read_text(errors="replace")
        # here.sh gives the code of the first process, which ends because the other was lost.
        wanted = code == (LOST if kills else 0)
        if SHARED in kills:
            wanted = code == 0 or "The same command resumes from there" in said
        if not wanted:
            faults.append(f"start {number}: exit code {code}\n{said[-2000:]}")
        faults += [f"start {number}: {command} is left" for command in left]
    lines = Workdir(workdir).metrics()
    if [line["step"] for line in lines] != list(range(STEPS + 1)):
        faults.append(f"steps {[line['step'] for line in lines]}")
    for line in lines[1:]:
        counts = {name: n for name, n in line.items() if name.startswith("ledger/")}
        told = sum(n for name, n in counts.items() if name != "ledger/rollouts")
        if not line["rollout/count"] == counts["ledger/rollouts"] == told == ROLLOUTS:
            faults.append(f"step {line['step']}: {line['rollout/count']} rollouts, {counts}")
    print(*faults, f"{sum(map(len, starts))} faults played, {len(faults)} found", sep="\n")
    return bool(faults)


def played(workdir, log, kills):
    """Run to the end, killing one part after each step. Return the exit code, and the command lines
    of what is left."""
    given = f"llm.serve.path=configs/assets/reader steps={STEPS} eval.every=0 checkpoint.every=1"
    words = command("configs/rehearsal.py", workdir, given)[1:]
    with open(log, "wb") as output:
        run = subprocess.Popen(
            [ROOT / "experiments/launch/here.sh", "2", "4", *words],
            cwd=ROOT, stdout=output, stderr=output, env=os.environ | {"PYTHON": sys.executable},
        )  # fmt: skip
    started: set[int] = set()
    before = max(steps_done(workdir), 0)
    try:
        for step, (name, part) in enumerate(kills.items(), before + 1):
            until = time.monotonic() + LIMIT
            while run.poll() is None and steps_done(workdir) < step and time.monotonic() < until:
                time.sleep(1.0)
            BALLAST.unlink(missing_ok=True)
            learners = [pid for pid in descendants(run.pid) if "run.py" in command_of(pid)]
            started |= set(descendants(run.pid))
            while name == LEARNER and steps_done(workdir) == step and not asleep(workdir):
                time.sleep(0.2)
            if run.poll() is not None or len(learners) < 2 or steps_done(workdir) > step:
                break
            print(f"after step {step}: {name}", flush=True)
            if part is None:
                fill(BALLAST)
            else:
                kill(learners[part[0]], part[1])
        code = run.wait(STEPS * LIMIT)
    finally:
        BALLAST.unlink(missing_ok=True)
        run.terminate()
    until = time.monotonic() + GONE
    while (left := [pid for pid in started if command_of(pid)]) and time.monotonic() < until:
        time.sleep(1.0)
    return code, [command_of(pid) for pid in left]


def asleep(workdir):
    """Return True if the run is in a phase in which vLLM's servers sleep."""
    try:
        phase = json.loads((workdir / "now.json").read_bytes())["phase"]
    except FileNotFoundError:
        return False
    return any(name in phase for name in ASLEEP)


def fill(path):
    """Write a file until there is no room left."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


def kill(learner, words):
    """Kill the first process of a learner whose command line has some words."""
    found = [
        pid
        for pid in (learner, *descendants(learner))
        if words in command_of(pid) and LAUNCHER not in command_of(pid)
    ]
    os.kill(found[0], signal.SIGKILL)
