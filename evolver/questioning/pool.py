"""The synthetic tasks of a run and how well each is solved, whoever invented them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from envs.world import Task
from evolver.questioning.filter import Duplicates
from evolver.questioning.mixture import mixture


class TaskPool:
    """Synthetic tasks with their results: what all ways of self-questioning have in common.

    A way of inventing tasks extends it by `explore(seed, budget) -> list[Task]`, whose tasks it `_keep`s, and may count
    what happens in `_counts`: "walks", "steps", "tried", "accepted" and "- <why>" for what was turned down.
    """

    def __init__(self, seed_tasks: Sequence[Task], *, overlap: float = 0.8, capacity: int = 512):
        """`overlap`: Jaccard similarity of queries from which a task repeats another; `capacity`: most tasks kept."""
        if not seed_tasks:
            raise ValueError("self-questioning explores the worlds of training tasks, and there are none")
        self._seeds, self.overlap, self.capacity = list(seed_tasks), overlap, capacity
        self._counts: Counter[str] = Counter()
        self._start_over([], {}, {})

    def _start_over(self, tasks: Sequence[Task], results: dict[str, list[int]], names: dict[str, int]) -> None:
        """Set everything that is kept between calls. `names` counts what was tried, by name."""
        self.tasks: dict[str, Task] = {}
        self._results: dict[str, list[int]] = {}  # id -> [successes, attempts]
        self._by_template: dict[str, list[int]] = {}  # the same, over the tasks of a template
        self._names = Counter(names)
        self._known = Duplicates(self.overlap, [*self._seeds, *tasks])
        for task in tasks:
            self._keep(task)
            if task.id in results:
                self._count(task.id, *results[task.id])

    def _keep(self, task: Task) -> None:
        self.tasks[task.id] = task

    def mixture(
        self,
        original: Sequence[Task],
        synthetic: Sequence[Task] | None = None,
        *,
        step: int,
        n: int,
        ratio: float,
        seed: int,
        learnable: bool = False,
    ) -> list[Task]:
        """The tasks of a step: see `mixture`. `learnable` prefers synthetic tasks that are solved sometimes."""
        synthetic = list(self.tasks.values()) if synthetic is None else synthetic
        weights = [self.learnability(task.id) for task in synthetic] if learnable else None
        return mixture(original, synthetic, step=step, n=n, ratio=ratio, seed=seed, weights=weights)

    def record(self, results: Iterable[tuple[str, bool]]) -> None:
        """Count attempts: (task id, success). Tasks that are not in the pool are passed over."""
        for id, success in results:
            if id in self.tasks:
                self._count(id, bool(success), 1)

    def _count(self, id: str, successes: int, attempts: int) -> None:
        template = self.tasks[id].meta.get("template", "")
        for counts in (self._results.setdefault(id, [0, 0]), self._by_template.setdefault(template, [0, 0])):
            counts[0] += successes
            counts[1] += attempts

    def learnability(self, id: str) -> float:
        """4 p (1 - p) of the estimated success rate p; tasks of one template are estimated together.

        p = (successes + 2 q) / (attempts + 2), where q = (successes + 1) / (attempts + 2) over all tasks of its
        template. A pool is larger than what a run can try twice, so that a task's own record says little.
        """
        template = self.tasks[id].meta.get("template", "") if id in self.tasks else None
        successes, attempts = self._by_template.get(template, (0, 0))
        prior = (successes + 1) / (attempts + 2)
        successes, attempts = self._results.get(id, (0, 0))
        rate = (successes + 2 * prior) / (attempts + 2)
        return 4.0 * rate * (1.0 - rate)

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, and the size of the pool and what its tasks are."""
        counts, self._counts = self._counts, Counter()
        figures = {f"questioning/{name}": float(counts[name]) for name in ("walks", "steps", "tried", "accepted")}
        figures |= {
            f"questioning/rejected/{n.removeprefix('- ')}": float(v) for n, v in sorted(counts.items()) if n[:2] == "- "
        }
        tried = [s / a for s, a in (self._results.get(id, (0, 0)) for id in self.tasks) if a]
        figures["questioning/pool"] = float(len(self.tasks))
        figures["questioning/learnable_rate"] = sum(0 < rate < 1 for rate in tried) / max(len(tried), 1)
        levels = Counter(task.difficulty for task in self.tasks.values())
        return figures | {f"questioning/difficulty/{level}": float(levels[level]) for level in sorted(levels)}

    def state(self) -> dict[str, Any]:
        """Everything that later calls depend on, as JSON values."""
        return {
            "tasks": [task.to_dict() for task in self.tasks.values()],
            "results": {id: list(pair) for id, pair in self._results.items()},
            "names": dict(self._names),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        results = {id: list(pair) for id, pair in state["results"].items()}
        self._start_over([Task.from_dict(record) for record in state["tasks"]], results, state["names"])

    def _shrink(self) -> None:
        """Let go of what teaches least, the oldest first among equals."""
        surplus = len(self.tasks) - self.capacity
        if surplus > 0:
            gone = set(sorted(self.tasks, key=self.learnability)[:surplus])
            results = {id: pair for id, pair in self._results.items() if id not in gone}
            self._start_over([task for id, task in self.tasks.items() if id not in gone], results, self._names)
