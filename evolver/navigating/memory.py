"""Self-navigating without a language model: contrasted attempts, a pool on disk, retrieval by the query."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from envs.world import Task, World
from evolver.navigating.experience import Experience
from evolver.navigating.extract import Lesson, extract, render
from evolver.navigating.mixed import plan
from evolver.navigating.pool import Pool
from evolver.traces import broken
from rl.trajectory import Trajectory


class Navigating:
    """What to put in front of which rollout, and what to learn from them afterwards."""

    def __init__(
        self,
        pool: Pool,
        *,
        eta: float = 0.5,
        k: int = 1,
        min_similarity: float = 0.3,
        render: Callable[[Lesson], str] = render,
        when: Callable[[str], str] = str,
        contrast_only: bool = False,
        make_world: Callable[[], World] | None = None,
        splits: Sequence[str] = ("train",),
        min_uses: int = 5,
        max_win_rate: float = 0.5,
        relative: bool = True,
        extract: Callable[..., list[Experience]] = extract,
    ):
        """`eta`: share of guided rollouts; `k`: most experiences per rollout; `min_similarity`: least cosine of a
        retrieved one; `extract`: what makes experiences of trajectories; `render`, `when`, `contrast_only`,
        `make_world`, `splits`: its arguments; the others: see `Pool.prune`."""
        self.pool, self.eta, self.k, self.min_similarity = pool, eta, k, min_similarity
        options = {"render": render, "when": when, "contrast_only": contrast_only, "make_world": make_world}
        self._extract = functools.partial(extract, splits=splits, **options)
        self.min_uses, self.max_win_rate, self.relative = min_uses, max_win_rate, relative
        self._counts: Counter[str] = Counter()
        self._similarity = 0.0

    def retrieve_all(self, queries: Sequence[str]) -> list[list[Experience]]:
        """What to put in front of each of these tasks."""
        return [self.retrieve(query) for query in queries]

    def retrieve(self, query: str) -> list[Experience]:
        """The experiences for a task's query, at most `k`, no two of the same content; [] if none is near.

        Among the near ones those that helped come first: a rank is the cosine plus a tenth of the smoothed gain
        (wins - expected) / (uses + 2).
        """
        near = self.pool.search(query, 4 * self.k, min_similarity=self.min_similarity)
        ranked = sorted(near, key=lambda pair: (-(pair[1] + 0.1 * _gain(pair[0])), pair[0].id))
        chosen: dict[str, tuple[Experience, float]] = {}
        for experience, similarity in ranked:
            if len(chosen) < self.k:
                chosen.setdefault(experience.content, (experience, similarity))
        self._counts["retrievals"] += 1
        self._counts["empty"] += not chosen
        self._similarity += max((similarity for _, similarity in chosen.values()), default=0.0)
        return [experience for experience, _ in chosen.values()]

    def guide(self, tasks: Sequence[Task], G: int, seed: int) -> list[list[list[Experience]]]:
        """For each task and each of its G rollouts the experiences to put in front of it, [] = unguided.

        Exactly round(eta * G) rollouts of a task are guided, or none where nothing is retrieved.
        """
        guided_NG = plan([task.id for task in tasks], G, self.eta, seed)
        wanted = [n for n, guided_G in enumerate(guided_NG) if guided_G.any()]
        retrieved = dict(zip(wanted, self.retrieve_all([tasks[n].query for n in wanted])))
        lists = []
        for n, guided_G in enumerate(guided_NG):
            found = retrieved.get(n, [])
            lists.append([list(found) if guided else [] for guided in guided_G])
            self._counts["rollouts"] += G
            self._counts["guided"] += int(guided_G.sum()) if found else 0
        return lists

    def learn(self, trajectories: Sequence[Trajectory], *, step: int = 0) -> list[str]:
        """Count uses, extract, add what is new, delete what does not help; return the ids added.

        Raises ValueError if a trajectory is not of a training task.
        """
        found = self._extract(trajectories, step=step)
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            if not broken(trajectory):  # the world's failure says nothing about what was told
                groups.setdefault(trajectory.task.id, []).append(trajectory)
        for group in groups.values():
            alone = [t for t in group if not t.guided] or group
            expected = sum(t.evaluation.success for t in alone) / len(alone)
            for trajectory in group:
                self.pool.record(trajectory.experience, success=trajectory.evaluation.success, expected=expected)
        added = self.pool.add(found)
        pruned = self.pool.prune(min_uses=self.min_uses, max_win_rate=self.max_win_rate, relative=self.relative)
        self._counts.update(extracted=len(found), added=len(added), pruned=len(pruned))
        return [id for id in added if id in self.pool]

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, and of the pool as it is."""
        counts, self._counts = self._counts, Counter()
        similarity, self._similarity = self._similarity, 0.0
        used = [e for e in self.pool.all() if e.uses]
        counted = getattr(self._extract.func, "counts", {})  # of an extractor that can fail
        figures = {f"navigating/{name}": float(count) for name, count in counted.items()}
        counted.update(dict.fromkeys(counted, 0))
        return figures | {
            "navigating/pool": float(len(self.pool)),
            "navigating/guided_rate": counts["guided"] / max(counts["rollouts"], 1),
            "navigating/empty_rate": counts["empty"] / max(counts["retrievals"], 1),
            "navigating/similarity": similarity / max(counts["retrievals"] - counts["empty"], 1),
            "navigating/extracted": float(counts["extracted"]),
            "navigating/added": float(counts["added"]),
            "navigating/pruned": float(counts["pruned"]),
            "navigating/win_rate": sum(e.wins for e in used) / max(sum(e.uses for e in used), 1),
            "navigating/expected_rate": sum(e.expected for e in used) / max(sum(e.uses for e in used), 1),
        }

    def state(self) -> dict[str, Any]:
        """Everything that later calls depend on, as JSON values."""
        return self.pool.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.pool.load_state(state)


def _gain(experience: Experience) -> float:
    return (experience.wins - experience.expected) / (experience.uses + 2)
