"""The policy that the quickstart starts from. It imitates a script that is careful at first and
careless at the end.

    python -m experiments.imitation --config=configs/base_policy.py

writes runs/base_policy/policy, of which configs/assets/travel_base is a copy. Expected on dev in
the agency `rules=0`,
in percent: avg@8 21.9, 24.3 at the best temperature, greedy 14.6. Time: 34 minutes on two busy
cores.
"""

from ml_collections import ConfigDict

from configs import imitation


def get_config(arg: str | None = None) -> ConfigDict:
    config = imitation.get_config(arg)
    config.env.args.houses = True
    config.steps = 4500
    config.careful = 0.55
    config.hint = 0.5
    config.care = 0.75
    config.row = 384
    config.rows = config.micro = 16
    return config
