"""Your world with a pretrained model, by default SmolLM2-135M on two cores.

    evolver evolve lending:Lending --config=configs/evolve_pretrained.py      # fetches the model
    make pretrained
    python run.py --mode=evolve --config=configs/evolve_pretrained.py:lending:Lending

`--config.model.path` names another checkpoint, and `--config.model.dtype=bfloat16` suits a GPU.
Everything but the settings below is that of configs/evolve.py.
"""

from configs import evolve
from configs.keys import variant
from configs.pretrained import SMOL

SETTINGS = {
    "model.path": SMOL,
    "steps": 20,
    "engine.weight_dtype": "bfloat16",
    "rollout.max_tokens": 64,
    "learner.updates": 1,
    "learner.micro": 2,
    "learner.chunk": 256,
    "optim.lr": 3e-5,
    "optim.warmup": 5,
    "navigating.extractor.name": "contrast",  # in its own words
    "eval.every": 10,
    "evolve.enough": 0.5,  # a round takes most of an hour on two cores
    "evolve.rounds": 1,
    "evolve.updates": 40,
    "evolve.rows": 4,
    "evolve.lr": 1e-4,
}
get_config = variant(evolve, SETTINGS)
