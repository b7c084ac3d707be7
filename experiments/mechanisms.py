"""Measure when each mechanism helps: dials, and the grid of all combinations, in travel agencies
with house rules.

    python -m experiments.mechanisms        # all studies: 39 runs for each of 5 seeds
    python -m experiments.mechanisms --studies questioning --seeds 0 1
    python -m experiments.mechanisms --only-report

The same command goes on where it was cut off, and finished runs are kept. A study is a dial with
some points; each point compares rows with its first row on the same held-out tasks and seeds. The
policy is that of the quickstart, and the runs are short, so that differences in speed show.
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

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.quickstart import ROWS
from evolver.files.workdir import Workdir
from experiments import compare, grid
from models.files import write_atomically

CONFIG = "configs/quickstart.py"
SHORT = {
    "steps": 40,
    "rollout.tasks": 8,
    "eval.every": 5,
    "eval.rollouts": 4,
    "eval.temperatures": "()",
    "eval.greedy": False,
    "checkpoint.every": 40,
    "log.trajectories": 0,
    "questioning.budget": 300,
    "questioning.share": 0.5,
    "env.args.rules": 2,
    "env.args.seed": 2,
}
FRESH = {
    "navigating.every": 5
}  # the first attempts solve easy tasks only, whose experience misleads in others
HALF = 50.0  # percent
EARLY = 10  # steps, in which the rows differ most


Point = dict[str, tuple[str, dict[str, Any]]]  # {row: (argument of the config, overrides)}


@dataclass(frozen=True)
class Study:
    """A dial and its points. The first row of a point is compared with."""

    dial: str
    points: dict[str, Point]


def rows(plain: str, other: str, name: str, **both: Any) -> Point:
    """Return two rows that differ in a mechanism."""
    return {plain: (plain, both), name: (other, both)}


def studies() -> dict[str, Study]:
    """Return all studies by name."""
    few = {"env.args.n_train": 16}
    tasks: dict[str, Point] = {"0": {"+questioning": ("q", {"questioning.share": 1.0})}}
    four = {"env.args.n_train": 4}
    tasks["4"] = {
        "grpo": ("grpo", four | {"rollout.tasks": 4, "rollout.group": 16}),
        "+questioning": ("q", four | {"questioning.share": 0.75}),
    }
    tasks |= {
        str(n): rows("grpo", "q", "+questioning", **{"env.args.n_train": n}) for n in (16, 64, 256)
    }
    rarity = {
        str(r): rows("q", "qn", "+navigating", **{"env.args.rarity": r, "questioning.share": 1.0})
        for r in (0.25, 0.1, 0.03, 0.01)
    }
    calls = {
        str(n): rows("grpo", "a", "+attributing", **{"env.args.level": n}) for n in (2, 3, 4, 6)
    }
    group = {
        str(g): rows("grpo", "a", "+attributing", **{"rollout.group": g, "rollout.tasks": 64 // g})
        for g in (2, 4, 8)
    }
    combined: Point = {
        name: (name, few) for name in ("grpo", "q", "n", "a", "qn", "qa", "na", "all")
    }
    beyond: dict[str, Point] = {
        "questioning": {
            "once": ("q", {"questioning.share": 1.0}),
            "every 10 steps": (
                "q",
                {"questioning.share": 1.0, "questioning.every": 10, "questioning.refresh": 60},
            ),
        },
        "credit": {
            "decoupled": ("all", few),
            "allocation": ("all", few | {"advantage.args.scheme": "allocation"}),
        },
    }
    return {
        "questioning": Study("original tasks", tasks),
        "navigating": Study("share of houses with such a desk call", rarity),
        "attributing": Study("calls of a task, without desk calls", calls),
        "rollouts": Study("rollouts of a task", group),
        "grid": Study("mechanisms", {"all": combined}),
        "beyond": Study("", beyond),
    }


def runs_of(
    known: Mapping[str, Study], seeds: Sequence[int]
) -> dict[str, dict[str, list[grid.Run]]]:
    """Return {study: {point: runs}}; seeds vary slowest in each, so that a study that is cut off
    has complete comparisons. A run with the settings of an earlier one shares its workdir."""
    runs: dict[str, dict[str, list[grid.Run]]] = {}
    names: dict[tuple, str] = {}
    for name, study in known.items():
        runs[name] = {point: [] for point in study.points}
        for point, table in study.points.items():
            for seed, (row, (argument, overrides)) in itertools.product(seeds, table.items()):
                values = SHORT | (FRESH if "navigating" in ROWS[argument] else {}) | overrides
                label = f"{name},{point},{row}".replace(" ", "_")
                settings = (
                    argument,
                    seed,
                    tuple(sorted((key, str(value)) for key, value in values.items())),
                )
                first = names.setdefault(settings, f"{label}-{seed}")
                same = "" if first == f"{label}-{seed}" else first
                runs[name][point].append(
                    grid.Run(label, seed, f"{CONFIG}:{argument}", values, same=same)
                )
    return runs


# --- results --------------------------------------------------------------------------------------


def at_equal_time(
    folder: Path, runs: Sequence[grid.Run], first: compare.Row, second: compare.Row
) -> compare.Estimate | None:
    """Return second - first at the last evaluation that both runs of a seed had reached by the
    shorter one's end."""
    names = {(run.row, run.seed): run.name for run in runs}
    before, after = {}, {}
    for seed in sorted(first.curves.keys() & second.curves.keys()):
        pair = []
        for row in (first, second):
            lines = {
                m["step"]: m["time/elapsed"]
                for m in Workdir(folder / names[row.name, seed]).metrics()
            }
            pair.append(
                {lines[step]: scores for step, scores in row.curves[seed].items() if step in lines}
            )
        end = min(max(times, default=0.0) for times in pair)
        last = [
            [scores for elapsed, scores in sorted(times.items()) if elapsed <= end]
            for times in pair
        ]
        if all(last):
            before[seed], after[seed] = (found[-1].per_task(found[-1].names[0]) for found in last)
    return compare.paired(before, after)


