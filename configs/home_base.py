"""The policy that configs/home.py starts from. It imitates a script that is careful at first and
careless at the end.

    python -m experiments.imitation --config=configs/home_base.py

writes runs/home_base/policy. The demonstrations show homes with house rules, never one of those
that are trained and
evaluated in. Time: 18 minutes on two cores.
"""

from ml_collections import ConfigDict

from configs import imitation
from configs.keys import change

VALUES = {
    "env.name": "home",
    "env.args.houses": True,
    "steps": 2600,
    "careful": 0.6,
    "demonstrations": 12000,
    "hint": 0.5,
    "pairs": 0.15,
    "care": 0.75,
    "row": 384,
    "rows": 16,
    "micro": 16,
}


def get_config(arg: str | None = None) -> ConfigDict:
    return change(imitation.get_config(arg), VALUES)
