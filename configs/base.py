"""Every key of every experiment, once: default, bounds, meaning, unit. The defaults are the
paper's, for Qwen2.5-14B. Those of language models are in configs/language_models.py, those of the
mesh in configs/meshes.py.

A variant is a table of the keys that it changes, or a few assignments; its docstring states its
command, the score to expect and the time it takes. Any value can be changed on the command line:
`--config.rollout.temperature=0.7`. Tuples are written as
`--config.learner.drop='("cancelled","env_error")'`. An unknown key is an error here, in a variant
and on the command line.

A group with the keys `name` and `args` is a plug: `name` is a known name or `module:attribute` of
your own file, and `args` are the keyword-only parameters of that callable, whose signature holds
their defaults. docs/extending.md has an example of each kind; `--mode=plan` prints every call with
its defaults.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from ml_collections import ConfigDict
from pydantic import Field

from configs.keys import (
    Decay,
    Dtype,
    Few,
    Group,
    Many,
    Patience,
    Plug,
    PositiveFraction,
    Seconds,
    Several,
    Temperature,
    Tokens,
    new,
)
from configs.language_models import Llm
from configs.meshes import Mesh, Sharding
from rl.bounds import Count, CountOrZero, Fraction, NotNegative, Weight

Preset = Literal[
    "tiny", "mini", "reader", "0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
]  # fmt: skip
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]
Gate = Literal["env_error", "cancelled", "parse_error", "stale", "overlong", "no_signal"]
Schedule = Literal["constant", "cosine", "linear"]


def get_config(arg: str | None = None) -> ConfigDict:
    if arg is not None:
        raise ValueError(f"this config takes no argument, got {arg!r}")
    return new(Config)


# --- the world and the policy ---------------------------------------------------------------------


class Env(Plug):
    """The world that the agent acts in."""

    name: str = "travel"
    """A name known to envs.make, or module:Class; `args` go to its constructor."""
    split: str = "train"
    """Split of the world that original tasks come from."""
    tasks: str = ""
    """JSON-lines file of tasks to train on instead of the split."""
    mode: Literal["inprocess", "worker", "http"] = "inprocess"
    """In this process, in workers, on a service."""
    url: str = ""
    """URL of the service, for env.mode=http; served = the run starts one on its machine."""
    python: str = ""
    """Interpreter of the workers, also of those of a service that the run starts; "" = this one."""
    workers: Several = 2
    """Worker processes."""
    memory_mb: Literal[0] | Annotated[int, Interval(ge=64, le=2**24)] = 0
    """Address space of one worker process, in MB; 0 = no limit."""
    recycle: CountOrZero = 0
    """Episodes after which a worker is replaced once it hosts no other; 0 = never."""
    timeout: Seconds = 60.0
    """Seconds that one call into the world may take."""


class Model(Group):
    """The policy."""

    path: str = ""
    """Hugging Face checkpoint to start from, a directory or a Hub id; "" = random weights."""
    preset: Preset = "tiny"
    """Shape of random weights."""
    tokenizer: str = ""
    """Directory of the tokenizer; "" = model.path."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    remat: Literal["none", "dots", "attention", "full"] = "none"
    """Activations that are kept: all, those of matrix products and attention, of attention alone,
    or none (full: least memory)."""
    attention: Literal[
        "auto", "blockwise", "cudnn", "cudnn_apart", "cudnn_packed", "splash", "ring"
    ] = "auto"
    """blockwise runs anywhere; cudnn ones need a GPU, splash a TPU; ring is for mesh.sequence."""


# --- rollouts -------------------------------------------------------------------------------------


class WorldTemplate(Group, extra="forbid", strict=True):
    """The context template of one world of a mixture, where it differs from the others'."""

    name: str = ""
    args: dict[str, Any] = {}
    show_tools: bool = True


class Template(Plug):
    """The context template: how an episode is written down for the policy."""

    name: str = "causal"
    """causal, brief (a line per tool), retrieved (of very many tools those that are asked for),
    latest (the last observation only), reasoning_augmented, sliding_window, self_managing,
    summarised_window."""
    show_tools: bool = True
    """List the tools in the system message; False for a policy that has memorised them."""
    render: Literal["auto", "qwen2.5", "qwen3"] = "auto"
    """The chat template: auto = the checkpoint's own."""
    calls: str = "auto"
    """hermes, llama3_json, mistral, or your CallFormat as module:attribute; auto = as saved, or as
    the chat template writes calls."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thoughts, where the chat template has a switch; auto = as it was saved."""
    parse_error: Literal["continue", "end"] = "continue"
    """Answer a malformed call with an error, or end."""
    cut_turn: Literal["end", "continue"] = "end"
    """At rollout.max_tokens: end, or use the turn."""
    max_observation: int = Field(4096, ge=8)
    """Tokens of one observation; longer ones are cut, with a visible mark."""
    worlds: dict[str, WorldTemplate] = {}
    """Of several worlds: {world: {"name", "args", "show_tools"}}, where they differ from these."""


