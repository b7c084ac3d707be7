"""Self-questioning without a language model: curiosity walks, tasks worded from what they changed, executed filters."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Task, World
from evolver.questioning.explore import Explorer, Walk, probe_of
from evolver.questioning.filter import unfeasible
from evolver.questioning.pool import TaskPool
from evolver.questioning.write import Proposal, Unfit, Writer
from rl.seeds import seed_of


class Questioning(TaskPool):
    """Explores the worlds of the training tasks and keeps a pool of synthetic tasks with how well each is solved.

    The world must have `difference()`, `describe()` and a profile with entities, operations and questions (see
    evolver/questioning/write.py). Seed tasks are masked: only the world they start in is explored, and names and ids in
    their queries are values worth trying. Nothing is kept between calls but the state of `state()`.
    """

    def __init__(
        self,
        make_world: Callable[[], World],
        seed_tasks: Sequence[Task],
        *,
        breadth: int = 6,
        depth: int = 20,
        branches: int = 2,
        per_walk: int = 3,
        rounds: int = 4,
        overlap: float = 0.8,
        capacity: int = 512,
    ):
        """`breadth`, `depth`: steps of the phases; `branches`: depth phases per breadth phase; `per_walk`: most tasks
        of one walk; `rounds`: most times a world is explored for one `explore`; the others: see TaskPool."""
        super().__init__(seed_tasks, overlap=overlap, capacity=capacity)
        self._make_world, self.per_walk, self.rounds = make_world, per_walk, rounds
        world = make_world()
        profile = world.profile()
        missing = [key for key in ("entities", "operations", "questions") if key not in profile]
        missing += [f"{name}()" for name in ("difference", "describe") if not hasattr(world, name)]
        world.close()
        if missing:
            raise ValueError(
                f"world '{world.name}' cannot be explored without a language model: it lacks {', '.join(missing)};"
                " set config.questioning.explorer=llm"
            )
        self.explorer = Explorer(profile, breadth=breadth, depth=depth, branches=branches)
        self.writer = Writer(profile, self.explorer.kinds)

    def _start_over(self, tasks: Sequence[Task], results: dict[str, list[int]], names: dict[str, int]) -> None:
        self._levels: Counter[int] = Counter()  # tasks by number of calls
        self._calls: dict[str, tuple[int, int]] = {}  # name -> (calls, tasks)
        self._tools: Counter[str] = Counter()  # in references
        super()._start_over(tasks, results, names)

    def explore(self, seed: int, budget: int) -> list[Task]:
        """At most `budget` new tasks, each executed and different from all there are; they join `tasks`.

        Walks over every world up to `rounds` times, taking from each its even share at a time, so that the tasks come
        from as many worlds as there are; worlds that have little to offer give fewer than asked for.
        """
        share = -(-budget // len(self._seeds))
        rng = random.Random(seed_of(seed, "explore"))
        world, found = self._make_world(), []
        try:
            for n in range(self.rounds):
                for start in rng.sample(self._seeds, len(self._seeds)):
                    end = min(len(found) + share, budget)
                    for walk in self.explorer.walks(world, probe_of(start), rng, hints=start.query):
                        self._counts.update(walks=1, steps=len(walk.events))
                        most = min(self.per_walk, end - len(found))
                        found += self._write(world, walk, rng, most, even=n < self.rounds - 1)
                        if len(found) >= end:
                            break
                    if len(found) >= budget:
                        return found
        finally:
            world.close()
            self._shrink()
        return found

    def state(self) -> dict[str, Any]:
        return super().state() | {"knowledge": self.explorer.knowledge.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.explorer.knowledge.load_state(state["knowledge"])

    def _write(self, world: World, walk: Walk, rng: random.Random, most: int, *, even: bool) -> list[Task]:
        """Tasks of a walk: of the difficulty and then of the name that the pool has fewest of.

        `even`: leave out what would give a difficulty much more than its even share.
        """
        proposals = self.writer.proposals(world, walk)
        fewest, largest = self.writer.calls
        made: list[Task] = []
        for _ in range(3 * most):
            if not proposals or len(made) >= most:
                break
            rng.shuffle(proposals)
            proposal = min(proposals, key=self._commonness)
            proposals.remove(proposal)
            share = len(self.tasks) / (largest - fewest + 1)
            if even and self._commonness(proposal)[0] > 1.2 * share + 2:
                break
            self._names[proposal.name] += 1
            task = self._accepted(world, proposal, rng)
            if task is not None:
                self._known.add(task)
                self._keep(task)
                made.append(task)
        return made

    def _commonness(self, proposal: Proposal) -> tuple[int, int]:
        """How many tasks there are as difficult as this one may be expected to be, and how many were tried like it."""
        calls, tasks = self._calls.get(proposal.name, (0, 0))
        return self._levels[round(calls / tasks)] if tasks else 0, self._names[proposal.name]

    def _keep(self, task: Task) -> None:
        super()._keep(task)
        self._levels[task.difficulty] += 1
        name = task.meta.get("template", "")
        calls, tasks = self._calls.get(name, (0, 0))
        self._calls[name] = (calls + task.difficulty, tasks + 1)
        self._tools.update(call.name for action in task.reference for call in parse(action).calls)

    def _accepted(self, world: World, proposal: Proposal, rng: random.Random) -> Task | None:
        self._counts["tried"] += 1
        try:
            task = self.writer.write(world, proposal, rng, common=self._tools)
        except Unfit as why:
            self._counts[f"- {why}"] += 1
            return None
        why = self._known.repeats(task) or unfeasible(world, task)
        self._counts[f"- {why}" if why else "accepted"] += 1
        return None if why else task
