"""Speed of the view and the cost of what it reads: `python -m experiments.bench.view
runs/quickstart`.

Copies the rollouts of a run under other step numbers until there are 100,000, starts the server on
them, and measures what a page waits for: the index of all rollouts, cold and again, one part with
its tokens, and a search for words. With a Chromium on the PATH it opens the pages there and
filters. Then it writes files of rollouts and their indexes anew and compares the time with that of
a training step. Wall time and processor time are shown, because wall time depends on the machine's
load.
"""

import contextlib
import functools
import gzip
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.values import Json
from evolver.files.rollout_files import (
    LEVEL,
    index_of,
    index_path,
    read_rollouts,
    rollout_files,
    write_rollouts,
)
from evolver.files.workdir import Workdir
from experiments import commands
from experiments.bench.browser import Browser, chromium
from experiments.bench.harness import family, processor_s

FILTERS = ("stop=max_turns", "success=0&guided=1", "task=flight&kind=step", "text=error", "")


def enlarged(run: Path, folder: Path, count: int) -> int:
    """Copy a run into a folder, with its files of training rollouts as often as gives `count`.
    Returns the rollouts."""
    for path in run.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    (folder / "trajectories").mkdir()
    files = [file for file in rollout_files(run) if file.kind == "step"]
    step = total = 0
    while total < count:
        for file in files:
            step += 1
            total += len(read_rollouts(file.path))
            target = folder / "trajectories" / f"step_{step:06d}{''.join(file.path.suffixes)}"
            shutil.copy(file.path, target)
            shutil.copy(index_path(file.path), index_path(target))
    return total


def ask(url: str) -> bytes:
    """Return the answer of the server. Raises OSError."""
    with urllib.request.urlopen(url, timeout=300) as answer:
        return answer.read()


def index(url: str) -> int:
    """Ask for the index as a page does, until nothing is pending, and return its size in bytes."""
    first = end = size = 0
    generation = -1
    while True:
        body = ask(f"{url}api/run/0/index?first={first}&end={end}&generation={generation}")
        found = json.loads(body)
        end = end or found["first"] + len(found["files"])
        first, generation, size = found["first"], found["generation"], size + len(body)
        if not found["pending"]:
            return size


def timed(pid: int, what: str, call: Callable[[], Any]) -> Any:
    """Call, print wall seconds and the processor's of another process, and return the result."""
    began, used = time.perf_counter(), processor_s(pid)
    result = call()
    wall, used = time.perf_counter() - began, processor_s(pid) - used
    print(f"{what:28} {wall:7.2f} s, {used:6.2f} s of the processor", flush=True)
    return result


def serve(folder: Path) -> None:
    """Start the server on a workdir and print what its answers take."""
    command = [sys.executable, "-m", "experiments.view", str(folder), "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timed_server = functools.partial(timed, process.pid)
    try:
        assert process.stdout is not None  # it is a pipe
        url = timed_server("server started", process.stdout.readline).split()[0]
        size = timed_server("index of all, first time", lambda: index(url))
        print(f"{'size of the index':28} {size / 1e6:7.1f} MB")
        timed_server("index of all, again", lambda: index(url))
        timed_server("rollouts of one part", lambda: ask(f"{url}api/run/0/rollouts/0/0"))
        timed_server("words indexed", lambda: words(url))
        body = timed_server("search for a word", lambda: ask(f"{url}api/run/0/search?q=error"))
        print(f"{'found':28} {sum(map(len, json.loads(body)['files'].values())):7,} rollouts")
        if chromium():
            looked_at(url, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def looked_at(url: str, server: int) -> None:
    """Open pages in a browser and print what it takes until they show something, and until all
    rollouts are there."""
    with Browser() as browser:

        def used() -> float:
            """Return the processor seconds of both."""
            return family_s(server) + family_s(browser.process.pid)

        def told(what: str, before: float) -> None:
            """Print what it took since the page was asked for."""
            wall, paid = browser.run("performance.now()") / 1e3, used() - before
            print(f"{what:34} {wall:6.2f} s, {paid:5.2f} s of the processors", flush=True)

        for page in ("overview", "rollouts", "groups", "rollouts?fate=trained&success=0"):
            browser.open("about:blank")
            before = used()
            browser.open(f"{url}#/{page}")
            browser.until("document.querySelector('#main table')")
            told(f"{page} shown", before)
        browser.until("view.runs[0].pending === 0 && !view.runs[0].finishing")
        told("all rollouts read", before)
        walls, before = [], used()
        for filters in 4 * FILTERS:
            script = f"history.replaceState(null, '', '#/rollouts?{filters}');"
            script += " const began = performance.now(); await show();"
            script += " return performance.now() - began;"
            walls.append(browser.run(f"(async () => {{ {script} }})()"))
        paid = 1e3 * (used() - before) / len(walls)
        median, most = statistics.median(walls), max(walls)
        print(
            f"{'a filter':34} {median:6.0f} ms, at most {most:.0f} ms; "
            f"{paid:.0f} ms of the processors"
        )


def family_s(pid: int) -> float:
    """Return the processor seconds of a process and of those that it started, as far as they live
    (Linux)."""
    total = 0.0
    for member in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            total += processor_s(member)
    return total


def words(url: str) -> Json:
    """Wait until the words of all files are indexed and return the last answer."""
    while True:
        answer = json.loads(ask(f"{url}api/run/0/search?q=zebra"))
        if answer["of"] and answer["done"] == answer["of"]:
            return answer
        time.sleep(2.0)  # the server indexes while nobody asks


def written(run: Path, folder: Path) -> None:
    """Print size and time of what training writes, per 1,000 rollouts and as a share of a step."""
    target, count = folder / "written.jsonl.gz", 0
    sizes: Counter[str] = Counter()
    files = [file for file in rollout_files(run) if file.kind == "step"][:20]
    used: dict[str, float] = defaultdict(float)
    for file in files:
        records = read_rollouts(file.path)
        count += len(records)
        began = time.process_time()
        write_rollouts(target, records)
        used["rollouts and index"] += time.process_time() - began
        began = time.process_time()
        gzip.compress(json.dumps(index_of(records)).encode(), LEVEL)
        used["index alone"] += time.process_time() - began
        text = "".join(json.dumps(record, ensure_ascii=False) for record in records)
        sizes["as plain lines of JSON"] += len(text.encode("utf-8", "surrogatepass"))
        sizes["compressed"] += target.stat().st_size
        sizes["index"] += index_path(target).stat().st_size
    for name, size in sizes.items():
        print(f"{name:28} {size / count:7.0f} KB per 1,000 rollouts")
    elapsed = [line["time/elapsed"] for line in Workdir(run).metrics()]
    step = statistics.median(b - a for a, b in itertools.pairwise(elapsed))
    for name, total in used.items():
        mean = total / len(files)
        print(
            f"{name:28} {1e3 * mean:7.1f} ms of the processor per step of {step:.2f} s: "
            f"{mean / step:.2%}"
        )


def main(run: Path, *, rollouts: int = 100_000, keep: Path | None = None) -> None:
    """Measure and print.

    run: workdir of a run
    keep: make the workdir here and leave it
    """
    with tempfile.TemporaryDirectory(prefix="evolver-bench-view-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "trajectories").exists():
            print(f"{enlarged(run, folder, rollouts):,} rollouts")
        serve(folder)
        written(run, Path(temporary))


if __name__ == "__main__":
    commands.program(main)
