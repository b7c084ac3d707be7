"""Your world with a pretrained model, by default SmolLM2-135M on two cores.

    evolver evolve lending:Lending --config=configs/evolve_pretrained.py      # fetches the model
    make pretrained
    python run.py --mode=evolve --config=configs/evolve_pretrained.py:lending:Lending

`--config.model.path` names another checkpoint, and `--config.model.dtype=bfloat16` suits a GPU.
Everything but the settings below is that of configs/evolve.py.
"""

from ml_collections import ConfigDict

from configs import base, evolve
from configs.pretrained import SMOL


def get_config(arg: str | None = None) -> ConfigDict:
    config = evolve.get_config(arg)
    config.model.path = SMOL
    config.steps = 20
    config.engine.weight_dtype = "bfloat16"
    config.rollout.max_tokens = 64
    config.learner.updates = 1
    config.learner.micro = 2
    config.learner.chunk = 256
    config.optim.lr = 3e-5
    config.optim.warmup = 5
    config.navigating.extractor.args = base.get_config().navigating.extractor.args
    config.eval.every = 10
    config.evolve.enough = 0.5  # a round takes most of an hour on two cores
    config.evolve.rounds = 1
    config.evolve.updates = 40
    config.evolve.rows = 4
    config.evolve.lr = 1e-4
    return config
