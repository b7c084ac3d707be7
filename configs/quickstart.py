"""A small agent that learns to run a travel agency: everything in one process, on two CPU cores.

    python run.py --config=configs/quickstart.py            # all three mechanisms
    python run.py --config=configs/quickstart.py:grpo       # the same budget, parts off

| argument | self-questioning | self-navigating | self-attributing |
|---|---|---|---|
| grpo | | | |
| q | yes | | |
| n | | yes | |
| a | | | yes |
| qn | yes | yes | |
| qa | yes | | yes |
| na | | yes | yes |
| all | yes | yes | yes |

With self-questioning the policy trains on invented tasks alone, without it on the agency's own
training tasks. Nothing says what this agency wants done before it changes an order (`rules`,
envs/desk/rules.py): the policy has only seen others. It is evaluated on tasks with other words,
worlds and combinations of goals.

docs/results.md has the scores to expect of all three mechanisms and the time that they take, and
compares the arguments in shorter runs.
"""

from ml_collections import ConfigDict

from configs import base

ROWS = {
    "grpo": (),
    "q": ("questioning",),
    "n": ("navigating",),
    "a": ("attributing",),
    "qn": ("questioning", "navigating"),
    "qa": ("questioning", "attributing"),
    "na": ("navigating", "attributing"),
    "all": ("questioning", "navigating", "attributing"),
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "all" if arg is None else arg
    if arg not in ROWS:
        raise ValueError(f"quickstart.py:{arg}: choose one of {', '.join(ROWS)}")
    config = base.get_config()
    config.steps = 80
    config.model.path = "configs/assets/travel_base"

    config.rollout.tasks = 16
    config.rollout.group = 8
    config.rollout.temperature = 1.0
    config.rollout.max_turns = 10
    config.rollout.max_tokens = 80
    config.rollout.context = 512
    config.template.show_tools = False
    config.template.max_observation = 256
    config.engine.slots = 64

    config.learner.updates = 2
    config.learner.row = 512
    config.learner.micro = 8
    config.optim.lr = 5e-4
    config.optim.schedule = "cosine"
    config.optim.weight_decay = 0.0
    config.loss.kl_coef = 0.0

    config.env.args.rules = 0
    config.questioning.share = 1.0
    config.questioning.explorer.args.most = 8
    config.questioning.budget = 600
    config.questioning.capacity = 1000
    config.questioning.learnable = True
    config.navigating.extractor.args.render = "envs.hints:render"
    config.navigating.extractor.args.when = "envs.hints:when_text"
    config.navigating.top_k = 1
    config.navigating.solutions = True

    config.eval.temperature = 1.0
    config.eval.temperatures = (0.2, 0.4, 0.6, 0.8)
    config.eval.every = 20
    config.checkpoint.every = 5

    for mechanism in ROWS[arg]:
        config[mechanism].enabled = True
    if "attributing" in ROWS[arg]:
        config.advantage.name = "adca"
    return config
