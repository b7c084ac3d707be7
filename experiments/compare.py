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

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from evolver.files.report import with_interval
from evolver.files.workdir import Workdir
from rl.evaluation import Scores, interval_over_seeds

COLOURS = (
    "#1b4f72", "#d35400", "#16a085", "#8e44ad", "#c0392b", "#7f8c8d", "#27ae60", "#b7950b",
    "#2e4053",
)  # fmt: skip
GREY = "#7f8c8d"
Curve = dict[int, Scores]  # {step: scores}
Values = dict[int, np.ndarray]  # {seed: value_N}
Table = list[list[str]]  # the header and the rows


@dataclass
class Row:
    """One condition: {seed: {step: scores}} of the runs that were evaluated, and what happened to
    the others."""

    name: str
    curves: dict[int, Curve] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[int, Scores]:
        """{seed: scores} of the last evaluations."""
        return {seed: curve[max(curve)] for seed, curve in self.curves.items() if curve}

    def final(self, measure: str = "") -> Values:
        """Return {seed: value_N} of the last evaluation. measure: as `Scores.per_task` takes it; ""
        = avg@k."""
        return {seed: values_of(scores, measure) for seed, scores in self.last.items()}

    def means(self, measure: str = "") -> list[dict[int, float]]:
        """Return {step: mean} of each run."""
        return [means_of(curve, measure) for curve in self.curves.values()]


def values_of(scores: Scores, measure: str = "") -> np.ndarray:
    """Return value_N of an evaluation. measure: as above."""
    return scores.per_task(measure or scores.names[0])


def means_of(curve: Curve, measure: str = "") -> dict[int, float]:
    """Return {step: mean over tasks} of a curve, in the order of the steps."""
    return {step: float(values_of(curve[step], measure).mean()) for step in sorted(curve)}


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return {step: mean} at the steps that several {step: value} share."""
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return {step: float(np.mean([curve[step] for curve in curves])) for step in steps}


@dataclass(frozen=True)
class Estimate:
    """A mean in percent with its interval. sd: of the runs; runs: their number.

    Without a run the texts are empty and the estimate is false; of one run there is no deviation.
    """

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    runs: int = 0

    def __bool__(self) -> bool:
        return self.runs > 0

    @property
    def scope(self) -> str:
        """The words behind an interval that does not cover how runs differ."""
        return " (over tasks, of this one run)" if self.runs == 1 else ""

    def __str__(self) -> str:
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]{self.scope}" if self else ""

    def signed(self) -> str:
        """Return the text of a difference."""
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]{self.scope}" if self else ""

    def deviation(self) -> str:
        """Return the text of the deviation."""
        return f"{self.sd:.1f}" if self.runs > 1 else ""

    def minus(self, value: float) -> Self:
        """Return the difference to a number that is known exactly."""
        low, high = self.low - value, self.high - value
        return replace(self, mean=self.mean - value, low=low, high=high)


NONE = Estimate()


def percent(values: Any) -> str:
    """Return the mean in percent, "" of no values."""
    return f"{100 * np.mean(values):.1f}" if np.size(values) else ""


def collect(folder: str | Path) -> Curve:
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
    return replace(
        scores[0],
        score_NR=np.concatenate([s.score_NR for s in scores], axis=1).tolist(),
        success_NR=np.concatenate([s.success_NR for s in scores], axis=1).tolist(),
        broken=sum(s.broken for s in scores),
        sweep={},
        worlds=[],
    )


def estimate(values: Values, least: float = 0.0) -> Estimate:
    """Return the mean of {seed: value_N} with its interval.

    The values lie between `least` and 1, and so does the interval, which few runs alone may widen
    beyond.
    """
    if not values:
        return NONE
    value_SN = 100 * np.stack(list(values.values()))
    mean_S = value_SN.mean(axis=1)
    sd = float(mean_S.std(ddof=1)) if len(mean_S) > 1 else math.nan
    low, high = (float(np.clip(end, 100 * least, 100)) for end in interval_over_seeds(value_SN))
    return Estimate(float(mean_S.mean()), low, high, sd, len(mean_S))


def subtracted(before: Values, after: Values) -> Values:
    """Return after - before over the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def paired(before: Values, after: Values) -> Estimate:
    """Return the estimate of after - before over the seeds that both have."""
    return estimate(subtracted(before, after), least=-1.0)


def height(curve: Curve, measure: str = "") -> np.ndarray:
    """Return value_N, the mean height of each task's curve over two or more {step: scores}, in [0,
    1]: the area under it, by trapezoids, over the range of the steps."""
    steps = sorted(curve)
    value_NE = np.stack([values_of(curve[step], measure) for step in steps], axis=1)
    return np.trapezoid(value_NE, steps) / (steps[-1] - steps[0])


