"""Your model: the template for runs from a pretrained checkpoint, on one GPU or on two cores.

    make pretrained
    python run.py --config=configs/pretrained.py --config.model.path=/dir/of/a/checkpoint
    python run.py --config=configs/pretrained.py:words
    python -m experiments.imitation --config=configs/pretrained_base.py
    python run.py --config=configs/pretrained.py:calls

| argument | machine | world | mechanisms |
|---|---|---|---|
| none | one GPU of 80 GB, 1.5B | `travel`, with its tools in the prompt | all three |
| words | two cores, SmolLM2 | reasoning-gym: one turn, after two solved questions | none: GRPO |
| calls | two cores, SmolLM2 | `travel`: tasks of two calls, after a short imitation | none: GRPO |

`words` needs requirements/reasoning.txt. Without an argument, the planner estimates, a 1.5B model
fits on one GPU of 80 GB; it has not been measured there. On held-out tasks `words` goes from 5.4 to
59.7% (27.1 before, at the best temperature) in about half an hour, and `calls` from 16.9 to 53.9%
(23.4 before) in 40 minutes (docs/results.md).
"""

from ml_collections import ConfigDict

from configs import base, quickstart
from configs.keys import change

SMOL = ".cache/smollm2-135m-instruct"  # written by `make pretrained`

# The quickstart with tools in the prompt, and settings for a GPU.
TRAVEL = {
    "model.path": SMOL,
    "navigating.extractor.name": "contrast",
    "template.show_tools": True,
    "template.max_observation": 1024,
    "rollout.max_tokens": 512,
    "rollout.context": 8192,
    "learner.row": 8192,
    "learner.micro": 1,
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "engine.cache_dtype": "bfloat16",
    "optim.lr": 1e-6,
    "optim.schedule": "constant",
    "loss.kl_coef": 0.001,
}
# GRPO with settings for a model of 135M parameters on two cores.
TWO_CORES = {
    "steps": 40,
    "model.path": SMOL,
    "rollout.tasks": 16,
    "rollout.group": 8,
    "rollout.temperature": 1.0,
    "engine.slots": 64,
    # half the memory, and about half the time of a product on a CPU with AMX
    "engine.weight_dtype": "bfloat16",
    "learner.updates": 1,
    "learner.share_prompts": True,
    "learner.row": 640,
    "learner.chunk": 256,  # a step trains few tokens
    "learner.micro": 2,
    "optim.lr": 1e-5,
    "optim.warmup": 5,
    "loss.kl_coef": 0.0,
    "eval.rollouts": 4,
    "eval.temperature": 1.0,
    "eval.temperatures": (0.2, 0.4, 0.6, 0.8),
    "eval.every": 20,
}
# The same on questions of one turn.
WORDS = {
    "env.name": "reasoning",
    "env.args.datasets": ("needle_haystack",),
    "env.args.options": {"needle_haystack": {"min_num_statements": 3, "max_num_statements": 5}},
    "env.args.examples": 2,
    "env.args.n_train": 512,
    "rollout.max_turns": 1,
    "rollout.max_tokens": 32,
    "rollout.context": 256,
}
# The same on tasks of two calls.
CALLS = {
    "steps": 20,
    "model.path": "runs/pretrained_base/policy",
    "rollout.tasks": 8,
    "rollout.must_end": True,
    "optim.lr": 3e-5,
    "optim.warmup": 2,
    "eval.tasks": 32,
    "eval.temperatures": (0.3, 0.6),
    "eval.every": 10,
    "env.args.level": 2,
    "env.args.n_train": 256,
    "template.show_tools": False,
    "template.max_observation": 128,
    "rollout.max_turns": 6,
    "rollout.max_tokens": 48,
    "rollout.context": 320,
}


def get_config(arg: str | None = None) -> ConfigDict:
    variants = {None: TRAVEL, "words": WORDS, "calls": CALLS}
    if arg not in variants:
        raise ValueError(f"pretrained.py:{arg}: choose words, calls, or no argument")
    config = change(base.get_config(), TWO_CORES) if arg else quickstart.get_config("all")
    return change(config, variants[arg])
