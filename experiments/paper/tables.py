"""A table of the paper beside our own scores: Markdown, CSV, LaTeX, and a figure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import LATEX_ESCAPE_RULES, tabulate

from configs.paper.cells import TABLES
from experiments import compare
from experiments.compare import Estimate, Row, Values
from experiments.ledger import INTERRUPTED, Ledger
from experiments.paper import measures
from experiments.paper.study import Study, module_of, title_of
from models.files import write_atomically
from rl.evaluation import Scores, steps_to

HEAD = (
    "cell", "measure", "published", "ours [95%]", "sd", "ours - published", "at T=0", "seeds",
    "hours", "money", "revision", "note",
)  # fmt: skip
CAPTIONS = {
    "tiny": "Tiny scale: a policy of less than a million parameters in `travel` (for AppWorld) and "
    "in short conversations of BFCL. It shows that each cell runs, and none of its scores compares "
    "with the paper's.",
    "full": "The paper's scores beside ours.",
}
CURVES = ("figure13b", "figure14", "figure15", "figure16")  # those whose figure shows curves


@dataclass
class Result(Row):
    """A cell: `curves` are those of its training runs, if it has any.

    scores: {seed: scores} of the final evaluations; greedy: of those at temperature 0; runs:
    the names of all.
    """

    scores: dict[int, Scores] = field(default_factory=dict)
    greedy: dict[int, Scores] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)

    def values(self, measure: str) -> Values:
        """Return {seed: one value per task} of a measure."""
        found = {}
        for seed in sorted(self.curves.keys() | self.scores.keys()):
            curve = self.curves.get(seed, {})
            value_N = measures.per_task(measure, self.scores.get(seed), curve)
            if value_N is not None:
                found[seed] = value_N
        return found


class Table:
    """A table with the results of its cells, as far as their runs are finished."""

    def __init__(self, study: Study, name: str, cells: Sequence[str], ledger: Ledger):
        self.study, self.name, self.ledger = study, name, ledger
        self.cells = {cell: TABLES[name][cell] for cell in cells}
        self.results = {cell: self._read(cell) for cell in cells}

    def _read(self, cell: str) -> Result:
        study, result = self.study, Result(cell)
        if (self.name, cell) in study.left_out:
            result.notes.append(study.left_out[self.name, cell])
            return result
        for seed in study.seeds:
            source = study.sources[self.name, cell, seed]
            result.runs += source.names
            codes = {name: self.ledger.last(name).code for name in source.names}
            failed = [name for name, code in codes.items() if code not in (0, None, INTERRUPTED)]
            if failed:
                result.notes.append(f"{', '.join(failed)} failed")
            elif any(code != 0 for code in codes.values()):
                result.notes.append(f"seed {seed} is missing")
            if curve := self.ledger.curve(source.train):
                result.curves[seed] = curve
            for name, scores in ((source.scores, result.scores), (source.greedy, result.greedy)):
                if curve := self.ledger.curve(name):
                    scores[seed] = curve[max(curve)]
        return result

    def lines(self) -> compare.Table:
        """Return a line per cell and measure, with the header."""
        rows = [list(HEAD)]
        for name, cell in self.cells.items():
            head, end = name, self._spent(self.results[name])  # stand in the first line only
            for measure in measures.shown(cell.published, cell.k):
                rows.append([head, measure, *self._figures(name, measure), *end])
                head, end = "", [""] * len(end)
        return rows

    def _spent(self, result: Result) -> list[str]:
        """Return four cells: hours, money, revisions of the code, notes."""
        runs = dict.fromkeys(result.runs)
        attempts = [self.ledger.last(run) for run in runs]
        money = sum(attempt.money for attempt in attempts)
        revisions = sorted({short(attempt.git) for attempt in attempts if attempt.git})
        return [
            f"{self.ledger.seconds(runs) / 3600:.2f}",
            f"{money:.2f}" if money else "",
            ", ".join(revisions),
            "; ".join(dict.fromkeys(result.notes)),
        ]

    def _figures(self, name: str, measure: str) -> list[str]:
        """Return six cells: the published score, ours with its interval, its deviation over seeds,
        ours - published, the success at temperature 0, the number of seeds."""
        published = self.cells[name].published.get(measure)
        text = "" if published is None else f"{published:g}"
        if self.study.tiny:
            published = None  # nothing compares with it
        if measure == "steps@.9":
            return [text, *self._steps(name, published)]
        result = self.results[name]
        zero = at_zero(result) if measure.startswith("avg@") else ""
        value = compare.estimate(result.values(measure))
        minus = value.minus(published).signed() if published is not None else ""
        return [text, str(value), value.deviation(), minus, zero, str(value.runs or "")]

    def _steps(self, name: str, published: float | None) -> list[str]:
        """Return the same, but for the published score, of steps@.9: steps by seed; "never" for a
        curve that does not reach the goal."""
        baseline = self.results.get(f"{name.rpartition(',')[0]},baseline")
        goal = measures.goal_of(list(baseline.curves.values())) if baseline else math.nan
        curves = self.results[name].curves.values()
        if math.isnan(goal) or not curves:
            return [""] * 5
        found = [steps_to(compare.means_of(curve, "avg@8"), goal) for curve in curves]
        text = ", ".join("never" if step is None else str(step) for step in found)
        reached, sd, minus = [step for step in found if step is not None], "", ""
        if reached == found:  # a mean of the seeds that reach it would be better, the fewer do
            sd = f"{np.std(reached, ddof=1):.1f}" if len(reached) > 1 else ""
            minus = f"{np.mean(reached) - published:+.0f}" if published is not None else ""
        return [text, sd, minus, "", str(len(found))]

    def orderings(self) -> compare.Table:
        """Return the paper's orderings: published and our paired difference, and if ours has its
        sign."""
        rows = [["better", "worse", "measure", "published", "ours, paired [95%]", "holds"]]
        for better, worse in comparisons(self.name, list(self.cells)):
            cell, other = self.cells[better], self.cells[worse]
            names = [n for n in measures.shown(cell.published, cell.k) if n != "steps@.9"]
            if not names:
                continue
            measure = next((name for name in ("auc", "avg@8") if name in names), names[0])
            both = [c.published[measure] for c in (cell, other) if measure in c.published]
            published = f"{both[0] - both[1]:+.1f}" if len(both) == 2 else ""
            change = paired(self.results[better], self.results[worse], measure)
            rows.append([better, worse, measure, published, change.signed(), verdict(change)])
        return rows


def short(revision: str) -> str:
    """Return the first 12 digits of a revision, with the mark of a tree that had changes."""
    return revision[:12] + ("-dirty" if revision.endswith("-dirty") else "")


def at_zero(result: Result) -> str:
    """Return the success at temperature 0: of 8 rollouts per task, or of the one greedy rollout."""
    if result.greedy:
        values = [scores.per_task("avg@8") for scores in result.greedy.values()]
    else:
        greedy = [scores for scores in result.scores.values() if scores.greedy_N]
        values = [scores.per_task("greedy") for scores in greedy]
    return compare.percent(values)


# --- the order of the rows ------------------------------------------------------------------------


def comparisons(table: str, cells: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs (better, worse) of cells that the table's orderings are about."""
    pairs: dict[tuple[str, str], None] = {}
    for order in module_of(table).ORDERS:
        better, worse = order.split(" > ")
        for name in cells:
            other = f",{name},".replace(f",{better},", f",{worse},", 1).strip(",")
            if other != name and other in cells:
                pairs[name, other] = None
    return list(pairs)


