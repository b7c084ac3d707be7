"""Count the held-out tasks that an untrained policy practically cannot do, and how many of them
training makes it do.

    python -m experiments.discovery --config=configs/quickstart.py runs/quickstart runs/quickstart-1
    python -m experiments.discovery --config=configs/quickstart.py runs/other \\
        -- --config.env.args.rules=1

A task is out of reach if the untrained policy solves it in fewer than 1% of 256 attempts: 64 at
each of four temperatures. Its evaluation is a folder (--base) and is not repeated. Flags after `--`
go to it; they have to be those of the runs that change the tasks. The runs count with their last
evaluation, by greedy rollouts.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evolver.files.report import aligned
from evolver.files.workdir import Workdir
from experiments import commands, compare
from models.files import write_atomically
from rl.evaluation import Scores

TEMPERATURE, OTHERS = 1.0, (0.2, 0.4, 0.7)
ATTEMPTS = 64  # at each temperature
RATE = 0.01


def main(
    runs: tuple[Path, ...],
    *,
    config: str,
    base: Path = Path("runs/discovery"),
    out: Path | None = None,
    flags: Sequence[str] = (),
) -> int:
    """Print the table. Words after `--` go to the evaluation of the untrained policy.

    runs: workdirs of finished runs
    config: their config
    base: folder of the untrained policy
    out: write the table to this file too
    """
    last = {}
    for run in runs:
        curve = Workdir(run).scores()
        if curve and curve[max(curve)].greedy_N:
            last[str(run)] = curve[max(curve)]
    if missing := [str(run) for run in runs if str(run) not in last]:
        hint = "give workdirs of runs with config.eval.greedy=True"
        raise commands.Problems(f"no greedy evaluation in {', '.join(missing)}: {hint}")
    if code := evaluate(config, base, flags):
        return code
    untrained = Scores(**Workdir(base).evaluations()[-1]["scores"][0])
    if other := [run for run, scores in last.items() if scores.tasks != untrained.tasks]:
        raise commands.Problems(f"{', '.join(other)} were evaluated on other tasks than {base}")
    text = table(untrained, last)
    print(text)
    if out:
        write_atomically(out, text + "\n")
    return 0


def evaluate(config: str, base: Path, flags: Sequence[str]) -> int:
    """Evaluate the untrained policy of a config, unless `base` holds the result. Return the exit
    code."""
    if Workdir(base).evaluations():
        return 0
    command = [
        sys.executable, "run.py", f"--config={config}", "--mode=eval", f"--workdir={base}",
        f"--config.eval.rollouts={ATTEMPTS}", f"--config.eval.temperature={TEMPERATURE}",
        f"--config.eval.temperatures={OTHERS}", *flags,
    ]  # fmt: skip
    return subprocess.run(command).returncode


def out_of_reach(base: Scores) -> np.ndarray:
    """Return a mask of the tasks that are solved in fewer than `RATE` of all sampled attempts."""
    attempts_NR = np.concatenate([base.success_NR, *base.sweep.values()], axis=1)
    return attempts_NR.mean(axis=1) < RATE


def table(base: Scores, runs: dict[str, Scores]) -> str:
    """Return a row for each run, in percent with 95% intervals over tasks, and their mean."""
    hard_N = out_of_reach(base)
    attempts = len(base.success_NR[0]) * (1 + len(base.sweep))
    lines = [
        f"{hard_N.sum()} of {len(hard_N)} tasks are solved "
        f"in fewer than {RATE:.0%} of {attempts} attempts"
    ]
    if not hard_N.any():
        return lines[0]
    greedy = {name: scores.per_task("greedy") for name, scores in runs.items()}
    if len(greedy) > 1:
        greedy["mean"] = np.mean(list(greedy.values()), axis=0)
    rows = []
    for name, value_N in greedy.items():
        parts = (value_N[hard_N], value_N[~hard_N])
        rows.append([name, *(compare.over_tasks(part_N) or "-" for part_N in parts)])
    head = ("solved greedily after training", "of these", "of the others")
    return "\n".join([*lines, "", aligned(head, rows)])


if __name__ == "__main__":
    commands.program(main)
