"""Play every fault, print a table, and exit with 1 if one breaks a run.

python -m tests.faults                   # all, two at a time: 14 minutes of processor time
python -m tests.faults --list            # only say what there is
python -m tests.faults --only=disk       # those whose kind, name or mode holds a word
python -m tests.faults --long            # 500 steps: what grows?
python -m tests.faults --rehearsal       # each part of a small flagship run; see `make rehearsal`
"""

from __future__ import annotations

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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument(
        "--only", default="", help="play those whose kind, name or mode holds one of these words"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        help="seconds after which a run counts as hanging; more on a busy machine",
    )
    parser.add_argument("--kills", type=int, default=20, help="how often a run is killed")
    parser.add_argument(
        "--pause", type=float, default=5.0, help="seconds for which a run is stopped"
    )
    parser.add_argument(
        "--long", action="store_true", help="a long run instead: does anything grow?"
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="kill each part of a small flagship run"
    )
    parser.add_argument("--steps", type=int, default=500, help="steps of the long run")
    asked = parser.parse_args(argv)
    folder = Path(
        tempfile.mkdtemp(prefix="faults-")
    )  # TemporaryDirectory would be removed at the end of every fork
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

        pairs = [(fault, mode) for fault in TABLE for mode in fault.modes]
        words = asked.only.split(",")
        chosen = [
            pair
            for pair in pairs
            if any(word in f"{pair[0].kind} {pair[0].name} {pair[1]}" for word in words)
        ]
        if asked.list:
            print(*(f"{fault.kind:12} {mode:6} {fault.name}" for fault, mode in chosen), sep="\n")
            return 0
        return play_all(folder, chosen, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def play_all(folder: Path, chosen: list, asked: argparse.Namespace) -> int:
    """Play the chosen (fault, mode) pairs, print one line each, and return the exit code."""
    from tests.faults import stage as stages

    settings = {"limit": asked.limit, "kills": asked.kills, "pause": asked.pause}
    settings |= prepare(folder, settings)
    waiting, running, failed, began = list(enumerate(chosen, 1)), {}, [], time.monotonic()
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            number, (fault, mode) = waiting.pop(0)
            pid, result = stages.play(fault.play, folder / str(number), mode=mode, **settings)
            running[pid] = number, fault, mode, result, time.monotonic()
        pid, _ = os.wait()
        number, fault, mode, result, since = running.pop(pid)
        problem, note = (
            json.loads(result.read_text()) if result.exists() else ("its process died", "")
        )
        verdict = "BROKEN" if problem else "skipped" if note.startswith("skipped") else "ok"
        line = f"{number:3}/{len(chosen)} {fault.kind:12} {mode:6} {fault.name:46} {verdict:8}"
        print(f"{line} {time.monotonic() - since:5.0f} s {note}".rstrip(), flush=True)
        if problem:
            failed.append((fault, mode, problem))
            print(*(f"        {text}" for text in problem.splitlines()), sep="\n", flush=True)
    kinds = len({fault.name for fault, _ in chosen})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (
        f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of the processor"
    )
    print(f"{kinds} faults in {len(chosen)} runs: {len(failed)} broken, {spent}")
    return bool(failed)


def prepare(folder: Path, settings: dict) -> dict:
    """Make a policy and its config and play the undisturbed run, each in a process of its own: this
    one must start no device before it forks. Return what each stage gets. Raises SystemExit if the
    undisturbed run is broken."""
    from evolver.files.workdir import Workdir
    from tests.faults import stage as stages
    from tests.tiny import config_file, tiny_policy

    config, straight = folder / "tiny.py", folder / "straight"
    pid = os.fork()
    if not pid:
        tiny_policy(folder / "policy")
        os._exit(0)
    os.waitpid(pid, 0)
    config_file(folder, folder / "policy")
    shared = {"config": config, "straight": straight / "run"}
    pid, result = stages.play(
        lambda stage: stage.run(), straight, mode="sync", **shared, **settings
    )
    os.waitpid(pid, 0)
    problem = json.loads(result.read_text())[0]
    if problem:
        raise SystemExit(f"the undisturbed run is broken: {problem}")
    return shared | {"pace": max(stages.durations(Workdir(straight / "run").metrics()))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
