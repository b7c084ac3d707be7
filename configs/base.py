"""Every key of every experiment, once: default, meaning, unit. The defaults are the paper's, for Qwen2.5-14B.

A variant calls this `get_config`, changes a few values, and opens with its command, the score to expect and the time it
takes, or where they stand. Anything can be changed on the command line: `--config.rollout.temperature=0.7`. Tuples are
written as `--config.learner.drop='("cancelled","env_error")'`, arguments of the world as `--config.env.args.n_dev=10`.
An unknown key is an error here, in a variant and on the command line.
"""

from ml_collections import ConfigDict


def role(temperature, max_tokens):
    """What is asked of one language model."""
    role = ConfigDict()
    role.url = ""  # "" = llm.url
    role.model = ""  # "" = llm.model
    role.key = ""  # "" = llm.key
    role.temperature = temperature  # 0 = the likeliest answer
    role.top_p = 1.0  # smallest set of tokens with this probability; 1 = all
    role.max_tokens = max_tokens  # of one answer
    role.extra = ""  # more fields of the request, as JSON: {"top_k": 100}
    return role


def get_config(arg=None):
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    config = ConfigDict()

    config.seed = 0  # of everything random: two runs of one seed give the same metrics
    config.steps = 100  # iterations: rollouts, then updates, then weights to the engine

    # The world that the agent lives in.
    env = config.env = ConfigDict()
    env.name = "travel"  # a name known to envs.make, or module:Class
    env.args = ConfigDict()  # keyword arguments of the world
    env.split = "train"  # the split that original tasks come from
    env.tasks = ""  # a JSON-lines file of tasks to train on instead of the split
    env.mode = "inprocess"  # where worlds run: inprocess, worker (processes of their own), http (a service)
    env.url = ""  # of the service, for env.mode=http
    env.python = ""  # interpreter of the workers; "" = this one
    env.workers = 2  # worker processes
    env.timeout = 60.0  # seconds that one call into the world may take

    # The policy.
    model = config.model = ConfigDict()
    model.path = ""  # a Hugging Face checkpoint to start from: directory or hub id; "" = random weights
    model.preset = "tiny"  # shape of random weights: tiny, mini, 0.5b to 72b, qwen3-0.6b to qwen3-32b
    model.tokenizer = ""  # directory of the tokenizer; "" = model.path
    model.dtype = "float32"  # of the computation: float32, bfloat16
    model.remat = "none"  # what the backward pass computes again: none, dots, attention, full (least memory)
    model.attention = "auto"  # blockwise (anywhere), cudnn, pallas (GPU), splash (TPU), ring (mesh.sequence > 1)

    # How an episode is written down for the policy.
    template = config.template = ConfigDict()
    template.tools = True  # list the tools in the system message; False for a policy that knows them
    template.parse_error = "continue"  # a malformed call is answered with an error, or ends the episode: continue, end
    template.cut_turn = "end"  # a turn cut at rollout.max_tokens ends the episode, or is taken as it is: end, continue
    template.max_observation = 4096  # tokens of one observation; longer ones are cut at a visible mark

    # Rollouts that are trained on.
    rollout = config.rollout = ConfigDict()
    rollout.tasks = 32  # tasks per step
    rollout.group = 8  # rollouts per task: the unit within which outcomes are compared
    rollout.refill = 0  # rounds of further tasks in place of groups without signal, at most (DAPO's dynamic sampling)
    rollout.temperature = 0.9  # of the policy's distribution, here and in the loss
    rollout.top_p = 1.0  # smallest set of tokens with this probability; 1 = all
    rollout.top_k = 0  # most probable tokens; 0 = all
    rollout.max_steps = 30  # turns of the policy in one episode
    rollout.max_tokens = 4096  # tokens of one turn
    rollout.context = 25580  # tokens of one episode, prompt and observations included
    rollout.timeout = 1800.0  # seconds for one episode, set-up included
    rollout.concurrency = 256  # episodes at a time
    rollout.async_depth = 0  # steps that rollouts are started ahead of the update they train; 0 = strictly on-policy

    # What generates.
    engine = config.engine = ConfigDict()
    engine.name = "jax"  # jax: in this process; vllm: on servers
    engine.slots = 256  # sequences whose keys and values are held at once, each of rollout.context tokens
    engine.decode_block = 32  # tokens decoded between two looks at the queue, or fewer:
    engine.leave = 0.25  # until this share of those decoded together is finished; low = others join sooner
    engine.prefill = 256  # longest piece of a prompt that is prefilled in one call, tokens
    engine.cache_dtype = "float32"  # of keys and values: float32, bfloat16
    engine.in_flight = "finish"  # requests during a weight update: finish first, cut and continued, keep (go on)

    # Of engine.name=vllm: servers of one's own, or those at given addresses.
    vllm = engine.vllm = ConfigDict()
    vllm.urls = ()  # of servers that run already; () = start them on this machine
    vllm.model = "policy"  # what they call the policy
    vllm.key = ""  # environment variable that holds their key; "" = none
    vllm.python = ""  # interpreter of a virtual environment with vLLM, to start servers with
    vllm.replicas = 1  # servers to start where no devices are named
    vllm.devices = ()  # one string for each server to start, its CUDA_VISIBLE_DEVICES: ("0,1", "2,3")
    vllm.flags = ""  # more words for `vllm serve`: "--enforce-eager --gpu-memory-utilization 0.6"
    vllm.start_timeout = 900.0  # seconds until a started server has to answer
    vllm.restarts = 2  # of servers that died, in all
    vllm.transfer = "shm"  # of weights: shm (same machine), nccl (GPUs), lora (adapters as files), none (to evaluate)
    vllm.shared = "/dev/shm"  # where shm and lora stage them: room for the model in model.dtype
    vllm.bucket = 1024  # MiB of weights that travel in one request
    vllm.tolerance = 0.0  # nats per token between learner and server after an update; 0 = by model.dtype

    # Self-questioning: explore the world, invent tasks that can be checked, train on a mixture.
    questioning = config.questioning = ConfigDict()
    questioning.enabled = False  # False = original tasks only
    questioning.explorer = "curiosity"  # who explores and writes tasks: curiosity (no language model), llm
    questioning.judge = "verifier"  # of synthetic tasks: verifier (the world), or an LLM: naive, principle, reference
    questioning.share = 0.5  # synthetic tasks among those of a step (lambda); 1 = no original ones
    questioning.tasks = ""  # a JSON-lines file of synthetic tasks, as `--mode=explore` writes it; "" = explore
    questioning.budget = 500  # synthetic tasks made by the first exploration
    questioning.refresh = 0  # synthetic tasks made by each later one
    questioning.every = 0  # steps between explorations; 0 = only before the first step
    questioning.capacity = 500  # synthetic tasks kept
    questioning.breadth = 3  # steps of the breadth-first phase of a walk (N_b)
    questioning.depth = 17  # steps of the depth-first phase (N_d)
    questioning.overlap = 0.8  # Jaccard similarity of queries from which a task repeats another
    questioning.learnable = False  # prefer synthetic tasks that are solved sometimes, not always

    # Self-navigating: rollouts guided by experience, which is stripped before training.
    navigating = config.navigating = ConfigDict()
    navigating.enabled = False  # False = no rollout sees experience
    navigating.share = 0.5  # eta: round(eta * group) rollouts of a group are guided
    navigating.pool = ""  # directory of a pool to start from, as `--mode=pool` writes it; "" = make one
    navigating.tasks = 32  # tasks that the first pool is made from
    navigating.rollouts = 4  # rollouts of each of them (N_pc); 0 = start with an empty pool
    navigating.every = 0  # steps between additions to the pool; 0 = frozen after the first
    navigating.top_k = 5  # most experiences in front of one rollout
    navigating.min_similarity = 0.3  # cosine below which nothing is retrieved
    navigating.extractor = "contrast"  # what makes experience of attempts: contrast (no language model), llm
    navigating.valid = 0.5  # of extractor=llm: least score of its validation; 0 = none
    navigating.embedder = "ngrams"  # what it is searched by: ngrams (hashed, in this process), endpoint (llm.embedder)
    navigating.refine = "none"  # of what is retrieved, by an LLM: none, rerank (choose), rewrite (choose and rewrite)
    navigating.wording = "plain"  # how an experience is put into words: plain, travel (as its base policy knows them)

    # Self-attributing: each step GOOD, BAD or abstain.
    attributing = config.attributing = ConfigDict()
    attributing.enabled = False  # False = no labels
    attributing.judge = "replay"  # who labels: replay (counterfactual, by the world), llm
    attributing.skip_flat = False  # no labels for groups whose outcomes are all equal
    attributing.max_replayed = 2000  # environment steps replayed for one trajectory; what is left abstains

    # Language models beside the policy: any OpenAI-compatible servers. A role takes from here what it leaves empty.
    llm = config.llm = ConfigDict()
    llm.url = ""  # of a server, with its /v1: http://127.0.0.1:8000/v1
    llm.model = ""  # as the server calls it
    llm.key = ""  # environment variable that holds the key; "" = none
    llm.cache = ""  # directory of answers, which runs may share; "" = llm_cache in the workdir, "off" = ask again
    llm.concurrency = 32  # calls at a time, of each server
    llm.requests_per_minute = 0  # of each server; 0 = no limit
    llm.tokens_per_minute = 0  # of each server, prompts and answers; 0 = no limit
    llm.deadline = 120.0  # seconds of one attempt
    llm.attempts = 6  # at one question; the waits between them double from 1 to 60 seconds
    llm.failures = 20  # questions given up in a row after which the run ends
    llm.prices = ""  # a JSON file {model: [money per million prompt tokens, per million completion tokens]}; "" = free
    llm.budget_money = 0.0  # what the whole run may cost, in the unit of the prices; then it ends; 0 = no limit
    llm.budget_tokens = 0  # prompt and completion tokens of the whole run; 0 = no limit
    llm.shown = 2000  # characters of one action or observation that a model is shown
    llm.explorer = role(temperature=1.0, max_tokens=2048)  # of questioning.explorer=llm
    llm.writer = role(temperature=1.0, max_tokens=8192)  # of the same: words tasks
    llm.judge = role(temperature=0.0, max_tokens=8192)  # of questioning.judge
    llm.step_judge = role(temperature=0.0, max_tokens=8192)  # of attributing.judge=llm
    llm.summariser = role(temperature=0.0, max_tokens=4096)  # of navigating.extractor=llm
    llm.reranker = role(temperature=0.0, max_tokens=2048)  # of navigating.refine
    llm.embedder = role(temperature=0.0, max_tokens=1)  # of navigating.embedder=endpoint; only url, model, key matter

    # From outcomes and labels to one number per step.
    advantage = config.advantage = ConfigDict()
    advantage.name = "grpo"  # grpo, rloo, dr_grpo, loop, adca (needs attributing)
    advantage.std = "sample"  # of grpo: divide by the group's sample or population deviation
    advantage.drop_below = 0.0  # of loop: smaller advantages become 0 (its paper: 0.01)
    advantage.alpha = 0.1  # of adca: weight of the labels against the outcome
    advantage.alpha_min = 0.0  # of adca: where alpha ends after alpha_steps, along a cosine
    advantage.alpha_steps = 0  # of adca; 0 = alpha is constant
    advantage.scheme = "decouple"  # of adca: decouple, allocation
    advantage.norm = "trajectory"  # of adca: trajectory (paper, section 5), step, reference (its code)
    advantage.outcome_at = "last_step"  # of adca: last_step, all_steps, none (labels only)
    advantage.length_normalise = False  # of adca: divide by the square root of the number of steps
    advantage.synthetic = 1.0  # factor on the advantages of synthetic tasks

    # The objective.
    loss = config.loss = ConfigDict()
    loss.name = "ppo"  # ppo, gspo, cispo
    loss.clip_low = 0.28  # ratios below 1 - clip_low are clipped
    loss.clip_high = 0.28  # ratios above 1 + clip_high are clipped
    loss.clip_high_guided = 0.6  # the same for guided rollouts (selective boosting)
    loss.dual_clip = 3.0  # bound of the loss where the advantage is negative; 0 = none
    loss.aggregate = "token-mean"  # token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm
    loss.kl = 0.001  # coefficient of the KL to the initial policy; 0 = no reference policy is kept
    loss.reference = "device"  # where that policy waits between uses: device, host
    loss.kl_estimator = "k3"  # k1, k2, k3
    loss.entropy = 0.0  # coefficient of an entropy bonus
    loss.old_logp = "recomputed"  # denominator of the ratio: recomputed by the learner, or sampled by the engine
    loss.guided_prompt = "stripped"  # what guided rollouts get old log-probabilities under: stripped, guided
    loss.importance_cap = 2.0  # truncation of the weights that correct engine against learner; 0 = no correction
    loss.importance_level = "token"  # what gets a weight of its own: token, sequence
    loss.importance_low = 0.0  # tokens (or sequences) whose untruncated weight is below this are masked
    loss.importance_high = 0.0  # ... or above this; 0 = none is
    loss.mismatch_alarm = 3.0  # times the usual gap between engine and learner at which an alarm is raised; 0 = never

    # AdamW.
    optim = config.optim = ConfigDict()
    optim.lr = 1e-6  # peak learning rate
    optim.schedule = "constant"  # after the warm-up: constant, cosine, linear (to 0 at the last step)
    optim.warmup = 0  # updates from 0 to lr
    optim.b1 = 0.9  # decay of the first moment
    optim.b2 = 0.999  # decay of the second moment
    optim.eps = 1e-8  # added to the root of the second moment
    optim.weight_decay = 0.01  # of matrices and embeddings
    optim.clip = 1.0  # global norm of the gradient; 0 = no clipping
    optim.master = "float32"  # dtype of what is trained: float32, bfloat16 (rounded stochastically)
    optim.offload = False  # keep the moments in the host's memory between updates

    # Train low-rank adapters instead of the weights, which are then kept in model.dtype.
    lora = config.lora = ConfigDict()
    lora.rank = 0  # of the additions; 0 = train the weights
    lora.alpha = 16.0  # an addition is scaled by alpha / rank
    lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # matrices that get one

    # How a step's samples become updates.
    learner = config.learner = ConfigDict()
    learner.updates = 4  # mini-batches of equal numbers of tasks, one update each
    learner.epochs = 1  # passes over the samples of a step
    learner.row = 25600  # tokens of a packed row; a longer sample is left out as overlong
    learner.micro = 1  # rows per forward and backward pass; changes memory, not the result
    learner.widths = 1  # programs for rows, from half of learner.row to all of it: for samples about as long as a row
    learner.chunk = 1024  # tokens that a device puts through the output head at once; changes memory, not the result
    learner.max_staleness = 1  # steps between sampling and training; older samples are left out
    learner.drop = ("cancelled", "env_error", "stale", "overlong", "no_signal")  # what is left out; also: parse_error
    learner.drop_truncated = False  # episodes cut short by a limit count as overlong (DAPO)

    # Held-out success, on fixed seeds.
    held_out = config.eval = ConfigDict()
    held_out.split = "dev"  # of the world
    held_out.tasks = 0  # tasks of the split, a fixed draw; 0 = all
    held_out.rollouts = 8  # of each task: k of avg@k, best@k, pass@k
    held_out.temperature = 0.9  # of these rollouts
    held_out.greedy = True  # one more rollout of each task at temperature 0
    held_out.every = 10  # steps; also before the first and after the last; 0 = never
    held_out.experience = False  # guide evaluation rollouts too

    checkpoint = config.checkpoint = ConfigDict()
    checkpoint.every = 10  # steps; also after the last, and when interrupted
    checkpoint.keep = 2  # latest ones kept, beside the best by avg@k
    checkpoint.milestones = 0  # steps; those of every so many are kept for good; 0 = none

    log = config.log = ConfigDict()
    log.trajectories = 1  # steps between two files of trajectories; 0 = none
    log.wandb = "off"  # Weights & Biases: off, offline, online
    log.project = "evolver"  # of W&B
    log.tensorboard = False  # write event files too

    # A base policy where no pretrained one exists: imitate scripted demonstrations instead of learning by reward.
    imitation = config.imitation = ConfigDict()
    imitation.demonstrations = 0  # episodes of envs/<env.name>/demos.py; 0 = learn by reward
    imitation.care = 0.5  # how careful their agent is: 0 slips often, 1 never
    imitation.careful = 0.5  # share of the updates that show no slips, the first; then ever more
    imitation.muon_lr = 0.01  # Muon's learning rate, for the layers' matrices; optim.lr is Adam's, for all else
    imitation.hint = 0.2  # share of demonstrations with an experience in front of the query
    imitation.rows = 24  # packed rows of learner.row tokens per update
    imitation.vocab = 900  # most entries of the tokenizer that is trained on their text
    imitation.final_lr = 0.05  # learning rate at the end, as a share of optim.lr

    # Devices along each axis; their product is the number of devices used. configs/meshes.py has choices for 8 to 64.
    mesh = config.mesh = ConfigDict()
    mesh.data = 1  # rows are spread, weights are copied
    mesh.fsdp = 1  # rows and weights are spread
    mesh.tensor = 1  # heads and hidden units are spread
    mesh.sequence = 1  # tokens of a row are spread

    # Processes of one run, one on each host. They share the workdir; each plays its part of the rollouts.
    hosts = config.hosts = ConfigDict()
    hosts.count = 1  # processes; 0 = what Slurm, Kubernetes or the TPU pod says, also of the other two
    hosts.index = 0  # of this process, from 0
    hosts.coordinator = ""  # host:port where process 0 can be reached
    hosts.deadline = 60.0  # seconds without a sign of life after which a process is lost, and ends the others

    # Which mesh axes split each axis of the weights: "" = none, or several, "fsdp,sequence".
    sharding = config.sharding = ConfigDict()
    sharding.vocab = "tensor"  # of embedding and output head
    sharding.embed = "fsdp,sequence"  # the model's width
    sharding.heads = "tensor"  # of queries
    sharding.kv_heads = "tensor"  # of keys and values
    sharding.mlp = "tensor"  # hidden units
    sharding.layers = ""  # which are walked through one after the other
    sharding.rank = ""  # of adapters

    config.lock()
    env.args.unlock()
    return config
