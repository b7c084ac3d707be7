"""Trained tokens/s of our learner, TRL's GRPO and tunix's GRPO on the same batch.

    python -m experiments.bench.learner [--batches flat multi_turn] [--repeats 5]

All load the same random tiny checkpoint (width 128, 2 layers, float32) and the same batch. Each
runs in its own process, and its fastest setting counts. A step is loss, gradient, clipping and
AdamW; ours includes packing the rows. `make bench-peers` installs the peers.
"""

import sys
import tempfile

from experiments import commands
from experiments.bench.engine import TINY
from experiments.bench.harness import Contender, compare
from experiments.bench.workload import MAKERS, batch_of
from models import hf, qwen

CONTENDERS = {
    "here": Contender(
        sys.executable,
        "experiments.bench.our_learner",
        ("--micro 16", "--micro 4 --chunk 512", "--micro 1 --chunk 256 --widths 8"),
    ),
    "TRL": Contender(
        ".bench/trl/bin/python",
        "experiments.bench.peer_trl",
        ("--micro 64", "--micro 16", "--micro 4", "--micro 2"),
    ),
    "tunix": Contender(
        ".bench/tunix/bin/python",
        "experiments.bench.peer_tunix",
        (
            *(f"--micro {micro}" for micro in (64, 16, 4, 2, 1)),
            *(f"--packed 1024 --micro {micro}" for micro in (0, 4, 1)),
        ),
    ),
}


def main(*, batches: commands.Words = tuple(MAKERS), repeats: int = 5) -> None:
    """Compare the learners and print a table.

    batches: flat, multi_turn
    """
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, TINY, qwen.init(TINY, 0))
        works = {name: batch_of(MAKERS[name](TINY.vocab)) for name in batches}
        compare("trained tokens/s", CONTENDERS, works, folder, repeats)


if __name__ == "__main__":
    commands.program(main)
