"""The clock, the percentiles and the comparisons that benchmarks share.

Standard library only, because peers import it under their own interpreters.
"""

import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clocked(
    call: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each of several calls."""
    seconds = []
    for _ in range(times):
        began = clock()
        call()
        seconds.append(clock() - began)
    return seconds


def percentiles_ms(seconds: Collection[float]) -> tuple[float, float]:
    """Return (p50, p95) in milliseconds."""
    cuts = statistics.quantiles(seconds, n=20) if len(seconds) > 1 else [*seconds] * 19
    return 1e3 * cuts[9], 1e3 * cuts[18]


def family(pid: int) -> list[int]:
    """Return a process and those that it started, directly or not, as far as they live (Linux)."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            children += map(int, path.read_text().split())
    return [pid, *itertools.chain.from_iterable(map(family, children))]


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process, ended threads included, to 10 ms (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load_before() -> str:
    """Return a note on what else the machine was doing when a measurement began."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before"


# --- comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A program that is measured: a module, which takes a model, a file of work and flags, and the
    interpreter that runs it, as a path from the repository's root. Of its settings the fastest
    counts."""

    python: str
    module: str
    settings: tuple[str, ...]

    @property
    def installed(self) -> bool:
        return (ROOT / self.python).exists()


def report(name: str, tokens: int, seconds: Sequence[float], warm_up: int = 1) -> None:
    """Print a measurement as one line of JSON. seconds: of each round; the first `warm_up` do not
    count. The peak of memory is that of the process and of those that it started."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    result = {
        "name": name,
        "seconds": seconds[warm_up:],
        "first_seconds": seconds[0],
        "tokens_per_second": tokens / min(seconds[warm_up:]),
        "peak_gb": sum(resource.getrusage(one).ru_maxrss for one in who) * 1024 / 1e9,
    }
    print(json.dumps(result), flush=True)


def compare(
    what: str,
    contenders: Mapping[str, Contender],
    works: Mapping[str, object],
    model: str,
    repeats: int,
) -> None:
    """Run all contenders on all works, one after the other, and print a table of tokens/s.

    works: written as JSON for the contenders. repeats: rounds that count.
    """
    speeds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, work in works.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(work))
            words = [model, str(path), f"--repeats={repeats}"]
            speeds[name] = {who: fastest(one, words) for who, one in contenders.items()}
    print("\n" + table(what, contenders, speeds))


def fastest(contender: Contender, words: Sequence[str]) -> float | None:
    """Return the tokens/s of the fastest setting; None if the contender is not installed or every
    setting failed."""
    speeds = []
    for setting in contender.settings if contender.installed else ():
        command = [contender.python, "-m", contender.module, *words, *setting.split()]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if process.returncode:
            print(f"{contender.module} {setting} failed:\n{process.stderr[-800:]}")
            continue
        result = json.loads(process.stdout.splitlines()[-1])
        speed, seconds = result["tokens_per_second"], result["seconds"]
        print(
            f"{result['name']}: {speed:,.0f} tokens/s, round {min(seconds):.2f} s "
            f"(median {statistics.median(seconds):.2f}), first {result['first_seconds']:.1f} s, "
            f"peak {result['peak_gb']:.1f} GB"
        )
        speeds.append(speed)
    return max(speeds, default=None)


def table(
    what: str, contenders: Mapping[str, Contender], speeds: Mapping[str, Mapping[str, float | None]]
) -> str:
    """Return a table of tokens/s by work, with the speed of the first contender (ours) relative to
    each peer."""
    lines = [f"{what:<18}" + "".join(f"{who:>18}" for who in contenders)]
    for name, by_contender in speeds.items():
        line = f"{name:<18}"
        ours, *_ = by_contender.values()
        for place, (who, speed) in enumerate(by_contender.items()):
            if speed is None:
                cell = "failed" if contenders[who].installed else "not installed"
            elif place == 0 or ours is None:
                cell = f"{speed:,.0f}"
            else:
                cell = f"{speed:,.0f} ({ours / speed:.2f}x)"
            line += f"{cell:>18}"
        lines.append(line)
    return "\n".join([*lines, "(in brackets: our speed divided by the peer's)"])
