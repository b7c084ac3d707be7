"""A program for tests of comparisons, which reports what it is told to."""

import json
import sys
from pathlib import Path

from experiments import commands
from experiments.bench.harness import report


def contender(model: str, work: str, *, rounds: int, repeats: int) -> None:
    """Report the tokens of the work, times `repeats`, in each of 1, 2, ... seconds, of which the
    first do not count."""
    tokens = sum(json.loads(Path(work).read_text()))
    seconds = [float(n) for n in range(rounds + 1)]
    report(f"{model} {rounds}", tokens * repeats, seconds)


if __name__ == "__main__":
    sys.exit(commands.run(contender))
