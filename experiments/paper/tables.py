"""A table of the paper beside our own scores: Markdown, CSV, LaTeX, and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.paper.cells import TABLES, Cell
from experiments import compare
from experiments.compare import Estimate, Row
from experiments.grid import INTERRUPTED, Ledger
from experiments.paper import measures
from experiments.paper.study import Study, module_of, title_of
from models.files import write_atomically
from rl.evaluation import Scores

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
class Result:
    """The results of a cell's runs: {seed: scores}, at temperature 0 too, {seed: curve}, and what
    is missing."""

    scores: dict[int, Scores]
    greedy: dict[int, Scores]
    curves: dict[int, dict[int, Scores]]
    notes: list[str]
    runs: list[str]

    def values(self, measure: str) -> dict[int, np.ndarray]:
        """Return {seed: one value per task} of a measure."""
        seeds = self.curves if measures.needs_curve(measure) else self.scores
        found = {
            s: measures.per_task(measure, self.scores.get(s), self.curves.get(s, {})) for s in seeds
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def tasks(self, seed: int) -> list[str]:
        """Return the tasks of a seed's final evaluation."""
        return self.scores[seed].tasks if seed in self.scores else []


def read(study: Study, table: str, cell: str, ledger: Ledger) -> Result:
    """Return the results of a cell, as far as its runs are finished."""
    result = Result({}, {}, {}, [], [])
    if (table, cell) in study.left_out:
        result.notes.append(study.left_out[table, cell])
        return result
    for seed in study.seeds:
        source = study.sources[table, cell, seed]
        result.runs += source.names
        codes = {name: ledger.code(name) for name in source.names}
        if bad := [name for name, code in codes.items() if code != 0]:
            failed = [name for name in bad if codes[name] not in (None, INTERRUPTED)]
            result.notes.append(
                f"{', '.join(failed)} failed" if failed else f"seed {seed} is missing"
            )
        found = {name: ledger.curve(name) for name, code in codes.items() if code == 0}
        if source.train in found:
            result.curves[seed] = found[source.train]
        for name, scores in ((source.scores, result.scores), (source.greedy, result.greedy)):
            if curve := found.get(name):
                scores[seed] = curve[max(curve)]
    return result


def lines(study: Study, table: str, cells: Sequence[str], ledger: Ledger) -> list[list[str]]:
    """Return the table: a line per cell and measure, with the header."""
    results = {name: read(study, table, name, ledger) for name in cells}
    rows = [list(HEAD)]
    for name, result in results.items():
        cell, runs = TABLES[table][name], dict.fromkeys(result.runs)
        attempts = [ledger.attempts(run)[-1] for run in runs if ledger.attempts(run)]
        hours, money = ledger.seconds(runs) / 3600, sum(attempt["money"] for attempt in attempts)
        revisions = sorted({short(attempt["git"] or "") for attempt in attempts} - {""})
        for number, measure in enumerate(measures.shown(cell.published, cell.k)):
            published = cell.published.get(measure)
            ours, sd, seeds, minus = figures(results, name, measure, published, study.tiny)
            zero = at_zero(result) if measure.startswith("avg@") else ""
            text = "" if published is None else f"{published:g}"
            end = ["", "", "", ""]
            if number == 0:
                spent = f"{money:.2f}" if money else ""
                end = [
                    f"{hours:.2f}",
                    spent,
                    ", ".join(revisions),
                    "; ".join(dict.fromkeys(result.notes)),
                ]
            rows.append(
                [name if number == 0 else "", measure, text, ours, sd, minus, zero, seeds, *end]
            )
    return rows


def short(revision: str) -> str:
    """Return the first 12 digits of a revision, with the mark of a tree that had changes."""
    return revision[:12] + ("-dirty" if revision.endswith("-dirty") else "")


def figures(
    results: Mapping[str, Result],
    name: str,
    measure: str,
    published: float | None,
    tiny: bool,
) -> tuple[str, str, str, str]:
    """Return four cells: ours with its interval, its deviation over seeds, the number of seeds,
    ours - published."""
    if measure == "steps@.9":
        return steps_figures(results, name, published, tiny)
    value = compare.estimate(results[name].values(measure))
    if value is None:
        return "", "", "", ""
    minus = ""
    if published is not None and not tiny:
        change = Estimate(
            value.mean - published,
            value.low - published,
            value.high - published,
            value.sd,
            value.runs,
        )
        minus = change.signed()
    return str(value), f"{value.sd:.1f}" if value.runs > 1 else "", str(value.runs), minus


