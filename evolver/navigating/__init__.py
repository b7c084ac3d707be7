"""Self-navigating: experience from earlier attempts guides some rollouts (section 4 of the
AgentEvolver paper)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evolver.navigating.experience import Experience, new_experience
from evolver.navigating.memory import Navigating, plan
from evolver.navigating.pool import Pool, PoolError
from rl.trajectory import Trajectory

__all__ = [
    "EXTRACTORS", "REFINERS", "Experience", "Extractor", "Navigating", "Pool", "PoolError", "Refiner", "Unrefined",
    "new_experience", "plan",
]  # fmt: skip

EXTRACTORS = {
    "contrast": "evolver.navigating.extract:Contrast",
    "llm": "evolver.navigating.llm:LlmExtractor",
}
REFINERS = {
    "none": "evolver.navigating:Unrefined",
    "rerank": "evolver.navigating.llm:Reranker",
    "rewrite": "evolver.navigating.llm:Rewriter",
}


class Extractor(Protocol):
    """Makes experience from attempts: the plug `navigating.extractor`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `extract`.
    """

    roles: tuple[str, ...] = ()  # chat roles that the extractor asks
    reads_labels: bool = (
        True  # False if it ignores the labels of turns, so that the first attempts get none
    )

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return new experiences, preferably made by `new_experience`; the pool merges duplicates.

        trajectories: attempts at any number of tasks, several per task. step: the training step,
        kept with each experience. Raises ValueError for a trajectory of a held-out task
        (`extract.learnable_groups` checks that).
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}


class Refiner(Protocol):
    """Chooses from the experiences that were retrieved, or rewrites them: the plug
    `navigating.refine`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `refine`.
    """

    roles: tuple[str, ...] = ()  # chat roles that the refiner asks
    candidates: int = 1  # experiences to retrieve for each one that is wanted

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        """Return at most `top_k` experiences for each query, [] for no guidance.

        candidates: for each query up to `top_k * self.candidates` experiences, best first. They
        belong to the pool: to change one, return a copy with the same id.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}


class Unrefined(Refiner):
    """Uses the experiences as they were retrieved."""

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        return [list(experiences) for experiences in candidates]
