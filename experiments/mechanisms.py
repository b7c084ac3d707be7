"""Measure when each mechanism helps: dials, and the grid of all combinations, in travel agencies
with house rules.

    python -m experiments.mechanisms        # all studies: 39 runs for each of 5 seeds
    python -m experiments.mechanisms --studies questioning --seeds 0 1
    python -m experiments.mechanisms --only-report

The same command goes on where it was cut off, and finished runs are kept. A study is a dial with
some points; each point compares rows with its first row on the same held-out tasks and seeds. The
policy is that of the quickstart, and the runs are short, so that differences in speed show.
experiments/mechanisms.toml has all of their settings.
MECHANISMS.md in --workdir holds the tables, beside a figure for each study.

    questioning   number of original tasks; without them there is nothing to train on but invented
                  tasks
    navigating    how common the desk calls are that the house wants, and so how rarely the policy
                  makes one at first; both rows train on invented tasks, whose solutions by the
                  explorer are the first experience
    attributing   number of calls of the tasks
    rollouts      number of rollouts of a task, for attributing
    grid          every combination of the three mechanisms at one setting
    beyond        explored again or once; the two ways to combine outcome and labels

Rows are compared after equal numbers of rollouts, after equal wall time (that of the row's run that
ended first), and by the mean height of their curves, which tells a faster row from a slower one
that ends as high. Intervals resample held-out tasks and seeds.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.quickstart import ROWS
from envs.values import Json
from evolver.files.workdir import Workdir
from experiments import commands, compare, grid
from models.files import write_atomically
from rl.evaluation import Scores, steps_to

CONFIG = "configs/quickstart.py"
SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
HALF = 0.5
EARLY = 10  # steps, in which the rows differ most
HEAD = (
    "point", "row", "seeds", "before", "after [95%]", "sd", "difference [95%]",
    "at equal time [95%]", "curve", "difference of curves [95%]", f"steps to {HALF:.0%}", "note",
)  # fmt: skip
SHARES = {  # column -> metric
    "success": "rollout/success",
    "of invented": "rollout/success/synthetic",
    "no signal": "no signal",
    "guided - unguided": "gain",
    "labels GOOD": "attributing/good_rate",
    "BAD": "attributing/bad_rate",
    "none": "attributing/abstain_rate",
}


@dataclass(frozen=True)
class Study:
    """A dial and its points: {point: {row: (argument of the config, overrides)}}. The first row of
    a point is compared with."""

    dial: str
    points: dict[str, dict[str, tuple[str, Json]]]


STUDIES = {name: Study(**study) for name, study in SETTINGS["studies"].items()}
Points = dict[str, list[grid.Run]]  # of a study: {point: runs}


def runs_of(known: Mapping[str, Study], seeds: Sequence[int]) -> dict[str, Points]:
    """Return {study: its points}; seeds vary slowest at each, so that a study that is cut off has
    complete comparisons. A run with the settings of an earlier one shares its workdir."""
    runs: dict[str, Points] = {}
    names: dict[tuple, str] = {}
    for name, study in known.items():
        runs[name] = {point: [] for point in study.points}
        for point, table in study.points.items():
            for seed, (row, (argument, overrides)) in itertools.product(seeds, table.items()):
                fresh = SETTINGS["navigating"] if "navigating" in ROWS[argument] else {}
                values = SETTINGS["common"] | fresh | overrides
                label = f"{name},{point},{row}".replace(" ", "_")
                run = grid.Run(label, seed, f"{CONFIG}:{argument}", values)
                settings = (argument, seed, *sorted(map(str, values.items())))
                first = names.setdefault(settings, run.name)
                runs[name][point].append(replace(run, same=first if first != run.name else ""))
    return runs


# --- results --------------------------------------------------------------------------------------


def at_equal_time(
    folder: Path, runs: Sequence[grid.Run], first: compare.Row, second: compare.Row
) -> compare.Estimate:
    """Return second - first at the last evaluation that both runs of a seed had reached by the
    shorter one's end."""
    names = {(run.row, run.seed): run.name for run in runs}

    def timed(row: compare.Row, seed: int) -> dict[float, Scores]:
        """Return {seconds since the start: scores}."""
        lines = Workdir(folder / names[row.name, seed]).metrics()
        times = {line["step"]: line["time/elapsed"] for line in lines}
        return {times[step]: found for step, found in row.curves[seed].items() if step in times}

    before, after = {}, {}
    for seed in sorted(first.curves.keys() & second.curves.keys()):
        pair = timed(first, seed), timed(second, seed)
        end = min(max(curve, default=0.0) for curve in pair)
        reached = [[t for t in curve if t <= end] for curve in pair]
        if all(reached):
            last = (curve[max(times)] for curve, times in zip(pair, reached))
            before[seed], after[seed] = map(compare.values_of, last)
    return compare.paired(before, after)


