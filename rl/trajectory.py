"""What one rollout leaves behind. Tokens are the engine's own: nothing here is ever re-encoded."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

from envs.world import Evaluation, Message, Task


class StopReason(enum.StrEnum):
    """Why an episode ended. Closed: the one-hot metrics `stop/<reason>` sum to the number of rollouts."""

    DONE = "done"  # the environment ended the episode
    MAX_STEPS = "max_steps"  # the policy used all its turns
    CONTEXT_FULL = "context_full"  # the next turn would not fit
    LENGTH = "length"  # a turn hit its token limit without an end token
    PARSE_ERROR = "parse_error"  # an unreadable turn, where the config says that ends the episode
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    CANCELLED = "cancelled"


@dataclass
class Completion:
    """One generation of an engine. `tokens` ends with the stop token when `stop` is "stop"."""

    tokens: list[int]
    logprobs: list[float]  # log p(token) at the sampling temperature (at 1 when it was 0), without top-p/top-k
    stop: str  # "stop" | "length"
    version: int  # of the weights that sampled it


@dataclass
class Sampling:
    """How to sample one generation. `seed` decides it, whatever else is in the batch."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0


@dataclass
class Step:
    """One policy generation and the observation that answers it."""

    prompt: list[int]  # every token before the generation, as the engine saw it
    completion: Completion
    action: str  # the decoded generation without its stop token
    observation: list[Message]
    info: dict[str, Any] = field(default_factory=dict)
    label: int = 0  # +1 GOOD, -1 BAD, 0 abstain
    advantage: float = 0.0


@dataclass
class Trajectory:
    """One rollout of one task."""

    task: Task
    rollout: int  # index within the group
    seed: int
    messages: list[Message]  # what opened the episode, experience included
    steps: list[Step] = field(default_factory=list)
    stop: StopReason = StopReason.CANCELLED
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(0.0, False))
    experience: list[str] = field(default_factory=list)  # ids of what was injected; [] = not guided
    told: list[str] = field(default_factory=list)  # and its words
    stripped: list[int] = field(default_factory=list)  # first prompt without the experience; [] = steps[0].prompt
    error: str = ""
    retries: int = 0  # resets that failed before this one

    @property
    def guided(self) -> bool:
        return bool(self.experience)

    @property
    def outcome(self) -> float:
        return self.evaluation.score

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        record["stop"] = self.stop.value
        return record
