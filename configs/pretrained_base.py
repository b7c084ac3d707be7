"""SmolLM2-135M-Instruct after a short imitation of a travel agent: where
`configs/pretrained.py:calls` starts.

    make pretrained
    python -m experiments.imitation --config=configs/pretrained_base.py

writes runs/pretrained_base/policy. The demonstrations have no slips: what this policy does wrong,
it has not learned. It solves 29.7% of training tasks of two calls at temperature 1, and 40.6%
greedily (docs/results.md).
"""

from ml_collections import ConfigDict

from configs import imitation


def get_config(arg: str | None = None) -> ConfigDict:
    config = imitation.get_config(arg)
    config.model.path = ".cache/smollm2-135m-instruct"
    config.steps = 22
    config.demonstrations = 1000
    config.careful = 1.0
    config.hint = 0.0
    config.rows = 8
    config.row = 512
    config.micro = 2
    config.lr = 1e-4
    config.warmup = 5
    return config
