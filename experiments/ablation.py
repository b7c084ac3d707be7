"""Run the rows of one experiment under several seeds, and compare them in a table and a plot.

    python -m experiments.ablation                                                  # the quickstart's five, seeds 0 1 2
    python -m experiments.ablation --config configs/bfcl_7b.py --rows original q --seeds 0 -- --config.steps=50
    python -m experiments.ablation --only-report

Each run has the workdir WORKDIR/<row>-<seed>. Finished runs are not repeated and interrupted ones resume. Flags after
`--` go to every run. With `--jobs 2` two run at once, which on a CPU is faster than one after the other, and write
their output to WORKDIR/<row>-<seed>.log.

The intervals of the table are 95% bootstrap intervals that resample the held-out tasks only, each with its mean over
the seeds. They say nothing about other seeds; the spread of the seeds is the sample standard deviation (n - 1) beside
them. The difference to the first row is paired by task and uses the seeds that both rows have.
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

from evolver.report import columns
from evolver.workdir import Workdir
from rl.evaluation import interval, paired_difference

INTERRUPTED = threading.Event()
ROWS = ("grpo", "q", "qn", "qa", "all")
COLOURS = ("#7f8c8d", "#16a085", "#8e44ad", "#d35400", "#1b4f72", "#c0392b", "#27ae60")
Curve = dict[int, np.ndarray]  # step -> success_N, the success rate of each held-out task


def curves(folder: Path, row: str, seeds: list[int]) -> dict[int, Curve]:
    """Return {seed: curve} of the runs of a row that were evaluated."""
    runs = {}
    for seed in seeds:
        scores = Workdir(folder / f"{row}-{seed}").scores()
        if scores:
            runs[seed] = {step: s.per_task(s.names[0]) for step, s in sorted(scores.items())}
    return runs


def table(folder: Path, rows: list[str], seeds: list[int]) -> str:
    """Return the table of held-out success after training, in percent."""
    runs = {row: curves(folder, row, seeds) for row in rows}
    final = {row: {seed: curve[max(curve)] for seed, curve in runs[row].items()} for row in rows}
    before = [curve[min(curve)].mean() for row in rows for curve in runs[row].values()]
    lines = [
        (row, *(f"{100 * final[row][seed].mean():.1f}" if seed in final[row] else "" for seed in seeds))
        + statistics(final[row], final[rows[0]] if row != rows[0] else {})
        for row in rows
    ]
    head = ("", *(f"seed {seed}" for seed in seeds), "mean [95% over tasks]", "sd of seeds", f"minus {rows[0]}, paired")
    start = f"before: {100 * np.mean(before):.1f}\n" if before else ""
    return start + "\n".join(columns(lines, head))


def statistics(success: dict[int, np.ndarray], first: dict[int, np.ndarray]) -> tuple[str, str, str]:
    """Return three cells of a row with {seed: success_N}: mean, deviation of the seeds, difference to the first row.

    A cell is empty where there are no runs, fewer than two seeds, or no seed in both rows.
    """
    if not success:
        return "", "", ""
    mean_N = np.mean(list(success.values()), axis=0)
    low, high = interval(mean_N)
    deviation = f"{100 * np.std([v.mean() for v in success.values()], ddof=1):.1f}" if len(success) > 1 else ""
    difference, both = "", [seed for seed in success if seed in first]
    if both:
        before_N, after_N = (np.mean([values[seed] for seed in both], axis=0) for values in (first, success))
        change = "{:+.1f} [{:+.1f}, {:+.1f}]"
        difference = change.format(*(100 * value for value in paired_difference(before_N, after_N)))
    return f"{100 * mean_N.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]", deviation, difference


def draw(folder: Path, rows: list[str], seeds: list[int], path: Path) -> None:
    """Plot held-out success over steps: a thin line for each seed, a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for row, colour in zip(rows, COLOURS):
        runs = curves(folder, row, seeds)
        for curve in runs.values():
            axes.plot(list(curve), [100 * v.mean() for v in curve.values()], color=colour, linewidth=0.7, alpha=0.45)
        steps = sorted(set.intersection(*(set(curve) for curve in runs.values()))) if runs else []
        if steps:
            mean_S = [100 * np.mean([curve[step].mean() for curve in runs.values()]) for step in steps]
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
    """Run the experiment `name` and return its exit code. After an interruption no further run starts."""
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
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--only-report", action="store_true", help="report on the existing runs and start none")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for every run")
    args = parser.parse_args()
    names = [f"{row}-{seed}" for seed in args.seeds for row in args.rows] if not args.only_report else []
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(lambda name: run(args, name), names))
    if 130 in codes:
        sys.exit("interrupted; the same command resumes")
    failed = [name for name, code in zip(names, codes) if code]
    print("\n" + table(args.workdir, args.rows, args.seeds))
    draw(args.workdir, args.rows, args.seeds, args.workdir / "ablation.png")
    print(f"\nplot: {args.workdir / 'ablation.png'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: INTERRUPTED.set())  # the runs receive the signal too, save and end
    main()