class Rollout(Group):
    """Rollouts that are trained on."""

    tasks: Many = 32
    """Tasks per step."""
    group: Several = 8
    """Rollouts per task: the unit within which outcomes are compared."""
    refill: int = Field(0, ge=0, le=1000)
    """Rounds of new tasks for groups without signal (dynamic sampling)."""
    temperature: Temperature = 0.9
    """Sampling temperature of the policy, also used in the loss."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens with this probability; 1 = all."""
    top_k: CountOrZero = 0
    """Sample from this many of the most probable tokens; 0 = all."""
    max_turns: int = Field(30, ge=1, le=10**5)
    """Turns of the agent in one episode."""
    max_tokens: Tokens = 4096
    """Tokens of one turn."""
    context: int = Field(25580, ge=2, le=2**24)
    """Tokens of one episode, prompt and observations included."""
    must_end: bool = False
    """An episode that a limit of turns or tokens ends has failed, whatever it had reached."""
    timeout: Seconds = 1800.0
    """Seconds of one episode, set-up included."""
    concurrency: Many = 256
    """Episodes at a time."""
    async_depth: int = Field(0, ge=0, le=100)
    """Steps that rollouts start ahead of their update; 0 = on-policy."""


class Vllm(Group):
    """vLLM servers (engine.name=vllm): started by the run, or already running at given
    addresses."""

    urls: tuple[str, ...] = ()
    """Addresses of running servers, which the processes of a run divide; () = each process starts
    servers on its machine."""
    model: str = "policy"
    """Name under which the servers offer the policy."""
    key: str = ""
    """Environment variable that holds the servers' key; "" = none."""
    python: str = ""
    """Interpreter of a virtual environment with vLLM, to start servers with."""
    replicas: int = Field(1, ge=1, le=1024)
    """Servers to start where vllm.devices is empty."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server to start: ("0,1", "2,3")."""
    flags: str = ""
    """Further flags for `vllm serve`: "--enforce-eager --gpu-memory-utilization 0.6"."""
    start_timeout: Patience = 900.0
    """Seconds within which a started server must answer."""
    restarts: CountOrZero = 2
    """Restarts of a server that dies without taking an update in between."""
    sleep: bool = False
    """Servers that the run starts on the learner's devices free their memory while it updates;
    those at urls stay awake."""
    transfer: Literal["shm", "nccl", "lora", "none"] = "shm"
    """The way that weights travel: shared memory, NCCL, adapter files; none for evaluation only."""
    shared: str = "/dev/shm"
    """Directory where shm and lora stage weights; must hold the model in model.dtype."""
    bucket: int = Field(1024, ge=1, le=2**20)
    """MiB of weights per request."""
    tolerance: float = Field(0.0, ge=0, le=100)
    """Nats per token between learner and server; 0 = by dtype."""


