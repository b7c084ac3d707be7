"""Processor time of a step early in a run, and with a long run behind it.

    python -m experiments.bench.growth [--tasks 100000] [--experiences 100000] [--steps 1000]

The quickstart with a learning rate of 0, so that all steps play and train alike: some steps with
the pools that it makes, then as many with copies of its tasks and with experiences of random words
in them, and with more lines of metrics. Checkpoints come as often as in the quickstart, and every
step adds experience. The first checkpoint of a process writes all tasks and experiences anew; it is
timed apart.
"""

import gc
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs import quickstart
from configs.keys import change
from evolver import loop
from evolver.build import Run, open_run
from evolver.navigating import new_experience
from evolver.phases.record import Recorder
from experiments import commands
from experiments.bench.harness import clocked, load_before

SETTINGS = {
    "optim.lr": 0.0, "questioning.budget": 60, "navigating.every": 1, "navigating.tasks": 8,
    "eval.every": 0, "eval.temperatures": (), "questioning.capacity": 10**6,
}  # fmt: skip
WORDS = 5000  # different words of the experiences


def main(
    *, tasks: int = 100_000, experiences: int = 100_000, steps: int = 1000, measured: int = 10
) -> None:
    """Print the processor seconds of a step, early and late.

    tasks, experiences: in the pools of the late steps
    steps: lines of metrics before the late steps
    measured: steps of each kind; two more warm up
    """
    print(load_before())
    config = change(quickstart.get_config(), SETTINGS)
    config.steps = 2 * (measured + 2) + 1  # the last one is always saved
    with tempfile.TemporaryDirectory() as folder, open_run(config, Path(folder)) as run:
        with Recorder(run) as recorder:
            loop.prepare(run, recorder)
            early = timed(run, recorder, measured)
            fill(run, tasks, experiences)
            recorder.history[:0] = [recorder.history[-1]] * steps
            began = time.process_time()
            recorder.save(replace=True)
            gc.collect()
            first = time.process_time() - began
            late = timed(run, recorder, measured)
    ratio = late / early
    print(f"a step: {early:.3f} s early, {late:.3f} s late, {ratio:.3f} times as much")
    print(f"the first checkpoint of a process with that behind it: {first:.3f} s")


def timed(run: Run, recorder: Recorder, measured: int) -> float:
    """Return the mean processor seconds of a step, after two that warm up."""
    steps = itertools.count(run.step + 1)
    seconds = clocked(
        lambda: loop.iterate(run, recorder, next(steps)), measured + 2, time.process_time
    )
    return statistics.mean(seconds[2:])


def fill(run: Run, tasks: int, experiences: int) -> None:
    """Fill the pools of a run up to these sizes."""
    assert run.tasks.pool and run.navigating
    state: dict[str, Any] = run.tasks.pool.state()
    known = list(run.tasks.pool.tasks.values())
    for n in range(tasks - len(known)):
        task = replace(known[n % len(known)], id=f"copy-{n}")
        state["tasks"].append(vars(task))
        state["results"][task.id] = [n % 3, 2]
    run.tasks.pool.load_state(state)
    draw, pool = random.Random(0), run.navigating.pool
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(WORDS)]
    held = pool.state()
    for n in range(experiences - len(pool)):
        text = " ".join(draw.choices(words, k=8))
        held["experiences"].append(new_experience(text, f"{text} {n}", sources=[f"t{n}"]).to_dict())
    pool.load_state(held)


if __name__ == "__main__":
    commands.program(main)
