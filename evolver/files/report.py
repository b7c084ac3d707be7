"""The report on a run: a table, `summary.md` and `curve.png`, from the files of its workdir alone.

python -m evolver.files.report runs/quickstart
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from evolver.files.progress import clock
from evolver.files.workdir import Workdir
from evolver.llm.store import accounts, ledger_lines
from models.files import BrokenFile, write_atomically
from rl.evaluation import Scores, interval, paired_difference

EVAL, ORIGINAL, SYNTHETIC = "#1b4f72", "#d35400", "#16a085"
FATES = {  # colours in the plot, from bottom to top
    "trained": "#5b8db8",
    "no_signal": "#d5d8dc",
    "overlong": "#f5cba7",
    "stale": "#c39bd3",
    "other": "#e6b0aa",
}


def report(path: str | Path) -> str:
    """Write `summary.md` and `curve.png`. Return the table and the path of the curve, for the
    terminal."""
    workdir = Workdir(path)
    text = table(workdir)
    draw(workdir, workdir / "curve.png")
    write_atomically(workdir / "summary.md", summary(workdir, text))
    return f"{text}\n\ncurve: {workdir / 'curve.png'}\n"


def table(workdir: Workdir) -> str:
    """Return the table of the first and last evaluation, with 95% intervals over tasks and the
    paired change."""
    scores = workdir.scores()
    if not scores:
        return "there is no evaluation (config.eval.every=0)"
    first, last = min(scores), max(scores)
    before, after = scores[first], scores[last]
    split = (workdir.config() or {}).get("config", {}).get("eval", {}).get("split", "held-out")
    rollouts = len(after.success_NR[0])
    lines = [
        f"{len(after.tasks)} {split} tasks, {rollouts} rollouts each at temperature {after.temperature:g};"
        " percent, 95% intervals over tasks",
        "",
    ]
    if first == last:
        return "\n".join(
            lines + columns(single_rows(after), ("", f"step {last}")) + sweep_lines(after)
        )
    best = (f"before, at T={before.best_temperature()[0]:g}",) if before.sweep else ()
    head = ("", f"before (step {first})", *best, f"after (step {last})", "change")
    return "\n".join(lines + columns(paired_rows(before, after), head) + sharpening(before, after))


def sweep_lines(scores: Scores) -> list[str]:
    """Return a line with the success at each temperature; [] if there was only one."""
    if not scores.sweep:
        return []
    success = {float(name): np.mean(value) for name, value in scores.sweep.items()}
    success[scores.temperature] = scores.per_task("avg@").mean()
    cells = ", ".join(f"{100 * success[t]:.1f} at {t:g}" for t in sorted(success))
    return ["", f"success by temperature: {cells}"]


def sharpening(before: Scores, after: Scores) -> list[str]:
    """Return a sentence on how much of a gain the untrained policy has at a better temperature; []
    if not measured."""
    if not before.sweep:
        return []
    temperature, best_N = before.best_temperature()
    start_N, end_N = before.per_task("avg@"), after.per_task("avg@")
    new, low, high = (100 * value for value in paired_difference(best_N, end_N))
    gain, sharper = 100 * (end_N.mean() - start_N.mean()), 100 * (best_N.mean() - start_N.mean())
    return [
        "",
        f"Of the gain of {gain:+.1f} points at temperature {after.temperature:g}, {sharper:.1f} are sharpening (the"
        f" policy before, at its best temperature of {temperature:g}) and {new:.1f} [{low:.1f}, {high:.1f}] are new.",
    ]


def single_rows(*scores: Scores) -> list[tuple[str, ...]]:
    """Return the rows of one evaluation, or the means of several seeds with their standard
    deviation (n - 1)."""
    evaluations, rows = [dict(measures(s)) for s in scores], []
    for name in evaluations[0]:
        value_SN = np.stack([values[name] for values in evaluations if name in values])
        spread = f"{100 * value_SN.mean(axis=1).std(ddof=1):.1f}" if len(value_SN) > 1 else ""
        rows.append((name, estimate(value_SN.mean(axis=0)), spread)[: 2 + (len(scores) > 1)])
    return rows


def paired_rows(before: Scores, after: Scores) -> list[tuple[str, ...]]:
    """Return the rows of two evaluations of the same tasks."""
    before_N, rows = dict(measures(before)), []
    best_N = dict(measures(at_best_temperature(before))) if before.sweep else {}
    for name, after_N in measures(after):
        if name in before_N and len(before_N[name]) == len(after_N):
            mean, low, high = paired_difference(before_N[name], after_N)
            change = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            best = (estimate(best_N[name]) if name in best_N else "",) if before.sweep else ()
            rows.append((name, estimate(before_N[name]), *best, estimate(after_N), change))
    return rows


def at_best_temperature(scores: Scores) -> Scores:
    """Return the scores at the temperature with the highest success; greedy rollouts count once per
    task."""
    temperature = scores.best_temperature()[0]
    if temperature == 0:
        success_NR = [
            [success] * len(row) for success, row in zip(scores.greedy_N, scores.success_NR)
        ]
    else:
        success_NR = scores.sweep.get(f"{temperature:g}", scores.success_NR)
    return dataclasses.replace(scores, success_NR=success_NR, greedy_N=[])


def measures(scores: Scores) -> list[tuple[str, np.ndarray]]:
    """Return (name, value_N) of each measure in the table, one value per task."""
    names = [name for name in scores.names if name != "score"]
    rows = [(name, scores.per_task(name)) for name in names]
    difficulty_N = np.asarray(scores.difficulty_N)
    for level in sorted(set(scores.difficulty_N)):
        tasks_N = difficulty_N == level
        rows.append((f"  difficulty {level} ({tasks_N.sum()})", scores.per_task(names[0])[tasks_N]))
    return rows


def estimate(value_N: np.ndarray) -> str:
    """Return the mean in percent with its 95% interval: "61.2 [55.0, 67.1]"."""
    low, high = interval(value_N)
    return f"{100 * value_N.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def columns(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    """Return a header, a rule and the rows as aligned lines of text; the first column is
    left-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for first, *others in [head, *rows]:
        cells = [
            first.ljust(widths[0]),
            *[cell.rjust(width) for cell, width in zip(others, widths[1:])],
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(len(line) for line in lines), *lines[1:]]