def paired(better: Result, worse: Result, measure: str) -> Estimate:
    """Return the difference over the seeds that both have with the same tasks."""

    tasks, others = ({seed: s.tasks for seed, s in r.scores.items()} for r in (better, worse))
    first = worse.values(measure).items()
    same = {seed: value_N for seed, value_N in first if tasks.get(seed) == others.get(seed)}
    return compare.paired(same, better.values(measure))


def verdict(change: Estimate) -> str:
    """Return "yes" or "no" if the interval excludes zero, else "unclear"."""
    if not change:
        return "not run"
    return "yes" if change.low > 0 else "no" if change.high < 0 else "unclear"


# --- files ----------------------------------------------------------------------------------------


def write(study: Study, name: str, cells: Sequence[str], folder: Path) -> str:
    """Write tables/NAME.md, .csv, .tex and the figure NAME.png, .svg below `folder`, and return
    the Markdown."""
    place, table = folder / "tables", Table(study, name, cells, Ledger(folder))
    body, order = table.lines(), table.orderings()
    title, caption = title_of(name), CAPTIONS[study.scale]
    parts = [f"# {title}", caption, compare.markdown(body)]
    parts += ["The paper's orderings:", compare.markdown(order)] if len(order) > 1 else []
    parts += [f"![{name}]({name}.png)"] if draw(table, place / name) else []
    text = compare.paragraphs(parts)
    write_atomically(place / f"{name}.md", text)
    write_atomically(place / f"{name}.csv", compare.csv_text(body))
    write_atomically(place / f"{name}.tex", latex(body, f"{title} {caption}"))
    return text


