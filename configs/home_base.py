"""The policy that configs/home.py starts from. It imitates a script that is careful at first and
careless at the end, as that of configs/base_policy.py does.

    python -m experiments.imitation --config=configs/home_base.py

writes runs/home_base/policy. The demonstrations show homes with house rules, never one of those
that are trained and
evaluated in. Time: 18 minutes on two cores.
"""

from ml_collections import ConfigDict

from configs import base_policy
from configs.keys import change

SETTINGS = {"steps": 2600, "careful": 0.6, "demonstrations": 12000, "pairs": 0.15}


def get_config(arg: str | None = None) -> ConfigDict:
    config = change(base_policy.get_config(arg), SETTINGS)
    config.env.name = "home"
    return config
