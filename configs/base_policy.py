"""The policy that the quickstart starts from. It imitates a script that is careful at first and careless at the end.

    python -m experiments.imitation --config=configs/base_policy.py

writes runs/base_policy/policy, of which configs/assets/travel_base is a copy. Expected on dev, in percent: avg@8 34.6,
greedy 81.2. Time: 27 minutes on one core.
"""

from configs import imitation


def get_config(arg=None):
    config = imitation.get_config(arg)
    config.care = 0.33
    return config
