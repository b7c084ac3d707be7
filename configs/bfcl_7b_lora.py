"""Qwen2.5-7B-Instruct in BFCL v3 multi-turn (base) with low-rank adapters, on one GPU of 141 GB or
on one host of TPUs; otherwise as configs/bfcl_7b.py. docs/first_day.md walks through it.

    python run.py --config=configs/bfcl_7b_lora.py --mode=plan --target=h200:1
    python run.py --config=configs/bfcl_7b_lora.py --config.model.path=/dir/of/Qwen2.5-7B-Instruct
    python run.py --config=configs/bfcl_7b_lora.py --config.mesh.fsdp=4 --config.learner.micro=4 \
        --mode=plan --target=v5p:4

This process generates, too, with the weights that train. Scores and time: not measured.
"""

from ml_collections import ConfigDict

from configs import base, bfcl_7b


def get_config(arg: str | None = None) -> ConfigDict:
    config = bfcl_7b.get_config(arg)
    config.mesh.fsdp = 1
    config.learner.micro = 1
    config.lora.rank = 32
    config.optim.lr = 1e-5  # ten times that of all weights
    config.engine = base.get_config().engine
    config.engine.cache_dtype = "bfloat16"
    config.engine.slots = config.rollout.concurrency = 32
    return config
