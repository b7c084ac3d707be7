"""A tiny policy learns by reward on real BFCL tasks, on two CPU cores.

    # imitate careless demonstrations
    python -m experiments.imitation --config=configs/bfcl_tiny_base.py
    python run.py --config=configs/bfcl_tiny.py                           # GRPO from there

The 27 conversations of the base category whose solutions have at most 3 calls: 15 train, 12 are
held out from learning by reward. The base policy imitated demonstrations of all 27, so the score
measures how carefully the policy works and
is not a BFCL score. Expected on the 12: avg@8 from 22.9 to 45.8 percent. Time: 6 and 4 minutes.
"""

from configs import base
from configs.keys import variant

WORLD = {"tools": "oracle+1", "docs": "brief", "splits": "100/100", "max_calls": 3}
SETTINGS = {
    "env.name": "bfcl",
    "env.args": WORLD,
    "model.path": "runs/bfcl_tiny_base/policy",
    "steps": 40,
    "rollout.tasks": 15,
    "rollout.temperature": 1.0,
    "rollout.max_turns": 12,
    "rollout.max_tokens": 96,
    "rollout.context": 640,
    "engine.slots": 64,
    "learner.updates": 2,
    "learner.row": 640,
    "learner.micro": 4,
    "optim.lr": 1e-4,
    "optim.weight_decay": 0.0,
    "loss.kl_coef": 0.0,
    "eval.split": "val",
    "eval.temperature": 1.0,
    "eval.temperatures": (0.2, 0.4, 0.6, 0.8),
    "checkpoint.every": 5,
}
get_config = variant(base, SETTINGS)
