"""Self-navigating: experience from earlier attempts guides some rollouts (section 4 of the
AgentEvolver paper)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evolver.metrics import Mechanism
from rl.trajectory import Trajectory

EXTRACTORS = {
    "contrast": "evolver.navigating.extract:Contrast",
    "llm": "evolver.navigating.llm:LlmExtractor",
}
REFINERS = {
    "none": "evolver.navigating:Unrefined",
    "rerank": "evolver.navigating.llm:Reranker",
    "rewrite": "evolver.navigating.llm:Rewriter",
}


@dataclass
class Experience:
    """Two sentences: `when` to use it, and its `content`, which is put into the prompt.

    `key` is the text that is embedded and searched: a query of the tasks it is for, or `when`
    itself. `uses` counts the guided rollouts that carried it, `wins` those that succeeded.
    `expected` sums, over the same rollouts, the success rate of the unguided rollouts of their
    groups, which estimates the wins without it.
    """

    id: str
    when: str
    content: str
    key: str
    sources: list[str]  # ids of the training tasks it comes from
    step: int  # training step of its extraction
    uses: int = 0
    wins: int = 0
    expected: float = 0.0

    @property
    def gain(self) -> float:
        """The smoothed gain in success per use, 0 for an experience that was not used yet."""
        return (self.wins - self.expected) / (self.uses + 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**vars(self), "sources": [*self.sources]}


def new_experience(
    when: str, content: str, *, sources: list[str], key: str = "", step: int = 0
) -> Experience:
    """Return an experience whose id is the hash of its text, so that the same text always has the
    same id. key: "" = `when`."""
    digest = hashlib.blake2b(json.dumps([when, content]).encode(), digest_size=8).hexdigest()
    return Experience(f"exp/{digest}", when, content, key or when, list(sources), step)


class Extractor(Mechanism, Protocol):
    """Makes experience from attempts: the plug `navigating.extractor`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `extract`.
    """

    # False if the extractor ignores the labels of turns, so that the first attempts get none
    reads_labels: bool = True

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return new experiences, preferably made by `new_experience`; the pool merges duplicates.

        trajectories: attempts at any number of tasks, several per task. step: the training step,
        kept with each experience. Raises ValueError for a trajectory of a held-out task
        (`extract.learnable_groups` checks that).
        """
        ...


class Refiner(Mechanism, Protocol):
    """Chooses from the experiences that were retrieved, or rewrites them: the plug
    `navigating.refine`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `refine`.
    """

    candidates: int = 1  # experiences to retrieve for each one that is wanted

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        """Return at most `top_k` experiences for each query, [] for no guidance.

        candidates: for each query up to `top_k * self.candidates` experiences, best first. They
        belong to the pool: to change one, return a copy with the same id.
        """
        ...


class Unrefined(Refiner):
    """Uses the experiences as they were retrieved."""

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        return [list(experiences) for experiences in candidates]
