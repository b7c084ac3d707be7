"""Every key of every experiment, once: default, bounds, meaning, unit. The defaults are the paper's, for Qwen2.5-14B.

A variant calls this `get_config` and changes a few values; its docstring states its command, the score to expect and
the time it takes. Any value can be changed on the command line: `--config.rollout.temperature=0.7`. Tuples are written
as `--config.learner.drop='("cancelled","env_error")'`. An unknown key is an error here, in a variant and on the command
line.

A group with the keys `name` and `args` is a plug: `name` is a known name or `module:attribute` of your own file, and
`args` are the keyword-only parameters of that callable, whose signature holds their defaults. docs/extending.md has an
example of each kind; `--mode=plan` prints every call with its defaults.
"""

from configs.keys import Keys, fraction, key, temperature

PRESETS = (
    *("tiny", "mini", "0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"),
    *(f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")),
)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
GATES = ("env_error", "cancelled", "parse_error", "stale", "overlong", "no_signal")


def get_config(arg=None):
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    config = keys().config
    config.lock()
    for free in (name for name, rule in keys().rules.items() if rule.free):
        group = config
        for part in free.split("."):
            group = group[part]
        group.unlock()
    return config


def keys():
    """Return the keys with their rules, as `configs.keys.Keys`."""
    root = Keys()
    root.seed = key(
        0, least=0
    )  # seeds everything random: two runs with one seed give the same metrics
    root.steps = key(
        100, least=1, most=10**7
    )  # iterations: rollouts, then updates, then new weights for the engine
    world_and_policy(root)
    rollouts(root)
    mechanisms(root)
    objective(root)
    learning(root)
    books(root)
    machines(root)
    return root


def world_and_policy(root):
    # The world that the agent acts in.
    env = root.plug(
        "env", "travel"
    )  # a name known to envs.make, or module:Class; `args` go to its constructor
    env.split = "train"  # split of the world that original tasks come from
    env.tasks = ""  # JSON-lines file of tasks to train on instead of the split
    env.mode = key(
        "inprocess", choices=("inprocess", "worker", "http")
    )  # in this process, in workers, on a service
    env.url = ""  # URL of the service, for env.mode=http
    env.python = ""  # interpreter of the workers; "" = this one
    env.workers = key(2, least=1, most=4096)  # worker processes
    env.memory_mb = key(
        0, least=64, most=2**24, zero=True
    )  # address space of one worker process, in MB; 0 = no limit
    env.recycle = key(
        0, least=0
    )  # episodes after which a worker is replaced once it hosts no other; 0 = never
    env.timeout = key(
        60.0, least=0.001, most=10**7
    )  # seconds that one call into the world may take

    # The policy.
    model = root.group("model")
    model.path = (
        ""  # Hugging Face checkpoint to start from, a directory or a Hub id; "" = random weights
    )
    model.preset = key("tiny", choices=PRESETS)  # shape of random weights
    model.tokenizer = ""  # directory of the tokenizer; "" = model.path
    model.dtype = key("float32", choices=("float32", "bfloat16"))  # dtype of the computation
    model.remat = key(
        "none", choices=("none", "dots", "attention", "full")
    )  # what is recomputed; full = least memory
    model.attention = key(  # blockwise runs anywhere; cudnn, pallas need a GPU, splash a TPU; ring is for mesh.sequence
        "auto", choices=("auto", "blockwise", "cudnn", "pallas", "splash", "ring")
    )


def rollouts(root):
    # The context template: how an episode is written down for the policy.
    template = root.plug("template", "causal")
    template.show_tools = (
        True  # list the tools in the system message; False for a policy that has memorised them
    )
    template.thinking = key(
        "auto", choices=("auto", "on", "off")
    )  # thoughts of a Qwen3 policy; auto = as it was saved
    template.parse_error = key(
        "continue", choices=("continue", "end")
    )  # answer a malformed call with an error, or end
    template.cut_turn = key(
        "end", choices=("end", "continue")
    )  # at rollout.max_tokens: end, or use the turn
    template.max_observation = key(
        4096, least=8
    )  # tokens of one observation; longer ones are cut, with a visible mark

    # Rollouts that are trained on.
    rollout = root.group("rollout")
    rollout.tasks = key(32, least=1, most=2**16)  # tasks per step
    rollout.group = key(
        8, least=1, most=4096
    )  # rollouts per task: the unit within which outcomes are compared
    rollout.refill = key(
        0, least=0, most=1000
    )  # rounds of new tasks for groups without signal (dynamic sampling)
    rollout.temperature = temperature(
        0.9
    )  # sampling temperature of the policy, also used in the loss
    rollout.top_p = key(
        1.0, above=0, most=1
    )  # sample from the smallest set of tokens with this probability; 1 = all
    rollout.top_k = key(0, least=0)  # sample from this many of the most probable tokens; 0 = all
    rollout.max_turns = key(30, least=1, most=10**5)  # turns of the agent in one episode
    rollout.max_tokens = key(4096, least=1, most=2**24)  # tokens of one turn
    rollout.context = key(
        25580, least=2, most=2**24
    )  # tokens of one episode, prompt and observations included
    rollout.must_end = (
        False  # an episode that a limit of turns or tokens ends has failed, whatever it had reached
    )
    rollout.timeout = key(
        1800.0, least=0.001, most=10**7
    )  # seconds of one episode, set-up included
    rollout.concurrency = key(256, least=1, most=2**16)  # episodes at a time
    rollout.async_depth = key(
        0, least=0, most=100
    )  # steps that rollouts start ahead of their update; 0 = on-policy

    # The engine that generates.
    engine = root.group("engine")
    engine.name = key("jax", choices=("jax", "vllm"))  # jax: in this process; vllm: on servers
    engine.slots = key(
        256, least=1, most=2**16
    )  # sequences in the KV cache at once, each of rollout.context tokens
    engine.decode_block = key(
        32, least=1, most=4096
    )  # most tokens decoded before new requests can join
    engine.leave = fraction(0.25)  # end a decode block once this fraction of its rows is done
    engine.prefill = key(
        256, least=1, most=2**24
    )  # most tokens of a prompt that are prefilled in one call
    engine.weight_dtype = key(
        "", choices=("", "float32", "bfloat16")
    )  # dtype of the matrices; "" = model.dtype
    engine.cache_dtype = key("float32", choices=("float32", "bfloat16"))  # dtype of keys and values
    engine.in_flight = key(
        "finish", choices=("finish", "cut", "keep")
    )  # requests during a weight update:
    # finish them first, cut them and continue them with the new weights, or keep them going

    # vLLM servers (engine.name=vllm): started by the run, or already running at given addresses.
    vllm = engine.group("vllm")
    vllm.urls = ()  # addresses of running servers; () = start servers on this machine
    vllm.model = "policy"  # name under which the servers offer the policy
    vllm.key = ""  # environment variable that holds the servers' key; "" = none
    vllm.python = ""  # interpreter of a virtual environment with vLLM, to start servers with
    vllm.replicas = key(1, least=1, most=1024)  # servers to start where vllm.devices is empty
    vllm.devices = ()  # CUDA_VISIBLE_DEVICES of each server to start: ("0,1", "2,3")
    vllm.flags = (
        ""  # further flags for `vllm serve`: "--enforce-eager --gpu-memory-utilization 0.6"
    )
    vllm.start_timeout = key(
        900.0, least=1, most=10**7
    )  # seconds within which a started server must answer
    vllm.restarts = key(2, least=0)  # restarts of dead servers, in total
    vllm.transfer = key(
        "shm", choices=("shm", "nccl", "lora", "none")
    )  # how weights travel: shared memory, NCCL,
    # adapter files; none for evaluation only
    vllm.shared = (
        "/dev/shm"  # directory where shm and lora stage weights; must hold the model in model.dtype
    )
    vllm.bucket = key(1024, least=1, most=2**20)  # MiB of weights per request
    vllm.tolerance = key(
        0.0, least=0, most=100
    )  # nats per token between learner and server; 0 = by dtype


def mechanisms(root):
    # Self-questioning: explore the world, invent tasks that can be checked, and train on a mixture.
    questioning = root.group("questioning")
    questioning.enabled = False  # False = train on original tasks only
    questioning.plug(
        "explorer", "curiosity"
    )  # explores and writes tasks: curiosity (no language model), llm
    questioning.plug(
        "words", "plain"
    )  # words tasks: plain (as explored), model (reworded by a language model)
    questioning.attempts = key(
        0, least=0
    )  # unguided attempts at each new task, one of which has to succeed; 0 = none
    questioning.plug(
        "judge", "verifier"
    )  # scores synthetic tasks: verifier, naive, principle, reference
    questioning.share = fraction(
        0.5
    )  # share of synthetic tasks in a step (the paper's lambda); 1 = no original tasks
    questioning.tasks = (
        ""  # JSON-lines file of synthetic tasks, as `--mode=explore` writes it; "" = explore
    )
    questioning.budget = key(500, least=0)  # synthetic tasks that the first exploration makes
    questioning.refresh = key(0, least=0)  # synthetic tasks that each later exploration makes
    questioning.every = key(
        0, least=0
    )  # steps between explorations; 0 = explore once, before the first step
    questioning.capacity = key(500, least=1)  # most synthetic tasks kept
    questioning.overlap = fraction(
        0.8
    )  # Jaccard similarity of two queries at which the later task is a duplicate
    questioning.learnable = (
        False  # prefer synthetic tasks that are solved sometimes, but not always
    )

    # Self-navigating: some rollouts are guided by experience, which is stripped before training.
    navigating = root.group("navigating")
    navigating.enabled = False  # False = no rollout sees experience
    navigating.share = fraction(0.5)  # share of guided rollouts in a group (the paper's eta)
    navigating.pool = (
        ""  # directory of an experience pool, as `--mode=pool` writes it; "" = make one
    )
    navigating.tasks = key(
        32, least=0
    )  # tasks that the first pool is made from, in the run's mixture; 0 = all
    navigating.rollouts = key(
        4, least=0
    )  # rollouts of each of them (the paper's N_pc); 0 = start with an empty pool
    navigating.solutions = (
        False  # the explorer's solutions of invented tasks count as first attempts, too
    )
    navigating.every = key(
        0, least=0
    )  # steps between additions to the pool; 0 = the first pool stays as it is
    navigating.top_k = key(5, least=1, most=10**4)  # most experiences in one prompt
    navigating.min_similarity = fraction(0.3)  # cosine similarity below which nothing is retrieved
    navigating.plug(
        "extractor", "contrast"
    )  # makes experience from attempts: contrast (no language model), llm
    navigating.plug(
        "embedder", "ngrams"
    )  # embeds what is searched: ngrams (hashed), policy (its states), endpoint
    navigating.plug(
        "refine", "none"
    )  # refines what was retrieved: none, rerank, rewrite (both by a language model)

    # Self-attributing: each turn is labelled GOOD, BAD or abstain.
    attributing = root.group("attributing")
    attributing.enabled = False  # False = no labels
    attributing.plug("judge", "replay")  # labels turns: replay (counterfactual, by the world), llm

    # Language models, on any OpenAI-compatible server, or the policy itself. A role inherits keys that it leaves empty.
    llm = root.group("llm")
    llm.url = ""  # URL of the server, including /v1: http://127.0.0.1:8000/v1; policy = the current policy, by the
    # run's engine; policy:initial = the initial one, by a second jax engine with weights and KV cache of its own
    llm.model = ""  # name of the model on the server; the policy needs none
    llm.key = ""  # environment variable that holds the key; "" = none
    llm.cache = ""  # directory of cached answers, which runs may share; "" = llm_cache in the workdir, "off" = no cache
    llm.concurrency = key(32, least=1, most=2**16)  # calls at a time, per server
    llm.requests_per_minute = key(0, least=0)  # per server, not of the policy; 0 = no limit
    llm.tokens_per_minute = key(0, least=0)  # the same, for tokens of prompts and answers together
    llm.deadline = key(120.0, least=0.1, most=10**7)  # seconds of one attempt
    llm.attempts = key(
        6, least=1, most=1000
    )  # attempts per question; waits double from 1 to 60 seconds
    llm.failures = key(20, least=1)  # consecutive failed questions after which the run ends
    llm.prices = ""  # JSON file {model: [money per million prompt tokens, per million completion tokens]}; "" = free
    llm.budget_money = key(
        0.0, least=0
    )  # cost at which the run ends, in the unit of the prices; 0 = no limit
    llm.budget_tokens = key(
        0, least=0
    )  # prompt and completion tokens at which the run ends; 0 = no limit
    llm.shown = key(2000, least=16)  # most characters of one action or observation shown to a model
    role(llm, "explorer", heat=1.0, max_tokens=2048)  # explores, for questioning.explorer
    role(
        llm, "writer", heat=1.0, max_tokens=8192
    )  # writes tasks, for questioning.explorer and .words
    role(llm, "judge", heat=0.0, max_tokens=8192)  # scores outcomes, for questioning.judge
    role(llm, "step_judge", heat=0.0, max_tokens=8192)  # labels turns, for attributing.judge
    role(
        llm, "summariser", heat=0.0, max_tokens=4096
    )  # extracts experience, for navigating.extractor
    role(llm, "reranker", heat=0.0, max_tokens=2048)  # refines experience, for navigating.refine
    role(
        llm, "embedder", heat=0.0, max_tokens=1
    )  # for navigating.embedder; uses url, model and key only


def role(llm, name, *, heat, max_tokens):
    """Add the keys of one role of a language model."""
    keys = llm.group(name)
    keys.url = ""  # "" = llm.url
    keys.model = ""  # "" = llm.model
    keys.key = ""  # "" = llm.key
    keys.temperature = temperature(heat)  # 0 = greedy
    keys.top_p = key(
        1.0, above=0, most=1
    )  # sample from the smallest set of tokens with this probability; 1 = all
    keys.max_tokens = key(max_tokens, least=1, most=2**24)  # tokens of one answer
    keys.extra = ""  # further fields of the request, as JSON: {"top_k": 100}, the only one that the policy knows


def objective(root):
    # The advantage estimator: from outcomes and labels to one number per turn.
    advantage = root.plug(
        "advantage", "grpo"
    )  # grpo, rloo, dr_grpo, loop, adca (needs attributing; args.norm is
    # bounded by default, and "trajectory" is the paper's)
    advantage.synthetic = key(
        1.0, least=0, most=1000
    )  # factor on the advantages of synthetic tasks

    # The loss: a policy objective per token, and what is added to it.
    loss = root.plug("loss", "ppo")  # ppo, gspo, cispo, nll
    loss.aggregate = key(  # how token losses are averaged
        "token-mean",
        choices=(
            "token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ),
    )
    loss.kl_coef = key(
        0.001, least=0, most=1000
    )  # coefficient of the KL to the initial policy; 0 = no reference
    loss.kl_estimator = key(
        "k3", choices=("k2", "k3")
    )  # estimator of that KL (k1's gradient is 0 on average)
    loss.reference = key(
        "device", choices=("device", "host")
    )  # memory that holds the reference policy between uses
    loss.entropy_coef = key(0.0, least=0, most=1000)  # coefficient of an entropy bonus
    loss.old_logp = key(
        "recomputed", choices=("recomputed", "sampled")
    )  # denominator of the ratio: learner or engine
    loss.guided_prompt = key(
        "stripped", choices=("stripped", "guided")
    )  # prompt of a guided rollout's old logp
    loss.importance_cap = key(
        2.0, least=1, zero=True
    )  # truncation of engine-to-learner weights; 0 = no weights
    loss.importance_level = key(
        "token", choices=("token", "sequence")
    )  # unit that gets an importance weight
    loss.importance_low = fraction(0.0)  # mask units whose untruncated weight is below this
    loss.importance_high = key(
        0.0, least=0
    )  # mask units whose untruncated weight is above this; 0 = none
    loss.mismatch_alarm = key(
        3.0, least=0
    )  # multiple of the usual engine-learner gap that raises an alarm; 0 = never


def learning(root):
    # AdamW.
    optim = root.group("optim")
    optim.lr = key(1e-6, above=0, most=1)  # peak learning rate
    optim.schedule = key(
        "constant", choices=("constant", "cosine", "linear")
    )  # after warm-up; the others end at 0
    optim.warmup = key(0, least=0)  # updates of the linear warm-up, from lr / warmup to lr
    optim.b1 = key(0.9, least=0, below=1)  # decay of the first moment
    optim.b2 = key(0.999, least=0, below=1)  # decay of the second moment
    optim.eps = key(1e-8, above=0, most=1)  # added to the root of the second moment
    optim.weight_decay = key(0.01, least=0, most=1000)  # of matrices and embeddings
    optim.clip = key(1.0, least=0)  # global norm to which gradients are clipped; 0 = no clipping
    optim.master = key(
        "float32", choices=("float32", "bfloat16")
    )  # dtype of trained weights; bfloat16 rounds randomly
    optim.offload = False  # keep the moments in host memory between updates

    # Low-rank adapters, trained instead of the weights, which are then kept in model.dtype.
    lora = root.group("lora")
    lora.rank = key(0, least=0, most=4096)  # rank of the adapters; 0 = train the weights
    lora.alpha = key(16.0, above=0, most=10**6)  # adapters are scaled by alpha / rank
    lora.targets = key(MATRICES, choices=MATRICES)  # matrices that get an adapter

    # How the samples of a step become updates.
    learner = root.group("learner")
    learner.updates = key(
        4, least=1, most=2**16
    )  # mini-batches per step, with nearly equal numbers of tasks
    learner.epochs = key(1, least=1, most=1000)  # passes over the samples of a step
    learner.row = key(
        25600, least=2, most=2**24
    )  # tokens of a packed row; longer samples are dropped as overlong
    learner.micro = key(
        1, least=1, most=4096
    )  # rows per forward and backward pass; changes memory, not the result
    learner.widths = key(
        1, least=1, most=64
    )  # row widths to compile, row/2 to row, to cut padding; same result
    learner.share_prompts = (
        False  # rollouts of a task share their prompt's tokens in a row; same result, fewer tokens
    )
    learner.chunk = key(
        1024, least=1, most=2**24
    )  # tokens per device in one pass of the output head
    learner.max_staleness = key(
        1, least=0
    )  # steps between sampling and training; older samples are dropped
    learner.drop = key(  # gates that drop rollouts; parse_error is off by default
        ("cancelled", "env_error", "stale", "overlong", "no_signal"), choices=GATES
    )
    learner.drop_truncated = False  # drop episodes that a limit cut short as overlong (DAPO)


def books(root):
    # Evaluation on held-out tasks, with fixed seeds.
    held_out = root.group("eval")
    held_out.split = "dev"  # held-out split, which is refused for training; "" = none, for a world with one split
    held_out.tasks = key(0, least=0)  # tasks of the split, drawn once; 0 = all
    held_out.rollouts = key(
        8, least=1, most=4096
    )  # rollouts per task: the k of avg@k, best@k, pass@k
    held_out.seeds = key(
        1, least=1, most=1000
    )  # evaluations of --mode=eval by different seeds, for a deviation
    held_out.temperature = temperature(0.9)  # sampling temperature of these rollouts
    held_out.temperatures = key(
        (), least=0.01, most=100
    )  # further ones, for the policy before training: they
    # tell what was learned from what a better temperature alone gives
    held_out.greedy = True  # add one rollout per task at temperature 0
    held_out.every = key(
        10, least=0
    )  # steps between evaluations, also before the first and after the last; 0 = never
    held_out.experience = fraction(
        0.0
    )  # share of a task's evaluation rollouts that are guided by experience

    checkpoint = root.group("checkpoint")
    checkpoint.every = key(
        10, least=1
    )  # steps between checkpoints; also after the last step and when interrupted
    checkpoint.keep = key(2, least=1)  # latest checkpoints kept, in addition to the best by avg@k
    checkpoint.milestones = key(
        0, least=0
    )  # keep every checkpoint whose step is a multiple of this; 0 = none

    log = root.group("log")
    log.trajectories = key(
        1, least=0
    )  # steps between two files of rollouts; 0 = none, also of held-out rollouts
    log.wandb = key("off", choices=("off", "offline", "online"))  # Weights & Biases
    log.project = "evolver"  # W&B project
    log.group = ""  # W&B group of runs that are compared; "" = none
    log.tags = ()  # W&B tags
    log.tensorboard = False  # write TensorBoard files too


def machines(root):
    # Devices along each mesh axis; their product is the number of devices used. configs/meshes.py has presets.
    mesh = root.group("mesh")
    mesh.data = key(1, least=1, most=2**16)  # splits rows; weights are replicated
    mesh.fsdp = key(1, least=1, most=2**16)  # splits rows and weights
    mesh.tensor = key(1, least=1, most=2**16)  # splits heads and hidden units
    mesh.sequence = key(1, least=1, most=2**16)  # splits the tokens of a row

    # Processes of one run, one per host. They share the workdir; each plays its share of the rollouts.
    hosts = root.group("hosts")
    hosts.count = key(
        1, least=0
    )  # processes; 0 = take these three keys from Slurm, Kubernetes or the TPU pod
    hosts.index = key(0, least=0)  # index of this process, from 0
    hosts.coordinator = ""  # host:port of process 0
    hosts.deadline = key(
        60.0, least=1, most=10**7
    )  # seconds without a heartbeat after which a process counts as lost

    # Mesh axes that split each axis of the weights: "" = none, or several: "fsdp,sequence".
    sharding = root.group("sharding")
    sharding.vocab = "tensor"  # of the embedding and the output head
    sharding.embed = "fsdp,sequence"  # the model's width
    sharding.heads = "tensor"  # query heads
    sharding.kv_heads = "tensor"  # key and value heads
    sharding.mlp = "tensor"  # hidden units
    sharding.layers = ""  # layers, which are scanned
    sharding.rank = ""  # rank of adapters
