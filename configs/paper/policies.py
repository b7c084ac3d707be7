"""The policies that tiny runs start from: imitations of careless demonstrations, by two layers for
7B, three for 14B.

    python -m experiments.imitation --config=configs/paper/policies.py:7b,appworld

Those for BFCL also imitate the explorer's solutions of its own tasks, without which they solve none
of these:

    for seed in $(seq 100 111); do
        python run.py --mode=explore --config=configs/paper/runs.py:14b,bfcl,q,tiny \\
            --config.seed=$seed --workdir=runs/explored/$seed
    done
    python -m experiments.imitation --config=configs/paper/policies.py:7b,bfcl

configs/assets has copies: travel_base_small (7b,appworld), travel_base, bfcl_base_small and
bfcl_base (14b,bfcl)."""

from ml_collections import ConfigDict

from configs import base_policy, bfcl_tiny_base
from configs.paper import runs

PRESETS = {"7b": "tiny", "14b": "mini"}
WORLDS = {"appworld": base_policy, "bfcl": bfcl_tiny_base}


def get_config(arg: str | None = None) -> ConfigDict:
    size, _, world = (arg or "7b,appworld").partition(",")
    if size not in PRESETS or world not in WORLDS:
        raise ValueError(
            f"policies.py:{arg}: give SIZE,WORLD of {', '.join(PRESETS)} and {', '.join(WORLDS)}"
        )
    config = WORLDS[world].get_config()
    config.model.preset = PRESETS[size]
    if world == "bfcl":
        config.env.args = runs.BFCL
        config.row = 896
        config.explored = "runs/explored/*/tasks.jsonl"
        config.steps = 600
        config.demonstrations = 5000
    return config
