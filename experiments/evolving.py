"""Evolve in several worlds with several seeds, and tabulate what each stage can do.

    PYTHONPATH=docs/examples python -m experiments.evolving lending:Lending --seeds 0 1 2
    python -m experiments.evolving --seeds 0 -- "--gym FrozenLake-v1" "--functions my_module"

Each word is what follows `evolver evolve`: a world, as a word or by a flag, and keys of the config.
Every run has a workdir in --out, so the same command goes on where it was interrupted; table.md
there is written after each run. Success is greedy unless a column says otherwise, in percent of the
held-out tasks. "given" is the policy that a run starts from, "imitated" what it is after imitation
(or the given one, if that needed none). "best" is the highest of all temperatures, greedy included,
chosen on these tasks, which favours the policy before training. Intervals resample the tasks and,
where all seeds have the same tasks, the seeds.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import command
from evolver.files.report import aligned
from evolver.files.workdir import Workdir
from experiments import commands, compare
from models.files import write_atomically
from rl.evaluation import Scores, interval, interval_over_seeds

HEAD = (
    "world", "seeds", "minutes", "held-out tasks", "given", "best", "imitated", "best", "trained",
    "trained - given's best", "trained - imitated's best",
)  # fmt: skip


class Result(NamedTuple):
    """The result of one run: the stages' scores on the held-out tasks, and the minutes it took."""

    given: Scores
    imitated: Scores | None
    trained: Scores
    minutes: float


def folder_of(out: Path, words: str, seed: int) -> Path:
    """Return the workdir of a run: "gym_FrozenLake-v1-0"."""
    place = next(w for w in command.evolving(shlex.split(words)) if w.startswith("--workdir="))
    return out / f"{Path(place).name.removeprefix('evolve-')}-{seed}"


def play(words: str, seed: int, folder: Path) -> int:
    """Run `evolver evolve` in a process of its own and return its exit code. Its minutes are added
    up in the workdir's parent, over interruptions."""
    flags = command.evolving([*shlex.split(words), f"--workdir={folder}"])
    clock, started = clock_of(folder), time.monotonic()
    try:
        return subprocess.call(
            [sys.executable, "run.py", "--mode=evolve", *flags, f"--config.seed={seed}"]
        )
    finally:
        before = float(clock.read_text()) if clock.is_file() else 0.0
        write_atomically(clock, f"{before + (time.monotonic() - started) / 60:.2f}\n")


def clock_of(folder: Path) -> Path:
    """Return the file that holds the minutes of a run so far."""
    return folder.with_name(f"{folder.name}.minutes")


def result_of(folder: Path) -> Result | None:
    """Return what a finished run measured, None if it has no report yet."""
    if not (folder / "summary.md").is_file():
        return None
    runs = Workdir(folder / "trained").scores()
    before, after = runs[min(runs)], runs[max(runs)]
    evaluated = Workdir(folder / "pretrained").evaluations()
    first = Scores(**evaluated[-1]["scores"][0]) if evaluated else before
    clock = clock_of(folder)
    minutes = float(clock.read_text()) if clock.is_file() else float("nan")
    return Result(first, before if evaluated else None, after, minutes)


def cells(name: str, results: list[Result]) -> list[str]:
    """Return the row of a world."""
    imitated = [r.imitated or r.given for r in results]
    trained = [r.trained.per_task("greedy") for r in results]
    same = len({tuple(r.trained.tasks) for r in results}) == 1

    def mean(values: list[np.ndarray]) -> str:
        return compare.percent([value_N.mean() for value_N in values])

    def gain(values: list[np.ndarray]) -> str:
        difference = [after_N - before_N for before_N, after_N in zip(values, trained)]
        low, high = (
            interval_over_seeds(difference) if same else interval(np.concatenate(difference))
        )
        middle = np.mean([value_N.mean() for value_N in difference])
        return f"{100 * middle:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    given_best = [r.given.best_temperature()[1] for r in results]
    imitated_best = [scores.best_temperature()[1] for scores in imitated]
    return [
        name, str(len(results)), f"{np.mean([r.minutes for r in results]):.0f}",
        str(len(results[0].trained.tasks)),
        mean([r.given.per_task("greedy") for r in results]), mean(given_best),
        mean([scores.per_task("greedy") for scores in imitated]), mean(imitated_best),
        mean(trained), gain(given_best), gain(imitated_best),
    ]  # fmt: skip


def table(out: Path, worlds: Sequence[str], seeds: Sequence[int]) -> str:
    """Return the table of the runs that are finished."""
    rows = []
    for words in worlds:
        found = [result_of(folder_of(out, words, seed)) for seed in seeds]
        done = [result for result in found if result is not None]
        rows += [cells(words, done)] if done else []
    return aligned(HEAD, rows, "pipe")


def main(
    worlds: commands.Words,
    *,
    seeds: commands.Numbers = (0, 1, 2),
    out: Path = Path("runs/evolving"),
) -> int:
    """Evolve, and print and write the table after each run.

    worlds: what follows `evolver evolve`
    out: directory of all workdirs and the table
    """
    places = [folder_of(out, words, 0) for words in worlds]  # ends if one cannot be read
    if len(set(places)) < len(places):
        raise commands.Problems(
            "two of the worlds have the same workdir: give one of them a --workdir"
        )
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for seed in seeds:
        for words in worlds:
            folder = folder_of(out, words, seed)
            if result_of(folder) is None and (code := play(words, seed, folder)):
                failed.append(f"{words}, seed {seed}: exit code {code}")
            text = table(out, worlds, seeds)
            write_atomically(out / "table.md", text + "\n")
            print(f"\n{text}\n", flush=True)
    print(*failed, sep="\n", file=sys.stderr)
    return min(len(failed), 1)


if __name__ == "__main__":
    try:
        sys.exit(commands.run(main))
    except KeyboardInterrupt:  # the run has said how it goes on
        sys.exit(130)
