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

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evolver.files.report import aligned
from evolver.files.workdir import Workdir
from models.files import write_atomically
from rl.evaluation import Scores, interval

TEMPERATURES = (0.2, 0.4, 0.7, 1.0)
ATTEMPTS = 64  # at each temperature
RATE = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="WORKDIR", help="finished runs")
    parser.add_argument("--config", required=True, help="their config")
    parser.add_argument(
        "--base", type=Path, default=Path("runs/discovery"), help="folder of the untrained policy"
    )
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    args = parser.parse_args(arguments[:cut])
    trained = {run: Workdir(run).scores() for run in args.runs}
    if missing := [
        str(run) for run, scores in trained.items() if not (scores and scores[max(scores)].greedy_N)
    ]:
        parser.error(
            f"no greedy evaluation in {', '.join(missing)}: "
            "give workdirs of runs with config.eval.greedy=True"
        )
    if code := evaluate(args.config, args.base, arguments[cut + 1 :]):
        return code
    base = Scores(**Workdir(args.base).evaluations()[-1]["scores"][0])
    last = {run: scores[max(scores)] for run, scores in trained.items()}
    if other := [str(run) for run, scores in last.items() if scores.tasks != base.tasks]:
        parser.error(f"{', '.join(other)} were evaluated on other tasks than {args.base}")
    text = table(base, {str(run): scores for run, scores in last.items()})
    print(text)
    if args.out:
        write_atomically(args.out, text + "\n")
    return 0


def evaluate(config: str, base: Path, flags: Sequence[str]) -> int:
    """Evaluate the untrained policy of a config, unless `base` holds the result. Return the exit
    code."""
    if Workdir(base).evaluations():
        return 0
    *others, own = TEMPERATURES
    values = {
        "rollouts": ATTEMPTS,
        "temperature": own,
        "temperatures": f"({','.join(map(str, others))})",
    }
    command = [sys.executable, "run.py", f"--config={config}", "--mode=eval", f"--workdir={base}"]
    return subprocess.run(
        [*command, *(f"--config.eval.{key}={value}" for key, value in values.items()), *flags]
    ).returncode


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
    rows = [
        (name, *map(_estimate, (value_N[hard_N], value_N[~hard_N])))
        for name, value_N in greedy.items()
    ]
    if len(greedy) > 1:
        mean_N = np.mean(list(greedy.values()), axis=0)
        rows.append(("mean", _estimate(mean_N[hard_N]), _estimate(mean_N[~hard_N])))
    head = ("solved greedily after training", "of these", "of the others")
    return "\n".join([*lines, "", aligned(head, rows)])


def _estimate(value_N: np.ndarray) -> str:
    if not len(value_N):
        return "-"
    low, high = interval(value_N)
    return f"{100 * value_N.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"


if __name__ == "__main__":
    sys.exit(main())
