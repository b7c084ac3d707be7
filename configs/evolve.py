"""Your world: from its tools to an agent that has learned them.

    make pretrained
    evolver evolve lending:Lending
    evolver evolve --mcp "python my_server.py"
    evolver evolve --gym FrozenLake-v1
    python run.py --mode=evolve --config=configs/evolve.py:lending:Lending

The argument is a world. The policy is SmolLM2-135M on a CPU; --config.model.path names another, and
--config.model.dtype=bfloat16 suits a GPU. evolver/evolve.py says what happens, and
docs/your_world.md what to expect. Every setting is the same for every world: how long episodes are
is read off the explorer's solutions.
"""

from ml_collections import ConfigDict

from configs import base
from configs.pretrained import SMOL


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config()
    config.env.name = arg or "travel"
    config.steps = 20
    config.model.path = SMOL
    config.template.name = "brief"
    config.template.max_observation = 256

    config.rollout.tasks = 8
    config.rollout.group = 8
    config.rollout.max_turns = 16  # this and the next two: at most
    config.rollout.max_tokens = 64
    config.rollout.context = 2048
    config.rollout.must_end = True
    config.rollout.concurrency = 64
    config.engine.slots = 64
    config.engine.weight_dtype = "bfloat16"

    config.learner.updates = 1
    config.learner.row = 2048
    config.learner.micro = 2
    config.learner.chunk = 256
    config.learner.share_prompts = True
    config.optim.lr = 3e-5
    config.optim.warmup = 2
    config.loss.kl_coef = 0.0

    config.questioning.enabled = True
    config.questioning.share = 1.0
    config.questioning.budget = 300
    config.questioning.explorer.args.rounds = 16  # a world may have one start
    config.questioning.learnable = True
    config.navigating.enabled = True
    config.navigating.rollouts = 0
    config.navigating.solutions = True
    config.navigating.top_k = 1
    config.attributing.enabled = True
    config.advantage.name = "adca"

    config.eval.tasks = 32
    config.eval.rollouts = 4
    config.eval.temperature = 1.0
    config.eval.temperatures = (0.3, 0.6)
    config.eval.every = 10
    config.checkpoint.every = 5
    return config
