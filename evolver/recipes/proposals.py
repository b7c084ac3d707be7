"""New tasks from actions that somebody played, for recipes that add tasks to the pool."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from envs.toolcalls import parse
from envs.world import Task, World, WorldError
from evolver.build import Run
from evolver.processes import hosts
from evolver.questioning import TaskPool
from evolver.questioning.played import replayer, verified_task
from evolver.questioning.tasks import Rejected
from rl.seeds import seed_of

Starts = dict[str, Task]  # original tasks by their ids
Proposal = tuple[Task, Sequence[str]]  # an original task, and actions from its start
Propose = Callable[[Starts, int, random.Random], Iterable[Proposal]]


@dataclass
class Proposer:
    """An explorer that makes a verified task of each proposal, where one can be made. `pool` counts
    the others by the reason.

    propose: called with the original tasks, the number of tasks that is wanted, and the source of
    randomness. first: {task id: number of the first proposal that the task was made of}.
    """

    propose: Propose
    pool: TaskPool
    first: dict[str, int] = field(default_factory=dict)

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterator[Task]:
        walker, starts = replayer(), {task.id: task for task in seeds}
        for number, (start, actions) in enumerate(self.propose(starts, budget, rng)):
            try:
                task = verified_task(world, start, actions, rng, walker=walker)
            except Rejected as reason:
                self.pool.reject(str(reason))
            except WorldError:
                self.pool.reject("the world broke")
            else:
                self.first.setdefault(task.id, number)
                yield task


def grow(run: Run, propose: Propose, most: int, *purpose: int | str) -> dict[int, Task]:
    """Add at most `most` tasks to the pool of the run, which has one, and return them by the
    numbers of their proposals. purpose: what the seed is derived from."""
    pool, seed = run.tasks.pool, seed_of(run.config.seed, *purpose)
    assert pool
    proposer = Proposer(propose, pool)

    def kept() -> dict[int, Task]:
        tasks = pool.grow(proposer, run.make_world, most, seed)
        return {proposer.first[task.id]: task for task in tasks}

    new = hosts.on_first(pool, kept)
    pool.shrink()
    return new


def calling(actions: Iterable[str]) -> list[str]:
    """Return the actions that call something."""
    return [action for action in actions if parse(action).calls]
