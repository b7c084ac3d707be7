"""The keys of language models: the roles that they play, their servers, and what limits them."""

from pydantic import Field

from configs.keys import Few, Group, Many, Patience, PositiveFraction, Temperature, Tokens
from rl.bounds import Count, CountOrZero, NotNegative


class Role(Group):
    """One role of a language model."""

    url: str = ""
    """Empty = llm.url."""
    model: str = ""
    """Empty = llm.model."""
    key: str = ""
    """Empty = llm.key."""
    temperature: Temperature = 0.0
    """0 = greedy."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens with this probability; 1 = all."""
    max_tokens: Tokens = 8192
    """Tokens of one answer."""
    extra: str = ""
    """Further fields of the request, as JSON: {"top_k": 100}, the only one that the policy
    knows."""


class Serve(Group):
    """A language model that the run serves itself on this machine, for roles with url=served."""

    path: str = ""
    """Its checkpoint, a directory or a Hub id; "" = none is served."""
    python: str = ""
    """Interpreter of a virtual environment with vLLM; "" = this project's own server."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES of the server: "6,7"; "" = those of the run."""
    context: Tokens = 8192
    """Most tokens of a question and its answer together."""
    flags: str = ""
    """Further flags of the server: "--gpu-memory-utilization 0.9"."""
    start_timeout: Patience = 900.0
    """Seconds within which it must answer."""
    restarts: CountOrZero = 2
    """Restarts of a server that dies while no step is done in between."""


class Llm(Group):
    """Language models, on any OpenAI-compatible server, or the policy itself. A role inherits keys
    that it leaves empty."""

    url: str = ""
    """URL of the server, including /v1: http://127.0.0.1:8000/v1; policy = the current policy, by
    the run's engine; policy:initial = the initial one, by a second jax engine with weights and KV
    cache of its own; served = the model of llm.serve."""
    model: str = ""
    """Name of the model on the server; the policy needs none."""
    key: str = ""
    """Environment variable that holds the key; "" = none."""
    cache: str = ""
    """Directory of cached answers, which runs may share; "" = llm_cache in the workdir, "off" = no
    cache."""
    concurrency: Many = 32
    """Calls at a time, per server."""
    requests_per_minute: CountOrZero = 0
    """Per server, not of the policy, divided among the processes of a run; 0 = no limit."""
    tokens_per_minute: CountOrZero = 0
    """The same, for tokens of prompts and answers together."""
    context: int = Field(0, ge=0, le=2**24)
    """Tokens of a question and its answer that the policy gives, for which the engine's cache has
    room; 0 = rollout.context."""
    deadline: float = Field(120.0, ge=0.1, le=10**7)
    """Seconds of one attempt."""
    attempts: Few = 6
    """Attempts per question; waits double from 1 to 60 seconds."""
    failures: Count = 20
    """Consecutive failed questions after which the run ends."""
    prices: str = ""
    """JSON file {model: [money per million prompt tokens, per million completion tokens]}; "" =
    free."""
    budget_money: NotNegative = 0.0
    """Cost at which the run ends, in the unit of the prices; 0 = no limit. Of several processes
    each may spend its part of what is left, and the first one that has spent it ends the run."""
    budget_tokens: int = Field(0, ge=-1)
    """Prompt and completion tokens at which the run ends; -1 = no limit; 0 = none is chosen, which
    a run whose roles have a key or a price does not start with, unless it has budget_money."""
    shown: int = Field(2000, ge=16)
    """Most characters of one action or observation shown to a model."""
    serve: Serve = Serve()
    explorer: Role = Role(temperature=1.0, max_tokens=2048)
    """Explores, for questioning.explorer."""
    writer: Role = Role(temperature=1.0)
    """Writes tasks, for questioning.explorer and .words."""
    judge: Role = Role()
    """Scores outcomes, for questioning.judge."""
    step_judge: Role = Role()
    """Labels turns, for attributing.judge."""
    summariser: Role = Role(max_tokens=4096)
    """Extracts experience, for navigating.extractor."""
    reranker: Role = Role(max_tokens=2048)
    """Refines experience, for navigating.refine."""
    embedder: Role = Role(max_tokens=1)
    """For navigating.embedder; uses url, model and key only."""
