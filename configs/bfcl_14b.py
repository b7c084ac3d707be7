"""The paper's second benchmark: Qwen2.5-14B-Instruct in BFCL v3 multi-turn (base), on 8 devices of
80 GB.

    python run.py --config=configs/bfcl_14b.py --mode=plan
    python run.py --config=configs/bfcl_14b.py --config.model.path=/dir/of/Qwen2.5-14B-Instruct

It uses the devices and arguments of configs/appworld_14b.py, and needs requirements/vllm.txt in
.venv-vllm and `pip install --no-deps -r requirements/bfcl.txt`. Tasks 0-99 train and 100-199 are
evaluated, as in the reference. The scores of the paper's tables 1 and 2, which nobody has
reproduced here (avg@8 / best@8, bootstrap, in percent): 41.6 / 54.1 before training; original 68.6
/ 74.3, q 60.3 / 72.1, hybrid 73.0 / 81.1, qn 62.8 / 74.5, qa 64.9 / 76.3, all 66.5 / 76.7.

Time: not measured. A run has 25,600 training episodes of up to 30 turns, and 9,900 evaluation
episodes. Navigating adds
2,000 for the experience pool: four of each of the 500 synthetic tasks.
"""

from ml_collections import ConfigDict

from configs import appworld_14b
from configs.keys import change

SETTINGS = {
    "env.name": "bfcl",
    "env.args": {"category": "multi_turn_base", "splits": "reference"},
    "env.python": "",
    "env.workers": 8,
    "eval.split": "val",
    "rollout.concurrency": 256,
    "engine.slots": 256,
    "template.show_tools": True,
    "questioning.explorer.args.depth": 27,
}


def get_config(arg: str | None = None) -> ConfigDict:
    config = change(appworld_14b.get_config(arg), SETTINGS)
    if (arg or "").startswith("hybrid"):
        config.questioning.share = 500 / 600
    return config