def heights(row: compare.Row) -> compare.Values:
    """Return {seed: value_N}, the mean height of each task's curve over the steps, in [0, 1]."""
    return {seed: compare.height(curve) for seed, curve in row.curves.items() if len(curve) > 1}


def steps_to_half(row: compare.Row) -> str:
    """Return the mean number of steps until half of the held-out tasks are solved; runs that never
    do are counted."""
    found = [steps_to(curve, HALF) for curve in row.means()]
    reached = [step for step in found if step is not None]
    mean = f"{np.mean(reached):.0f}" if reached else ""
    never = len(found) - len(reached)
    return f"{mean} ({never} of {len(found)} never)".strip() if never else mean


def short(row: compare.Row) -> str:
    """Return the name of a row without those of its study and its point."""
    return row.name.rpartition(",")[2]


@dataclass(frozen=True)
class Line:
    """A row of a point: its success after training and, above the first row of the point, the
    differences after equal rollouts, after equal time, and of the curves."""

    point: str
    row: compare.Row
    after: compare.Estimate
    change: compare.Estimate = compare.NONE
    timed: compare.Estimate = compare.NONE
    above: compare.Estimate = compare.NONE


def frame(folder: Path, points: Points) -> list[Line]:
    """Return the lines of a study."""
    lines = []
    for point, runs in points.items():
        first, *others = grid.gather(runs, folder)
        lines.append(Line(point, first, compare.estimate(first.final())))
        for row in others:
            change = compare.difference(first, row)
            timed = at_equal_time(folder, runs, first, row)
            above = compare.paired(heights(first), heights(row))
            lines.append(Line(point, row, compare.estimate(row.final()), change, timed, above))
    return lines


def table(lines: Sequence[Line]) -> compare.Table:
    """Return the header and a line for each point and row of a study."""
    rows = [list(HEAD)]
    for line in lines:
        row, after = line.row, line.after
        starts = [next(iter(curve.values())) for curve in row.means()]
        cells = [line.point, short(row), str(after.runs), compare.percent(starts), str(after)]
        cells += [after.deviation(), line.change.signed(), line.timed.signed()]
        curves = [curve.mean() for curve in heights(row).values()]
        cells += [compare.percent(curves), line.above.signed(), steps_to_half(row)]
        rows.append([*cells, "; ".join(row.notes)])
    return rows


def logged(folder: Path, points: Points) -> compare.Table:
    """Return the header and a line for each point and row: what the runs logged that explains their
    results.

    Shares are percentages of rollouts, or of turns for labels, over the first EARLY steps of all
    seeds whose workdirs are there. *no signal*: rollouts that did not train because all of their
    group scored alike. *guided - unguided*: by how much guided rollouts succeed more often than the
    unguided ones of their groups.
    """
    table = [["point", "row", "seeds", "invented tasks", *SHARES]]
    for point, runs in points.items():
        for row in grid.gather(runs, folder):
            names = [run.name for run in runs if run.row == row.name and run.seed in row.curves]
            metrics = [Workdir(folder / name).metrics() for name in names]
            metrics = [lines for lines in metrics if lines]
            early = [explained(m) for m in itertools.chain(*metrics) if 0 < m["step"] <= EARLY]
            pools = [m[-1]["questioning/pool"] for m in metrics if "questioning/pool" in m[-1]]
            shares = []
            for key in SHARES.values():
                share = compare.percent([m[key] for m in early if key in m])
                shares.append(f"{float(share):+.1f}" if share and key == "gain" else share)
            invented = f"{np.mean(pools):.0f}" if pools else ""
            table.append([point, short(row), str(len(metrics)), invented, *shares])
    return table


