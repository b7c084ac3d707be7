"""Qwen2.5-7B-Instruct in BFCL v3 multi-turn (base) on 8 devices of 80 GB; otherwise as
configs/bfcl_14b.py.

    python run.py --config=configs/bfcl_7b.py --mode=plan
    python run.py --config=configs/bfcl_7b.py --config.model.path=/dir/of/Qwen2.5-7B-Instruct

The paper's scores, which nobody has reproduced here (tasks 100-199, avg@8 / best@8, in percent):
29.8 / 42.4 before training; original 58.8 / 74.0, q 49.0 / 60.6, hybrid 65.3 / 75.6, qn 53.3 /
61.0, qa 56.8 / 65.3, all 57.9 / 69.0.
Time: not measured; about half of the 14B's.
"""

from configs import appworld_7b, bfcl_14b
from configs.keys import variant

get_config = variant(bfcl_14b, appworld_7b.SMALLER)
