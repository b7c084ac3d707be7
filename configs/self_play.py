"""Games of OpenSpiel against itself, in the manner of SPIRAL (arXiv 2506.24119).

    python run.py --config=configs/self_play.py         # both players are the policy
    python run.py --config=configs/self_play.py:random  # the other one moves at random

It is evaluated in games against an opponent that moves at random, as either player: what is shown
is the share of games that it wins. The policy is that of configs/evolve.py, which has never seen a
game. Needs requirements/openspiel.txt.
"""

from ml_collections import ConfigDict

from configs import base
from configs.keys import use

OPPONENTS = ("self", "random")


def get_config(arg: str | None = None) -> ConfigDict:
    opponent = "self" if arg is None else arg
    if opponent not in OPPONENTS:
        raise ValueError(f"self_play.py:{arg}: choose one of {', '.join(OPPONENTS)}")
    config = base.get_config()
    config.steps = 60
    config.env.name = "openspiel"
    config.env.args.opponent = opponent
    config.model.path = "configs/assets/reader"
    use(config.template, "latest")
    config.template.max_observation = 256
    config.template.cut_turn = "continue"  # a turn without an end is no move, and loses

    config.rollout.tasks = 16
    config.rollout.group = 8
    config.rollout.max_turns = 12
    config.rollout.max_tokens = 48
    config.rollout.context = 512
    config.engine.slots = 64

    config.learner.updates = 2
    config.learner.row = 512
    config.learner.micro = 8
    config.learner.share_prompts = True
    config.learner.drop = ("cancelled", "env_error", "stale", "overlong")
    config.optim.lr = 1e-4
    config.optim.schedule = "cosine"
    config.loss.kl_coef = 0.0
    config.advantage.name = "spiral" if opponent == "self" else "grpo"

    config.eval.tasks = 48
    config.eval.rollouts = 4
    config.eval.temperature = 1.0
    config.eval.temperatures = (0.3, 0.6)
    config.eval.every = 20
    return config
