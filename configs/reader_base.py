"""A small policy that reads the tools of worlds that it never saw: where `evolver evolve` starts.

    python -m experiments.imitation --config=configs/reader_base.py             # for one GPU
    python -m experiments.imitation --config=configs/reader_base.py:again       # for two cores
    python -m experiments.imitation --config=configs/reader_base.py:smollm2     # for one GPU

It imitates agents in made-up worlds, whose tools, names, schemas and hidden rules are random
(envs/made_up): their own tasks, half of them in the explorer's words, and exercises in reading
lists. It begins with induction heads laid out (experiments/imitation/induction.py), and with lists
of pairs alone, because random weights find no such heads in few tokens; docs/results.md says how
far that brings it. `again` goes on from the shipped one, as that itself did twice. `smollm2`
teaches SmolLM2-135M-Instruct the same; a whole run of it was not seen.
"""

from ml_collections import ConfigDict

from configs import imitation
from configs.keys import change
from configs.pretrained import SMOL

READER = {
    "env.name": "made_up",
    "template.name": "brief",
    "model.preset": "reader",
    "model.dtype": "bfloat16",
    "vocab": 2048,
    "words": True,
    "demonstrations": 200_000,
    "careful": 1.0,
    "hint": 0.1,
    "induction": True,
    "lists": 0.01,
    "whole": 0.3,
    "pairs": 0.05,
    "steps": 6000,
    "muon_lr": 0.015,
    "warmup": 50,
    "row": 1024,
    "rows": 64,
    "micro": 64,
}
TRAINED = {"words": False, "induction": False, "lists": 0.0, "whole": 0.0, "pairs": 0.0}
# {argument: the keys that it changes}
CHANGES = {
    "again": TRAINED | {
        "model.path": "configs/assets/reader",
        "model.dtype": "float32",
        "model.written": "bfloat16",
        "demonstrations": 20_000,
        "steps": 260,
        "warmup": 15,
        "rows": 8,
        "micro": 1,
        "lr": 3e-4,
    },
    "smollm2": TRAINED | {
        "model.path": SMOL,
        "demonstrations": 12_000,
        "steps": 150,
        "row": 2048,
        "rows": 32,
        "micro": 8,
        "lr": 1e-4,
    },
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    if arg not in (None, *CHANGES):
        raise ValueError(f"reader_base.py:{arg}: the argument is again or smollm2, or none")
    return change(imitation.get_config(), READER | CHANGES.get(arg or "", {}))
