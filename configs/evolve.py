"""Your world: from its tools to an agent that has learned them.

    evolver evolve lending:Lending
    evolver evolve --mcp "python my_server.py"
    evolver evolve --gym FrozenLake-v1
    python run.py --mode=evolve --config=configs/evolve.py:lending:Lending

The argument is a world. The policy is the small one of configs/reader_base.py, which has learned to
read tools in made-up worlds; configs/evolve_pretrained.py starts from a pretrained model instead.
evolver/evolve.py says what happens, and docs/your_world.md what to expect. Every setting is the
same for every world: how long episodes are is read off the explorer's solutions.
"""

from ml_collections import ConfigDict

from configs import base
from configs.keys import change

SETTINGS = {
    "steps": 40,
    "model.path": "configs/assets/reader",
    "template.name": "brief",
    "template.args.most": 300,
    "template.max_observation": 256,
    "rollout.tasks": 8,
    "rollout.group": 8,
    "rollout.max_turns": 32,  # this and the next two: at most
    "rollout.max_tokens": 96,
    "rollout.context": 2048,
    "rollout.must_end": True,
    "rollout.concurrency": 64,
    "engine.slots": 64,
    "learner.updates": 2,
    "learner.row": 2048,
    "learner.share_prompts": True,
    "optim.lr": 1e-4,
    "optim.warmup": 10,
    # Negative advantages, and rewards without demonstrations, unlearned what was imitated
    # (docs/results.md).
    "recipe.name": "demonstrated",
    "recipe.args.solutions": 8,
    "recipe.args.weight": 2.0,
    "recipe.args.negative": 0.0,
    "optim.schedule": "cosine",
    "loss.fast": True,  # saves a forward pass of every step
    # Failures are longer than successes; in a mean over tokens they outweigh them, and a policy
    # unlearns its calls (docs/results.md).
    "loss.aggregate": "seq-mean-token-mean",
    "questioning.enabled": True,
    "questioning.share": 1.0,
    # Half of those that train are imitated: many solutions teach more than many passes over few.
    "questioning.budget": 1500,
    "questioning.capacity": 1500,
    "questioning.minutes": 15.0,
    "questioning.explorer.args.rounds": 16,  # more where a world has few starts
    "questioning.learnable": True,
    "questioning.words.name": "asked",  # other words than the tools', as users have
    "navigating.enabled": True,
    "navigating.rollouts": 0,
    "navigating.solutions": True,
    "navigating.extractor.args.render": "envs.hints:render",
    "navigating.extractor.args.when": "envs.hints:when_text",
    "navigating.top_k": 1,
    "attributing.enabled": True,
    "advantage.name": "adca",
    "eval.tasks": 32,
    "eval.rollouts": 4,
    "eval.temperature": 1.0,
    "eval.temperatures": (0.3, 0.6),
    "eval.every": 20,
    "checkpoint.every": 5,
    "evolve.probes": 32,
    "evolve.enough": 0.95,
    "evolve.rounds": 3,
    "evolve.solutions": 1000,
    "evolve.guided": 0.25,
    "evolve.renames": True,
    "evolve.updates": 60,
    "evolve.rows": 8,
    "evolve.lr": 3e-4,
}


def get_config(arg: str | None = None) -> ConfigDict:
    config = change(base.get_config(), SETTINGS)
    config.env.name = arg or "travel"
    return config
