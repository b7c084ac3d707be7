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
from configs.keys import use
from configs.pretrained import SMOL


def get_config(arg: str | None = None) -> ConfigDict:
    if arg not in (None, "again", "smollm2"):
        raise ValueError(f"reader_base.py:{arg}: the argument is again or smollm2, or none")
    config = imitation.get_config()
    use(config.env, "made_up")
    use(config.template, "brief")
    config.model.preset = "reader"
    config.model.dtype = "bfloat16"
    config.vocab = 2048
    config.words = True
    config.demonstrations = 200_000
    config.careful = 1.0
    config.hint = 0.1
    config.induction = True
    config.lists = 0.01
    config.whole = 0.3
    config.pairs = 0.05
    config.steps = 6000
    config.muon_lr = 0.015
    config.warmup = 50
    config.row = 1024
    config.rows = 64
    config.micro = 64
    if arg:
        config.words = config.induction = False
        config.lists = config.whole = config.pairs = 0.0
    if arg == "again":
        config.model.path = "configs/assets/reader"
        config.model.dtype, config.model.written = "float32", "bfloat16"
        config.demonstrations = 20_000
        config.steps = 260
        config.warmup = 15
        config.rows, config.micro = 8, 1
        config.lr = 3e-4
    if arg == "smollm2":
        config.model.path = SMOL
        config.demonstrations = 12_000
        config.steps = 150
        config.row = 2048
        config.rows = 32
        config.micro = 8
        config.lr = 1e-4
    return config
