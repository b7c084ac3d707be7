"""Self-navigating: retrieving experience that guides rollouts, and learning new experience from
them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.world import Task
from evolver.metrics import Meter, Metrics, mean
from evolver.navigating import Experience, Extractor, Refiner
from evolver.navigating.experience_pool import ExperiencePool
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of

# candidates per experience retrieved: the ranking depends on success too, not only on similarity
_NEAR = 4
_GAIN_WEIGHT = 0.1  # of the gain of an experience, beside the cosine of its key
_METRICS = ("guided_rate", "empty_rate", "similarity", "extracted", "added", "pruned")


@dataclass
class Navigating:
    """Retrieves experience for rollouts and learns from them. What later calls depend on is the
    state of the pool."""

    pool: ExperiencePool
    extractor: Extractor
    refiner: Refiner
    share: float  # of a group's rollouts that are guided
    top_k: int  # most experiences per rollout
    min_similarity: float  # least cosine of a retrieved experience

    def __post_init__(self) -> None:
        self._meter = Meter("navigating", *_METRICS)

    def retrieve(self, queries: Sequence[str]) -> list[list[Experience]]:
        """Return the experiences for each query: at most `top_k`, [] if none is near enough."""
        most = self.top_k * self.refiner.candidates
        near = self.pool.search(queries, _NEAR * most, min_similarity=self.min_similarity)
        candidates = [self._candidates(found, most) for found in near]
        refined = self.refiner.refine(queries, candidates, self.top_k)
        for experiences in refined:  # a refiner may drop what was found, and add what was not
            self._meter.average("empty_rate", not experiences)
        return refined

    def _candidates(self, near: Sequence[tuple[Experience, float]], most: int) -> list[Experience]:
        """Return the best `most` of the experiences near a query, no two with the same content."""
        ranked = sorted(
            near, key=lambda pair: (-(pair[1] + _GAIN_WEIGHT * pair[0].gain), pair[0].id)
        )
        by_content: dict[str, tuple[Experience, float]] = {}
        for pair in ranked:
            by_content.setdefault(pair[0].content, pair)
        chosen = list(by_content.values())[:most]
        if chosen:
            self._meter.average("similarity", max(similarity for _, similarity in chosen))
        return [experience for experience, _ in chosen]

    def guide(self, tasks: Sequence[Task], G: int, seed: int) -> list[list[list[Experience]]]:
        """Return the experiences for each task and each of its G rollouts, [] = unguided.

        Exactly round(share * G) rollouts of a task are guided, or none if nothing is retrieved.
        """
        guided_NG = guided_rollouts([task.id for task in tasks], G, self.share, seed)
        retrieved: list[list[Experience]] = [[] for _ in tasks]
        if guided_NG.any():
            retrieved = self.retrieve([task.query for task in tasks])
        guidance = []
        for guided_G, found in zip(guided_NG, retrieved, strict=True):
            given_G = [list(found) if guided else [] for guided in guided_G]
            for given in given_G:
                self._meter.average("guided_rate", bool(given))
            guidance.append(given_G)
        return guidance

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the uses and wins of the experience that guided a step's rollouts; retrieval ranks
        by them.

        They are compared with the success rate of the unguided rollouts of their group, or of all
        if all are guided. Broken rollouts are left out, because they say nothing about the
        experience that they carried.
        """
        for group in groups_of(t for t in trajectories if not t.broken).values():
            unguided = [t for t in group if not t.guided] or group
            expected = mean(t.success for t in unguided)
            for trajectory in group:
                if trajectory.guided:
                    won = trajectory.success
                    self.pool.record(trajectory.experience, success=won, expected=expected)
                    self._meter.average("win_rate", won)
                    self._meter.average("expected_rate", expected)

    def learn(self, trajectories: Sequence[Trajectory], *, step: int) -> None:
        """Extract, add new experiences and delete those that do not help.

        Raises ValueError if a trajectory is of a held-out task.
        """
        extracted = self.extractor.extract(trajectories, step=step)
        self.pool.splits |= {t.task.split for t in trajectories}
        added = self.pool.add(extracted)
        pruned = self.pool.prune()
        self._meter.count("extracted", len(extracted))
        self._meter.count("added", len(added))
        self._meter.count("pruned", len(pruned))

    def metrics(self) -> Metrics:
        """Return metrics since the last call, and the size of the pool. Without guided rollouts
        there are no rates of their success."""
        own = self._meter.read() | {"navigating/pool": float(len(self.pool))}
        return self.extractor.metrics() | own | self.refiner.metrics()


def guided_rollouts(task_ids: Sequence[str], G: int, share: float, seed: int) -> np.ndarray:
    """Return bool [tasks, G]: exactly round(share * G) guided rollouts per task, drawn from `seed`
    and the task's id (share is N_e / G in eq. 15 of the AgentEvolver paper).

    The draw for one task does not depend on the other tasks of the batch.
    """
    guided_NG = np.zeros((len(task_ids), G), bool)
    for guided_G, id in zip(guided_NG, task_ids):
        rng = np.random.default_rng(seed_of(seed, "guided", id))
        guided_G[rng.permutation(G)[: round(share * G)]] = True
    return guided_NG
