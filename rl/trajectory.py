"""The records of a rollout. Tokens are those of the engine, never re-encoded from text."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envs.world import Evaluation, Message, Task, Tool


class StopReason(enum.StrEnum):
    """The reason why an episode ended. The one-hot metrics `stop/<reason>` sum to the number of
    rollouts."""

    DONE = "done"  # the environment ended the episode
    MAX_TURNS = "max_turns"  # the policy used all its turns, or the world truncated the episode
    CONTEXT_FULL = "context_full"  # the next turn does not fit into the context
    LENGTH = "length"  # a turn reached its token limit without an end token
    PARSE_ERROR = "parse_error"  # the environment could not read a turn, and parse_error="end"
    ENV_ERROR = "env_error"  # the environment, or the context template, raised an exception
    ENV_TIMEOUT = "env_timeout"  # a call into the world exceeded its own limit
    CANCELLED = "cancelled"  # its deadline passed, wherever it did, or no judge scored its outcome


# ends by a limit of turns or tokens
LIMITED = (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.LENGTH)
# ends by a failure of the environment or the context template
FAILED = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)
BROKEN = (*FAILED, StopReason.CANCELLED)  # ends that the policy did not cause


class EndsRun(Exception):
    """Ends the whole run, not only the episode in which it is raised, such as by the language model
    of a template."""


@dataclass
class Completion:
    """One generation of an engine. `tokens` ends with the stop token when `stop` is "stop"."""

    tokens: list[int]
    # log p(token) at the sampling temperature (at 1 when it was 0), without top-p/top-k; [] =
    # unknown, as of an answer that was held to a schema: the learner then takes its own
    logprobs: list[float]
    stop: str  # "stop" | "length"
    version: int  # of the oldest weights that sampled a part of it

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the stop token."""
        return self.tokens[:-1] if self.stop == "stop" else self.tokens


@dataclass
class Sampling:
    """Parameters of one generation. The seed alone determines the sample, whatever else is in the
    batch."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0


@dataclass
class Turn:
    """One generation of the policy and the observation that answers it."""

    prompt: list[int]  # every token before the generation, as the engine saw it
    completion: Completion
    # what the world was given: the text, with its calls in the format of envs/toolcalls.py
    action: str
    observation: list[Message]
    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0  # the world's, for this turn; the outcome is the trajectory's evaluation
    label: int = 0  # +1 GOOD, -1 BAD, 0 abstain
    reason: str = ""  # the judge's, for the label
    advantage: float = 0.0
    # the part of it that outcomes give; the labels give the rest; None = unknown
    outcome_advantage: float | None = None
    # the prompt without the injected experience; [] = `prompt`
    stripped: list[int] = field(default_factory=list)
    given: bool = False  # repeated from another rollout, which this one began with
    # {name: one number, or one per token of the generation}, for the loss, see `Tokens.channels`
    channels: dict[str, Any] = field(default_factory=dict)
    # (tokens,) float32: log p by the learner before the update minus by the engine; None = unknown
    gap: np.ndarray | None = None
    # (tokens,) float32: p by the learner at the update over that before it; None = not trained
    ratio: np.ndarray | None = None
    # (tokens,) float32: the advantages that trained; None = `advantage` for each token
    weighed: np.ndarray | None = None

    @property
    def trains(self) -> bool:
        """True if the policy generated tokens in it that belong to this rollout."""
        return bool(self.completion.tokens) and not self.given

    @property
    def training_prompt(self) -> list[int]:
        """The prompt that the learner sees: without experience."""
        return self.stripped or self.prompt

    @property
    def training_tokens(self) -> list[int]:
        """The prompt that the learner sees, and the generation."""
        return self.training_prompt + self.completion.tokens


@dataclass
class Trajectory:
    """One rollout of one task."""

    task: Task
    rollout: int  # index within the group
    seed: int
    messages: list[Message]  # the opening messages, experience included
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason = StopReason.CANCELLED
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(0.0, False))
    # ids of the injected experiences; [] = not guided
    experience: list[str] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)  # the text of each of them
    # those that the episode opened with, and those added since
    tools: list[Tool] = field(default_factory=list)
    error: str = ""
    restarted: str = ""  # why the episode was started again, in another world; "" = it was not
    draw: int = 0  # tells groups of one task apart, see `group`
    lost: Evaluation | None = None  # an evaluation that does not count, see `forfeit`
    replaced: bool = False  # its group has no signal, and `rollout.refill` plays others instead
    reward: float | None = None  # what the plug `reward` made of the score; None = the score

    @property
    def group(self) -> tuple[str, int]:
        """The task and the draw of it: a task that is drawn again, for a later step, starts another
        group."""
        return self.task.id, self.draw

    @property
    def name(self) -> str:
        """A text that tells the rollouts of a step apart: the task, the index and the seed."""
        return f"{self.task.id}/{self.rollout}/{self.seed}"

    @property
    def guided(self) -> bool:
        return bool(self.experience)

    @property
    def branched(self) -> bool:
        """True if it began with turns of another rollout, so that its outcome is not all its
        own."""
        return any(turn.given for turn in self.turns)

    @property
    def failed(self) -> bool:
        """True if the environment or the context template failed."""
        return self.stop in FAILED

    @property
    def broken(self) -> bool:
        """True if a failure or a deadline ended the episode, so that its outcome is not the
        policy's."""
        return self.stop in BROKEN

    @property
    def outcome(self) -> float:
        return self.evaluation.score

    @property
    def success(self) -> bool:
        return self.evaluation.success

    @property
    def compared(self) -> float:
        """The number that estimators compare: the reward, or the score where none shaped it."""
        return self.outcome if self.reward is None else self.reward

    @property
    def reached(self) -> Evaluation:
        """The evaluation of what the episode reached, also where that does not count."""
        return self.lost or self.evaluation

    def forfeit(self) -> None:
        """Count the episode as failed; what it reached stays in `lost`, and its score is the
        component "reached"."""
        lost = self.lost = self.reached
        components = lost.components | {"reached": lost.score}
        self.evaluation = replace(lost, score=lost.low, success=False, components=components)


def groups_of(trajectories: Iterable[Trajectory]) -> dict[tuple[str, int], list[Trajectory]]:
    """Return {(task id, draw): its trajectories}, both in the order of their first appearance.

    Two draws of a task may be played by two policies, so they must not share a baseline.
    """
    groups: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups
