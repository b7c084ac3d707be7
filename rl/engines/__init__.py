"""Generation engines: token ids in, token ids out. Sampled tokens are trained on as they are, never
re-encoded.

`jax` runs in this process, `vllm` drives vLLM servers, `serve` offers the JAX engine to OpenAI
clients.
"""

from typing import Any, Protocol

import numpy as np

from rl.trajectory import Completion, Sampling

# temperatures, besides 0, at which logits and their quotients stay finite
COLDEST, HOTTEST = 1e-5, 1e5


class ContextFull(ValueError):
    """The prompt and the requested tokens exceed the engine's context."""


class RequestFault(ValueError):
    """The engine could not go on with one request; all others go on."""


class EngineFault(RuntimeError):
    """The engine failed and returned no sample; the message gives the cause."""


def check_request(prompt_ids: list[int], sampling: Sampling, *, vocab: int, context: int) -> None:
    """Raise ValueError for an invalid request, ContextFull for one that is too long."""
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    for name in ("max_tokens", "top_k", "seed"):
        if not isinstance(value := getattr(sampling, name), int):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
        raise ValueError(f"a prompt token is outside of the vocabulary 0..{vocab - 1}")
    if any(not 0 <= token < vocab for token in sampling.stop_tokens):
        raise ValueError(f"a stop token is outside of the vocabulary 0..{vocab - 1}")
    if sampling.temperature and not COLDEST <= sampling.temperature <= HOTTEST:
        raise ValueError(
            f"temperature is {sampling.temperature}; it must be 0, or {COLDEST:g} to {HOTTEST:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}; it must be above 0, and at most 1")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}; it must be at least 1, or 0 for all tokens")
    if len(prompt_ids) + sampling.max_tokens > context:
        raise ContextFull(
            f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} to generate exceed the"
            f" context of {context}"
        )


class Guide(Protocol):
    """Restricts the tokens of one generation, in the JAX engine. For vLLM's it is a schema."""

    def allowed(self) -> np.ndarray:
        """Return a boolean mask over the vocabulary: the tokens that may come next, at least
        one."""

    def accept(self, token: int) -> None:
        """Note the token that came next."""


class Engine(Protocol):
    """The interface that rollouts use. All methods run on one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights that it has now."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """Sample after `prompt_ids`. If the prompt extends the session's earlier tokens, their KV
        cache is reused.

        A session may have one request in flight. Cancelling the call frees its resources.
        Raises ContextFull, EngineFault, and ValueError for an invalid request.
        """

    async def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored."""

    async def sleep(self) -> None:
        """Give the memory of devices that a learner shares to it, until the next `load` or
        `generate`. Engines with memory of their own do nothing."""

    async def load(self, params: Any, version: int) -> None:
        """Sample with these weights from now on. A completion carries the oldest version that
        sampled a part of it."""

    def clear_cache(self) -> None:
        """Drop all session state while the engine is idle, so that later samples do not depend on
        it."""

    def stats(self) -> dict[str, float]:
        """Return counters since the start."""

    def servers(self) -> list[dict[str, Any]]:
        """Return the name and the state of each server behind it, and its requests."""

    async def close(self) -> None:
        """Stop. Pending requests fail with EngineFault."""
