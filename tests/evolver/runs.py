"""Whole runs of the program in this process, and what they left."""

import itertools
import time

import run
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir


def flags(*words):
    """Return the flags that words stand for: "steps=2 seed=1" for --config.steps=2 --config.seed=1.
    Words that begin with -- are flags already."""
    own = [[word] if word.startswith("--") else word.split() for word in words]
    return [
        word if word.startswith("--") else f"--config.{word}"
        for word in itertools.chain.from_iterable(own)
    ]


def command(config, workdir, *words):
    return ["run.py", f"--config={config}", f"--workdir={workdir}", *flags(*words)]


def go(config, workdir, *words):
    """Play a run to its end and return its exit code."""
    return run.main(command(config, workdir, *words))


def figures(workdir, *without):
    """Return the metrics of each step but those of the clock and those that begin so."""
    skipped = ("time/", *without)
    return [
        {name: value for name, value in line.items() if not name.startswith(skipped)}
        for line in Workdir(workdir).metrics()
    ]


def eventually(holds, seconds=60):
    """Wait until something holds, so long at most."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def rollouts_of(workdir, name):
    """Return the recorded rollouts of a step, or of an evaluation."""
    name = name if isinstance(name, str) else f"step_{name:06d}"
    return read_rollouts(workdir / f"trajectories/{name}.jsonl.gz")
