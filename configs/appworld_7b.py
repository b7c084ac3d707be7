"""Qwen2.5-7B-Instruct in AppWorld on 8 devices of 80 GB; otherwise as configs/appworld_14b.py.

    python run.py --config=configs/appworld_7b.py --mode=plan
    python run.py --config=configs/appworld_7b.py --config.model.path=/dir/of/Qwen2.5-7B-Instruct

The paper's scores, which nobody has reproduced here (test_normal, avg@8 / best@8, in percent): 1.8
/ 5.6 before training; original 16.1 / 25.5, q 23.2 / 40.3, hybrid 21.8 / 36.3, qn 26.3 / 43.1, qa
25.7 / 43.7, all 32.4 / 51.2.
Time: not measured; about half of the 14B's.
"""

from configs import appworld_14b
from configs.keys import variant

# of a 14B config, for the 7B model, whose training state fits on the devices
SMALLER = {
    "model.preset": "7b",
    # 4 key/value heads do not divide among 8 devices
    "engine.vllm.devices": ("0,1,2,3", "4,5,6,7"),
    "optim.offload": False,
    "loss.reference": "device",
}
get_config = variant(appworld_14b, SMALLER)
