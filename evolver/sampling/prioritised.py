"""Samplers that prefer some tasks by their results so far, original and synthetic ones alike.

The success rate of a task is estimated as (successes + 1) / (attempts + 2), so that a task that was
never tried has 1/2. Guided rollouts do not count.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from envs.world import Task
from evolver.parts import Parts
from evolver.sampling import Draw, Sampler, mixed
from rl.bounds import NotNegative
from rl.trajectory import Trajectory


class Prioritised(Sampler):
    """Draws tasks in proportion to a priority, without replacement. A subclass defines it."""

    def __init__(self, parts: Parts):
        self.results: dict[str, list[int]] = {}  # id -> [successes, attempts]

    @abstractmethod
    def priority(self, rate: float) -> float:
        """Return the weight of a task, given its estimated success rate; 0 comes last."""

    def draw(self, draw: Draw) -> list[Task]:
        original, synthetic = map(self._weights, (draw.originals, draw.synthetic))
        return mixed(draw, original=original, synthetic=synthetic)

    def _weights(self, tasks: Sequence[Task]) -> list[float]:
        counts = [self.results.get(task.id, (0, 0)) for task in tasks]
        return [self.priority((won + 1) / (tried + 2)) for won, tried in counts]

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        for t in trajectories:
            if not (t.broken or t.guided):
                counts = self.results.setdefault(t.task.id, [0, 0])
                counts[0] += t.success
                counts[1] += 1

    def state(self) -> Any:
        """Return the results, as JSON values."""
        return self.results

    def load_state(self, state: Any) -> None:
        """Continue from what `state` returned."""
        self.results = state


class Failures(Prioritised):
    """Draws tasks in proportion to their failure rate."""

    def __init__(self, parts: Parts, *, power: NotNegative = 1.0):
        """power: exponent of the failure rate; 0 = all tasks alike."""
        super().__init__(parts)
        self.power = power

    def priority(self, rate: float) -> float:
        return float((1 - rate) ** self.power)


class Learnability(Prioritised):
    """Draws tasks in proportion to 4 p (1 - p), the variance of their success over its maximum."""

    def priority(self, rate: float) -> float:
        return 4 * rate * (1 - rate)
