"""Games of OpenSpiel against itself, in the manner of SPIRAL (arXiv 2506.24119).

    python run.py --config=configs/self_play.py         # both players are the policy
    python run.py --config=configs/self_play.py:random  # the other one moves at random

It is evaluated in games against an opponent that moves at random, as either player: what is shown
is the share of games that it wins. The policy is that of configs/evolve.py, which has never seen a
game. Needs requirements/openspiel.txt.
"""

from ml_collections import ConfigDict

from configs import base
from configs.keys import change

OPPONENTS = {"self": "spiral", "random": "grpo"}  # and the estimator of each
SETTINGS = {
    "steps": 60,
    "env.name": "openspiel",
    "model.path": "configs/assets/reader",
    "template.name": "latest",
    "template.max_observation": 256,
    "template.cut_turn": "continue",  # a turn without an end is no move, and loses
    "rollout.tasks": 16,
    "rollout.group": 8,
    "rollout.max_turns": 12,
    "rollout.max_tokens": 48,
    "rollout.context": 512,
    "engine.slots": 64,
    "learner.updates": 2,
    "learner.row": 512,
    "learner.micro": 8,
    "learner.share_prompts": True,
    "learner.drop": ("cancelled", "env_error", "stale", "overlong"),
    "optim.lr": 1e-4,
    "optim.schedule": "cosine",
    "loss.kl_coef": 0.0,
    "eval.tasks": 48,
    "eval.rollouts": 4,
    "eval.temperature": 1.0,
    "eval.temperatures": (0.3, 0.6),
    "eval.every": 20,
}


def get_config(arg: str | None = None) -> ConfigDict:
    opponent = "self" if arg is None else arg
    if opponent not in OPPONENTS:
        raise ValueError(f"self_play.py:{arg}: choose one of {', '.join(OPPONENTS)}")
    config = change(base.get_config(), SETTINGS)
    config.env.args.opponent = opponent
    config.advantage.name = OPPONENTS[opponent]
    return config
