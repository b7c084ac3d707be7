"""The report on a run: a table, `summary.md` and `curve.png`, from the files of its workdir alone.

python -m evolver.files.report runs/quickstart
"""

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from evolver.config.derived import MECHANISMS
from evolver.files.formats import found
from evolver.files.progress import clock
from evolver.files.workdir import Workdir
from evolver.llm.store import accounts, ledger_lines
from evolver.metrics import Metrics
from models.files import BrokenFile, write_atomically
from rl.evaluation import Scores, interval

EVAL = "#1b4f72"
ORIGINAL = "#d35400"
SYNTHETIC = "#16a085"
FATES = {  # colours in the plot, from bottom to top
    "trained": "#5b8db8",
    "no_signal": "#d5d8dc",
    "overlong": "#f5cba7",
    "stale": "#c39bd3",
    "other": "#e6b0aa",
}
WINDOW = 5  # steps of the moving mean in the plot
GAP = 6.0  # percent between the names of two curves
Rows = list[tuple[str, ...]]


def report(path: str | Path) -> str:
    """Write `summary.md` and `curve.png`. Return the table and the path of the curve, for the
    terminal."""
    workdir = Workdir(path)
    table = evaluation_table(workdir)
    plot_curves(workdir, workdir / "curve.png")
    write_atomically(workdir / "summary.md", summary(workdir, table))
    return f"{table}\n\ncurve: {workdir / 'curve.png'}\n"


# --- the table of evaluations ---------------------------------------------------------------------


def evaluation_table(workdir: Workdir) -> str:
    """Return the table of the first and last evaluation, with 95% intervals over tasks and the
    paired change."""
    scores = workdir.scores()
    if not scores:
        return "there is no evaluation (config.eval.every=0)"
    first = min(scores)
    last = max(scores)
    before = scores[first]
    after = scores[last]
    split = found(workdir.config(), "config.eval.split") or "held-out"
    title = (
        f"{len(after.tasks)} {split} tasks, {len(after.success_NR[0])} rollouts each at temperature"
        f" {after.temperature:g}; percent, 95% intervals over tasks, of this one run\n"
    )
    if first == last:
        return "\n".join([title, scores_table([after], f"step {last}")])
    columns = {f"before (step {first})": before}
    if before.sweep:
        best = f"before, at T={before.best_temperature()[0]:g}"
        columns[best] = at_best_temperature(before)
    columns[f"after (step {last})"] = after
    table = aligned(["", *columns, "change"], paired_rows([*columns.values()]))
    return "\n".join([title, table, *sharpening(before, after)])


def scores_table(scores: Sequence[Scores], name: str) -> str:
    """Return the table of an evaluation called `name`, with its success at each temperature.

    scores: of one evaluation, or of several that differ in their seeds: then cells are means over
    the seeds, with the standard deviation (n - 1) beside them.
    """
    by_seed = [values_by_name(s) for s in scores]
    rows = []
    for measure in by_seed[0]:
        value_SN = np.stack([values[measure] for values in by_seed if measure in values])
        cells = [measure, with_interval(value_SN.mean(axis=0))]
        if len(value_SN) > 1:  # greedy rollouts are of the first seed only
            cells.append(f"{100 * value_SN.mean(axis=1).std(ddof=1):.1f}")
        rows.append(tuple(cells))
    head = ["", name, f"sd of {len(scores)} seeds"][: 2 + (len(scores) > 1)]
    return "\n".join([aligned(head, rows), *success_by_temperature(scores[0])])


def success_by_temperature(scores: Scores) -> list[str]:
    """Return a line with the success at each temperature; [] if there was only one."""
    if not scores.sweep:
        return []
    success = sorted(scores.by_temperature.items())
    cells = [f"{100 * value_NR.mean():.1f} at {heat:g}" for heat, value_NR in success]
    return ["", f"success by temperature: {', '.join(cells)}"]


def sharpening(before: Scores, after: Scores) -> list[str]:
    """Return a sentence on how much of a gain the untrained policy has at a better temperature; []
    if not measured."""
    if not before.sweep:
        return []
    temperature, best_N = before.best_temperature()
    start_N = before.per_task("avg@")
    end_N = after.per_task("avg@")
    at = f"at temperature {after.temperature:g}"
    best = f"its best temperature of {temperature:g}"
    return ["", told_gain(start_N, best_N, end_N, at, best)]


