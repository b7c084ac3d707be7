"""The policy that the quickstart starts from. It imitates a script that is careful at first and
careless at the end.

    python -m experiments.imitation --config=configs/base_policy.py

writes runs/base_policy/policy, of which configs/assets/travel_base is a copy. Expected on dev in
the agency `rules=0`,
in percent: avg@8 21.9, 24.3 at the best temperature, greedy 14.6. Time: 34 minutes on two busy
cores.
"""

from configs import imitation
from configs.keys import variant

SETTINGS = {
    "env.args.houses": True,
    "steps": 4500,
    "careful": 0.55,
    "hint": 0.5,
    "care": 0.75,
    "row": 384,
    "rows": 16,
    "micro": 16,
}
get_config = variant(imitation, SETTINGS)
