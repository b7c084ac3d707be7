"""Every key of every experiment, once: default, meaning, unit. The defaults are the paper's, for Qwen2.5-14B.

A variant calls this `get_config`, changes a few values, and opens with its command, the score to expect and the time it
takes. Anything can be changed on the command line: `--config.rollout.temperature=0.7`. Tuples are written as
`--config.eval.splits='("dev",)'`. An unknown key is an error here, in a variant, and on the command line.
"""

from ml_collections import ConfigDict


def get_config(arg=None):
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    config = ConfigDict()

    config.seed = 0  # of everything random: two runs of one seed give the same metrics
    config.steps = 100  # iterations: rollouts, then updates, then weights to the engine

    # The world that the agent lives in.
    env = config.env = ConfigDict()
    env.name = "travel"  # a name known to envs.make
    env.args = ConfigDict()  # keyword arguments of the world
    env.split = "train"  # the split that original tasks come from
    env.tasks = ""  # a JSON-lines file of tasks to train on instead of the split
    env.timeout = 60.0  # seconds that one call into the world may take

    # The policy.
    model = config.model = ConfigDict()
    model.path = ""  # directory of a Hugging Face checkpoint to start from; "" = random weights
    model.preset = "tiny"  # shape of random weights: tiny, 0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b
    model.tokenizer = ""  # directory of the tokenizer; "" = model.path
    model.dtype = "float32"  # of the computation: float32, bfloat16
    model.param_dtype = "float32"  # of the weights that are trained
    model.remat = "none"  # what the backward pass recomputes: none, full

    # How an episode is written down for the policy.
    template = config.template = ConfigDict()
    template.name = "linear"  # the whole conversation, append-only
    template.parse_error = (
        "continue"  # a malformed tool call is answered with an error, or ends the turn: continue, end
    )
    template.max_observation = 4096  # tokens of one observation; longer ones are cut at a visible mark

    # Rollouts that are trained on.
    rollout = config.rollout = ConfigDict()
    rollout.tasks = 32  # tasks per step
    rollout.group = 8  # rollouts per task: the unit within which outcomes are compared
    rollout.temperature = 0.9
    rollout.top_p = 1.0
    rollout.top_k = 0  # 0 = all tokens
    rollout.max_steps = 30  # turns of the policy in one episode
    rollout.max_tokens = 4096  # tokens of one turn
    rollout.context = 25580  # tokens of one episode, prompt and observations included
    rollout.timeout = 1800.0  # seconds for one episode, set-up included
    rollout.concurrency = 256  # episodes at a time

    # What generates.
    engine = config.engine = ConfigDict()
    engine.name = "jax"  # jax: in this process
    engine.slots = 256  # sequences decoded at a time, each with a KV cache of rollout.context tokens
    engine.decode_block = 8  # tokens decoded between two looks at the queue
    engine.cache_dtype = "float32"  # of keys and values: float32, bfloat16

    # Self-questioning: explore the world, invent tasks that can be checked, train on a mixture.
    questioning = config.questioning = ConfigDict()
    questioning.enabled = False
    questioning.tasks = (
        ""  # a JSON-lines file of synthetic tasks (`--mode=explore` writes one); "" = explore at the start
    )
    questioning.originals = True  # original tasks in the mixture; False = synthetic ones only
    questioning.ratio = 1.0  # synthetic tasks per original one in the mixture
    questioning.budget = 2000  # environment calls of one exploration
    questioning.max_tasks = 500  # synthetic tasks kept
    questioning.every = 0  # steps between explorations; 0 = only before the first step
    questioning.similarity = 0.8  # Jaccard similarity of words from which a task repeats another

    # Self-navigating: rollouts guided by experience, which is stripped before training.
    navigating = config.navigating = ConfigDict()
    navigating.enabled = False
    navigating.pool = ""  # directory of an experience pool to start from (`--mode=pool` writes one); "" = build one
    navigating.share = 0.5  # eta: round(eta * group) rollouts of a group are guided
    navigating.top_k = 5  # experiences retrieved for a task
    navigating.min_similarity = 0.0  # cosine below which nothing is retrieved
    navigating.rollouts = 4  # rollouts per task that the first pool is made from; 0 = start empty
    navigating.tasks = 32  # tasks that the first pool is made from
    navigating.every = 0  # steps between additions to the pool; 0 = frozen after the first
    navigating.max_pool = 10000  # experiences kept

    # Self-attributing: each step GOOD, BAD or abstain.
    attributing = config.attributing = ConfigDict()
    attributing.enabled = False
    attributing.skip_flat = False  # no labels for groups whose outcomes are all equal
    attributing.max_replayed = 2000  # environment steps replayed for one trajectory; what is left abstains

    # From outcomes and labels to one number per step.
    advantage = config.advantage = ConfigDict()
    advantage.name = "grpo"  # grpo, rloo, dr_grpo, loop, adca (needs attributing)
    advantage.std = "sample"  # of grpo: divides by the group's sample or population deviation
    advantage.eps = 1e-6  # of grpo
    advantage.alpha = 0.1  # of adca: weight of the labels against the outcome
    advantage.alpha_min = 0.0  # of adca: where alpha ends after alpha_steps, along a cosine
    advantage.alpha_steps = 0  # of adca; 0 = alpha is constant
    advantage.scheme = "decouple"  # of adca: decouple, allocation
    advantage.norm = "trajectory"  # of adca: trajectory (paper, section 5), step, reference (its code)
    advantage.outcome_at = "last_step"  # of adca: last_step, all_steps, none (labels only)
    advantage.length_normalise = False  # of adca: divide by the square root of the number of steps
    advantage.weight_synthetic = 1.0  # factor on the advantages of synthetic tasks
    advantage.exclude = (
        "env_error",
        "env_timeout",
        "cancelled",
    )  # stop reasons that neither train nor count in a group

    # The objective.
    loss = config.loss = ConfigDict()
    loss.name = "ppo"  # ppo, gspo, cispo
    loss.clip_low = 0.28
    loss.clip_high = 0.28
    loss.clip_high_guided = 0.6  # upper clip for guided rollouts (selective boosting); = clip_high switches it off
    loss.dual_clip = 3.0  # bound of the loss at negative advantages; 0 = none
    loss.aggregate = "token-mean"  # token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm
    loss.kl = 0.001  # coefficient of the KL to the initial policy; 0 = no reference policy is kept
    loss.kl_estimator = "k3"  # k1, k2, k3
    loss.old_logp = "recomputed"  # denominator of the ratio: recomputed by the learner, or as sampled by the engine
    loss.guided_prompt = (
        "stripped"  # prompt under which guided rollouts get their old log-probabilities: stripped, guided
    )
    loss.importance_cap = 2.0  # truncation of the weights that correct engine against learner; 0 = no correction

    # AdamW.
    optim = config.optim = ConfigDict()
    optim.lr = 1e-6
    optim.schedule = "constant"  # after the warm-up: constant, cosine, linear (to 0 at the last step)
    optim.warmup = 0  # updates from 0 to lr
    optim.b1 = 0.9
    optim.b2 = 0.999
    optim.eps = 1e-8
    optim.weight_decay = 0.01
    optim.clip = 1.0  # global norm of the gradient; 0 = no clipping

    # How a step's samples become updates.
    learner = config.learner = ConfigDict()
    learner.updates = 4  # mini-batches of equal numbers of tasks, one update each
    learner.epochs = 1  # passes over the samples of a step
    learner.row = 25600  # tokens of a packed row; a longer sample is left out as overlong
    learner.micro = 1  # rows per forward and backward pass; changes memory, not the result
    learner.max_staleness = 1  # updates of the weights between sampling and training; older samples are left out

    # Held-out success, on fixed seeds.
    eval_ = config.eval = ConfigDict()
    eval_.split = "dev"
    eval_.tasks = 0  # tasks of the split, evenly spread; 0 = all
    eval_.rollouts = 8  # k of avg@k, best@k, pass@k
    eval_.temperature = 0.9  # of these rollouts
    eval_.greedy = True  # one more rollout per task at temperature 0
    eval_.every = 10  # steps; also before the first and after the last; 0 = neither
    eval_.experience = False  # guide evaluation rollouts too

    checkpoint = config.checkpoint = ConfigDict()
    checkpoint.every = 10  # steps; also after the last, and when interrupted
    checkpoint.keep = 2  # latest ones kept, beside the best by avg@k

    log = config.log = ConfigDict()
    log.trajectories = 1  # steps between two files of trajectories; 0 = none
    log.wandb = "off"  # off, offline, online
    log.project = "evolver"  # of W&B
    log.tensorboard = False

    # Devices along each axis; their product is the number of devices used.
    mesh = config.mesh = ConfigDict()
    mesh.data = 1
    mesh.fsdp = 1
    mesh.tensor = 1
    mesh.sequence = 1

    config.lock()
    env.args.unlock()
    return config
