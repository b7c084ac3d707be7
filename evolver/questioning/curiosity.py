"""Self-questioning without a language model: curiosity walks, and tasks worded from what they changed or showed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Task, World
from evolver.questioning.pool import TaskPool
from evolver.questioning.tasks import Unfit, probe_of
from evolver.questioning.walks import Walk, Walker
from evolver.questioning.write import Proposal, Writer
from rl.bounds import Count, CountOrZero


class Curiosity:
    """An explorer for worlds with `difference()`, `describe()` and a profile with entities, operations and questions
    (see evolver/questioning/write.py).

    Names and ids in the queries of seed tasks are values that a walk may try.
    """

    def __init__(
        self,
        make_world: Callable[[], World],
        pool: TaskPool,
        *,
        breadth: CountOrZero = 3,
        depth: CountOrZero = 17,
        branches: Count = 2,
        per_walk: Count = 3,
        rounds: Count = 4,
    ):
        """breadth, depth: steps of the two phases of a walk (N_b and N_d in the paper). branches: depth phases per
        breadth phase. per_walk: most tasks kept from one walk. rounds: passes over the worlds per call of `explore`.

        Raises ValueError if the world lacks one of the methods or profile keys above.
        """
        self.pool, self.per_walk, self.rounds = pool, per_walk, rounds
        world = make_world()
        profile = world.profile()
        missing = [key for key in ("entities", "operations", "questions") if key not in profile]
        missing += [f"{name}()" for name in ("difference", "describe") if not hasattr(world, name)]
        world.close()
        if missing:
            raise ValueError(
                f"world '{world.name}' cannot be explored without a language model: it lacks {', '.join(missing)};"
                " set config.questioning.explorer.name=llm"
            )
        self.walker = Walker(profile, breadth=breadth, depth=depth, branches=branches)
        self.writer = Writer(profile, self.walker.kinds)
        self._tried: Counter[str] = Counter()  # proposals by name

    def explore(self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random) -> Iterator[Task]:
        """Yield new tasks, in up to `rounds` passes over the worlds of all seeds.

        Each pass takes at most an even share of the budget from each world, so that the tasks come from as many worlds
        as possible. Worlds that offer little give fewer.
        """
        statistics = _Statistics(self.pool.tasks.values())
        share, size = -(-budget // len(seeds)), len(self.pool.tasks)
        for n in range(self.rounds):
            for start in rng.sample(seeds, len(seeds)):
                end = min(len(self.pool.tasks) + share, size + budget)
                for walk in self.walker.walks(world, probe_of(start), rng, hints=start.query):
                    self.pool.count(walks=1, steps=len(walk.events))
                    most = min(self.per_walk, end - len(self.pool.tasks))
                    yield from self._tasks(world, walk, rng, most, statistics, even=n < self.rounds - 1)
                    if len(self.pool.tasks) >= end:
                        break

    def _tasks(
        self, world: World, walk: Walk, rng: random.Random, most: int, statistics: _Statistics, *, even: bool
    ) -> Iterator[Task]:
        """Yield tasks of a walk until `most` are kept, first those of the rarest difficulty, then of the rarest name.

        even: stop before a difficulty gets much more than its even share of the pool.
        """

        def commonness(proposal: Proposal) -> tuple[int, int]:
            return statistics.as_difficult_as(proposal.name), self._tried[proposal.name]

        proposals = self.writer.proposals(world, walk)
        fewest, largest = self.writer.calls
        kept = 0
        for _ in range(3 * most):
            if not proposals or kept >= most:
                break
            rng.shuffle(proposals)
            proposal = min(proposals, key=commonness)
            proposals.remove(proposal)
            share = len(self.pool.tasks) / (largest - fewest + 1)
            if even and commonness(proposal)[0] > 1.2 * share + 2:
                break
            self._tried[proposal.name] += 1
            try:
                task = self.writer.write(world, proposal, rng, common=statistics.tools)
            except Unfit as reason:
                self.pool.reject(str(reason))
                continue
            yield task
            if self.pool.tasks.get(task.id) is task:
                statistics.add(task)
                kept += 1

    def state(self) -> dict[str, Any]:
        """Return what was learnt, as JSON values."""
        return {"knowledge": self.walker.knowledge.state(), "tried": dict(self._tried)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.walker.knowledge.load_state(state["knowledge"])
        self._tried = Counter(state["tried"])


class _Statistics:
    """Statistics of the pool: the number of tasks of each difficulty, and the tools that their references use."""

    def __init__(self, tasks: Iterable[Task]):
        self.tools: Counter[str] = Counter()
        self._difficulties: Counter[int] = Counter()
        self._templates: dict[str, tuple[int, int]] = {}  # template -> (sum of difficulties, tasks)
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        name = task.meta.get("template", "")
        difficulty, tasks = self._templates.get(name, (0, 0))
        self._templates[name] = (difficulty + task.difficulty, tasks + 1)
        self._difficulties[task.difficulty] += 1
        self.tools.update(call.name for action in task.reference for call in parse(action).calls)

    def as_difficult_as(self, template: str) -> int:
        """Return the number of tasks that are as difficult as those of `template` are on average, 0 if it has none."""
        difficulty, tasks = self._templates.get(template, (0, 0))
        return self._difficulties[round(difficulty / tasks)] if tasks else 0
