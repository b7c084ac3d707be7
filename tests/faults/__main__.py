"""Play every fault, print a table, and exit with 1 if one breaks a run.

python -m tests.faults                   # all, two at a time: 14 minutes of processor time
python -m tests.faults --list            # only say what there is
python -m tests.faults --only=disk       # those whose kind, name or mode holds a word
python -m tests.faults --long            # 500 steps: what grows?
python -m tests.faults --rehearsal       # each part of a small flagship run; see `make rehearsal`
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main(argv):
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=about)
    for name, means in {
        "list": "list the faults",
        "long": "a long run instead: does anything grow?",
        "rehearsal": "kill each part of a small flagship run",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=means)
    for name, default, means in (
        ("only", "", "play those whose kind, name or mode holds one of these words"),
        ("jobs", 2, "faults at a time"),
        ("limit", 600.0, "seconds after which a run counts as hanging; more on a busy machine"),
        ("kills", 20, "how often a run is killed"),
        ("pause", 5.0, "seconds for which a run is stopped"),
        ("steps", 500, "steps of the long run"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=means)
    asked = parser.parse_args(argv)
    # A TemporaryDirectory would be removed at the end of every fork.
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/jax")  # before jax is imported
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    try:
        if asked.long:
            from tests.faults.long import long_run

            return long_run(folder, asked.steps)
        if asked.rehearsal:
            from tests.faults.rehearsal import rehearsal

            return rehearsal(folder)
        from tests.faults.table import TABLE

        chosen = []
        for fault in TABLE:
            for mode in fault.modes:
                text = f"{fault.kind} {fault.name} {mode}"
                if any(word in text for word in asked.only.split(",")):
                    chosen.append((fault, mode))
        if asked.list:
            print(*(f"{fault.kind:12} {mode:6} {fault.name}" for fault, mode in chosen), sep="\n")
            return 0
        return play_all(folder, chosen, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def play_all(folder, chosen, asked):
    """Play the chosen (fault, mode) pairs, print one line each, and return the exit code."""
    from tests.faults import stage as stages

    settings = {"limit": asked.limit, "kills": asked.kills, "pause": asked.pause}
    settings |= prepare(folder, settings)
    waiting, running, failed, began = list(enumerate(chosen, 1)), {}, 0, time.monotonic()
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            number, (fault, mode) = waiting.pop(0)
            pid, result = stages.play(fault.play, folder / str(number), mode=mode, **settings)
            running[pid] = number, fault, mode, result, time.monotonic()
        pid, _ = os.wait()
        number, fault, mode, result, since = running.pop(pid)
        problem, note = "its process died", ""
        if result.exists():
            problem, note = json.loads(result.read_text())
        verdict = "BROKEN" if problem else "skipped" if note.startswith("skipped") else "ok"
        line = f"{number:3}/{len(chosen)} {fault.kind:12} {mode:6} {fault.name:46} {verdict:8}"
        print(f"{line} {time.monotonic() - since:5.0f} s {note}".rstrip(), flush=True)
        if problem:
            failed += 1
            print(*(f"        {text}" for text in problem.splitlines()), sep="\n", flush=True)
    kinds = len({fault.name for fault, _ in chosen})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, processor = time.monotonic() - began, used.ru_utime + used.ru_stime
    spent = f"{took:.0f} s, {processor:.0f} s of the processor"
    print(f"{kinds} faults in {len(chosen)} runs: {failed} broken, {spent}")
    return bool(failed)


def prepare(folder, settings):
    """Make a policy and its config and play the undisturbed run. Return what each stage gets.
    Raises SystemExit if the undisturbed run is broken."""
    from evolver.files.workdir import Workdir
    from tests.faults import stage as stages

    straight = folder / "straight"
    shared = {"config": stages.make_config(folder), "straight": straight / "run"}
    whole = settings | shared | {"mode": "sync"}
    pid, result = stages.play(lambda stage: stage.run(), straight, **whole)
    os.waitpid(pid, 0)
    problem = json.loads(result.read_text())[0]
    if problem:
        raise SystemExit(f"the undisturbed run is broken: {problem}")
    return shared | {"pace": max(stages.durations(Workdir(straight / "run").metrics()))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