def latex(table: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table for LaTeX with the package booktabs: its filled columns up to the seeds."""
    width = HEAD.index("seeds") + 1
    head, *rows = compare.filled([row[:width] for row in table])
    columns = ["left", "left"] + ["right"] * (len(head) - 2)
    body = tabulate(rows, head, "latex_booktabs", colalign=columns, disable_numparse=True)
    title = f"\\centering\n\\caption{{{caption.translate(str.maketrans(LATEX_ESCAPE_RULES))}}}"
    return f"\\begin{{table}}\n{title}\n{body}\n\\end{{table}}\n"


def draw(table: Table, path: Path) -> bool:
    """Write the figure of a table, a column for each world. Return False, and write none, if no
    cell has a score.

    At full scale hollow marks are the published scores; a tiny figure has none, and says what it
    is.
    """
    if not any(result.scores for result in table.results.values()):
        return False
    columns: dict[str, list[str]] = {}
    for name, cell in table.cells.items():
        columns.setdefault(cell.world, []).append(name)
    curves = itertools.chain(*(row.curves.values() for row in table.results.values()))
    curved = table.name in CURVES and any(len(curve) > 1 for curve in curves)
    tall = 0.3 * max(map(len, columns.values())) + 1
    figure = compare.new_figure(6.5 * len(columns) + 1, tall + 4 * curved + 0.7)
    panels = figure.subplots(
        1 + curved, len(columns), squeeze=False, height_ratios=[4] * curved + [tall]
    )
    title = title_of(table.name)
    if table.study.tiny:
        title += "\nTINY SCALE, A CPU POLICY: NOT THE PAPER'S SCORES"
    figure.suptitle(title, fontsize=9)
    for column, (world, names) in enumerate(columns.items()):
        if len(columns) > 1:
            panels[0, column].set_title(world, fontsize=9)
        draw_scores(panels[-1, column], table, names)
        if curved:
            rows = [replace(table.results[name], name=label(name, world)) for name in names]
            compare.draw_curves(panels[0, column], [row for row in rows if row.curves])
    compare.save(figure, path)
    return True


def label(name: str, world: str) -> str:
    """Return the name of a cell without the world that it is evaluated in: "14b, qa"."""
    words = name.split(",")
    if world in words[1:]:
        del words[len(words) - 1 - words[::-1].index(world)]
    return ", ".join(words)


def draw_scores(axes: Any, table: Table, names: Sequence[str]) -> None:
    """Draw the first measure of each cell with its interval and a dot for each seed, and the
    published one unless the scale is tiny."""
    values, shown = {}, []
    for place, name in enumerate(names):
        cell = table.cells[name]
        measure = measures.shown(cell.published, cell.k)[0].replace("steps@.9", "auc")
        values[label(name, cell.world)] = table.results[name].values(measure)
        shown.append(measure)
        published = cell.published.get(measure)
        if published is not None and not table.study.tiny:
            axes.plot(published, place, "D", color=compare.GREY, markerfacecolor="none")
    compare.draw_intervals(axes, values)
    axes.set_xlim(0, 100)
    axes.set_xlabel(", ".join(dict.fromkeys(shown)) + ", %")
