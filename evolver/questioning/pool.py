"""The synthetic tasks of a run, and how often each is solved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from envs.probed import probed
from envs.world import Task, World, WorldError
from evolver.questioning.mixture import mixture
from evolver.questioning.tasks import Duplicates, is_verified, unfeasible
from rl.seeds import seed_of

if TYPE_CHECKING:
    from evolver.questioning import Explorer
    from evolver.questioning.words import Words


class TaskPool:
    """Synthetic tasks with their results. Any explorer can fill it (`grow`).

    seeds: the training tasks whose worlds are explored. tasks: {id: task}. results: {id:
    [successes, attempts]}.
    duplicates: detects tasks that repeat a seed or another task.
    """

    def __init__(
        self, seeds: Sequence[Task], *, overlap: float, capacity: int, tasks: Iterable[Task] = ()
    ):
        """overlap: least Jaccard similarity of two queries that counts as a repetition. capacity:
        most tasks kept.
        tasks: synthetic tasks to start with."""
        if not seeds:
            raise ValueError(
                "self-questioning explores the worlds of training tasks, and there are none"
            )
        self.seeds, self.overlap, self.capacity = list(seeds), overlap, capacity
        self._counts: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._explorer_state: Any = None  # what Explorer.state() returned last
        self.refreshed = 0  # the step that the tasks were last refreshed for
        self._reset(tasks, {})

    def _reset(self, tasks: Iterable[Task], results: dict[str, list[int]]) -> None:
        self.tasks: dict[str, Task] = {task.id: task for task in tasks}
        self.results: dict[str, list[int]] = {}
        self._by_template: dict[
            str, list[int]
        ] = {}  # like `results`, summed over the tasks of a template
        self.duplicates = Duplicates(self.overlap, [*self.seeds, *self.tasks.values()])
        for id in self.tasks:
            if id in results:
                self._add_result(id, *results[id])

    # --- growing ----------------------------------------------------------------------------------

    def grow(
        self, explorer: Explorer, make_world: Callable[[], World], budget: int, seed: int
    ) -> list[Task]:
        """Let `explorer` propose tasks until `budget` of them are kept. Return the kept tasks.

        Each task is kept at once, so that tasks that were paid for survive if the explorer raises.
        The pool may then have more than its capacity, until `shrink`.
        """
        if self._explorer_state is not None and hasattr(explorer, "load_state"):
            explorer.load_state(self._explorer_state)
        kept: list[Task] = []
        try:
            with closing(probed(make_world())) as world, closing(probed(make_world())) as checked:
                for task in explorer.explore(
                    world, self.seeds, budget, random.Random(seed_of(seed, "explore"))
                ):
                    if reason := self._unfit(checked, task):
                        self.reject(reason)
                    else:
                        self.count(tried=1, accepted=1)
                        self.tasks[task.id] = task
                        self.duplicates.add(task)
                        kept.append(task)
                    if len(kept) >= budget:
                        break
        finally:
            if hasattr(explorer, "state"):
                self._explorer_state = explorer.state()
        return kept

    def count(
        self, *, walks: int = 0, env_steps: int = 0, tried: int = 0, accepted: int = 0
    ) -> None:
        """Add to the counts of the exploration."""
        self._counts.update(walks=walks, env_steps=env_steps, tried=tried, accepted=accepted)

    def reject(self, reason: str, *, tried: int = 1) -> None:
        """Count a rejected proposal by reason. tried=0: exploration failed before it made a
        proposal."""
        self._counts["tried"] += tried
        self._rejected[reason] += 1

    def rejections(self) -> str:
        """Return a one-line summary of the proposals since the last call of `metrics`."""
        reasons = ", ".join(f"{n} x {reason}" for reason, n in self._rejected.most_common())
        walks, kept = self._counts["walks"], self._counts["accepted"]
        return f"{walks} walks, {kept} tasks kept, rejected: {reasons or 'none'}"

    def _unfit(self, world: World, task: Task) -> str:
        """Return why a task is rejected, or "" if it is kept."""
        if task.origin != "synthetic":
            raise ValueError(
                f"the explorer proposed the task {task.id} with origin '{task.origin}', not 'synthetic'"
            )
        try:
            return self.duplicates.repeats(task) or (
                unfeasible(world, task) if is_verified(task) else ""
            )
        except WorldError:
            return "the world broke"

    def shrink(self) -> None:
        """Remove the tasks with the least learnability, among equals the oldest, until `capacity`
        are left."""
        surplus = len(self.tasks) - self.capacity
        if surplus > 0:
            removed = set(sorted(self.tasks, key=self.learnability)[:surplus])
            self._reset(
                [task for id, task in self.tasks.items() if id not in removed], self.results
            )

    def reword(self, words: Words, ids: Collection[str], tools: str) -> None:
        """Give the tasks `ids` the queries that `words` chooses. They keep their ids and their
        places."""
        for task in words.reword([self.tasks[id] for id in ids if id in self.tasks], tools):
            self.tasks[task.id] = task
        self._reset(list(self.tasks.values()), self.results)  # `duplicates` knows the queries

    def remove(self, ids: Collection[str], reason: str) -> None:
        """Remove tasks, and count them as rejected."""
        self._counts["accepted"] -= len(ids)
        self._rejected[reason] += len(ids)
        self._reset([task for id, task in self.tasks.items() if id not in ids], self.results)

    # --- choosing ---------------------------------------------------------------------------------

    def mixture(
        self,
        original: Sequence[Task],
        synthetic: Sequence[Task] | None = None,
        *,
        learnable: bool = False,
        **draw: Any,
    ) -> list[Task]:
        """Return the tasks of a step. draw: step, n, share and seed of `mixture`.

        learnable: prefer synthetic tasks that are solved sometimes, and give all templates the same
        chance: an explorer finds few tasks of the kinds that are hard to find, which are no easier
        to learn.
        """
        synthetic = list(self.tasks.values()) if synthetic is None else synthetic
        weights = None
        if learnable:
            times = Counter(task.meta.get("template", task.id) for task in synthetic)
            weights = [
                self.learnability(t.id) / times[t.meta.get("template", t.id)] for t in synthetic
            ]
        return mixture(original, synthetic, weights=weights, **draw)

    def record(self, results: Iterable[tuple[str, bool]]) -> None:
        """Count attempts: (task id, success). Ids that are not in the pool are ignored."""
        for id, success in results:
            if id in self.tasks:
                self._add_result(id, bool(success), 1)

    def _add_result(self, id: str, successes: int, attempts: int) -> None:
        template = self.tasks[id].meta.get("template", "")
        for counts in (
            self.results.setdefault(id, [0, 0]),
            self._by_template.setdefault(template, [0, 0]),
        ):
            counts[0] += successes
            counts[1] += attempts

    def learnability(self, id: str) -> float:
        """Return 4 p (1 - p) for the estimated success rate p of a task.

        p = (successes + 2 q) / (attempts + 2), where q = (successes + 1) / (attempts + 2) over all
        tasks of the same template. The pool holds more tasks than a run can try twice, so a task's
        own results say little.
        """
        template = self.tasks[id].meta.get("template", "") if id in self.tasks else None
        successes, attempts = self._by_template.get(template, (0, 0))
        prior = (successes + 1) / (attempts + 2)
        successes, attempts = self.results.get(id, (0, 0))
        rate = (successes + 2 * prior) / (attempts + 2)
        return 4.0 * rate * (1.0 - rate)

    # --- metrics and state ------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return exploration counts since the last call, and statistics of the current pool."""
        counts, self._counts = self._counts, Counter()
        rejected, self._rejected = self._rejected, Counter()
        figures = {
            f"questioning/{name}": float(counts[name])
            for name in ("walks", "env_steps", "tried", "accepted")
        }
        figures |= {
            f"questioning/rejected/{reason}": float(n) for reason, n in sorted(rejected.items())
        }
        rates = [s / n for s, n in (self.results.get(id, (0, 0)) for id in self.tasks) if n]
        figures["questioning/pool"] = float(len(self.tasks))
        figures["questioning/learnable_rate"] = sum(0 < rate < 1 for rate in rates) / max(
            len(rates), 1
        )
        levels = Counter(task.difficulty for task in self.tasks.values())
        return figures | {
            f"questioning/difficulty/{level}": float(levels[level]) for level in sorted(levels)
        }

    def state(self) -> dict[str, Any]:
        """Return everything that later calls depend on, as JSON values; the explorer's state is
        part of it.

        The tasks' own lists and dicts are in it, not copies, which nobody changes.
        """
        return {
            "tasks": [dict(vars(task)) for task in self.tasks.values()],
            "results": {id: list(pair) for id, pair in self.results.items()},
            "explorer": self._explorer_state,
            "refreshed": self.refreshed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._explorer_state, self.refreshed = state["explorer"], state.get("refreshed", 0)
        self._reset([Task.from_dict(record) for record in state["tasks"]], state["results"])
