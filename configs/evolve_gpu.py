"""Your world with a pretrained model on one GPU of 80 GB, by default SmolLM2-135M.

    make pretrained
    python run.py --mode=evolve --config=configs/evolve_gpu.py:lending:Lending
    python run.py --mode=evolve --config=configs/evolve_gpu.py:lending:Lending \
        --config.model.path=/dir/of/a/checkpoint

Larger batches than those of configs/evolve_pretrained.py, in bfloat16. docs/speed.md says what was
measured; a whole run has not been seen.
"""

from ml_collections import ConfigDict

from configs import evolve_pretrained


def get_config(arg: str | None = None) -> ConfigDict:
    config = evolve_pretrained.get_config(arg)
    config.steps = 60
    config.model.dtype = "bfloat16"
    config.engine.cache_dtype = "bfloat16"
    config.engine.slots = 128
    config.rollout.tasks = 16
    config.rollout.concurrency = 128
    config.learner.share_prompts = False
    config.learner.most_segments = 8
    config.learner.micro = 8
    config.learner.chunk = 1024
    config.optim.lr = 2e-5
    config.evolve.updates = 100
    config.evolve.rows = 16
    return config
