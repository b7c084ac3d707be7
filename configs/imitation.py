"""Every key of imitation, once: default, bounds, meaning, unit. For `python -m
experiments.imitation`.

A variant is a table of the keys that it changes, as configs/base_policy.py is. Any value can be
changed on the command line: `--config.steps=100`. An unknown key is an error here, in a variant
and on the command line.
"""

from typing import Literal

from ml_collections import ConfigDict

from configs.base import Preset, Schedule
from configs.keys import Decay, Dtype, Group, Plug, new
from rl.bounds import Count, CountOrZero, Fraction, NotNegative, Positive


def get_config(arg: str | None = None) -> ConfigDict:
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    return new(Config)


class Model(Group):
    """The policy."""

    path: str = ""
    """Checkpoint to start from, with its tokenizer: a directory or a Hub id; "" = random
    weights."""
    preset: Preset = "mini"
    """Shape of random weights."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    written: Dtype | Literal[""] = ""
    """Dtype of the weights that are written; "" = that of the computation."""


class Config(Group):
    """All keys of imitation."""

    seed: CountOrZero = 0
    """Seeds everything random: two runs with one seed give the same policy."""
    steps: Count = 2000
    """Updates."""

    # What is imitated: envs/<env.name>/demos.py, and the solutions of explored tasks in any world.
    env: Plug = Plug(name="travel")
    """travel, home, bfcl, or with `explored` any world; `args` go to `demonstrate`."""
    explored: str = ""
    """Files such as runs/explore-*/tasks.jsonl: solutions of their tasks, too; "" = none."""
    demonstrations: Count = 20000
    """Episodes without slips, and as many careless ones."""
    care: Fraction = 0.5
    """Care of the careless episodes: 0 = frequent slips, 1 = none."""
    careful: Fraction = 0.5
    """Share of the updates, from the first, without slips; then their share grows."""
    lists: Fraction = 0.0
    """Share of the updates, from the first, that show only short lists of random pairs of
    tokens."""
    whole: Fraction = 0.0
    """Share of the updates, after those of lists, in which prompts and observations train, too."""
    pairs: Fraction = 0.0
    """Share of the samples, before there are slips, that are lists of random pairs of tokens."""
    share_prompts: bool = False
    """Samples of a row share what their prompts begin with, such as the tools of a world."""
    induction: bool = False
    """Random weights begin with heads that copy what followed an earlier occurrence of a token
    (experiments/imitation/induction.py)."""
    hint: Fraction = 0.2
    """Share of demonstrations with an experience in front of the query."""
    template: Plug = Plug(name="causal")
    """Writes the prompts of the demonstrated turns: causal, or sliding_window with its `limit`;
    none that asks a model."""

    model: Model = Model()
    vocab: int = 900
    """Most entries of the tokenizer of random weights, which is trained on the careless
    demonstrations."""
    words: bool = False
    """Train the tokenizer on words alone. A word then has the same ids behind a space, a quote and
    a bracket, so that copying it is copying ids; texts take more tokens."""

    # The batch of an update.
    rows: Count = 24
    """Packed rows."""
    row: Count = 256
    """Tokens of a row; longer demonstrations are left out."""
    micro: Count = 24
    """Rows per forward and backward pass; changes memory, not the result."""

    # Muon for the matrices of the layers, Adam for all other weights and for those of a checkpoint.
    muon_lr: Positive = 0.01
    """Muon's peak learning rate."""
    lr: Positive = 3e-3
    """Adam's peak learning rate."""
    final_lr: Fraction = 0.05
    """Learning rate at the end, as a share of the peak."""
    schedule: Schedule = "cosine"
    """After warm-up."""
    warmup: CountOrZero = 20
    """Updates of the linear warm-up, from peak / warmup to the peak."""
    b2: Decay = 0.98
    """Adam's decay of the second moment."""
    clip: NotNegative = 1.0
    """Global norm to which gradients are clipped; 0 = no clipping."""