def heights(row: compare.Row) -> dict[int, np.ndarray]:
    """Return {seed: value_N}, the mean height of each task's curve over the steps, in [0, 1]."""
    return {seed: compare.height(curve) for seed, curve in row.curves.items() if len(curve) > 1}


def higher(first: compare.Row, second: compare.Row) -> compare.Estimate | None:
    """Return how much higher the second row's curves are, in the mean over the steps; None without
    a shared seed."""
    return compare.paired(heights(first), heights(second))


def steps_to_half(row: compare.Row) -> str:
    """Return the mean number of steps until half of the held-out tasks are solved; runs that never
    do are counted."""
    found = []
    for curve in row.curves.values():
        means = {step: 100 * s.per_task(s.names[0]).mean() for step, s in sorted(curve.items())}
        found.append(next((step for step, mean in means.items() if mean >= HALF), None))
    if not found:
        return ""
    reached = [step for step in found if step is not None]
    never = len(found) - len(reached)
    text = f"{np.mean(reached):.0f}" if reached else ""
    return text if not never else f"{text} ({never} of {len(found)} never)".strip()


def table(folder: Path, runs: Mapping[str, Sequence[grid.Run]], prefix: str) -> list[list[str]]:
    """Return the header and a line for each point and row of a study."""
    head = [
        "point",
        "row",
        "seeds",
        "before",
        "after [95%]",
        "sd",
        "difference [95%]",
        "at equal time [95%]",
    ]
    lines = [[*head, "curve", "difference of curves [95%]", f"steps to {HALF:.0f}%", "note"]]
    for point, several in runs.items():
        found = grid.gather(several, folder)
        for row in found:
            mean = compare.estimate(row.final())
            change = compare.difference(found[0], row) if row is not found[0] else None
            timed = at_equal_time(folder, several, found[0], row) if row is not found[0] else None
            sd = f"{mean.sd:.1f}" if mean and mean.runs > 1 else ""
            name = row.name.removeprefix(f"{prefix},{point},".replace(" ", "_"))
            starts = [
                100 * c[min(c)].per_task(c[min(c)].names[0]).mean() for c in row.curves.values()
            ]
            start = f"{np.mean(starts):.1f}" if starts else ""
            curves, above = heights(row), higher(found[0], row) if row is not found[0] else None
            height = (
                f"{100 * np.mean([curve.mean() for curve in curves.values()]):.1f}"
                if curves
                else ""
            )
            signed = [value.signed() if value else "" for value in (change, timed, above)]
            cells = [
                str(mean.runs if mean else 0),
                start,
                str(mean or ""),
                sd,
                *signed[:2],
                height,
                signed[2],
            ]
            lines.append([point, name, *cells, steps_to_half(row), "; ".join(row.notes)])
    return lines


def logged(folder: Path, runs: Mapping[str, Sequence[grid.Run]], prefix: str) -> list[list[str]]:
    """Return the header and a line for each point and row: what the runs logged that explains their
    results.

    Shares are percentages of rollouts, or of turns for labels, over the first EARLY steps of all
    seeds whose workdirs are there. *no signal*: rollouts that did not train because all of their
    group scored alike. *guided - unguided*: by how much guided rollouts succeed more often than the
    unguided ones of their groups.
    """
    head = [
        "point",
        "row",
        "seeds",
        "invented tasks",
        "success",
        "of invented",
        "no signal",
        "guided - unguided",
    ]
    lines = [[*head, "labels GOOD", "BAD", "none"]]

    def cell(found: Sequence[Mapping[str, Any]], key: str, less: str = "") -> str:
        values = [
            m[key] - (m[less] if less else 0.0)
            for m in found
            if key in m and (not less or less in m)
        ]
        return f"{100 * np.mean(values):{'+' if less else ''}.1f}" if values else ""

    for point, several in runs.items():
        for row in grid.gather(several, folder):
            names = [run.name for run in several if run.row == row.name and run.seed in row.curves]
            metrics = [
                list(Workdir(folder / name).metrics()) for name in names if (folder / name).is_dir()
            ]
            found = [m for run in metrics for m in run if 0 < m["step"] <= EARLY]
            shares = [
                {**m, "no_signal": m["ledger/no_signal"] / m["ledger/rollouts"]} for m in found
            ]
            pools = [
                run[-1]["questioning/pool"] for run in metrics if "questioning/pool" in run[-1]
            ]
            lines.append(
                [
                    point,
                    row.name.removeprefix(f"{prefix},{point},".replace(" ", "_")),
                    str(len(metrics)),
                    f"{np.mean(pools):.0f}" if pools else "",
                    cell(shares, "rollout/success"),
                    cell(shares, "rollout/success/synthetic"),
                    cell(shares, "no_signal"),
                    cell(shares, "navigating/win_rate", less="navigating/expected_rate"),
                    *(
                        cell(shares, f"attributing/{kind}_rate")
                        for kind in ("good", "bad", "abstain")
                    ),
                ]
            )
    return lines