class Engine(Group):
    """The engine that generates."""

    name: Literal["jax", "vllm"] = "jax"
    """jax: in this process; vllm: on servers."""
    slots: Many = 256
    """Sequences in the KV caches at once, each of rollout.context tokens."""
    devices: CountOrZero = 0
    """Devices of this process that generate, each with all weights and its share of the slots; 0 =
    all of the mesh. For engine.name=jax."""
    decode_block: Several = 32
    """Most tokens decoded before new requests can join."""
    leave: Fraction = 0.25
    """End a decode block once this fraction of its rows is done."""
    prefill: Tokens = 256
    """Most tokens of a prompt that are prefilled in one call."""
    weight_dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of the matrices; "" = model.dtype."""
    cache_dtype: Dtype = "float32"
    """Dtype of keys and values."""
    in_flight: Literal["finish", "cut", "keep"] = "finish"
    """Requests during a weight update: finish them first, cut them and continue them with the new
    weights, or keep them going."""
    vllm: Vllm = Vllm()


# --- the mechanisms -------------------------------------------------------------------------------


class Questioning(Group):
    """Self-questioning: explore the world, invent tasks that can be checked, and train on a
    mixture."""

    enabled: bool = False
    """False = train on original tasks only."""
    explorer: Plug = Plug(name="curiosity")
    """Explores and writes tasks: curiosity (no language model), llm."""
    words: Plug = Plug(name="plain")
    """Words tasks: plain (as explored), inlined (values inside the descriptions of tools), asked
    (as people ask, in many forms), model (reworded by a language model)."""
    attempts: CountOrZero = 0
    """Unguided attempts at each new task, one of which has to succeed; 0 = none."""
    judge: Plug = Plug(name="verifier")
    """Scores synthetic tasks: verifier, naive, principle, reference."""
    share: Fraction = 0.5
    """Share of synthetic tasks in a step (the paper's lambda); 1 = no original tasks."""
    tasks: str = ""
    """JSON-lines file of synthetic tasks, as `--mode=explore` writes it; "" = explore."""
    budget: CountOrZero = 500
    """Synthetic tasks that the first exploration makes."""
    minutes: NotNegative = 0.0
    """Minutes after which an exploration ends with the tasks that it has, which a seed then does
    not decide alone; 0 = no limit."""
    refresh: CountOrZero = 0
    """Synthetic tasks that each later exploration makes."""
    every: CountOrZero = 0
    """Steps between explorations; 0 = explore once, before the first step."""
    capacity: Count = 500
    """Most synthetic tasks kept."""
    overlap: Fraction = 0.8
    """Jaccard similarity of two queries at which the later task is a duplicate."""
    learnable: bool = False
    """The sampler `epochs` prefers synthetic tasks that are solved sometimes, but not always."""


class Navigating(Group):
    """Self-navigating: some rollouts are guided by experience, which is stripped before
    training."""

    enabled: bool = False
    """False = no rollout sees experience."""
    share: Fraction = 0.5
    """Share of guided rollouts in a group (the paper's eta)."""
    pool: str = ""
    """Directory of an experience pool, as `--mode=pool` writes it; "" = make one."""
    tasks: CountOrZero = 32
    """Tasks that the first pool is made from, in the run's mixture; 0 = all."""
    rollouts: CountOrZero = 4
    """Rollouts of each of them (the paper's N_pc); 0 = start with an empty pool."""
    solutions: bool = False
    """The explorer's solutions of invented tasks count as first attempts, too."""
    every: CountOrZero = 0
    """Steps between additions to the pool; 0 = the first pool stays as it is."""
    top_k: int = Field(5, ge=1, le=10**4)
    """Most experiences in one prompt."""
    min_similarity: Fraction = 0.3
    """Cosine similarity below which nothing is retrieved."""
    extractor: Plug = Plug(name="contrast")
    """Makes experience from attempts: contrast (no language model), llm."""
    embedder: Plug = Plug(name="ngrams")
    """Embeds what is searched: ngrams (hashed), policy (its states), endpoint."""
    refine: Plug = Plug(name="none")
    """Refines what was retrieved: none, rerank, rewrite (both by a language model)."""


class Attributing(Group):
    """Self-attributing: each turn is labelled GOOD, BAD or abstain."""

    enabled: bool = False
    """False = no labels."""
    judge: Plug = Plug(name="replay")
    """Labels turns: replay (counterfactual, by the world), llm."""


# --- the objective --------------------------------------------------------------------------------


class Recipe(Plug):
    """The phases of a step."""

    name: str = "standard"
    """standard; those of evolver/recipes: see configs/relatives.py."""


class Sampler(Plug):
    """The choice of the tasks of a step."""

    name: str = "epochs"
    """epochs, failures (most failed first), learnability (solved sometimes), quotas (per world)."""


class Reward(Plug):
    """The stage at which outcomes are shaped before they are compared; scores stay as they are."""

    name: str = "score"
    """score, overlong (DAPO's penalty of long rollouts), novelty (a bonus for new states)."""


class Advantage(Plug):
    """The advantage estimator: from outcomes and labels to one number per turn."""

    name: str = "grpo"
    """grpo, rloo, dr_grpo, loop, gigpo, turn_rloo, spiral (for players of a game), adca (needs
    attributing; args.norm is bounded by default, and "trajectory" is the paper's)."""
    synthetic: Weight = 1.0
    """Factor on the advantages of synthetic tasks."""
    worlds: dict[str, Weight] = {}
    """Of several worlds: {world: factor on the advantages of its tasks}."""


class Loss(Plug):
    """The loss: a policy objective per token, and what is added to it."""

    name: str = "ppo"
    """ppo, gspo, cispo, nll, webrl, empo2, actor_critic."""
    aggregate: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """The average of token losses."""
    kl_coef: Weight = 0.001
    """Coefficient of the KL to the reference policy, the initial one by default; 0 = no KL."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of that KL (k1's gradient is 0 on average)."""
    renew_reference: CountOrZero = 0
    """Steps after which the KL's reference becomes the current policy; 0 = it stays the initial
    one."""
    reference: Literal["device", "host"] = "device"
    """Memory that holds the reference policy between uses."""
    entropy_coef: Weight = 0.0
    """Coefficient of an entropy bonus."""
    old_logp: Literal["recomputed", "sampled"] = "recomputed"
    """Denominator of the ratio: learner or engine."""
    fast: bool = False
    """No passes before an update: old_logp counts as sampled and kl_coef as 0. Guided rollouts
    whose prompt is stripped, and plugs that need a reference, keep theirs."""
    guided_prompt: Literal["stripped", "guided"] = "stripped"
    """Prompt of a guided rollout's old logp."""
    importance_cap: Literal[0] | Annotated[float, Ge(1)] = 2.0
    """Truncation of engine-to-learner weights; 0 = no weights."""
    importance_level: Literal["token", "sequence"] = "token"
    """Unit that gets an importance weight."""
    importance_low: Fraction = 0.0
    """Mask units whose untruncated weight is below this."""
    importance_high: NotNegative = 0.0
    """Mask units whose untruncated weight is above this; 0 = none."""
    mismatch_alarm: NotNegative = 3.0
    """Multiple of the usual engine-learner gap that raises an alarm; 0 = never."""


class Optim(Group):
    """AdamW."""

    lr: PositiveFraction = 1e-6
    """Peak learning rate."""
    schedule: Schedule = "constant"
    """After warm-up; the others end at 0 with the last step, also if steps make fewer updates."""
    warmup: CountOrZero = 0
    """Updates of the linear warm-up, from lr / warmup to lr; half of a run that is not longer."""
    b1: Decay = 0.9
    """Decay of the first moment."""
    b2: Decay = 0.999
    """Decay of the second moment."""
    eps: PositiveFraction = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Weight = 0.01
    """Of matrices and embeddings."""
    clip: NotNegative = 1.0
    """Global norm to which gradients are clipped; 0 = no clipping."""
    master: Dtype = "float32"
    """Dtype of trained weights; bfloat16 rounds randomly."""
    offload: bool = False
    """Keep the moments in host memory between updates."""


class Lora(Group):
    """Low-rank adapters, trained instead of the weights, which are then kept in model.dtype."""

    rank: int = Field(0, ge=0, le=4096)
    """Rank of the adapters; 0 = train the weights."""
    alpha: float = Field(16.0, gt=0, le=10**6)
    """Adapters are scaled by alpha / rank."""
    targets: tuple[Matrix, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    """Matrices that get an adapter."""


class Learner(Group):
    """Updates from the samples of a step."""

    updates: Many = 4
    """Mini-batches per step, with nearly equal numbers of tasks."""
    epochs: Few = 1
    """Passes over the samples of a step."""
    row: int = Field(25600, ge=2, le=2**24)
    """Tokens of a packed row; longer samples are dropped as overlong."""
    micro: Several = 1
    """Rows per forward and backward pass; changes memory, not the result."""
    widths: int = Field(1, ge=1, le=64)
    """Row widths to compile, row/2 to row, to cut padding; same result."""
    share_prompts: bool = False
    """Samples of a row share what their prompts begin with; same result, fewer tokens."""
    most_segments: CountOrZero = 0
    """Most samples of a packed row; 0 = as many as fit. With it, GPUs compute attention within
    samples alone (cudnn_packed; before Hopper cudnn_apart), in memory that grows with it."""
    chunk: Tokens = 1024
    """Tokens per device in one pass of the output head."""
    max_staleness: CountOrZero = 1
    """Steps between sampling and training; older samples are dropped."""
    drop: tuple[Gate, ...] = ("cancelled", "env_error", "stale", "overlong", "no_signal")
    """Gates that drop rollouts; parse_error is off by default."""
    drop_truncated: bool = False
    """Drop episodes that a limit cut short as overlong (DAPO)."""


# --- records --------------------------------------------------------------------------------------


class Eval(Group):
    """Evaluation on held-out tasks, with fixed seeds."""

    split: str = "dev"
    """Held-out split, or a JSON-lines file of held-out tasks; refused for training; "" = none, for
    a world with one split."""
    tasks: CountOrZero = 0
    """Tasks of the split, drawn once; 0 = all."""
    worlds: dict[str, CountOrZero] = {}
    """Of several worlds: {world: its tasks of the split}; `tasks` is then for those not named."""
    rollouts: Several = 8
    """Rollouts per task: the k of avg@k, best@k, pass@k."""
    seeds: Few = 1
    """Evaluations of --mode=eval by different seeds, for a deviation."""
    temperature: Temperature = 0.9
    """Sampling temperature of these rollouts."""
    temperatures: tuple[Annotated[float, Interval(ge=0.01, le=100)], ...] = ()
    """Further ones, for the policy before training: they tell what was learned from what a better
    temperature alone gives."""
    greedy: bool = True
    """Add one rollout per task at temperature 0."""
    every: CountOrZero = 10
    """Steps between evaluations, also before the first and after the last; 0 = never."""
    experience: Fraction = 0.0
    """Share of a task's evaluation rollouts that are guided by experience."""


class Evolve(Group):
    """From a world to an agent that has learned it, for --mode=evolve."""

    held_out: float = Field(0.25, ge=0.01, le=0.9)
    """Share of the starts, and of the combinations of goals, whose invented tasks are held out
    where the world has no held-out tasks of its own."""
    probes: Count = 16
    """Invented tasks on which temperatures and policies are compared. Where ten times as many are
    left, these are of starts or combinations of goals that nothing trains on."""
    enough: Fraction = 0.5
    """Success on these, at the best temperature, from which a policy imitates nothing more."""
    rounds: CountOrZero = 1
    """The most rounds of imitation, after each of which the policy is evaluated."""
    solutions: Count = 200
    """The most solutions of the explorer that are imitated, and at most half of each difficulty."""
    other_ids: Count = 16
    """Sets of ids in whose place each of them is imitated, so that a policy looks ids up; 0 = its
    own ids alone."""
    renames: bool = False
    """Show other digits in the ids of each task that trains, so that a policy goes on looking ids
    up: the few starts of a world have few ids."""
    guided: Fraction = 0.0
    """Share of the imitated episodes that begin with the experience that guides rollouts of their
    task, so that a policy learns to follow it; navigating.enabled."""
    updates: Count = 40
    """Updates of a round of imitation."""
    rows: Count = 4
    """Packed rows of each of them, of learner.row tokens."""
    lr: PositiveFraction = 1e-4
    """Their peak learning rate."""


class Checkpoint(Group):
    """Checkpoints to resume from."""

    every: Count = 10
    """Steps between checkpoints; also after the last step and however the run ends."""
    minutes: float = Field(60.0, ge=0, le=10**7)
    """Most minutes between checkpoints, if steps take long; 0 = no limit."""
    keep: Count = 2
    """Latest checkpoints kept, in addition to the best by avg@k."""
    milestones: CountOrZero = 0
    """Keep every checkpoint whose step is a multiple of this; 0 = none."""


class Log(Group):
    """Metrics and rollouts that are written."""

    trajectories: CountOrZero = 1
    """Steps between two files of rollouts; 0 = none, also of held-out rollouts."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases."""
    project: str = "evolver"
    """W&B project."""
    group: str = ""
    """W&B group of runs that are compared; "" = none."""
    tags: tuple[str, ...] = ()
    """W&B tags."""
    tensorboard: bool = False
    """Write TensorBoard files too."""


# --- machines -------------------------------------------------------------------------------------


class Hosts(Group):
    """Processes of one run, one per host. They share the workdir; each plays its share of the
    rollouts."""

    count: CountOrZero = 1
    """Processes; 0 = take these three keys from Slurm, Kubernetes or the TPU pod."""
    index: CountOrZero = 0
    """Index of this process, from 0."""
    coordinator: str = ""
    """host:port of process 0."""
    deadline: Patience = 60.0
    """Seconds without a heartbeat after which a process counts as lost."""


class Config(Group):
    """All keys of a run."""

    seed: CountOrZero = 0
    """Seeds everything random: two runs with one seed give the same metrics."""
    steps: int = Field(100, ge=1, le=10**7)
    """Iterations: rollouts, then updates, then new weights for the engine."""
    env: Env = Env()
    model: Model = Model()
    template: Template = Template()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    questioning: Questioning = Questioning()
    navigating: Navigating = Navigating()
    attributing: Attributing = Attributing()
    llm: Llm = Llm()
    recipe: Recipe = Recipe()
    sampler: Sampler = Sampler()
    reward: Reward = Reward()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    optim: Optim = Optim()
    lora: Lora = Lora()
    learner: Learner = Learner()
    eval: Eval = Eval()
    evolve: Evolve = Evolve()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    mesh: Mesh = Mesh()
    hosts: Hosts = Hosts()
    sharding: Sharding = Sharding()
