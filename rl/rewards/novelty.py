"""The intrinsic reward of EMPO2 (Liu et al., "Exploratory Memory-Augmented LLM Agent via Hybrid On-
and Off-Policy Optimization", arXiv 2602.23008): what was seldom seen before is worth a visit.

The paper counts the states of a memory that are similar in embedding; here a state is the text of
an observation, word for word, together with the task that it was seen in.
"""

import hashlib
import itertools
import json
from typing import Any

import numpy as np

from rl.advantages.batch import Batch
from rl.bounds import NotNegative
from rl.trajectory import Trajectory


class Novelty:
    """Adds a bonus for new states to the scores."""

    def __init__(self, *, scale: NotNegative = 0.1):
        """scale: the reward of a state that nobody has seen before."""
        self.scale = scale
        self.visits: dict[str, int] = {}  # {hash of the state: rollouts that saw it}

    def __call__(self, batch: Batch) -> np.ndarray:
        """Return score + scale * sum of 1 / n over the different states of a rollout, (N,). n: the
        rollouts up to the end of this step that saw the state, so that the order of a step's
        rollouts does not matter."""
        seen = [states(trajectory) for trajectory in batch.trajectories]
        for state in itertools.chain.from_iterable(seen):
            self.visits[state] = self.visits.get(state, 0) + 1
        bonus_N = [sum(1 / self.visits[state] for state in own) for own in seen]
        return batch.outcome_N + self.scale * np.array(bonus_N, np.float64)

    def state(self) -> dict[str, int]:
        return self.visits

    def load_state(self, state: dict[str, int]) -> None:
        self.visits = state


def states(trajectory: Trajectory) -> list[str]:
    """Return the hashes of the different states that a rollout saw, in order."""
    found: dict[str, Any] = {}
    for turn in trajectory.turns:
        contents = [message["content"] for message in turn.observation]
        if contents:
            text = json.dumps([trajectory.task.id, contents])
            found[hashlib.sha256(text.encode()).hexdigest()[:16]] = None
    return list(found)
