"""Your world on one GPU of 80 GB: with the default policy, or with a pretrained one.

    python run.py --mode=evolve --config=configs/evolve_gpu.py:lending:Lending
    make pretrained
    python run.py --mode=evolve --config=configs/evolve_gpu.py:lending:Lending \
        --config.model.path=.cache/smollm2-135m-instruct --config.optim.lr=2e-5

Larger batches than those of configs/evolve.py, in bfloat16. docs/results.md and docs/speed.md say
what was measured with the default policy; no whole run of a pretrained one was seen.
"""

from configs import evolve
from configs.keys import variant

SETTINGS = {
    "model.dtype": "bfloat16",
    "engine.cache_dtype": "bfloat16",
    "engine.slots": 128,
    "rollout.tasks": 16,
    "rollout.concurrency": 128,
    "learner.share_prompts": False,
    "learner.most_segments": 8,
    "learner.micro": 8,
    "evolve.rows": 16,
}
get_config = variant(evolve, SETTINGS)
