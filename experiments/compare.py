"""Comparison of runs that differ in one thing: a table in Markdown and CSV, and a figure, from
their workdirs.

A `Row` is one condition with its runs, one per seed. `collect` reads them, `lines` makes the cells
of a table, `markdown` and `csv_text` its texts, and `draw` the figure. Success is in percent.

The intervals are 95% bootstrap intervals that resample the held-out tasks and the runs
(`rl.evaluation.interval_over_seeds`). With one run, or one on each side of a difference, they
resample the tasks alone and say so: they are then too narrow for the method, see
`rl.evaluation.interval`. A difference is that of runs of the same seed on the same
tasks; `sd` is the sample standard deviation (n - 1) of the runs.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evolver.files.workdir import Workdir
from rl.evaluation import Scores, interval, interval_over_seeds, mean_height

COLOURS = (
    "#1b4f72", "#d35400", "#16a085", "#8e44ad", "#c0392b", "#7f8c8d", "#27ae60", "#b7950b",
    "#2e4053",
)  # fmt: skip
GREY = "#7f8c8d"


@dataclass
class Row:
    """One condition: {seed: {step: scores}} of the runs that were evaluated, and what happened to
    the others."""

    name: str
    curves: dict[int, dict[int, Scores]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[int, Scores]:
        """{seed: scores} of the last evaluations."""
        return {seed: curve[max(curve)] for seed, curve in self.curves.items() if curve}

    def final(self, measure: str = "") -> dict[int, np.ndarray]:
        """Return {seed: value_N} of the last evaluation. measure: as `Scores.per_task` takes it; ""
        = avg@k."""
        return {seed: values_of(scores, measure) for seed, scores in self.last.items()}

    def means(self, measure: str = "") -> list[dict[int, float]]:
        """Return {step: mean} of each run."""
        return [means_of(curve, measure) for curve in self.curves.values()]

    def tasks(self) -> set[tuple[str, ...]]:
        """Return the sets of tasks that the last evaluations are of."""
        return {tuple(scores.tasks) for scores in self.last.values()}


def values_of(scores: Scores, measure: str = "") -> np.ndarray:
    """Return value_N of an evaluation. measure: as above."""
    return scores.per_task(measure or scores.names[0])


def means_of(curve: Mapping[int, Scores], measure: str = "") -> dict[int, float]:
    """Return {step: mean over tasks} of a curve, in the order of the steps."""
    return {step: float(values_of(curve[step], measure).mean()) for step in sorted(curve)}


@dataclass(frozen=True)
class Estimate:
    """A mean in percent with its interval. sd: of the runs, nan if there are fewer than two; runs:
    their number."""

    mean: float
    low: float
    high: float
    sd: float
    runs: int

    @property
    def scope(self) -> str:
        """The words behind an interval that does not cover how runs differ."""
        return " (over tasks, of this one run)" if self.runs == 1 else ""

    def __str__(self) -> str:
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]{self.scope}"

    def signed(self) -> str:
        """Return the text of a difference."""
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]{self.scope}"

    def minus(self, value: float) -> Estimate:
        """Return the difference to a number that is known exactly."""
        low, high = self.low - value, self.high - value
        return Estimate(self.mean - value, low, high, self.sd, self.runs)


def signed(change: Estimate | None) -> str:
    """Return the text of a difference, "" of none."""
    return change.signed() if change else ""


def deviation(value: Estimate | None) -> str:
    """Return the text of a deviation, "" of fewer than two runs."""
    return f"{value.sd:.1f}" if value and value.runs > 1 else ""


def percent(values: Any) -> str:
    """Return the mean in percent, "" of no values."""
    return f"{100 * np.mean(values):.1f}" if np.size(values) else ""


def collect(folder: str | Path) -> dict[int, Scores]:
    """Return {step: scores} of the run in a workdir, {} if it was not evaluated.

    An evaluation of its own (`--mode=eval`) counts as step 0; its seeds are joined into one with
    more rollouts.
    """
    workdir = Workdir(folder)
    if found := workdir.scores():
        return found
    records = [record for record in workdir.evaluations() if record.get("scores")]
    return {0: joined([Scores(**scores) for scores in records[-1]["scores"]])} if records else {}


def joined(scores: Sequence[Scores]) -> Scores:
    """Return evaluations of the same tasks as one, with the rollouts of all of them."""
    first = scores[0]
    return Scores(
        first.tasks,
        first.difficulty_N,
        [[x for s in scores for x in s.score_NR[n]] for n in range(len(first.tasks))],
        [[x for s in scores for x in s.success_NR[n]] for n in range(len(first.tasks))],
        first.greedy_N,
        sum(s.broken for s in scores),
        first.temperature,
    )


def estimate(values: Mapping[int, np.ndarray], least: float = 0.0) -> Estimate | None:
    """Return the mean of {seed: value_N} with its interval, None if there are no values.

    The values lie between `least` and 1, and so does the interval, which few runs alone may widen
    beyond.
    """
    if not values:
        return None
    value_SN = 100 * np.stack(list(values.values()))
    mean_S = value_SN.mean(axis=1)
    sd = float(mean_S.std(ddof=1)) if len(mean_S) > 1 else math.nan
    low, high = (float(np.clip(end, 100 * least, 100)) for end in interval_over_seeds(value_SN))
    return Estimate(float(mean_S.mean()), low, high, sd, len(mean_S))


def subtracted(
    before: Mapping[int, np.ndarray], after: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Return after - before of {seed: value_N} over the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def paired(before: Mapping[int, np.ndarray], after: Mapping[int, np.ndarray]) -> Estimate | None:
    """Return the estimate of after - before, None if they share no seed."""
    return estimate(subtracted(before, after), least=-1.0)


def height(curve: Mapping[int, Scores], measure: str = "") -> np.ndarray:
    """Return value_N, the mean height of each task's curve over the steps of {step: scores}, in [0,
    1]."""
    steps = sorted(curve)
    value_EN = np.stack([values_of(curve[step], measure) for step in steps])
    return np.array([mean_height(dict(zip(steps, value_E))) for value_E in value_EN.T])


def changes(first: Row, second: Row, measure: str = "") -> dict[int, np.ndarray]:
    """Return second - first over the seeds that both have, {} if they were given different
    tasks."""
    if len(first.tasks() | second.tasks()) > 1:
        return {}
    return subtracted(first.final(measure), second.final(measure))


def difference(first: Row, second: Row, measure: str = "") -> Estimate | None:
    """Return the estimate of second - first, None if there is nothing to compare."""
    return estimate(changes(first, second, measure), least=-1.0)


def lines(rows: Sequence[Row], seeds: Sequence[int], measure: str = "") -> list[list[str]]:
    """Return the header and a line for each row: success by seed, mean, deviation, difference to
    the first row."""
    first = rows[0]
    by_seed = [f"seed {seed}" for seed in seeds]
    table = [["", *by_seed, "mean [95%]", "sd", f"minus {first.name} [95%]", "note"]]
    for row in rows:
        values = row.final(measure)
        mean = estimate(values)
        change = difference(first, row, measure) if row is not first else None
        cells = [percent(values.get(seed, ())) for seed in seeds]
        figures = [str(mean or ""), deviation(mean), signed(change)]
        table.append([row.name, *cells, *figures, "; ".join(row.notes)])
    return table


def before(rows: Sequence[Row]) -> str:
    """Return a sentence with the mean success before training, "" if no run was evaluated before
    and after."""
    curves = [curve for row in rows for curve in row.means() if len(curve) > 1]
    means = [next(iter(curve.values())) for curve in curves]
    return f"before training: {percent(means)}" if means else ""


def over_tasks(value_N: np.ndarray) -> str:
    """Return the mean of one value per task in percent with its interval, "" of no values."""
    low, high = interval(value_N)
    return f"{percent(value_N)} [{100 * low:.1f}, {100 * high:.1f}]" if len(value_N) else ""


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Return a header and rows as a Markdown table; columns that are empty throughout are left
    out."""
    kept = [i for i in range(len(table[0])) if i == 0 or any(row[i] for row in table[1:])]
    rows = [[row[i].replace("|", "\\|") for i in kept] for row in table]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(kept))]
    text = []
    for first, *others in rows:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        text.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    rule = (
        "|"
        + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        + "|"
    )
    return "\n".join([text[0], rule, *text[1:]]) + "\n"


