"""What a run achieved, read from its workdir alone: a table, `summary.md` and `curve.png`.

python -m evolver.report runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from evolver.books import Workdir, clock, write_atomically
from evolver.llm_store import Ledger, ledger_lines
from rl.evaluation import Scores, interval, paired_difference

EVAL, ORIGINAL, SYNTHETIC = "#1b4f72", "#d35400", "#16a085"
FATES = {  # colours of the ledger, most frequent first
    "trained": "#5b8db8",
    "no_signal": "#d5d8dc",
    "overlong": "#f5cba7",
    "stale": "#c39bd3",
    "other": "#e6b0aa",
}


def report(path: str | Path) -> str:
    """Write `summary.md` and `curve.png`; returns the table and where the picture is, for the terminal."""
    workdir = Workdir(path)
    text = table(workdir)
    draw(workdir, workdir / "curve.png")
    write_atomically(workdir / "summary.md", summary(workdir, text))
    return f"{text}\n\ncurve: {workdir / 'curve.png'}\n"


def table(workdir: Workdir) -> str:
    """Before and after on the same tasks, with 95% intervals over tasks; the change is paired."""
    scores = workdir.scores()
    if not scores:
        return "no evaluation was run (config.eval.every=0)"
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
        return "\n".join(lines + columns(single_rows(after), ("", f"step {last}")))
    head = ("", f"before (step {first})", f"after (step {last})", "change")
    return "\n".join(lines + columns(paired_rows(before, after), head))


def single_rows(scores: Scores) -> list[tuple[str, ...]]:
    """Rows of one evaluation."""
    return [(name, estimate(value_N)) for name, value_N in measured(scores)]


def paired_rows(before: Scores, after: Scores) -> list[tuple[str, ...]]:
    """Rows of two evaluations of the same tasks."""
    then, rows = dict(measured(before)), []
    for name, now_N in measured(after):
        if name in then and len(then[name]) == len(now_N):
            mean, low, high = paired_difference(then[name], now_N)
            change = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            rows.append((name, estimate(then[name]), estimate(now_N), change))
    return rows


def measured(scores: Scores) -> list[tuple[str, np.ndarray]]:
    """(name, one value per task) of each measure that the table shows."""
    names = [name for name in scores.names if name != "score"]
    rows = [(name, scores.per_task(name)) for name in names]
    difficulty_N = np.asarray(scores.difficulty_N)
    for level in sorted(set(scores.difficulty_N)):
        tasks_N = difficulty_N == level
        rows.append((f"  difficulty {level} ({tasks_N.sum()})", scores.per_task(names[0])[tasks_N]))
    return rows


def estimate(value_N: np.ndarray) -> str:
    """ "61.2 [55.0, 67.1]"."""
    low, high = interval(value_N)
    return f"{100 * value_N.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def columns(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    """Rows as aligned text, the first column to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for first, *others in [head, *rows]:
        cells = [first.ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(others, widths[1:])]]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(len(line) for line in lines), *lines[1:]]


def summary(workdir: Workdir, text: str) -> str:
    """The text of `summary.md`."""
    record, metrics = workdir.config() or {}, workdir.metrics()
    config, last = record.get("config", {}), metrics[-1] if metrics else {}
    fates: dict[str, float] = {}
    for line in metrics:
        for key, value in line.items():
            if key.startswith("ledger/") and key != "ledger/rollouts":
                fates[key.removeprefix("ledger/")] = fates.get(key.removeprefix("ledger/"), 0) + (value or 0)
    total = sum(fates.values())
    mechanisms = [m for m in ("questioning", "navigating", "attributing") if config.get(m, {}).get("enabled")]
    facts = [
        ("environment", config.get("env", {}).get("name")),
        ("policy", config.get("model", {}).get("path") or f"random {config.get('model', {}).get('preset')}"),
        ("mechanisms", ", ".join(mechanisms) or "none (original tasks only)"),
        ("advantage", config.get("advantage", {}).get("name")),
        ("steps", last.get("step")),
        ("seed", record.get("seed")),
        ("time", clock(last["time/elapsed"]) if last.get("time/elapsed") else None),
        ("rollouts", f"{total:,.0f}" if total else None),
        ("revision", record.get("git")),
    ]
    lines = [f"# {workdir.path.name}", "", "![learning curve](curve.png)", "", "```", text, "```", ""]
    lines += [f"- {name}: {value}" for name, value in facts if value is not None]
    if total:
        lines += ["", "What became of the rollouts:", "", "| fate | rollouts | share |", "|---|---:|---:|"]
        ranked = sorted(fates.items(), key=lambda item: -item[1])
        lines += [f"| {fate} | {count:,.0f} | {count / total:.1%} |" for fate, count in ranked if count]
    return "\n".join([*lines, *chat_lines(workdir)]) + "\n"


