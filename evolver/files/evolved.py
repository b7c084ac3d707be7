"""The report of --mode=evolve: what the policy could do before and after each stage."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.world import text_of
from evolver.files.formats import Record
from evolver.files.report import aligned, told_gain, with_interval
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir
from rl.evaluation import Scores


def summary(folder: Path, rules: Mapping[tuple[str, str], int], solutions: int) -> str:
    """Return the table of held-out success, what of it is new, and the hidden rules.

    rules: {(first call, later call): solutions that need this order}, of so many `solutions`.
    """
    runs = Workdir(folder / "trained").scores()
    before = runs[min(runs)]
    after = runs[max(runs)]
    columns = {"pretrained": before}
    if evaluated := Workdir(folder / "pretrained").evaluations():
        columns = {"pretrained": Scores(**evaluated[-1]["scores"][0]), "imitated": before}
    head = ["success, %"]
    values = []
    for name, scores in columns.items():
        head += [f"{name}, greedy", f"at T={scores.temperature:g}"]
        values += [scores.per_task("greedy"), scores.per_task("avg@")]
    head.append(f"trained ({max(runs)} steps), greedy")
    values.append(after.per_task("greedy"))
    rows = [(f"{len(after.tasks)} held-out tasks", *map(with_interval, values))]
    for kind, level, chosen_N in after.parts:
        if kind == "difficulty":
            cells = [f"{100 * value_N[chosen_N].mean():.1f}" for value_N in values]
            rows.append((f"  difficulty {level} ({chosen_N.sum()})", *cells))
    *_, greedy_N, sampled_N, trained_N = values
    best_N = max(greedy_N, sampled_N, key=np.mean)
    at = "by training, greedily"
    best = "its best temperature"
    gain = told_gain(greedy_N, best_N, trained_N, at, best)
    return "\n".join([aligned(head, rows), "", gain, *rule_lines(folder, rules, solutions)])


def rule_lines(folder: Path, rules: Mapping[tuple[str, str], int], solutions: int) -> list[str]:
    """Return a line per hidden rule: who needs it, and who follows it."""
    if not rules:
        return ["", "No call was refused for want of an earlier one."]
    first = greedy(folder, min)
    last = greedy(folder, max)
    lines = [
        "",
        f"Rules that solutions of the explorer need ({solutions} were played without a call):",
    ]
    for (call, later), count in Counter(dict(rules)).most_common(5):
        before = in_order(first, call, later)
        after = in_order(last, call, later)
        lines.append(
            f"  {call} before {later}: {count} solutions; of {len(last)} greedy held-out rollouts"
            f" {before} do both in this order before training, {after} after"
        )
    return lines


def greedy(folder: Path, which: Any) -> list[Record]:
    """Return the greedy held-out rollouts of the first or last evaluation; which: min or max."""
    paths = sorted((folder / "trained/trajectories").glob("held_out_*.jsonl.gz"))
    records = read_rollouts(which(paths)) if paths else []
    return [record for record in records if record["fate"] == "greedy"]


def in_order(records: Sequence[Record], first: str, later: str) -> int:
    """Return how many rollouts called one tool and then the other, both without an error."""
    count = 0
    for record in records:
        names: list[str] = []
        for turn in record["turns"]:
            if not turn["info"].get("errors"):
                names += [call["name"] for call in turn["info"].get("calls", ())]
        count += first in names and later in names[names.index(first) :]
    return count


def written_rollouts(folder: Path) -> str:
    """Return three greedy held-out rollouts as text: one that training made succeed, one that
    succeeded before and after, one that still fails, as far as there are such."""
    before = {record["task"]: record for record in greedy(folder, min)}
    kinds: dict[tuple[bool, bool], Record] = {}
    names = {
        (False, True): "learned", (True, True): "known before", (False, False): "not learned",
        (True, False): "lost",
    }  # fmt: skip
    for record in greedy(folder, max):
        kind = bool(before.get(record["task"], {}).get("success")), bool(record["success"])
        kinds.setdefault(kind, record)
    chosen = [(name, kinds[kind]) for kind, name in names.items() if kind in kinds][:3]
    parts = [f"=== {name}: {one['task']} ===\n{_text(one)}" for name, one in chosen]
    return "\n\n".join(parts) + "\n"


def _text(record: Record) -> str:
    lines = [f"task: {record['query']}"]
    for turn in record["turns"]:
        lines += [f"agent: {turn['action']}", f"world: {text_of(turn['observation'])}"]
    lines.append(f"success: {record['success']} (ended by {record['stop']})")
    return "\n".join(lines)
