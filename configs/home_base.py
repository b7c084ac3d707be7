"""The policy that configs/home.py starts from. It imitates a script that is careful at first and
careless at the end, as that of configs/base_policy.py does.

    python -m experiments.imitation --config=configs/home_base.py

writes runs/home_base/policy. The demonstrations show homes with house rules, never one of those
that are trained and
evaluated in. Time: 18 minutes on two cores.
"""

from configs import base_policy
from configs.keys import variant

SETTINGS = {
    "env.name": "home",
    "env.args.houses": True,
    "steps": 2600,
    "careful": 0.6,
    "demonstrations": 12000,
    "pairs": 0.15,
}
get_config = variant(base_policy, SETTINGS)
