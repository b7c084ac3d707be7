"""Self-questioning without a language model, in any world with tools: curiosity walks, and tasks
from their effects."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from envs.world import Task, World, first_of_worlds
from evolver.parts import Parts
from evolver.questioning.attention import attended, subjects
from evolver.questioning.calls import Event, Events, Json
from evolver.questioning.goals import Goal, Writer, goals_of
from evolver.questioning.kinds import start_state
from evolver.questioning.pool import TaskPool
from evolver.questioning.start_state import StartState
from evolver.questioning.tasks import GUESSABLE, Rejected, check_probe, probe_of
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Call, Walker
from evolver.replaying import calls_of
from rl.bounds import Count, CountOrZero

_PATIENCE = 512  # visits of worlds by which something has to be found
_PROPOSALS = 3  # goals that are written per task that a walk may give
_REHEARSING = 0.25  # of the time, at most
_TRIALS = 64  # of goals of one name, after which none of them is expected to become a task
_RETRIED = 0.1  # of such goals
_HALF = 0.5  # rate of success up to which a difficulty counts once
_SURPLUS = 6.0  # how much more a difficulty counts for each success beyond


class Curiosity:
    """An explorer that needs nothing but `reset`, `step` and the tool schemas of a world.

    It learns which calls only read, which values their arguments take and which calls make others
    possible; what the reading calls show is the state, and a task is a change of it
    (evolver/questioning/{walks,start_state,goals}.py).
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
        depth phases per breadth phase. per_walk: most tasks kept from one walk. rounds: passes over
        the worlds per call of `explore`. rehearsals: worlds that are explored before the first
        task, to learn how everything works. goals: most changes that a task asks for. least, most:
        calls of a task's solution.
        """
        assert parts.task_pool is not None  # every explorer gets one
        self.pool = parts.task_pool
        self.per_walk = per_walk
        self.rounds = rounds
        self.rehearsals = rehearsals
        self.goals = goals
        self.least = least
        self.most = most
        self.walker = Walker(breadth=breadth, depth=depth, branches=branches)
        self._tried: Counter[str] = Counter()  # goals by name
        self._made: set[str] = set()  # names of goals that became tasks
        # start -> what its world showed: fields of SeenValues, and StartState.state()
        self._starts: dict[str, Json] = {}
        self._tools: dict[str, str] = {}  # start -> names of its operations
        self._tools_in: dict[str, list[str]] = {}  # world -> those of its visited starts
        self._rehearsed = False
        self._slow = False  # some world was
        self._subjects = 1  # visits that it takes to attend to all tools

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterator[Task]:
        """Yield new tasks, in up to `rounds` passes over the worlds of all seeds. If those find
        nothing to make a task of, others follow, within bounds, until they do: where every tool
        wants an id, the first is a lucky guess.

        Each pass takes at most an even share of the budget from each start, so that the tasks come
        from as many starts as possible. Starts that offer little give fewer. But for the last pass,
        starts with the same tools also get no more than their even share, so that in a mixture of
        worlds the easiest one does not give all tasks.
        """
        for first in first_of_worlds(seeds):
            check_probe(world, first)
        self._rehearse(world, rng.sample(seeds, len(seeds)), rng)
        statistics = _PoolStatistics(self.pool)
        share = -(-budget // len(seeds))
        size = len(self.pool.tasks)
        left = self.rounds
        passes = 0
        found = False
        worlds = {task.env for task in seeds}
        while left and (found or passes < self.rounds or passes * len(seeds) < _PATIENCE):
            found = bool(self._tried) or self._slow
            for task in self._order(seeds, rng):
                if self.pool.is_over():
                    return
                end = min(len(self.pool.tasks) + share, size + budget)
                unseen = worlds - self._tools_in.keys()
                even = budget / max(len(set(self._tools.values())) + len(unseen), 1)
                if left > 1 and self._is_served(task, even, size):
                    continue
                for start, walk in self._walks(world, task, rng):
                    most = min(self.per_walk, end - len(self.pool.tasks))
                    yield from self._tasks(start, walk, rng, most, statistics)
                    if len(self.pool.tasks) >= end or self.pool.is_over():
                        break
            passes += 1
            if found or passes < self.rounds:
                left -= 1
            elif self._tried:
                left = self.rounds

    def _rehearse(self, world: World, seeds: Sequence[Task], rng: random.Random) -> None:
        """Explore some worlds without writing tasks, unless this explorer already knows how things
        work."""
        if self._rehearsed:
            return
        number = 0
        visits = self.rehearsals
        while number < visits:
            for start, _ in self._walks(world, seeds[number % len(seeds)], rng):
                self._slow |= start.slow
                if late := self.pool.spent() > _REHEARSING:
                    break
            # In a slow world the first tasks have to do without the others.
            if (self._slow and number) or late or self.pool.is_over():
                break
            number += 1
            visits = max(self.rehearsals, self._subjects)
        self._rehearsed = True

    def _is_served(self, task: Task, share: float, size: int) -> bool:
        """Return True if the starts with the same tools as `task` have their share of the tasks
        since the pool had `size`. A start that was not visited has any of the tools that its world
        has shown elsewhere."""
        tools = self._tools.get(task.id)
        new = itertools.islice(self.pool.tasks.values(), size, None)
        given = Counter(self._tools.get(other.meta.get("source", "")) for other in new)
        known = self._tools_in.get(task.env, []) if tools is None else [tools]
        return bool(known) and all(given[each] >= share for each in known)

    def _walks(
        self, world: World, task: Task, rng: random.Random
    ) -> Iterator[tuple[StartState, list[Event]]]:
        """Walk from the start of a task, learn from each walk, and yield it. What the world shows
        is kept for later visits."""
        kept = self._starts.get(task.id, {})
        seen = SeenValues(shown_by=dict(kept.get("shown_by", {})))
        for kind, values in kept.get("values", {}).items():
            seen.values[kind] = dict.fromkeys(values)
        start = start_state(probe_of(task), world, self.walker.stats, rng, seen)
        start.load_state(kept.get("state", {}))
        self._tools[task.id] = tools = " ".join(start.operations)
        shown = self._tools_in.setdefault(task.env, [])
        shown += [tools] * (tools not in shown)
        first = self._beginning(start, task, rng)
        self._subjects = subjects(start.operations)
        start.stats.crowded = self._subjects > 1
        begun = {name for name, _ in first}
        start.operations = attended(start.operations, start.stats, rng, begun)
        for walk in self.walker.walks(world, start.task, rng, seen, first, start.operations):
            start.learn_roles(walk)
            start.extend(walk)
            self._starts[task.id] = {
                "values": {kind: list(values) for kind, values in seen.values.items()},
                "shown_by": dict(seen.shown_by),
                "state": start.state(),
            }
            try:
                yield start, walk
            finally:
                self.pool.count(walks=1, env_steps=len(walk) + start.take_steps())

    def _order(self, seeds: Sequence[Task], rng: random.Random) -> list[Task]:
        """Return the starts in the order in which they are explored: first those of tasks that
        teach most now."""
        gains: dict[str, float] = defaultdict(float)
        for id, task in self.pool.tasks.items():
            if id in self.pool.results:
                gains[task.meta.get("source", "")] += self.pool.learnability(id)
        return sorted(rng.sample(seeds, len(seeds)), key=lambda task: -gains[task.id])

    def _beginning(self, start: StartState, task: Task, rng: random.Random) -> list[Call]:
        """Return calls to begin a walk with: some of the solution of a task there that fails more
        often than not, so that the walk looks around where the policy gets stuck."""
        hard = [self.pool.tasks[id] for id, (won, n) in self.pool.results.items() if 2 * won < n]
        failed = [other for other in hard if other.meta.get("source") == task.id]
        if not failed:
            return []
        made = calls_of(rng.choice(failed))
        calls = [(call.name, call.arguments) for call in made if call.name in start.operations]
        return calls[: rng.randrange(len(calls) + 1)]

    def _tasks(
        self,
        start: StartState,
        walk: Events,
        rng: random.Random,
        most: int,
        statistics: _PoolStatistics,
    ) -> Iterator[Task]:
        """Yield tasks of a walk until `most` are kept, first those of the rarest difficulty, then
        of the rarest name."""

        def commonness(goal: Goal) -> tuple[float, int]:
            return statistics.as_difficult_as(goal.name), self._tried[goal.name]

        found = goals_of(walk, start, most=self.goals)
        goals = [goal for goal in found if self._hopes(goal.name, rng)]
        writer = Writer(start, least=self.least, most=self.most)
        kept = tried = 0
        while goals and kept < most and tried < _PROPOSALS * most:
            rng.shuffle(goals)
            goal = min(goals, key=commonness)
            goals.remove(goal)
            self._tried[goal.name] += 1
            try:
                guesses = self.pool.guesses(goal.name)
                task = writer.write(goal, common=statistics.tools, guesses=guesses)
            except Rejected as reason:
                self.pool.reject(str(reason))
                tried += str(reason) != GUESSABLE  # which was known without a call
                continue
            tried += 1
            yield task
            if self.pool.tasks.get(task.id) is task:
                self._made.add(goal.name)
                statistics.add(task)
                kept += 1

    def _hopes(self, name: str, rng: random.Random) -> bool:
        """Return True for the name of goals that become tasks, or were not tried often. Others are
        tried now and then, as what is known of the world grows."""
        often = self._tried[name] >= _TRIALS and name not in self._made
        return not often or rng.random() < _RETRIED

    def findings(self) -> str:
        """Return what is known of the operations that were called."""
        return self.walker.stats.summary()

    def state(self) -> Json:
        """Return what was learnt, as JSON values."""
        return {
            "stats": self.walker.stats.state(),
            "beside": {value: sorted(others) for value, others in self.walker.beside.items()},
            "tried": dict(self._tried),
            "made": sorted(self._made),
            "starts": self._starts,
            "tools": self._tools,
            "tools_in": self._tools_in,
            "rehearsed": self._rehearsed,
            "slow": self._slow,
        }

    def load_state(self, state: Json) -> None:
        """Continue from what `state` returned."""
        self.walker.stats.load_state(state["stats"])
        self.walker.beside = {value: set(others) for value, others in state["beside"].items()}
        self._tried = Counter(state["tried"])
        self._starts = dict(state["starts"])
        self._made = set(state["made"])
        self._tools = dict(state["tools"])
        self._tools_in = dict(state["tools_in"])
        self._rehearsed = state["rehearsed"]
        self._slow = state["slow"]


class _PoolStatistics:
    """Statistics of the pool: the number of tasks of each difficulty, and the tools that their
    references use.

    A difficulty counts for more tasks than it has if its tasks are nearly always solved, so that
    the difficulty of new tasks rises with success.
    """

    def __init__(self, pool: TaskPool):
        self.tools: Counter[str] = Counter()
        self._difficulties: Counter[int] = Counter()
        self._of_template: dict[str, list[int]] = {}  # the difficulties of its tasks
        for task in pool.tasks.values():
            self.add(task)
        self._won: Counter[int] = Counter()  # attempts at tasks of a difficulty
        self._tried: Counter[int] = Counter()
        for id, (won, tried) in pool.results.items():
            self._won[pool.tasks[id].difficulty] += won
            self._tried[pool.tasks[id].difficulty] += tried

    def add(self, task: Task) -> None:
        """Count a task."""
        self._of_template.setdefault(task.meta.get("template", ""), []).append(task.difficulty)
        self._difficulties[task.difficulty] += 1
        self.tools.update(call.name for call in calls_of(task))

    def as_difficult_as(self, template: str) -> float:
        """Return the number of tasks that are as difficult as those of `template` are on average, 0
        if it has none. It counts once if they are solved at most half of the time or were not
        tried, up to four times if they always are."""
        levels = self._of_template.get(template)
        if not levels:
            return 0
        level = round(sum(levels) / len(levels))
        solved = self._won[level] / max(self._tried[level], 1)
        return self._difficulties[level] * (1.0 + _SURPLUS * max(solved - _HALF, 0.0))
