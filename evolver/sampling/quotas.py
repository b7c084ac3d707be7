"""A sampler that gives each world its share of a step."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from envs.world import Task
from evolver.parts import Parts
from evolver.sampling import Draw, Sampler, mixed
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
        kinds = (
            ("original", draw.originals, draw.n - n_synthetic),
            ("synthetic", draw.synthetic, n_synthetic),
        )
        chosen = []
        for kind, tasks, n in kinds:
            sizes = Counter(task.env for task in tasks)
            weights = {world: self.weights.get(world, 1) for world in sizes}
            for world, number in apportioned(n, weights, sizes).items():
                own = [task for task in tasks if task.env == world]
                seed = seed_of(draw.seed, kind, world)
                chosen += mixed(Draw(own, [], number, 0.0, draw.place, seed))
        seed = seed_of(draw.seed, "order", draw.place)
        return [chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))]


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
        # The order of `weights` breaks ties, and somebody gets a task in every round.
        largest = sorted(free, key=lambda world: int(exact[world]) - exact[world])
        rounded_up = largest[: rest - sum(map(int, exact.values()))]
        for world in free:
            more = int(exact[world]) + (world in rounded_up)
            given[world] = min(given[world] + more, sizes[world])
    return given
