"""Tree-GRPO (Ji et al., "Tree Search for LLM Agent Reinforcement Learning", arXiv 2509.21240):
rollouts branch, and their outcomes are compared within their tree and among all trees of the task.

The paper claims that trees do better than chains on 11 data sets of question answering, for the
same number of tokens and tool calls, since branches share their first turns. Here each of the
`rollout.group` rollouts of a task is the first of a tree.

    config.recipe.name = "tree"
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evolver import grading
from evolver.build import Run
from evolver.metrics import Played
from evolver.phases.rollouts import graded_rollouts, sampling_of
from evolver.recipes import Chosen, Recipe
from rl.advantages.outcome import grpo
from rl.bounds import Count
from rl.rollout import Job, branch
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of

Place = tuple[str, int, int]  # a rollout: its task, draw and index


@dataclass(eq=False, kw_only=True)
class Tree(Recipe):
    """Trains on trees of rollouts; the plug `advantage` is not asked.

    branches: rollouts that leave each tree in a round, each after some turns of one of its
    rollouts, both drawn at random. rounds: number of rounds.
    """

    branches: Count = 1
    rounds: Count = 1

    def __post_init__(self) -> None:
        self.parent: dict[Place, Place] = {}  # branch -> the rollout that it left

    def roll_out(self, run: Run, chosen: Chosen, step: int) -> Played:
        trajectories, metrics = super().roll_out(run, chosen, step)
        self.parent, first = {}, len(trajectories)
        for number in range(self.rounds):
            jobs = self.jobs(run, trajectories, number, step)
            played, _ = graded_rollouts(run, jobs, "branches", run.grader, self.judge)
            trajectories = [*trajectories, *played]
        return trajectories, metrics | {"tree/branches": len(trajectories) - first}

    def jobs(
        self, run: Run, trajectories: Sequence[Trajectory], number: int, step: int
    ) -> list[Job]:
        """Return the branches of a round."""
        jobs = []
        for group in groups_of(trajectories).values():
            trees: dict[Place, list[Trajectory]] = {}
            for t in group:
                if len(t.turns) > 1 and not t.broken:
                    trees.setdefault(self.root(place_of(t)), []).append(t)
            index = len(group)
            for root, members in trees.items():
                seed = seed_of(run.config.seed, "tree", step, number, *root)
                rng = random.Random(seed)
                for i in range(self.branches):
                    parent = rng.choice(members)
                    sampling = sampling_of(run.config)
                    job = Job(parent.task, index, seed_of(seed, "branch", i), sampling)
                    jobs.append(branch(parent, rng.randrange(1, len(parent.turns)), job))
                    self.parent[parent.task.id, parent.draw, index] = place_of(parent)
                    index += 1
        return jobs

    def root(self, place: Place) -> Place:
        """Return the first rollout of the tree of a rollout."""
        while place in self.parent:
            place = self.parent[place]
        return place

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        """Write `advantages`. A turn that several rollouts share trains once, with their mean."""
        grading.shape(run.config, run.reward, trajectories, step)
        counted = grading.counted(run.config, trajectories)
        reward_N = np.array([t.compared for t in counted])
        roots = [self.root(place_of(t)) for t in counted]
        value_N = advantages(reward_N, roots)
        given = {place_of(t): sum(turn.given for turn in t.turns) for t in trajectories}
        through: dict[tuple[Place, int], list[float]] = {}  # (rollout, turn) -> of those through it
        for trajectory, value in zip(counted, value_N):
            place = place_of(trajectory)
            for k in reversed(range(len(trajectory.turns))):
                while k < given[place]:
                    place = self.parent[place]
                through.setdefault((place, k), []).append(float(value))
        for trajectory in counted:
            for k, turn in enumerate(trajectory.turns):
                turn.advantage = float(np.mean(through.get((place_of(trajectory), k), 0.0)))


def place_of(trajectory: Trajectory) -> Place:
    """Return the key of a rollout of a step."""
    return (*trajectory.group, trajectory.rollout)


def advantages(reward_N: np.ndarray, roots: Sequence[Place]) -> np.ndarray:
    """Return A_intra-tree + A_inter-tree: the rewards standardised among the rollouts of their tree
    and among those of all trees of the task, (N,)."""
    return grpo(reward_N, numbered(roots)) + grpo(reward_N, numbered([r[:2] for r in roots]))


def numbered(groups: Sequence[tuple[object, ...]]) -> np.ndarray:
    """Return the numbers of groups in the order in which they come first, (N,)."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[key] for key in groups], np.int64)
