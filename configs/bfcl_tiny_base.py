"""The policy that configs/bfcl_tiny.py starts from. It imitates careless solutions of short BFCL
conversations.

    python -m experiments.imitation --config=configs/bfcl_tiny_base.py

writes runs/bfcl_tiny_base/policy. Expected on the 12 held-out conversations, in percent: avg@8
22.9, greedy 83.3.
Time: 6 minutes on two cores.
"""

from ml_collections import ConfigDict

from configs import bfcl_tiny, imitation


def get_config(arg: str | None = None) -> ConfigDict:
    config = imitation.get_config(arg)
    config.steps = 300
    config.env.name = "bfcl"
    config.env.args = bfcl_tiny.WORLD
    config.demonstrations = 3000
    config.care = 0.35
    config.hint = 0.0
    config.vocab = 2000
    config.model.preset = "tiny"
    config.rows = 16
    config.row = 640
    config.micro = 16
    return config