def csv_text(table: Sequence[Sequence[Any]]) -> str:
    """Return the rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(rows: Sequence[Row], path: str | Path, *, measure: str = "", title: str = "") -> None:
    """Write PATH.png and PATH.svg: the final success of each row (left), and the differences to the
    first row.

    Both have intervals, and a dot for each seed. A row alone differs from none: its curve is drawn
    instead.
    """
    figure = new_figure(10, 0.42 * len(rows) + 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    figure.suptitle(title, fontsize=10)
    draw_means(left, rows, measure)
    if len(rows) > 1:
        draw_differences(right, rows, measure)
    else:
        draw_curves(right, rows, measure)
    save(figure, path)


def save(figure: Any, path: str | Path) -> None:
    """Write PATH.png and PATH.svg; equal figures give equal files."""
    from matplotlib import rc_context

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": "evolver", "svg.fonttype": "none"}):
        figure.savefig(f"{path}.png")
        figure.savefig(f"{path}.svg", metadata={"Date": None})


def draw_curves(axes: Any, rows: Sequence[Row], measure: str = "") -> None:
    """Draw success over steps: a thin line for each run, a thick one for the mean at the steps that
    all runs share."""
    for i, row in enumerate(rows):
        colour = COLOURS[i % len(COLOURS)]
        curves = row.means(measure)
        for curve in curves:
            heights = [100 * mean for mean in curve.values()]
            axes.plot(list(curve), heights, color=colour, linewidth=0.7, alpha=0.45)
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if steps:
            mean_S = [np.mean([100 * curve[step] for curve in curves]) for step in steps]
            style = "-o" if i < len(COLOURS) else "--o"
            label = f"{row.name} {mean_S[-1]:.0f}%"
            axes.plot(steps, mean_S, style, markersize=3, color=colour, linewidth=2, label=label)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"held-out success{f', {measure}' if measure else ''}, %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=8)


def draw_means(axes: Any, rows: Sequence[Row], measure: str = "") -> None:
    """Draw the final success of each row with its interval and a dot for each seed."""
    draw_intervals(axes, {row.name: row.final(measure) for row in rows})
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"final success{f', {measure}' if measure else ''}, %")


def draw_differences(axes: Any, rows: Sequence[Row], measure: str = "") -> None:
    """Draw the difference of each row to the first one with its interval and a dot for each
    seed."""
    first, *others = rows
    draw_intervals(axes, {row.name: changes(first, row, measure) for row in others}, least=-1.0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"points above {first.name}")


def draw_intervals(
    axes: Any, values: Mapping[str, Mapping[int, np.ndarray]], least: float = 0.0
) -> None:
    """Draw a line for each name with the estimate of its {seed: value_N} and a dot for each run.
    least: as `estimate` takes it."""
    labels = []
    for place, (name, found) in enumerate(values.items()):
        value = estimate(found, least)
        labels.append(name + (value.scope.replace(" (", "\n(") if value else ""))
        if value is None:
            axes.annotate("no runs", (1, place), color=GREY, fontsize=8, va="center")
            continue
        axes.plot([value.low, value.high], [place, place], color=GREY, linewidth=2)
        axes.plot(value.mean, place, "|", color=COLOURS[0], markersize=12, markeredgewidth=2)
        dots = sorted(100 * value_N.mean() for value_N in found.values())
        style = {"color": COLOURS[1], "markersize": 4, "alpha": 0.8}
        axes.plot(dots, [place] * len(dots), "o", **style)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
