"""The policies that tiny runs start from, where configs/assets has none: imitations of careless demonstrations.

    python -m experiments.imitation --config=configs/paper/policies.py:7b,appworld

`python -m experiments.paper ... --scale=tiny` makes those that it needs. 7B stands for two layers, 14B for three.
"""

from configs import base_policy, bfcl_tiny_base
from configs.paper import runs

PRESETS = {"7b": "tiny", "14b": "mini"}
WORLDS = {"appworld": base_policy, "bfcl": bfcl_tiny_base}


def get_config(arg=None):
    size, _, world = (arg or "7b,appworld").partition(",")
    if size not in PRESETS or world not in WORLDS:
        raise ValueError(f"policies.py:{arg}: give SIZE,WORLD of {', '.join(PRESETS)} and {', '.join(WORLDS)}")
    config = WORLDS[world].get_config()
    config.model.preset = PRESETS[size]
    if world == "bfcl":
        config.env.args, config.row = runs.BFCL, 896
    return config
