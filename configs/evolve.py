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
from configs.keys import use


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config()
    config.env.name = arg or "travel"
    config.steps = 40
    config.model.path = "configs/assets/reader"
    use(config.template, "brief", most=300)
    config.template.max_observation = 256

    config.rollout.tasks = 8
    config.rollout.group = 8
    config.rollout.max_turns = 32  # this and the next two: at most
    config.rollout.max_tokens = 96
    config.rollout.context = 2048
    config.rollout.must_end = True
    config.rollout.concurrency = 64
    config.engine.slots = 64

    config.learner.updates = 2
    config.learner.row = 2048
    config.learner.share_prompts = True
    config.optim.lr = 1e-4
    config.optim.warmup = 10
    # Negative advantages, and rewards without demonstrations, unlearned what was imitated
    # (docs/results.md).
    use(config.recipe, "demonstrated", solutions=8, weight=2.0, negative=0.0)
    config.optim.schedule = "cosine"
    config.loss.kl_coef = 0.0
    config.loss.old_logp = "sampled"  # saves a forward pass of every step
    # Failures are longer than successes; in a mean over tokens they outweigh them, and a policy
    # unlearns its calls (docs/results.md).
    config.loss.aggregate = "seq-mean-token-mean"

    config.questioning.enabled = True
    config.questioning.share = 1.0
    # Half of those that train are imitated: many solutions teach more than many passes over few.
    config.questioning.budget = config.questioning.capacity = 1500
    config.questioning.minutes = 15.0
    config.questioning.explorer.args.rounds = 16  # more where a world has few starts
    config.questioning.learnable = True
    config.questioning.words.name = "asked"  # other words than the tools', as users have
    config.navigating.enabled = True
    config.navigating.rollouts = 0
    config.navigating.solutions = True
    config.navigating.extractor.args.render = "envs.hints:render"
    config.navigating.extractor.args.when = "envs.hints:when_text"
    config.navigating.top_k = 1
    config.attributing.enabled = True
    config.advantage.name = "adca"

    config.eval.tasks = 32
    config.eval.rollouts = 4
    config.eval.temperature = 1.0
    config.eval.temperatures = (0.3, 0.6)
    config.eval.every = 20
    config.checkpoint.every = 5
    config.evolve.probes = 32
    config.evolve.enough = 0.95
    config.evolve.rounds = 3
    config.evolve.solutions = 1000
    config.evolve.guided = 0.25
    config.evolve.renames = True
    config.evolve.updates = 60
    config.evolve.rows = 8
    config.evolve.lr = 3e-4
    return config
