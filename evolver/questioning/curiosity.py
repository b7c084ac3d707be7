"""Self-questioning without a language model, in any world with tools: curiosity walks, and tasks
from their effects."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Task, World
from evolver.parts import Parts
from evolver.questioning.calls import Event, tool_names
from evolver.questioning.goals import Proposal, Writer, proposals
from evolver.questioning.pool import TaskPool
from evolver.questioning.start_state import Site
from evolver.questioning.tasks import Unfit, check_probe, probe_of
from evolver.questioning.walks import Known, Walk, Walker
from rl.bounds import Count, CountOrZero

_PATIENCE = 512  # visits of worlds by which something has to be found


class Curiosity:
    """An explorer that needs nothing but `reset`, `step` and the tool schemas of a world.

    It learns which calls only read, which values their arguments take and which calls make others
    possible; what the reading calls show is the state, and a task is a change of it
    (evolver/questioning/{walks,site,goals}.py).
    """

    def __init__(
        self,
        parts: Parts,
        *,
        breadth: CountOrZero = 6,
        depth: CountOrZero = 18,
        branches: Count = 2,
        per_walk: Count = 3,
        rounds: Count = 4,
        rehearsals: CountOrZero = 16,
        goals: Count = 2,
        least: Count = 1,
        most: Count = 6,
    ):
        """breadth, depth: steps of the two phases of a walk (N_b and N_d in the paper). branches:
        depth phases per
        breadth phase. per_walk: most tasks kept from one walk. rounds: passes over the worlds per
        call of `explore`.
        rehearsals: worlds that are explored before the first task, to learn how everything works.
        goals: most changes
        that a task asks for. least, most: calls of a task's solution.
        """
        self.pool, self.per_walk, self.rounds = parts.task_pool, per_walk, rounds
        self.rehearsals, self.goals, self.least, self.most = rehearsals, goals, least, most
        self.walker = Walker(breadth=breadth, depth=depth, branches=branches)
        self._tried: Counter[str] = Counter()  # proposals by name
        self._known: dict[
            str, list[dict[str, Any]]
        ] = {}  # start -> what its world showed: the fields of `Known`
        self._memories: dict[str, dict[str, Any]] = {}  # start -> Site.memory() of a slow world
        self._rehearsed = False
        self._slow = False  # some world was

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterator[Task]:
        """Yield new tasks, in up to `rounds` passes over the worlds of all seeds. If those find
        nothing to make a task
        of, others follow, within bounds, until they do: where every tool wants an id, the first is
        a lucky guess.

        Each pass takes at most an even share of the budget from each world, so that the tasks come
        from as many worlds as possible. Worlds that offer little give fewer.
        """
        check_probe(world, seeds[0], probe_of(seeds[0]))
        self._rehearse(world, seeds, rng)
        statistics = _Statistics(self.pool, self.least, self.most)
        share, size = -(-budget // len(seeds)), len(self.pool.tasks)
        left, passes, known = self.rounds, 0, False
        while left and (known or passes < self.rounds or passes * len(seeds) < _PATIENCE):
            known = bool(self._tried) or self._slow
            for start in self._order(seeds, rng):
                end = min(len(self.pool.tasks) + share, size + budget)
                for site, walk in self._walks(world, start, rng):
                    most = min(self.per_walk, end - len(self.pool.tasks))
                    yield from self._tasks(site, walk, rng, most, statistics, even=left > 1)
                    if len(self.pool.tasks) >= end:
                        break
            passes += 1
            if known or passes < self.rounds:
                left -= 1
            elif self._tried:
                left = self.rounds

    def _rehearse(self, world: World, seeds: Sequence[Task], rng: random.Random) -> None:
        """Explore some worlds without writing tasks, unless this explorer already knows how things
        work."""
        if self._rehearsed:
            return
        for number in range(self.rehearsals):
            slow = [site.slow for site, _ in self._walks(world, seeds[number % len(seeds)], rng)]
            self._slow |= any(slow)
            if any(slow) and number:  # in a slow world the first tasks have to do without
                break
        self._rehearsed = True

    def _walks(self, world: World, start: Task, rng: random.Random) -> Iterator[tuple[Site, Walk]]:
        """Walk from a start, learn from each walk, and yield it. What the world shows is kept for
        later visits."""
        values, shown_by = self._known.get(start.id, ({}, {}))
        known = Known(
            {kind: dict.fromkeys(inner) for kind, inner in values.items()}, dict(shown_by)
        )
        site = Site(probe_of(start), world, self.walker.knowledge, rng, known)
        site.recall(self._memories.get(start.id, {}))
        beginning = self._beginning(site, start, rng)
        for walk in self.walker.walks(world, site.task, rng, known, beginning, site.operations):
            site.learn_roles(walk.events)
            site.extend(walk.events)
            values = {kind: list(values) for kind, values in known.values.items()}
            self._known[start.id] = [values, dict(known.shown_by)]
            if memory := site.memory():
                self._memories[start.id] = memory
            try:
                yield site, walk
            finally:
                self.pool.count(walks=1, env_steps=len(walk.events) + site.steps)
                site.steps = 0

    def _order(self, seeds: Sequence[Task], rng: random.Random) -> list[Task]:
        """Return the starts in the order in which they are explored: first those of tasks that
        teach most now."""
        gains: Counter[str] = Counter()
        for task in self.pool.tasks.values():
            if task.id in self.pool.results:
                gains[task.meta.get("source", "")] += self.pool.learnability(task.id)
        return sorted(rng.sample(seeds, len(seeds)), key=lambda start: -gains[start.id])

    def _beginning(self, site: Site, start: Task, rng: random.Random) -> list[Event]:
        """Return calls to begin a walk with: some of the solution of a task there that fails more
        often than not, so that the walk looks around where the policy gets stuck."""
        failed = [
            task
            for id, (won, tried) in self.pool.results.items()
            if 2 * won < tried and (task := self.pool.tasks[id]).meta.get("source") == start.id
        ]
        if not failed:
            return []
        calls = [call for action in rng.choice(failed).reference for call in parse(action).calls]
        known = [call for call in calls if call.name in site.operations]
        return [
            Event(call.name, call.arguments, "") for call in known[: rng.randrange(len(known) + 1)]
        ]

    def _tasks(
        self,
        site: Site,
        walk: Walk,
        rng: random.Random,
        most: int,
        statistics: _Statistics,
        *,
        even: bool,
    ) -> Iterator[Task]:
        """Yield tasks of a walk until `most` are kept, first those of the rarest difficulty, then
        of the rarest name.

        even: stop before a difficulty gets much more than its even share of the pool.
        """

        def commonness(proposal: Proposal) -> tuple[float, int]:
            return statistics.as_difficult_as(proposal.name), self._tried[proposal.name]

        candidates = proposals(walk.events, site, goals=self.goals)
        writer = Writer(site, least=self.least, most=self.most)
        kept = 0
        for _ in range(3 * most):
            if not candidates or kept >= most:
                break
            rng.shuffle(candidates)
            proposal = min(candidates, key=commonness)
            candidates.remove(proposal)
            if (
                even
                and commonness(proposal)[0]
                > 1.2 * len(self.pool.tasks) / (self.most - self.least + 1) + 2
            ):
                break
            self._tried[proposal.name] += 1
            try:
                task = writer.write(proposal, rng, common=statistics.tools)
            except Unfit as reason:
                self.pool.reject(str(reason))
                continue
            yield task
            if self.pool.tasks.get(task.id) is task:
                statistics.add(task)
                kept += 1

    def state(self) -> dict[str, Any]:
        """Return what was learnt, as JSON values."""
        return {
            "knowledge": self.walker.knowledge.state(),
            "tried": dict(self._tried),
            "known": self._known,
            "memories": self._memories,
            "rehearsed": self._rehearsed,
            "slow": self._slow,
            "beside": {value: sorted(others) for value, others in self.walker.beside.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.walker.knowledge.load_state(state["knowledge"])
        self._tried, self._known = Counter(state["tried"]), dict(state["known"])
        self._memories = dict(state["memories"])
        self._rehearsed, self._slow = state["rehearsed"], state["slow"]
        self.walker.beside = {value: set(others) for value, others in state["beside"].items()}


class _Statistics:
    """Statistics of the pool: the number of tasks of each difficulty, and the tools that their
    references use.

    A difficulty counts for more tasks than it has if its tasks are nearly always solved, so that
    the difficulty of new tasks rises with success.
    """

    def __init__(self, pool: TaskPool, least: int, most: int):
        self._surplus = {level: _surplus(pool, level) for level in range(least, most + 1)}
        self.tools: Counter[str] = Counter()
        self._difficulties: Counter[int] = Counter()
        self._templates: dict[str, tuple[int, int]] = {}  # template -> (sum of difficulties, tasks)
        for task in pool.tasks.values():
            self.add(task)

    def add(self, task: Task) -> None:
        name = task.meta.get("template", "")
        difficulty, tasks = self._templates.get(name, (0, 0))
        self._templates[name] = (difficulty + task.difficulty, tasks + 1)
        self._difficulties[task.difficulty] += 1
        self.tools.update(tool_names(task.reference))

    def as_difficult_as(self, template: str) -> float:
        """Return the number of tasks that are as difficult as those of `template` are on average, 0
        if it has none."""
        difficulty, tasks = self._templates.get(template, (0, 0))
        if not tasks:
            return 0
        level = round(difficulty / tasks)
        return self._difficulties[level] * self._surplus.get(level, 1.0)


def _surplus(pool: TaskPool, level: int) -> float:
    """Return 1 for a difficulty that is solved at most half of the time or was not tried, up to 4
    if it always is."""
    counts = [
        pool.results[id]
        for id, task in pool.tasks.items()
        if task.difficulty == level and id in pool.results
    ]
    rate = sum(won for won, _ in counts) / max(sum(tried for _, tried in counts), 1)
    return 1.0 + 6.0 * max(rate - 0.5, 0.0)