def steps_figures(
    results: Mapping[str, Result], name: str, published: float | None, tiny: bool
) -> tuple[str, str, str, str]:
    """Return the four cells of steps@.9: steps by seed; "never" for a curve that does not reach the
    goal."""
    prefix = name.rpartition(",")[0]
    baseline = results.get(f"{prefix},baseline")
    goal = measures.goal_of(list(baseline.curves.values())) if baseline else math.nan
    if math.isnan(goal) or not results[name].curves:
        return "", "", "", ""
    found = [measures.steps_of(curve, goal) for curve in results[name].curves.values()]
    text, sd, minus = ", ".join("never" if step is None else str(step) for step in found), "", ""
    reached = [step for step in found if step is not None]
    if reached == found:  # a mean of the seeds that reach the goal would be better, the fewer do
        sd = f"{np.std(reached, ddof=1):.1f}" if len(reached) > 1 else ""
        minus = f"{np.mean(reached) - published:+.0f}" if published is not None and not tiny else ""
    return text, sd, str(len(found)), minus


def at_zero(result: Result) -> str:
    """Return the success at temperature 0: of 8 rollouts per task, or of the one greedy rollout."""
    values = {seed: scores.per_task("avg@8") for seed, scores in result.greedy.items()}
    if not values:
        values = {
            seed: scores.per_task("greedy")
            for seed, scores in result.scores.items()
            if scores.greedy_N
        }
    value = compare.estimate(values)
    return f"{value.mean:.1f}" if value else ""


# --- the order of the rows ------------------------------------------------------------------------


