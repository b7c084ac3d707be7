"""A small policy that reads the tools of worlds that it never saw: where `evolver evolve` starts.

    python -m experiments.imitation.made_up --worlds 2000 --out runs/made_up.jsonl
    python -m experiments.imitation --config=configs/reader_base.py
    python -m experiments.imitation --config=configs/reader_base.py:smollm2     # for one GPU

It imitates agents in made-up worlds, whose tools, names, schemas and hidden rules are random
(envs/made_up): the worlds' own tasks, the explorer's in the first of them, and exercises in reading
lists. No world is shown twice but those. It begins with induction heads laid out
(experiments/imitation/induction.py), and with lists of pairs alone, because random weights find no
such heads in so few tokens; docs/results.md says how far that brings it. configs/assets/reader was
made so in 41 minutes on two cores, from 10,453 tasks of about the first thousand worlds.
`smollm2` teaches SmolLM2-135M-Instruct the same on a GPU, from the worlds' own tasks; a whole
run of it was not seen.
"""

from ml_collections import ConfigDict

from configs import imitation
from configs.keys import use
from configs.pretrained import SMOL


def get_config(arg: str | None = None) -> ConfigDict:
    if arg not in (None, "smollm2"):
        raise ValueError(f"reader_base.py:{arg}: the argument is smollm2, or none")
    config = imitation.get_config()
    use(config.env, "made_up")
    use(config.template, "brief")
    config.explored = "runs/made_up*.jsonl"
    config.model.preset = "small"
    config.vocab = 2048
    config.words = True
    config.demonstrations = 60000
    config.careful = 1.0
    config.hint = 0.1
    config.induction = True
    config.lists = 0.04
    config.whole = 0.3
    config.pairs = 0.1
    config.steps = 3000
    config.row = 640
    config.rows = 4
    config.micro = 4
    if arg == "smollm2":
        config.explored = ""
        config.model.path = SMOL
        config.model.dtype = "bfloat16"
        config.words = config.induction = False
        config.lists = config.whole = config.pairs = 0.0
        config.demonstrations = 12000
        config.steps = 150
        config.row = 2048
        config.rows = 32
        config.micro = 8
        config.lr = 1e-4
    return config
