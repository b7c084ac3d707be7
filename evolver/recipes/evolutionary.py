"""An evolutionary pool of tasks, in the manner of AlphaEvolve (Novikov et al., "AlphaEvolve: A
coding agent for scientific and algorithmic discovery", arXiv 2506.13131): the best of many kinds
have children, which are kept if an evaluator accepts them.

The paper reports, among others, a product of complex 4 x 4 matrices with 48 multiplications. There
a language model changes programs, whose score is their fitness. Here a child joins the solutions of
two tasks of one world, or leaves a call out, and is what that makes of the world, verified; the
fitness of a task is its learnability, and every combination of goals is a niche.

    config.recipe.name = "evolutionary"
    config.questioning.enabled = True
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from envs.world import Task
from evolver.build import Run
from evolver.metrics import Metrics
from evolver.questioning import TaskPool
from evolver.recipes import Chosen, Recipe
from evolver.recipes.proposals import Proposal, Starts, calling, grow
from rl.bounds import Count, Fraction


@dataclass(eq=False, kw_only=True)
class Evolutionary(Recipe):
    """Lets tasks have children every `every` steps.

    children: most new tasks of a generation. tournament: niches drawn for each parent, of which the
    fittest task becomes one. crossover: chance of two parents instead of one.
    """

    every: Count = 8
    children: Count = 16
    tournament: Count = 3
    crossover: Fraction = 0.75
    needs_tasks = True  # the config is checked for it

    def choose(self, run: Run, step: int) -> tuple[Chosen, Metrics]:
        """Return the tasks of a step, which may be children."""
        pool = run.tasks.pool
        if pool and step > 1 and (step - 1) % self.every == 0:
            new = grow(run, partial(self.offspring, pool), self.children, "evolutionary", step)
            self.figures["evolutionary/children"] = len(new)
        return super().choose(run, step)

    def offspring(
        self, pool: TaskPool, starts: Starts, budget: int, rng: random.Random
    ) -> Iterator[Proposal]:
        """Yield joined or shortened solutions of tasks of the pool, which may grow meanwhile."""
        for _ in range(4 * budget):  # most proposals are refused
            tasks = [t for t in pool.tasks.values() if t.meta.get("source") in starts]
            one = self.parent(pool, rng, tasks)
            if one is None:
                return
            start, actions = starts[one.meta["source"]], calling(one.reference)
            kin = [t for t in tasks if t.meta["source"] == start.id and t.id != one.id]
            other = self.parent(pool, rng, kin) if rng.random() < self.crossover else None
            if other:
                actions += calling(other.reference)
            elif len(actions) > 1:
                del actions[rng.randrange(len(actions))]
            yield start, actions

    def parent(self, pool: TaskPool, rng: random.Random, tasks: Sequence[Task]) -> Task | None:
        """Return the fittest task of some niches, None if there are no tasks."""
        niches: dict[str, list[Task]] = {}
        for task in tasks:
            if task.reference:
                niches.setdefault(task.meta.get("template", task.id), []).append(task)
        drawn = rng.sample(list(niches.values()), min(self.tournament, len(niches)))
        members = [rng.choice(niche) for niche in drawn]
        return max(members, key=lambda task: pool.learnability(task.id), default=None)