def summary(workdir: Workdir, text: str) -> str:
    """Return the text of `summary.md`. text: the table."""
    record, metrics = workdir.config() or {}, workdir.metrics()
    config, last = record.get("config", {}), metrics[-1] if metrics else {}
    fates: dict[str, float] = {}
    for line in metrics:
        for key, value in line.items():
            if key.startswith("ledger/") and key != "ledger/rollouts":
                fate = key.removeprefix("ledger/")
                fates[fate] = fates.get(fate, 0) + (value or 0)
    total = sum(fates.values())
    mechanisms = [
        m for m in ("questioning", "navigating", "attributing") if config.get(m, {}).get("enabled")
    ]
    facts = [
        ("environment", config.get("env", {}).get("name")),
        (
            "policy",
            config.get("model", {}).get("path")
            or f"random {config.get('model', {}).get('preset')}",
        ),
        ("mechanisms", ", ".join(mechanisms) or "none (original tasks only)"),
        ("advantage", config.get("advantage", {}).get("name")),
        ("steps", last.get("step")),
        ("seed", record.get("seed")),
        ("time", clock(last["time/elapsed"]) if last.get("time/elapsed") else None),
        ("rollouts", f"{total:,.0f}" if total else None),
        ("revision", record.get("git")),
    ]
    lines = [
        f"# {workdir.path.name}",
        "",
        "![learning curve](curve.png)",
        "",
        "```",
        text,
        "```",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in facts if value is not None]
    if total:
        lines += ["", "Rollouts by fate:", "", "| fate | rollouts | share |", "|---|---:|---:|"]
        ranked = sorted(fates.items(), key=lambda item: -item[1])
        lines += [
            f"| {fate} | {count:,.0f} | {count / total:.1%} |" for fate, count in ranked if count
        ]
    return "\n".join([*lines, *chat_lines(workdir)]) + "\n"


def chat_lines(workdir: Workdir) -> list[str]:
    """Return the table of the calls to language models by role, from `llm.jsonl`; [] if there were
    none."""
    lines = ledger_lines(workdir / "llm.jsonl")
    if not lines:
        return []
    head = "| role | calls | cached | tokens in | tokens out | money | seconds p50 / p95 | failed attempts | unanswered |"
    rows = ["", "Calls to language models:", "", head, "|---|" + "---:|" * 8]
    for role, a in sorted(accounts(lines).items()):
        seconds = [
            line.get("seconds", 0.0)
            for line in lines
            if line["role"] == role and line["what"] == "call"
        ]
        p50, p95 = np.percentile(seconds or [0.0], [50, 95])
        cached = f"{a.hits:,} ({a.hits / (a.calls + a.hits):.1%})" if a.calls + a.hits else "0"
        failed = ", ".join(f"{kind} {count}" for kind, count in a.failures.most_common()) or "0"
        cells = [
            f"{a.calls:,}",
            cached,
            f"{a.prompt_tokens:,}",
            f"{a.completion_tokens:,}",
            f"{a.money:.4g}",
        ]
        rows.append(
            f"| {role} | {' | '.join(cells)} | {p50:.2f} / {p95:.2f} | {failed} | {a.unanswered} |"
        )
    return rows