def told_gain(
    start_N: np.ndarray, best_N: np.ndarray, end_N: np.ndarray, at: str, best: str
) -> str:
    """Return how much of a gain in success, from `start_N` to `end_N`, is sharpening: what the
    policy before has at its best temperature, `best_N`. at, best: words for both."""
    new_N = end_N - best_N
    gain = 100 * (end_N.mean() - start_N.mean())
    sharper = 100 * (best_N.mean() - start_N.mean())
    if new_N.mean() <= 0:  # parts of a gain would be negative, or more than the whole
        return (
            f"The change {at} is {gain:+.1f} points, and nothing of it is new: sharpening alone"
            f" gives {sharper:+.1f} (the policy before, at {best}), and the policy after is"
            f" {with_interval(new_N, '+')} points from that."
        )
    return (
        f"Of the gain of {gain:+.1f} points {at}, {sharper:.1f} are sharpening (the policy before,"
        f" at {best}) and {with_interval(new_N)} are new."
    )


def paired_rows(evaluations: Sequence[Scores]) -> Rows:
    """Return the rows of `evaluation_table` from evaluations of the same tasks: a column for each,
    and the change from the first to the last."""
    columns = [values_by_name(scores) for scores in evaluations]
    rows = []
    for name, after_N in columns[-1].items():
        before_N = columns[0].get(name)
        if before_N is not None and len(before_N) == len(after_N):
            cells = [with_interval(column[name]) if name in column else "" for column in columns]
            # Paired, so that the interval is not widened by the spread of the tasks.
            rows.append((name, *cells, with_interval(after_N - before_N, "+")))
    return rows


def at_best_temperature(scores: Scores) -> Scores:
    """Return the scores at the temperature with the highest success; greedy rollouts count once per
    task."""
    temperature = scores.best_temperature()[0]
    if temperature:
        success_NR = scores.by_temperature[temperature]
    else:
        rollouts = len(scores.success_NR[0])
        success_NR = np.repeat(scores.greedy_N, rollouts).reshape(-1, rollouts)
    return dataclasses.replace(scores, success_NR=success_NR.tolist(), greedy_N=[])


def values_by_name(scores: Scores) -> dict[str, np.ndarray]:
    """Return {name: value_N} of the measures in the table, one value per task."""
    names = [name for name in scores.names if name != "score"]
    values = {name: scores.per_task(name) for name in names}
    rows = dict(values)
    for kind, part, tasks_N in scores.parts:
        label = f"  {kind} {part} ({tasks_N.sum()})"
        rows[label] = values[names[0]][tasks_N]
        if kind == "world":
            rows |= {f"{label}, {name}": values[name][tasks_N] for name in names[1:]}
    return rows


def with_interval(value_N: np.ndarray, sign: str = "") -> str:
    """Return the mean in percent with its 95% interval: "61.2 [55.0, 67.1]". sign: "+" for
    differences."""
    mean, low, high = (100 * value for value in (value_N.mean(), *interval(value_N)))
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "simple") -> str:
    """Return a table as lines of text; the first column is left-aligned, the others are
    right-aligned. style: one of tabulate's formats, "pipe" for Markdown."""
    columns = ["left"] + ["right"] * (len(head) - 1)
    return tabulate(
        rows, head, style, colalign=columns, disable_numparse=True, preserve_whitespace=True
    )


# --- the summary ----------------------------------------------------------------------------------


def summary(workdir: Workdir, table: str) -> str:
    """Return the text of `summary.md`. table: that of the evaluations."""
    metrics = workdir.metrics()
    ledger = Counter[str]()
    for line in metrics:
        ledger.update({name: n for name, n in line.items() if name.startswith("ledger/")})
    total = ledger["ledger/rollouts"]
    lines = [f"# {workdir.path.name}", "", "![learning curve](curve.png)", "", "```", table, "```"]
    lines += ["", *facts(workdir, metrics, total), *alarm_lines(metrics)]
    if total:
        lines += ["", "Rollouts by fate:", "", fates_table(ledger)]
    return "\n".join([*lines, *calls_table(workdir)]) + "\n"


