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
from configs.keys import use

SMOL = ".cache/smollm2-135m-instruct"  # written by `make pretrained`


def get_config(arg: str | None = None) -> ConfigDict:
    variants = {None: travel, "words": words, "calls": calls}
    if arg not in variants:
        raise ValueError(f"pretrained.py:{arg}: choose words, calls, or no argument")
    return variants[arg]()


def travel() -> ConfigDict:
    """Return the quickstart with tools in the prompt, and settings for a GPU."""
    config = quickstart.get_config("all")
    config.model.path = SMOL
    use(config.navigating.extractor, "contrast")
    config.template.show_tools = True
    config.template.max_observation = 1024
    config.rollout.max_tokens = 512
    config.rollout.context = 8192
    config.learner.row = 8192
    config.learner.micro = 1
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.engine.cache_dtype = "bfloat16"
    config.optim.lr = 1e-6
    config.optim.schedule = "constant"
    config.loss.kl_coef = 0.001
    return config


def two_cores() -> ConfigDict:
    """Return GRPO with settings for a model of 135M parameters on two cores."""
    config = base.get_config()
    config.steps = 40
    config.model.path = SMOL
    config.rollout.tasks = 16
    config.rollout.group = 8
    config.rollout.temperature = 1.0
    config.engine.slots = 64
    config.engine.weight_dtype = (
        "bfloat16"  # half the memory, and about half the time of a product on a CPU with AMX
    )
    config.learner.updates = 1
    config.learner.share_prompts = True
    config.learner.row = 640
    config.learner.chunk = 256  # a step trains few tokens
    config.learner.micro = 2
    config.optim.lr = 1e-5
    config.optim.warmup = 5
    config.loss.kl_coef = 0.0
    config.eval.rollouts = 4
    config.eval.temperature = 1.0
    config.eval.temperatures = (0.2, 0.4, 0.6, 0.8)
    config.eval.every = 20
    return config


def words() -> ConfigDict:
    """Return GRPO on questions of one turn."""
    config = two_cores()
    config.env.name = "reasoning"
    config.env.args.datasets = ("needle_haystack",)
    config.env.args.options = {
        "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5}
    }
    config.env.args.examples = 2
    config.env.args.n_train = 512
    config.rollout.max_turns = 1
    config.rollout.max_tokens = 32
    config.rollout.context = 256
    return config


def calls() -> ConfigDict:
    """Return GRPO on tasks of two calls."""
    config = two_cores()
    config.steps = 20
    config.model.path = "runs/pretrained_base/policy"
    config.rollout.tasks = 8
    config.rollout.must_end = True
    config.optim.lr = 3e-5
    config.optim.warmup = 2
    config.eval.tasks = 32
    config.eval.temperatures = (0.3, 0.6)
    config.eval.every = 10
    config.env.args.level = 2
    config.env.args.n_train = 256
    config.template.show_tools = False
    config.template.max_observation = 128
    config.rollout.max_turns = 6
    config.rollout.max_tokens = 48
    config.rollout.context = 320
    return config
