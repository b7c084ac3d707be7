"""The policy that the quickstart starts from, made by imitating a script that is careful first and careless at last.

    python run.py --config=configs/base_policy.py

writes runs/base_policy/policy; configs/assets/travel_base is a copy of it. Expected on dev: avg@8 34.6, greedy 81.2, in
percent. Time: 27 minutes on one core.
"""

from configs import base


def get_config(arg=None):
    config = base.get_config(arg)
    config.steps = 2000
    config.model.preset = "mini"
    config.template.tools = False

    config.imitation.demonstrations = 20000
    config.imitation.care = 0.33
    config.imitation.hint = 0.2
    config.imitation.rows = 24

    config.learner.row = 256
    config.learner.micro = 24
    config.optim.lr = 3e-3
    config.optim.schedule = "cosine"
    config.optim.warmup = 20
    config.optim.b2 = 0.98
    return config
