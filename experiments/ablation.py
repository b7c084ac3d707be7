"""Rows of one experiment under several seeds: run what is not finished, then a table and a picture of all.

    python -m experiments.ablation                                                  # the quickstart's five, seeds 0 1 2
    python -m experiments.ablation --config configs/bfcl_7b.py --rows original q --seeds 0 -- --config.steps=50
    python -m experiments.ablation --only-report

A run lives in WORKDIR/<row>-<seed>; an interrupted one goes on where it stood. What follows `--` goes to every run.
With `--jobs 2` two run at once, on a CPU in less time than one after the other, and write to WORKDIR/<row>-<seed>.log.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from evolver.books import Workdir
from evolver.report import columns
from rl.evaluation import interval

INTERRUPTED = threading.Event()
ROWS = ("grpo", "q", "qn", "qa", "all")
COLOURS = ("#7f8c8d", "#16a085", "#8e44ad", "#d35400", "#1b4f72", "#c0392b", "#27ae60")


def curves(folder: Path, row: str, seeds: list[int]) -> dict[int, dict[int, np.ndarray]]:
    """seed -> step -> success of each held-out task, shares over its rollouts; of the runs that were evaluated."""
    found = {}
    for seed in seeds:
        scores = Workdir(folder / f"{row}-{seed}").scores()
        if scores:
            found[seed] = {step: s.per_task(s.names[0]) for step, s in sorted(scores.items())}
    return found


def table(folder: Path, rows: list[str], seeds: list[int]) -> str:
    """Held-out success after training: each seed, their mean, and its 95% interval over tasks and seeds."""
    lines, before = [], []
    for row in rows:
        runs = curves(folder, row, seeds)
        final = {seed: run[max(run)] for seed, run in runs.items()}
        before += [run[min(run)].mean() for run in runs.values()]
        cells = [f"{100 * final[seed].mean():.1f}" if seed in final else "" for seed in seeds]
        if final:
            value_N = np.mean(list(final.values()), axis=0)  # of each task, over the seeds
            low, high = interval(value_N)
            cells += [f"{100 * value_N.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"]
            cells += [f"{100 * np.std([v.mean() for v in final.values()]):.1f}"]
        lines.append((row, *cells, *[""] * (len(seeds) + 2 - len(cells))))
    head = ("", *(f"seed {seed}" for seed in seeds), "mean [95% over tasks]", "sd of seeds")
    start = f"before: {100 * np.mean(before):.1f}\n" if before else ""
    return start + "\n".join(columns(lines, head))


def draw(folder: Path, rows: list[str], seeds: list[int], path: Path) -> None:
    """Held-out success over steps: a thin line for each seed, a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for row, colour in zip(rows, COLOURS):
        runs = curves(folder, row, seeds)
        for run in runs.values():
            axes.plot(list(run), [100 * v.mean() for v in run.values()], color=colour, linewidth=0.7, alpha=0.45)
        steps = sorted(set.intersection(*(set(run) for run in runs.values()))) if runs else []
        if steps:
            mean_S = [100 * np.mean([run[step].mean() for run in runs.values()]) for step in steps]
            axes.plot(steps, mean_S, "-o", markersize=4, color=colour, linewidth=2.2, label=f"{row}  {mean_S[-1]:.0f}%")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out success, %")
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color="#e5e7e9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def run(args: argparse.Namespace, name: str) -> int:
    """One run; its exit code. After an interruption none is started."""
    row, _, seed = name.rpartition("-")
    command = [sys.executable, "run.py", f"--config={args.config}:{row}", f"--config.seed={seed}"]
    command += [f"--workdir={args.workdir / name}", *args.flags]
    if INTERRUPTED.is_set():
        return 130
    print(f"$ {' '.join(command[1:])}", flush=True)
    args.workdir.mkdir(parents=True, exist_ok=True)
    with open(args.workdir / f"{name}.log", "a") if args.jobs > 1 else contextlib.nullcontext() as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    if code == 130:
        INTERRUPTED.set()
    print(f"{name}: {'done' if code == 0 else f'exit code {code}'}", flush=True)
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="arguments of the config file")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workdir", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only-report", action="store_true", help="of the runs that are there")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for every run")
    args = parser.parse_args()
    names = [f"{row}-{seed}" for seed in args.seeds for row in args.rows] if not args.only_report else []
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(lambda name: run(args, name), names))
    if 130 in codes:
        sys.exit("interrupted; the same command goes on from there")
    failed = [name for name, code in zip(names, codes) if code]
    print("\n" + table(args.workdir, args.rows, args.seeds))
    draw(args.workdir, args.rows, args.seeds, args.workdir / "ablation.png")
    print(f"\npicture: {args.workdir / 'ablation.png'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: INTERRUPTED.set())  # the runs get it too, save and end
    main()
