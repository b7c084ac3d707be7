"""The argument of every mechanism: what a run gives to explorers, judges, extractors and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.world import World

if TYPE_CHECKING:
    from evolver.llm.client import Chat
    from evolver.questioning.pool import TaskPool


@dataclass(frozen=True)
class Parts:
    """The one positional argument of a mechanism."""

    make_world: Callable[[], World] = World  # makes an environment that only its caller uses
    client: Chat | None = None  # see `chat`
    max_chars: int = 2000  # characters that a language model is shown of one action or observation
    policy: str = ""  # config.model.path
    task_pool: TaskPool | None = None  # the synthetic tasks, with self-questioning
    splits: tuple[str, ...] = ()  # of the tasks that experience may be learnt from

    @property
    def chat(self) -> Chat:
        """The client of language models. Raises ValueError if no plug in use declares a role."""
        if self.client is None:
            raise ValueError(
                "a plug that asks language models must declare its roles as an attribute, such as"
                ' roles = ("judge",); names are in evolver/llm/roles.py'
            )
        return self.client