def chat_lines(workdir: Workdir) -> list[str]:
    """What the language models beside the policy were asked, by role, from the ledger `llm.jsonl`."""
    accounts, times = Ledger(workdir / "llm.jsonl").total, {}
    for line in ledger_lines(workdir / "llm.jsonl"):
        if line["what"] == "call":
            times.setdefault(line["role"], []).append(line.get("seconds", 0.0))
    if not accounts:
        return []
    head = (
        "| role | calls | from the cache | tokens in | tokens out | money | seconds p50 / p95 | failed attempts"
        " | unanswered |"
    )
    rows = ["", "What language models were asked:", "", head, "|---|" + "---:|" * 8]
    for role, a in sorted(accounts.items()):
        share = f"{a.hits:,} ({a.hits / (a.calls + a.hits):.1%})" if a.calls + a.hits else "0"
        p50, p95 = np.percentile(times.get(role, [0.0]), [50, 95])
        failed = ", ".join(f"{kind} {count}" for kind, count in a.failures.most_common()) or "0"
        figures = [f"{a.calls:,}", share, f"{a.prompt_tokens:,}", f"{a.completion_tokens:,}", f"{a.money:.4g}"]
        rows.append(f"| {role} | {' | '.join(figures)} | {p50:.2f} / {p95:.2f} | {failed} | {a.unanswered} |")
    return rows


def draw(workdir: Workdir, path: Path) -> None:
    """The learning curve: held-out success with its interval, success in training, and what became of the rollouts."""
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
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
    figure.savefig(path)


def draw_success(axes: Any, scores: dict[int, Scores], metrics: list[dict[str, Any]]) -> None:
    """Success in percent over steps."""
    ends = []
    for origin, colour in (("original", ORIGINAL), ("synthetic", SYNTHETIC)):
        points = [(m["step"], 100 * m[key]) for m in metrics if m.get(key := f"rollout/success/{origin}") is not None]
        if points:
            step_S, value_S = np.array(points).T
            axes.plot(step_S, value_S, ".", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
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
    """A name at the right end of each curve, moved apart where they would overlap."""
    places, gap = [], 6.0
    for value, text, colour in sorted(ends, key=lambda end: end[0]):
        place = max(value, places[-1] + gap) if places else max(value, 2.0)
        places.append(place)
        weight = "bold" if colour == EVAL else "normal"
        axes.annotate(
            f"{text}  {value:.0f}%", (1.0, place), xycoords=("axes fraction", "data"), xytext=(8, 0),
            textcoords="offset points", va="center", color=colour, fontsize=9, fontweight=weight,
        )  # fmt: skip


def draw_ledger(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Shares of the rollouts of each step: trained, and why not."""
    lines = [m for m in metrics if m.get("ledger/rollouts")]
    if not lines:
        axes.set_visible(False)
        return
    step_S = np.array([m["step"] for m in lines])
    total_S = np.array([m["ledger/rollouts"] for m in lines], float)
    share = {fate: np.array([m.get(f"ledger/{fate}", 0) for m in lines]) / total_S for fate in FATES if fate != "other"}
    share["other"] = np.clip(1 - sum(share.values()), 0, None)
    shown = {fate: 100 * s for fate, s in share.items() if s.max() > 1e-6}
    axes.stackplot(step_S, list(shown.values()), colors=[FATES[fate] for fate in shown], linewidth=0)
    axes.set_ylim(0, 100)
    axes.set_ylabel("rollouts, %")
    names = [fate.replace("_", " ") for fate in shown]
    axes.legend(axes.collections, names, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def smooth(value_S: np.ndarray, window: int = 5) -> np.ndarray:
    """Centred moving mean, over what there is at the ends."""
    half = window // 2
    return np.array([value_S[max(0, i - half) : i + half + 1].mean() for i in range(len(value_S))])


def main(folders: list[str]) -> int:
    """Report on each run; 1 where a folder holds nothing to report on."""
    for folder in folders:
        workdir = Workdir(folder)
        if not (workdir.metrics() or workdir.scores()):
            print(f"{folder}: nothing to report on, there is neither metrics.jsonl nor eval/ in it", file=sys.stderr)
            return 1
        print(report(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