def fates_table(ledger: Counter[str]) -> str:
    """Return the table of fates, with a column for each world of a mixture. ledger: the sums of
    `ledger/*` over the steps."""
    total = ledger["ledger/rollouts"]
    worlds = sorted({world for name in ledger if (world := name.partition("/world_")[2])})
    rows = []
    for name, n in ledger.most_common():
        if n and name != "ledger/rollouts" and "/world_" not in name:
            own = [f"{ledger[f'{name}/world_{world}']:,.0f}" for world in worlds]
            fate = name.removeprefix("ledger/")
            rows.append((fate, f"{n:,.0f}", f"{n / total:.1%}", *own))
    return aligned(("fate", "rollouts", "share", *worlds), rows, "pipe")


def facts(workdir: Workdir, metrics: Sequence[Metrics], rollouts: float) -> list[str]:
    """Return a line for each of the main facts about a run."""
    claimed = workdir.config()
    if not (claimed and metrics):
        return []
    config = claimed["config"]
    last = metrics[-1]
    enabled = [name for name in MECHANISMS if found(config, f"{name}.enabled")]
    took = last.get("time/elapsed")
    path = found(config, "model.path")
    name = found(config, "env.name")
    mixed = found(config, "env.args.worlds")
    policy = path or f"random {found(config, 'model.preset') or 'unknown'}"
    return [
        f"- environment: {', '.join(mixed) if isinstance(mixed, dict) else name or 'unknown'}",
        f"- policy: {policy}",
        f"- mechanisms: {', '.join(enabled) or 'none (original tasks only)'}",
        f"- advantage: {found(config, 'advantage.name') or 'unknown'}",
        f"- steps: {last['step']}",
        f"- seed: {claimed.get('seed')}",
        f"- time: {'unknown' if took is None else clock(took)}",
        f"- rollouts: {rollouts:,.0f}",
        f"- revision: {claimed.get('git')}",
    ]


def alarm_lines(metrics: Sequence[Metrics]) -> list[str]:
    """Return a line for each alarm that was raised, with its steps."""
    lines = []
    for name in sorted(set().union(*metrics)):
        steps = [line["step"] for line in metrics if line.get(name)]
        if re.fullmatch(r"alarm/\w+", name) and steps:
            often = f"{len(steps)} times, steps {steps[0]} to {steps[-1]}"
            lines.append(f"- {name}: {often if len(steps) > 1 else f'step {steps[0]}'}")
    return lines


def calls_table(workdir: Workdir) -> list[str]:
    """Return the table of the calls to language models by role, from `llm.jsonl`; [] if there were
    none."""
    lines = ledger_lines(workdir / "llm.jsonl")
    if not lines:
        return []
    rows = []
    for role, a in sorted(accounts(lines).items()):
        calls = [line for line in lines if line["role"] == role and line["what"] == "call"]
        seconds = [line.get("seconds", 0.0) for line in calls]
        p50, p95 = np.percentile(seconds or [0.0], [50, 95])
        asked = a.calls + a.hits
        row = {
            "role": role,
            "calls": f"{a.calls:,}",
            "cached": f"{a.hits:,} ({a.hits / asked:.1%})" if asked else "0",
            "tokens in": f"{a.prompt_tokens:,}",
            "tokens out": f"{a.completion_tokens:,}",
            "money": f"{a.money:.4g}",
            "seconds p50 / p95": f"{p50:.2f} / {p95:.2f}",
            "failed attempts": ", ".join(f"{k} {n}" for k, n in a.failures.most_common()) or "0",
            "unanswered": f"{a.unanswered}",
        }
        rows.append([*row.values()])
    return ["", "Calls to language models:", "", aligned([*row], rows, "pipe")]


# --- the plot -------------------------------------------------------------------------------------


