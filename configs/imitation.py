"""Every key of imitation, once: default, bounds, meaning, unit. For `python -m
experiments.imitation`.

A variant calls this `get_config` and changes a few values, as configs/base_policy.py does. Any
value can be changed on
the command line: `--config.steps=100`. An unknown key is an error here, in a variant and on the
command line.
"""

from configs.base import PRESETS
from configs.keys import Keys, fraction, key


def get_config(arg=None):
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    config = keys().config
    config.lock()
    config.env.args.unlock()
    return config


def keys():
    """Return the keys with their rules, as `configs.keys.Keys`."""
    root = Keys()
    root.seed = key(
        0, least=0
    )  # seeds everything random: two runs with one seed give the same policy
    root.steps = key(2000, least=1)  # updates

    # What is imitated: envs/<env.name>/demos.py, and the solutions of explored tasks in any world.
    root.plug(
        "env", "travel"
    )  # travel, home, bfcl, or with `explored` any world; `args` go to `demonstrate`
    root.explored = (
        ""  # files such as runs/explore-*/tasks.jsonl: solutions of their tasks, too; "" = none
    )
    root.demonstrations = key(20000, least=1)  # episodes without slips, and as many careless ones
    root.care = fraction(0.5)  # care of the careless episodes: 0 = frequent slips, 1 = none
    root.careful = fraction(
        0.5
    )  # share of the updates, from the first, without slips; then their share grows
    root.pairs = fraction(
        0.0
    )  # share of the samples, before there are slips, that are lists of random pairs of tokens
    root.hint = fraction(0.2)  # share of demonstrations with an experience in front of the query

    # The prompts of the demonstrated turns, as in a run of this template (docs/extending.md).
    root.plug(
        "template", "causal"
    )  # causal, or sliding_window with its `limit`; none that asks a model

    # The policy.
    model = root.group("model")
    # checkpoint to start from, with its tokenizer: a directory or a Hub id; "" = random weights
    model.path = ""
    model.preset = key("mini", choices=PRESETS)  # shape of random weights
    model.dtype = key("float32", choices=("float32", "bfloat16"))  # dtype of the computation
    # most entries of the tokenizer of random weights; it is trained on the careless demonstrations
    root.vocab = 900

    # The batch of an update.
    root.rows = key(24, least=1)  # packed rows
    root.row = key(256, least=1)  # tokens of a row; longer demonstrations are left out
    root.micro = key(
        24, least=1
    )  # rows per forward and backward pass; changes memory, not the result

    # Muon for the matrices of the layers, Adam for all other weights and for all those of a
    # checkpoint.
    root.muon_lr = key(0.01, above=0)  # Muon's peak learning rate
    root.lr = key(3e-3, above=0)  # Adam's peak learning rate
    root.final_lr = fraction(0.05)  # learning rate at the end, as a share of the peak
    root.schedule = key("cosine", choices=("constant", "cosine", "linear"))  # after warm-up
    root.warmup = key(20, least=0)  # updates of the linear warm-up, from peak / warmup to the peak
    root.b2 = key(0.98, least=0, below=1)  # Adam's decay of the second moment
    root.clip = key(1.0, least=0)  # global norm to which gradients are clipped; 0 = no clipping
    return root