def comparisons(table: str, cells: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs (better, worse) of cells that the table's orderings are about."""
    pairs = []
    for order in module_of(table).ORDERS:
        better, worse = order.split(" > ")
        for name in cells:
            words, wanted = name.split(","), better.split(",")
            for place in range(len(words) - len(wanted) + 1):
                if words[place : place + len(wanted)] == wanted:
                    other = ",".join(
                        [*words[:place], *worse.split(","), *words[place + len(wanted) :]]
                    )
                    if other in cells:
                        pairs.append((name, other))
                    break
    return list(dict.fromkeys(pairs))


def orderings(study: Study, table: str, cells: Sequence[str], ledger: Ledger) -> list[list[str]]:
    """Return the table of the paper's orderings: published and our paired difference, and if ours
    has its sign."""
    rows = [["better", "worse", "measure", "published", "ours, paired [95%]", "holds"]]
    results = {name: read(study, table, name, ledger) for name in cells}
    for better, worse in comparisons(table, cells):
        cell, other = TABLES[table][better], TABLES[table][worse]
        names = [n for n in measures.shown(cell.published, cell.k) if n != "steps@.9"]
        if not names:
            continue
        measure = "auc" if "auc" in names else "avg@8" if "avg@8" in names else names[0]
        known = measure in cell.published and measure in other.published
        published = f"{cell.published[measure] - other.published[measure]:+.1f}" if known else ""
        change = paired(results[better], results[worse], measure)
        rows.append(
            [better, worse, measure, published, change.signed() if change else "", verdict(change)]
        )
    return rows


def paired(better: Result, worse: Result, measure: str) -> Estimate | None:
    """Return the difference over the seeds that both have, None without such seeds or with
    different tasks."""
    first, second = worse.values(measure), better.values(measure)
    return compare.paired(
        {s: value for s, value in first.items() if better.tasks(s) == worse.tasks(s)}, second
    )


def verdict(change: Estimate | None) -> str:
    """Return "yes" or "no" if the interval excludes zero, else "unclear"."""
    if change is None:
        return "not run"
    return "yes" if change.low > 0 else "no" if change.high < 0 else "unclear"


# --- files ----------------------------------------------------------------------------------------


def write(study: Study, table: str, cells: Sequence[str], folder: Path) -> str:
    """Write tables/TABLE.md, .csv, .tex and the figure TABLE.png, .svg below `folder`, and return
    the Markdown."""
    place, ledger = folder / "tables", Ledger(folder)
    body, order = lines(study, table, cells, ledger), orderings(study, table, cells, ledger)
    title, caption = title_of(table), CAPTIONS[study.scale]
    drawn = draw(study, table, cells, ledger, place / table)
    parts = [f"# {title}", caption, compare.markdown(body)]
    parts += ["The paper's orderings:", compare.markdown(order)] if len(order) > 1 else []
    parts += [f"![{table}]({table}.png)"] if drawn else []
    text = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    write_atomically(place / f"{table}.md", text)
    write_atomically(place / f"{table}.csv", compare.csv_text(body))
    write_atomically(place / f"{table}.tex", latex(body, f"{title} {caption}"))
    return text


def latex(table: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table for LaTeX with the package booktabs: its filled columns up to the seeds."""
    width = HEAD.index("seeds") + 1
    kept = [i for i in range(width) if i == 0 or any(row[i] for row in table[1:])]
    rows = [" & ".join(escaped(row[i]) for i in kept) + r" \\" for row in table]
    head, body = rows[0], "\n".join(rows[1:])
    columns = "ll" + "r" * (len(kept) - 2)
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{escaped(caption)}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        f"{head}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def escaped(text: str) -> str:
    """Return text in which nothing is a command of LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {char: f"\\{char}" for char in "&%$#_{}"}
    return "".join(special.get(char, char) for char in text)


def draw(study: Study, table: str, cells: Sequence[str], ledger: Ledger, path: Path) -> bool:
    """Write the figure of a table, a column for each world. Return False, and write none, if no
    cell has a score.

    At full scale hollow marks are the published scores; a tiny figure has none, and says what it
    is.
    """
    results = {name: read(study, table, name, ledger) for name in cells}
    if not any(result.scores for result in results.values()):
        return False
    worlds = list(dict.fromkeys(TABLES[table][name].world for name in cells))
    columns = {
        world: [name for name in cells if TABLES[table][name].world == world] for world in worlds
    }
    curved = table in CURVES and any(
        len(curve) > 1 for r in results.values() for curve in r.curves.values()
    )
    tall = 0.3 * max(map(len, columns.values())) + 1
    figure = compare.new_figure(6.5 * len(worlds) + 1, tall + 4 * curved + 0.7)
    panels = figure.subplots(
        1 + curved, len(worlds), squeeze=False, height_ratios=[4] * curved + [tall]
    )
    title = title_of(table)
    if study.tiny:
        title += "\nTINY SCALE, A CPU POLICY: NOT THE PAPER'S SCORES"
    figure.suptitle(title, fontsize=9)
    for column, (world, names) in enumerate(columns.items()):
        if len(worlds) > 1:
            panels[0, column].set_title(world, fontsize=9)
        draw_scores(
            panels[-1, column],
            {name: results[name] for name in names},
            TABLES[table],
            study.tiny,
        )
        if curved:
            rows = [
                Row(label(name, world), results[name].curves)
                for name in names
                if results[name].curves
            ]
            compare.draw_curves(panels[0, column], rows)
    compare.save(figure, path)
    return True


def label(name: str, world: str) -> str:
    """Return the name of a cell without the world that it is evaluated in: "14b, qa"."""
    words = name.split(",")
    if world in words[1:]:
        del words[len(words) - 1 - words[::-1].index(world)]
    return ", ".join(words)


def draw_scores(
    axes: Any, results: Mapping[str, Result], cells: Mapping[str, Cell], tiny: bool
) -> None:
    """Draw the first measure of each cell with its interval and a dot for each seed, and the
    published one unless `tiny`."""
    first = {name: measures.shown(cells[name].published, cells[name].k)[0] for name in results}
    first = {name: "auc" if measure == "steps@.9" else measure for name, measure in first.items()}
    values = {name: result.values(first[name]) for name, result in results.items()}
    dots = [[100 * value_N.mean() for value_N in found.values()] for found in values.values()]
    names = [label(name, cells[name].world) for name in results]
    compare.draw_intervals(
        axes, names, [compare.estimate(found) for found in values.values()], dots
    )
    for place, name in enumerate(results):
        published = cells[name].published.get(first[name])
        if published is not None and not tiny:
            axes.plot(
                published, place, "D", markerfacecolor="none", color=compare.GREY, markersize=6
            )
    axes.set_xlim(0, 100)
    axes.set_xlabel(", ".join(dict.fromkeys(first.values())) + ", %")