def plot_curves(workdir: Workdir, path: Path) -> None:
    """Plot the learning curve: held-out success with its interval, success in training, and the
    fates of rollouts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = workdir.metrics()
    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    plot_success(top, workdir.scores(), metrics)
    plot_fates(bottom, metrics)
    top.set_xlim(0, max([1, *(line["step"] for line in metrics)]))
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)  # a short run has no step 0.25
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
    figure.savefig(path)


def plot_success(axes: Any, scores: dict[int, Scores], metrics: Sequence[Metrics]) -> None:
    """Plot success in percent over steps."""
    ends = []
    half = WINDOW // 2
    for origin, colour in (("original", ORIGINAL), ("synthetic", SYNTHETIC)):
        key = f"rollout/success/{origin}"
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            step_S, success_S = np.transpose(points)
            value_S = 100 * success_S
            # the centred mean over WINDOW values; at the ends, over those that exist
            near = [value_S[max(0, i - half) : i + half + 1] for i in range(len(value_S))]
            mean_S = np.array([values.mean() for values in near])
            faint = {"alpha": 0.25, "markersize": 4, "markeredgewidth": 0}
            axes.plot(step_S, value_S, ".", color=colour, **faint)
            axes.plot(step_S, mean_S, color=colour, linewidth=1.4)
            ends.append((mean_S[-1], f"training, {origin} tasks", colour))
    if scores:
        step_E = list(scores)
        name = scores[step_E[0]].names[0]
        value_EN = [100 * s.per_task(name) for s in scores.values()]
        mean_E = [value_N.mean() for value_N in value_EN]
        low_E, high_E = np.transpose([interval(value_N) for value_N in value_EN])
        axes.fill_between(step_E, low_E, high_E, color=EVAL, alpha=0.15, linewidth=0)
        axes.plot(step_E, mean_E, "-o", color=EVAL, linewidth=2.4, markersize=5, zorder=5)
        ends.append((mean_E[-1], f"held-out tasks, {name}", EVAL))
        for _, world, tasks_N in (p for p in scores[step_E[-1]].parts if p[0] == "world"):
            of_world_E = [v_N[tasks_N].mean() for v_N in value_EN if len(v_N) == len(tasks_N)]
            if len(of_world_E) == len(step_E):
                axes.plot(step_E, of_world_E, "--", color=EVAL, linewidth=1.0)
                ends.append((of_world_E[-1], f"of them, {world}", EVAL))
    axes.set(ylim=(0, 100), ylabel="success, %", axisbelow=True)
    axes.grid(axis="y", color="#e5e7e9", linewidth=0.8)
    label_ends(axes, ends)


def label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write a name at the right end (value, name, colour) of each curve; move names apart that
    would overlap."""
    height = 2.0 - GAP
    for value, text, colour in sorted(ends):
        height = max(value, height + GAP)
        weight = "bold" if colour == EVAL else "normal"
        axes.annotate(
            f"{text}  {value:.0f}%", (1.0, height), xycoords=("axes fraction", "data"),
            xytext=(8, 0), textcoords="offset points", va="center", color=colour, fontsize=9,
            fontweight=weight,
        )  # fmt: skip


def plot_fates(axes: Any, metrics: Sequence[Metrics]) -> None:
    """Plot the share of each fate among the rollouts of each step."""
    lines = [line for line in metrics if line.get("ledger/rollouts")]
    if not lines:
        axes.set_visible(False)
        return
    shares = {}
    rest_S = np.ones(len(lines))
    for fate in FATES:
        share_S = np.array(
            [line.get(f"ledger/{fate}", 0) / line["ledger/rollouts"] for line in lines]
        )
        shares[fate] = 100 * share_S
        rest_S -= share_S
    shares["other"] = 100 * np.clip(rest_S, 0, None)  # which is no key of the ledger
    shown = {fate: share_S for fate, share_S in shares.items() if share_S.max() > 1e-4}
    axes.stackplot(
        [line["step"] for line in lines], *shown.values(), linewidth=0,
        labels=[fate.replace("_", " ") for fate in shown], colors=[FATES[fate] for fate in shown],
    )  # fmt: skip
    axes.set(ylim=(0, 100), ylabel="rollouts, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def main(folders: list[str]) -> int:
    """Print the report on each run. Return 1 if a folder holds no run, else 0."""
    try:
        for folder in folders:
            workdir = Workdir(folder)
            if not (workdir.metrics() or workdir.scores()):
                why = "nothing to report on: it contains neither metrics.jsonl nor eval/"
                raise BrokenFile(f"{folder}: {why}")
            print(report(folder))
    except BrokenFile as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