def draw(folder: Path, name: str, study: Study, runs: Mapping[str, Sequence[grid.Run]]) -> None:
    """Write NAME.png and NAME.svg: by point, success after training, and how much higher than the
    first row the others are after equal numbers of rollouts (in the mean over the curve) and after
    equal wall time."""
    figure = compare.new_figure(13, 3.8)
    panels = figure.subplots(1, 3)
    found = {point: grid.gather(several, folder) for point, several in runs.items()}
    names = list(
        dict.fromkeys(row.name.rpartition(",")[2] for several in found.values() for row in several)
    )
    for n, (label, colour) in enumerate(zip(names, compare.COLOURS)):
        drawn: list[list[tuple[float, compare.Estimate | None]]] = [[], [], []]
        for place, (point, several) in enumerate(found.items()):
            x = place + 0.06 * (n - len(names) / 2)
            for row in (row for row in several if row.name.rpartition(",")[2] == label):
                drawn[0].append((x, compare.estimate(row.final())))
                if row is not several[0]:
                    drawn[1].append((x, higher(several[0], row)))
                    drawn[2].append((x, at_equal_time(folder, runs[point], several[0], row)))
        for axes, values, style in zip(panels, drawn, ("-o", "o", "o")):
            shown = [(x, value) for x, value in values if value]
            if shown:
                spread = [[v.mean - v.low for _, v in shown], [v.high - v.mean for _, v in shown]]
                places, means = [x for x, _ in shown], [v.mean for _, v in shown]
                axes.errorbar(
                    places, means, spread, fmt=style, color=colour, label=label, capsize=2
                )
    labels = (
        "held-out success after training, %",
        "equal rollouts: curve above the first row's, points",
        "equal wall time: above the first row, points",
    )
    for axes, label in zip(panels, labels):
        axes.set_xticks(range(len(found)), list(found))
        axes.set_xlabel(study.dial)
        axes.set_ylabel(label, fontsize=9)
    for axes in panels[1:]:
        axes.axhline(0, color="black", linewidth=0.8)
    if names:
        panels[0].legend(frameon=False, fontsize=8)
    compare.save(figure, folder / name)


def report(folder: Path, chosen: dict[str, Study], seeds: Sequence[int]) -> str:
    """Write MECHANISMS.md, a CSV file and a figure for each study, and return the text."""
    parts = [
        "# When each mechanism helps",
        "",
        f"avg@4 on held-out tasks after {SHORT['steps']} steps, in percent.",
    ]
    runs = runs_of(studies() | chosen, seeds)
    for name, study in chosen.items():
        lines = table(folder, runs[name], name)
        draw(folder, name, study, runs[name])
        write_atomically(folder / f"{name}.csv", compare.csv_text(lines))
        parts += [
            "",
            f"## {name}" + (f", by {study.dial}" if study.dial else ""),
            "",
            compare.markdown(lines),
        ]
        parts += [
            f"Logged in steps 1 to {EARLY}, in percent:",
            "",
            compare.markdown(logged(folder, runs[name], name)),
        ]
    text = "\n".join(parts)
    write_atomically(folder / "MECHANISMS.md", text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    known = studies()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--studies", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--workdir", type=Path, default=Path("runs/mechanisms"))
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, flags = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    chosen = {name: known[name] for name in args.studies}
    every = runs_of(known, args.seeds)
    runs = {run.name: run for name in chosen for several in every[name].values() for run in several}
    args.workdir.mkdir(parents=True, exist_ok=True)
    states = {}
    if not args.only_report:
        if found := grid.problems(list(runs.values()), args.workdir, flags):
            parser.error("\n".join(found))
        by_seed = sorted(runs.values(), key=lambda run: run.seed)
        states = grid.execute(by_seed, args.workdir, jobs=args.jobs, flags=flags)
    print(report(args.workdir, chosen, args.seeds))
    return int(any(state != "done" for state in states.values()))


if __name__ == "__main__":
    sys.exit(main())