def draw(workdir: Workdir, path: Path) -> None:
    """Draw the learning curve: held-out success with its interval, success in training, and the
    fates of rollouts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = workdir.metrics()
    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    draw_success(top, workdir.scores(), metrics)
    draw_ledger(bottom, metrics)
    steps = [line["step"] for line in metrics]
    top.set_xlim(0, max([1, *steps]))
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)  # a short run has no step 0.25
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
    figure.savefig(path)


def draw_success(axes: Any, scores: dict[int, Scores], metrics: list[dict[str, Any]]) -> None:
    """Draw success in percent over steps."""
    ends = []
    for origin, colour in (("original", ORIGINAL), ("synthetic", SYNTHETIC)):
        points = [
            (m["step"], 100 * m[key])
            for m in metrics
            if m.get(key := f"rollout/success/{origin}") is not None
        ]
        if points:
            step_S, value_S = np.array(points).T
            axes.plot(
                step_S, value_S, ".", color=colour, alpha=0.25, markersize=4, markeredgewidth=0
            )
            axes.plot(step_S, smooth(value_S), color=colour, linewidth=1.4)
            ends.append((smooth(value_S)[-1], f"training, {origin} tasks", colour))
    if scores:
        name = next(iter(scores.values())).names[0]
        step_E = np.array(list(scores))
        value_EN = [s.per_task(name) for s in scores.values()]
        mean_E = 100 * np.array([v.mean() for v in value_EN])
        low_E, high_E = 100 * np.array([interval(v) for v in value_EN]).T
        axes.fill_between(step_E, low_E, high_E, color=EVAL, alpha=0.15, linewidth=0)
        axes.plot(step_E, mean_E, "-o", color=EVAL, linewidth=2.4, markersize=5, zorder=5)
        ends.append((mean_E[-1], f"held-out tasks, {name}", EVAL))
    axes.set_ylim(0, 100)
    axes.set_ylabel("success, %")
    axes.grid(axis="y", color="#e5e7e9", linewidth=0.8)
    axes.set_axisbelow(True)
    label_ends(axes, ends)


def label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write a name at the right end (value, name, colour) of each curve; move names apart that
    would overlap."""
    height, gap = -np.inf, 6.0
    for value, text, colour in sorted(ends, key=lambda end: end[0]):
        height = max(value, height + gap, 2.0)
        weight = "bold" if colour == EVAL else "normal"
        axes.annotate(
            f"{text}  {value:.0f}%", (1.0, height), xycoords=("axes fraction", "data"), xytext=(8, 0),
            textcoords="offset points", va="center", color=colour, fontsize=9, fontweight=weight,
        )  # fmt: skip


def draw_ledger(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Draw the share of each fate among the rollouts of each step."""
    lines = [m for m in metrics if m.get("ledger/rollouts")]
    if not lines:
        axes.set_visible(False)
        return
    step_S = np.array([m["step"] for m in lines])
    total_S = np.array([m["ledger/rollouts"] for m in lines], float)
    share = {
        fate: np.array([m.get(f"ledger/{fate}", 0) for m in lines]) / total_S
        for fate in FATES
        if fate != "other"
    }
    share["other"] = np.clip(1 - sum(share.values()), 0, None)
    shown = {fate: 100 * s for fate, s in share.items() if s.max() > 1e-6}
    axes.stackplot(
        step_S, list(shown.values()), colors=[FATES[fate] for fate in shown], linewidth=0
    )
    axes.set_ylim(0, 100)
    axes.set_ylabel("rollouts, %")
    names = [fate.replace("_", " ") for fate in shown]
    axes.legend(
        axes.collections,
        names,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=9,
    )


def smooth(value_S: np.ndarray, window: int = 5) -> np.ndarray:
    """Return the centred moving mean; at the ends, over the values that exist."""
    half = window // 2
    return np.array([value_S[max(0, i - half) : i + half + 1].mean() for i in range(len(value_S))])


def main(folders: list[str]) -> int:
    """Print the report on each run. Return 1 if a folder holds no run, else 0."""
    for folder in folders:
        workdir = Workdir(folder)
        try:
            if not (workdir.metrics() or workdir.scores()):
                print(
                    f"{folder}: nothing to report on: it contains neither metrics.jsonl nor eval/",
                    file=sys.stderr,
                )
                return 1
            print(report(folder))
        except BrokenFile as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
