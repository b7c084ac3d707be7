"""A small policy that reads the tools of worlds that it never saw: where `evolver evolve` starts.

    python -m experiments.imitation.made_up --worlds 2000 --out runs/made_up.jsonl
    python -m experiments.imitation --config=configs/reader_base.py

It imitates agents in made-up worlds, whose tools, names, schemas and hidden rules are random
(envs/made_up): the worlds' own tasks, and the explorer's in the first 2,000 worlds. No world is
shown twice but those. configs/assets/reader was made so, in 49 minutes on two cores, when most
words of made-up worlds were English (commit fc182af): it copies those, and hardly any others
(docs/results.md). It has not been made again since most words are coined.
"""

from ml_collections import ConfigDict

from configs import imitation
from configs.keys import use


def get_config(arg: str | None = None) -> ConfigDict:
    config = imitation.get_config(arg)
    use(config.env, "made_up")
    use(config.template, "brief")
    config.explored = "runs/made_up*.jsonl"
    config.model.preset = "small"
    config.vocab = 2048
    config.words = True
    config.demonstrations = 60000
    config.careful = 1.0
    config.hint = 0.1
    config.whole = 0.5
    config.pairs = 0.1
    config.steps = 1400
    config.row = 640
    config.rows = 16
    config.micro = 4
    return config
