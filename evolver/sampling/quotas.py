"""A sampler that gives each world its share of a step."""

from collections.abc import Mapping, Sequence

import numpy as np

from envs.world import Task
from evolver.parts import Parts
from evolver.questioning.pool import mixture
from evolver.sampling import Draw, Sampler
from rl.bounds import NotNegative
from rl.seeds import seed_of


class Quotas(Sampler):
    """Draws from each world in proportion to its weight, in epochs of its own."""

    of_worlds = "weights"  # the argument that names worlds

    def __init__(self, parts: Parts, *, weights: dict[str, NotNegative] | None = None):
        """weights: {world: weight}, by a task's `env`; 1 for a world that is not named."""
        self.weights = weights or {}

    def draw(self, draw: Draw) -> list[Task]:
        n_synthetic = round(draw.share * draw.n)
        chosen = self._of_worlds(draw, draw.originals, draw.n - n_synthetic, "original")
        chosen += self._of_worlds(draw, draw.synthetic, n_synthetic, "synthetic")
        seed = seed_of(draw.seed, "order", draw.place)
        return [chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))]

    def _of_worlds(self, draw: Draw, tasks: Sequence[Task], n: int, kind: str) -> list[Task]:
        by_world: dict[str, list[Task]] = {}
        for task in tasks:
            by_world.setdefault(task.env, []).append(task)
        sizes = {world: len(own) for world, own in by_world.items()}
        numbers = apportioned(n, {world: self.weights.get(world, 1) for world in by_world}, sizes)
        chosen = []
        for world, number in numbers.items():
            own, seed = by_world[world], seed_of(draw.seed, kind, world)
            chosen += mixture(own, [], step=draw.place, n=number, share=0.0, seed=seed)
        return chosen


def apportioned(n: int, weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return {world: tasks}: n of them in proportion to the weights, by the largest remainder, none
    more than its size. What a world cannot give, the others do; with no weight left, all alike."""
    given = dict.fromkeys(weights, 0)
    while (rest := n - sum(given.values())) > 0:
        free = [world for world in weights if given[world] < sizes[world]]
        if not free:
            raise ValueError(f"{n} tasks are needed, and there are {sum(sizes.values())}")
        total = sum(weights[world] for world in free)
        exact = {w: rest * weights[w] / total if total else rest / len(free) for w in free}
        floors = {world: int(exact[world]) for world in free}
        # The order of `weights` breaks ties, and somebody gets a task in every round.
        largest = sorted(free, key=lambda world: floors[world] - exact[world])
        rounded_up = largest[: rest - sum(floors.values())]
        for world in free:
            number = given[world] + floors[world] + (world in rounded_up)
            given[world] = min(number, sizes[world])
    return given