def explained(line: Mapping[str, Any]) -> Json:
    """Return the metrics of a step with its share of rollouts without signal and, if there were
    guided ones, what these gain."""
    found = {**line, "no signal": line["ledger/no_signal"] / line["ledger/rollouts"]}
    if "navigating/expected_rate" in line:
        found["gain"] = line["navigating/win_rate"] - line["navigating/expected_rate"]
    return found


PANELS = {  # estimate of a line -> its axis
    "after": "held-out success after training, %",
    "above": "equal rollouts: curve above the first row's, points",
    "timed": "equal wall time: above the first row, points",
}


def draw(folder: Path, name: str, dial: str, lines: Sequence[Line]) -> None:
    """Write NAME.png and NAME.svg: by point, success after training, and how much higher than the
    first row the others are after equal numbers of rollouts (in the mean over the curve) and after
    equal wall time."""
    figure = compare.new_figure(13, 3.8)
    points = list(dict.fromkeys(line.point for line in lines))
    names = list(dict.fromkeys(short(line.row) for line in lines))
    for axes, (what, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items()):
        for n, row in enumerate(names):
            of_row = [line for line in lines if short(line.row) == row]
            shown = {points.index(line.point): getattr(line, what) for line in of_row}
            values = {place: value for place, value in shown.items() if value}
            if not values:
                continue
            means, lows, highs = np.transpose([(v.mean, v.low, v.high) for v in values.values()])
            axes.errorbar(
                0.06 * (n - len(names) / 2) + np.array([*values]), means,
                [means - lows, highs - means], fmt="-o" if what == "after" else "o",
                color=compare.colour(n), label=row, capsize=2,
            )  # fmt: skip
        axes.set_xticks(range(len(points)), points)
        axes.set_xlabel(dial)
        axes.set_ylabel(label, fontsize=9)
        if what != "after":
            axes.axhline(0, color="black", linewidth=0.8)
        elif names:
            axes.legend(frameon=False, fontsize=8)
    compare.save(figure, folder / name)


def report(folder: Path, studies: Mapping[str, Points]) -> str:
    """Write MECHANISMS.md, a CSV file and a figure for each study, and return the text."""
    parts = [
        "# When each mechanism helps",
        f"avg@4 on held-out tasks after {SETTINGS['common']['steps']} steps, in percent.",
    ]
    for name, points in studies.items():
        lines, dial = frame(folder, points), STUDIES[name].dial
        draw(folder, name, dial, lines)
        rows = table(lines)
        write_atomically(folder / f"{name}.csv", compare.csv_text(rows))
        parts += [f"## {name}" + (f", by {dial}" if dial else ""), compare.markdown(rows)]
        parts += [f"Logged in steps 1 to {EARLY}, in percent:"]
        parts += [compare.markdown(logged(folder, points))]
    text = compare.paragraphs(parts)
    write_atomically(folder / "MECHANISMS.md", text)
    return text


def main(
    *,
    studies: commands.Words = (),
    seeds: commands.Numbers = (0, 1, 2, 3, 4),
    jobs: int = 2,
    workdir: Path = Path("runs/mechanisms"),
    only_report: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Run studies. Words after `--` go to every run of run.py.

    studies: questioning, navigating, attributing, rollouts, grid, beyond; all if none is named
    jobs: runs at once
    only_report: run nothing
    """
    if unknown := [name for name in studies if name not in STUDIES]:
        wrong = [f"--studies {name}: choose {', '.join(STUDIES)}" for name in unknown]
        raise commands.Problems(*wrong)
    every = runs_of(STUDIES, seeds)
    chosen = {name: every[name] for name in studies or STUDIES}
    points = itertools.chain(*(points.values() for points in chosen.values()))
    runs = {run.name: run for run in itertools.chain(*points)}
    by_seed = sorted(runs.values(), key=lambda run: run.seed)
    return grid.command(
        by_seed, workdir, lambda: report(workdir, chosen), jobs=jobs, flags=flags,
        only_report=only_report,
    )  # fmt: skip


if __name__ == "__main__":
    commands.program(main)
