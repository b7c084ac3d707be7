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
from configs.keys import change

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
SETTINGS = {
    "steps": 80,
    "model.path": "configs/assets/travel_base",
    "rollout.tasks": 16,
    "rollout.group": 8,
    "rollout.temperature": 1.0,
    "rollout.max_turns": 10,
    "rollout.max_tokens": 80,
    "rollout.context": 512,
    "template.show_tools": False,
    "template.max_observation": 256,
    "engine.slots": 64,
    "learner.updates": 2,
    "learner.row": 512,
    "learner.micro": 8,
    "optim.lr": 5e-4,
    "optim.schedule": "cosine",
    "optim.weight_decay": 0.0,
    "loss.kl_coef": 0.0,
    "env.args.rules": 0,
    "questioning.share": 1.0,
    "questioning.explorer.args.most": 8,
    "questioning.budget": 600,
    "questioning.capacity": 1000,
    "questioning.learnable": True,
    "navigating.extractor.args.render": "envs.hints:render",
    "navigating.extractor.args.when": "envs.hints:when_text",
    "navigating.top_k": 1,
    "navigating.solutions": True,
    "eval.temperature": 1.0,
    "eval.temperatures": (0.2, 0.4, 0.6, 0.8),
    "eval.every": 20,
    "checkpoint.every": 5,
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "all" if arg is None else arg
    if arg not in ROWS:
        raise ValueError(f"quickstart.py:{arg}: choose one of {', '.join(ROWS)}")
    config = change(base.get_config(), SETTINGS)
    for mechanism in ROWS[arg]:
        config[mechanism].enabled = True
    if "attributing" in ROWS[arg]:
        config.advantage.name = "adca"
    return config
