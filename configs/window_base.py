"""The quickstart's policy after it was shown contexts that have lost their oldest turns.

    python -m experiments.imitation --config=configs/window_base.py:window \\
        --workdir=runs/window_base
    python -m experiments.imitation --config=configs/window_base.py:whole --workdir=runs/whole_base

Both imitate the same demonstrations for as long, `window` with a sliding window of 128 tokens,
`whole` with everything. The demonstrations are those of configs/base_policy.py, of other agencies
than the quickstart's. Expected after 40 steps of GRPO in contexts of 160 tokens, avg@4 of three
seeds: 54.0 for `window` with a sliding window, 46.9 for `whole` with the causal template
(docs/results.md). Time: 5 minutes each.
"""

from ml_collections import ConfigDict

from configs import base_policy
from configs.keys import use


def get_config(arg: str | None = None) -> ConfigDict:
    if arg not in (None, "window", "whole"):
        raise ValueError(f"window_base.py:{arg}: give window or whole")
    config = base_policy.get_config()
    config.model.path = "configs/assets/travel_base"
    config.steps = 400
    config.careful = 0.0
    config.lr = 5e-4
    if arg != "whole":
        use(config.template, "sliding_window", limit=128)
    return config
