"""Self-navigating: retrieving experience that guides rollouts, and learning new experience from
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.world import Task
from evolver.navigating.experience import Experience
from evolver.navigating.pool import Pool
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of

if TYPE_CHECKING:
    from evolver.navigating import Extractor, Refiner

# candidates per experience retrieved: the ranking depends on success too, not only on similarity
_NEAR = 4


class Navigating:
    """Retrieves experience for rollouts and learns from them."""

    def __init__(
        self,
        pool: Pool,
        extractor: Extractor,
        refiner: Refiner,
        *,
        share: float,
        top_k: int,
        min_similarity: float,
    ):
        """share: fraction of a group's rollouts that are guided. top_k: most experiences per
        rollout. min_similarity: least cosine of a retrieved experience."""
        self.pool, self.extractor, self.refiner = pool, extractor, refiner
        self.share, self.top_k, self.min_similarity = share, top_k, min_similarity
        self._counts: Counter[str] = Counter()
        self._similarity = self._expected = 0.0

    def retrieve(self, queries: Sequence[str]) -> list[list[Experience]]:
        """Return the experiences for each query: at most `top_k`, [] if none is near enough."""
        most = self.top_k * self.refiner.candidates
        near = self.pool.search_all(queries, _NEAR * most, min_similarity=self.min_similarity)
        return self.refiner.refine(
            queries, [self._candidates(found, most) for found in near], self.top_k
        )

    def _candidates(self, near: Sequence[tuple[Experience, float]], most: int) -> list[Experience]:
        """Return at most `most` of the experiences near a query, no two with the same content.

        They are ranked by the cosine plus a tenth of the smoothed gain (wins - expected) / (uses +
        2).
        """
        ranked = sorted(near, key=lambda pair: (-(pair[1] + 0.1 * _gain(pair[0])), pair[0].id))
        chosen: dict[str, tuple[Experience, float]] = {}
        for experience, similarity in ranked:
            if len(chosen) < most:
                chosen.setdefault(experience.content, (experience, similarity))
        self._counts["retrievals"] += 1
        self._counts["empty"] += not chosen
        self._similarity += max((similarity for _, similarity in chosen.values()), default=0.0)
        return [experience for experience, _ in chosen.values()]

    def guide(self, tasks: Sequence[Task], G: int, seed: int) -> list[list[list[Experience]]]:
        """Return the experiences for each task and each of its G rollouts, [] = unguided.

        Exactly round(share * G) rollouts of a task are guided, or none if nothing is retrieved.
        """
        guided_NG = plan([task.id for task in tasks], G, self.share, seed)
        guided_tasks = [n for n, guided_G in enumerate(guided_NG) if guided_G.any()]
        retrieved = dict(zip(guided_tasks, self.retrieve([tasks[n].query for n in guided_tasks])))
        guidance = []
        for n, guided_G in enumerate(guided_NG):
            experiences = retrieved.get(n, [])
            guidance.append([list(experiences) if guided else [] for guided in guided_G])
            self._counts["rollouts"] += G
            self._counts["guided"] += int(guided_G.sum()) if experiences else 0
        return guidance

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the uses and wins of the experience that guided a step's rollouts; retrieval ranks
        by them.

        Broken rollouts are left out, because they say nothing about the experience that they
        carried.
        """
        for group in groups_of(t for t in trajectories if not t.broken).values():
            expected = success_without(group)
            for trajectory in (t for t in group if t.guided):
                won = bool(trajectory.evaluation.success)
                self.pool.record(trajectory.experience, success=won, expected=expected)
                self._counts.update(used=1, won=won)
                self._expected += expected

    def learn(self, trajectories: Sequence[Trajectory], *, step: int) -> list[str]:
        """Extract, add new experiences and delete those that do not help. Return the ids added.

        Raises ValueError if a trajectory is of a held-out task.
        """
        extracted = self.extractor.extract(trajectories, step=step)
        self.pool.splits |= {t.task.split for t in trajectories}
        added = self.pool.add(extracted)
        pruned = self.pool.prune()
        self._counts.update(extracted=len(extracted), added=len(added), pruned=len(pruned))
        return [id for id in added if id in self.pool]

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, and the size of the pool. Without guided rollouts
        there are no rates of their success."""
        counts, self._counts = self._counts, Counter()
        similarity, expected = self._similarity, self._expected
        self._similarity = self._expected = 0.0
        rates = (
            {"win": counts["won"] / counts["used"], "expected": expected / counts["used"]}
            if counts["used"]
            else {}
        )
        return self.extractor.metrics() | {
            "navigating/pool": float(len(self.pool)),
            "navigating/guided_rate": counts["guided"] / max(counts["rollouts"], 1),
            "navigating/empty_rate": counts["empty"] / max(counts["retrievals"], 1),
            "navigating/similarity": similarity / max(counts["retrievals"] - counts["empty"], 1),
            "navigating/extracted": float(counts["extracted"]),
            "navigating/added": float(counts["added"]),
            "navigating/pruned": float(counts["pruned"]),
        } | {f"navigating/{name}_rate": rate for name, rate in rates.items()} | self.refiner.metrics()  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return everything that later calls depend on, as JSON values."""
        return self.pool.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.pool.load_state(state)


def plan(task_ids: Sequence[str], G: int, share: float, seed: int) -> np.ndarray:
    """Return bool [tasks, G]: exactly round(share * G) guided rollouts per task, drawn from `seed`
    and the task's id.

    The draw for one task does not depend on the other tasks of the batch. Raises ValueError for a
    `share` outside [0, 1] (N_e / G in eq. 15 of the AgentEvolver paper).
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is the fraction of guided rollouts, between 0 and 1; got {share}")
    guided_NG = np.zeros((len(task_ids), G), bool)
    for row_G, id in zip(guided_NG, task_ids, strict=True):
        rng = np.random.default_rng(seed_of(seed, "guided", id))
        row_G[rng.permutation(G)[: round(share * G)]] = True
    return guided_NG


def success_without(group: Sequence[Trajectory]) -> float:
    """Return the success rate of the unguided rollouts of a group, or of all of them if all are
    guided."""
    unguided = [t for t in group if not t.guided] or group
    return sum(t.evaluation.success for t in unguided) / len(unguided)


def _gain(experience: Experience) -> float:
    return (experience.wins - experience.expected) / (experience.uses + 2)
