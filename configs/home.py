"""The quickstart in another world: a smart home that the policy does not know, trained in on
invented tasks alone.

    # imitate careless demonstrations
    python -m experiments.imitation --config=configs/home_base.py
    python run.py --config=configs/home.py                           # explore this one and train

The arguments are those of the quickstart. Nothing says what this home wants done before a device is
changed (`rules`, envs/desk/rules.py). Bounds, stated before any measurement: avg@8 of the base
policy at its best temperature at most 40, after training greedy and avg@8 at least 65, on 40
held-out tasks with other words, homes and pairs of changes. All are met (docs/results.md).
"""

from configs import quickstart
from configs.keys import variant

SETTINGS = {
    "env.name": "home",
    "env.args.rules": 0,
    "model.path": "runs/home_base/policy",
    "questioning.budget": 400,
}
get_config = variant(quickstart, SETTINGS)
