"""Compare the norms of ADCA's labels on the recorded rollouts of a run, and on a case made to break
one of them.

    python -m experiments.norms runs/quickstart

Recomputes the advantages of every training step from the labels and outcomes in `trajectories/`.
The made-up case has 8 attempts of 30 turns: 7 successes with 16 GOOD turns, then 14 BAD ones,
beside a failure with 15 and 15.
"""

import itertools
import typing
from pathlib import Path

import numpy as np

from envs.values import Json
from envs.world import Task
from evolver.files.report import aligned
from evolver.files.rollout_files import read_rollouts, rollout_files
from experiments import commands
from experiments.view.replay import trajectory_of
from rl.advantages import Batch
from rl.advantages.attribution import Norm, adca
from rl.trajectory import BROKEN

NORMS: tuple[Norm, ...] = typing.get_args(Norm)
EDGES = (50, 90, 99, 99.9, 100)
MADE_UP = (
    np.array([1.0] * 7 + [0.0]), np.zeros(8, int),
    np.array([[1] * 16 + [-1] * 14] * 7 + [[1] * 15 + [-1] * 15]), np.full(8, 30),
)  # fmt: skip


def batch_of(records: list[Json]) -> Batch:
    """Return the rollouts of a step."""
    tasks = {r["task"]: Task(r["task"], "", r["query"]) for r in records}
    return Batch.of(list(filter(None, (trajectory_of(r, tasks) for r in records))), 0)


def compared(steps: list[list[Json]], alpha: float) -> dict[Norm, tuple[np.ndarray, np.ndarray]]:
    """Return, by norm, (advantages, those of the outcomes alone) of all turns that trained."""
    found: dict[Norm, list[np.ndarray]] = {norm: [] for norm in NORMS}
    outcomes = []
    for records in steps:
        records = [r for r in records if r["stop"] not in BROKEN]
        batch = batch_of(records)
        arrays = batch.outcome_N, batch.group_N, batch.label_NK, batch.turns_N
        trained_N = np.array([r["fate"] == "trained" for r in records], bool)
        on_NK = batch.on_NK & trained_N[:, None]
        outcomes.append(adca(*arrays, alpha=0.0)[on_NK])
        for norm in NORMS:
            found[norm].append(adca(*arrays, alpha=alpha, norm=norm)[on_NK])
    outcome = np.concatenate(outcomes)
    return {norm: (np.concatenate(values), outcome) for norm, values in found.items()}


def main(workdir: tuple[Path, ...], *, alpha: float = 0.1) -> None:
    """Print a table.

    workdir: of a run with config.attributing.enabled=True
    alpha: weight of the labels
    """
    files = itertools.chain.from_iterable(map(rollout_files, workdir))
    steps = [read_rollouts(file.path) for file in files if file.kind == "step"]
    if not steps:
        where = ", ".join(map(str, workdir))
        raise commands.Problems(f"no trajectories/step_* in {where}")
    sizes = [f"p{edge:g}" if edge < 100 else "max" for edge in EDGES]
    rows = []
    for norm, (value, outcome) in compared(steps, alpha).items():
        turned = np.mean((np.sign(value) != np.sign(outcome))[np.abs(outcome) > 1e-9])
        extreme_NK = adca(*MADE_UP, alpha=alpha, norm=norm)
        cells = [f"{size:.2f}" for size in np.percentile(np.abs(value), EDGES)]
        extremes = [f"{np.abs(extreme_NK).max():.1f}", f"{extreme_NK[:7].min():.1f}"]
        rows.append([norm, *cells, f"{turned:.1%}", *extremes])
    head = ["|advantage|", *sizes, "sign turned", "made-up case: max", "least of a success"]
    print(aligned(head, rows))
    print(
        f"{len(value):,} turns that trained. "
        "Sign turned: against the sign of the outcome's advantage alone."
    )


if __name__ == "__main__":
    commands.program(main)
