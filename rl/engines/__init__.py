"""Engines generate: tokens in, tokens out. Never text: what was sampled is what trains."""

from __future__ import annotations

from typing import Any, Protocol

from rl.trajectory import Completion, Sampling


class ContextFull(ValueError):
    """The prompt and the tokens asked for do not fit into the engine's context."""


class EngineFault(RuntimeError):
    """The engine itself failed; nothing was sampled. The message says why."""


class Engine(Protocol):
    """What rollouts need of an engine. All methods run on one event loop."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample after `prompt_ids`. A session's next prompt may extend its earlier tokens, which are then kept.

        One request at a time per session. Cancelling the call frees what it holds.
        Raises ContextFull, EngineFault, ValueError (a request that makes no sense).
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session. Unknown ones are ignored."""
        ...

    async def load(self, params: Any, version: int) -> None:
        """Sample with these weights from now on. Every completion names the version that sampled all of it."""
        ...

    def forget(self) -> None:
        """Drop what is kept of sessions, while none is running, so that what follows does not depend on it."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Stop; whoever still waits gets EngineFault."""
        ...
