"""The policies that tiny runs start from: imitations of careless demonstrations, by two layers for 7B, three for 14B.

    python -m experiments.imitation --config=configs/paper/policies.py:7b,appworld

configs/assets has copies: travel_base_small (7b,appworld), travel_base, bfcl_base_small and bfcl_base (14b,bfcl).
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