def changes(first: Row, second: Row, measure: str = "") -> Values:
    """Return second - first over the seeds that both have, {} if they were given different
    tasks."""
    evaluations = [*first.last.values(), *second.last.values()]
    if len({tuple(scores.tasks) for scores in evaluations}) > 1:
        return {}
    return subtracted(first.final(measure), second.final(measure))


def difference(first: Row, second: Row, measure: str = "") -> Estimate:
    """Return the estimate of second - first."""
    return estimate(changes(first, second, measure), least=-1.0)


def lines(rows: Sequence[Row], seeds: Sequence[int], measure: str = "") -> Table:
    """Return the header and a line for each row: success by seed, mean, deviation, difference to
    the first row."""
    first = rows[0]
    by_seed = [f"seed {seed}" for seed in seeds]
    table = [["", *by_seed, "mean [95%]", "sd", f"minus {first.name} [95%]", "note"]]
    for row in rows:
        values = row.final(measure)
        mean = estimate(values)
        change = difference(first, row, measure).signed() if row is not first else ""
        cells = [percent(values.get(seed, ())) for seed in seeds]
        cells += [str(mean), mean.deviation(), change, "; ".join(row.notes)]
        table.append([row.name, *cells])
    return table


def before(rows: Sequence[Row]) -> str:
    """Return a sentence with the mean success before training, "" if no run was evaluated before
    and after."""
    curves = itertools.chain.from_iterable(row.means() for row in rows)
    means = [next(iter(curve.values())) for curve in curves if len(curve) > 1]
    return f"before training: {percent(means)}" if means else ""


def over_tasks(value_N: np.ndarray, sign: str = "") -> str:
    """Return the mean of one value per task in percent with its interval, "" of no values. sign:
    "+" for differences."""
    return with_interval(value_N, sign) if len(value_N) else ""


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Return a header and rows as a Markdown table; columns that are empty throughout are left
    out."""
    padded: Table = []
    for column in zip(*filled(table)):
        cells = [cell.replace("|", "\\|") for cell in column]
        width = max(3, *map(len, cells))
        side, rule = (">", "-:") if padded else ("<", "--")
        head, *rows = (f" {cell:{side}{width}} " for cell in cells)
        padded.append([head, "-" * width + rule, *rows])
    return "".join(f"|{'|'.join(row)}|\n" for row in zip(*padded))


def paragraphs(parts: Sequence[str]) -> str:
    """Return texts and tables with an empty line between them."""
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def filled(table: Sequence[Sequence[str]]) -> Table:
    """Return a header and rows without the columns, but the first, that are empty in all rows."""
    columns = [c for n, c in enumerate(zip(*table)) if n == 0 or any(c[1:])]
    return [list(row) for row in zip(*columns)]


def csv_text(table: Sequence[Sequence[Any]]) -> str:
    """Return the rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def colour(number: int) -> str:
    """Return the colour of a row; after the last colour the first one follows."""
    return COLOURS[number % len(COLOURS)]


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
    draw_intervals(left, {row.name: row.final(measure) for row in rows})
    left.set_xlim(0, 100)
    left.set_xlabel(f"final success{f', {measure}' if measure else ''}, %")
    first, *others = rows
    if others:
        changed = {row.name: changes(first, row, measure) for row in others}
        draw_intervals(right, changed, least=-1.0)
        right.axvline(0, color="black", linewidth=0.8)
        right.set_xlabel(f"points above {first.name}")
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
        curves = row.means(measure)
        for curve in curves:
            heights = [100 * mean for mean in curve.values()]
            axes.plot(list(curve), heights, color=colour(i), linewidth=0.7, alpha=0.45)
        mean = mean_curve(curves)
        if mean:
            heights = [100 * height for height in mean.values()]
            style = "-o" if i < len(COLOURS) else "--o"
            label = f"{row.name} {heights[-1]:.0f}%"
            axes.plot(
                list(mean), heights, style, markersize=3, color=colour(i), linewidth=2, label=label
            )
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"held-out success{f', {measure}' if measure else ''}, %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=8)


def draw_intervals(axes: Any, values: Mapping[str, Values], least: float = 0.0) -> None:
    """Draw a line for each name with the estimate of its {seed: value_N} and a dot for each run.
    least: as `estimate` takes it."""
    labels = []
    for place, (name, found) in enumerate(values.items()):
        value = estimate(found, least)
        labels.append(name + value.scope.replace(" (", "\n("))
        if not value:
            axes.annotate("no runs", (1, place), color=GREY, fontsize=8, va="center")
            continue
        axes.plot([value.low, value.high], [place, place], color=GREY, linewidth=2)
        axes.plot(value.mean, place, "|", color=colour(0), markersize=12, markeredgewidth=2)
        dots = sorted(100 * value_N.mean() for value_N in found.values())
        axes.plot(dots, [place] * len(dots), "o", color=colour(1), markersize=4, alpha=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
