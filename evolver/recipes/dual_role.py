"""One policy that proposes tasks and solves them, in the manner of Absolute Zero (Zhao et al.,
"Absolute Zero: Reinforced Self-play Reasoning with Zero Data", arXiv 2505.03335).

The paper reports that a 7B model trained without any data of others gains 10.2 points, on average,
in code and mathematics. There a proposal is a program, which an interpreter checks; here the policy
acts in the world after it was shown an earlier task, and what it did is made the new task, and
verified. Advantages have two levels: proposals are compared with others after the same task, by how
learnable theirs are, and solutions with others of their task, by the plug `advantage`.

    config.recipe.name = "dual_role"
    config.questioning.enabled = True
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from envs.world import Evaluation, Task
from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics
from evolver.phases.rollouts import gather_rollouts, sampling_of
from evolver.questioning.tasks import probe_of
from evolver.recipes import Chosen, Recipe, give
from evolver.recipes.proposals import calling, grow
from rl.advantages import Batch
from rl.advantages.outcome import grpo
from rl.bounds import Count, Positive
from rl.rollout import jobs_of
from rl.seeds import seed_of
from rl.trajectory import Trajectory

ASK = (
    "Somebody asked this here: {example}\nDo something else that could be asked for here, and end."
)
UNREADABLE, USELESS = -1.0, -0.5  # rewards of proposals without a call, and without a task


@dataclass(eq=False, kw_only=True)
class DualRole(Recipe):
    """Trains on solutions and on proposals, whose tasks come first among those of their step.

    examples: earlier tasks of a step, each shown to some proposers. proposals: how many these are.
    weight: factor on the advantages of proposals. query: what the proposer is told, with {example}
    in the place of the words of the earlier task.
    """

    examples: Count = 2
    proposals: Count = 4
    weight: Positive = 1.0
    query: str = ASK
    needs_tasks = True  # the config is checked for it
    in_step = True  # what it proposes is tried, and rewarded, in the same step

    def __post_init__(self) -> None:
        self.proposed: list[tuple[Trajectory, str]] = []  # and the id of its task, "" without one

    def choose(self, run: Run, step: int) -> tuple[Chosen, Metrics]:
        """Return the tasks of a step: those of new proposals, then others."""
        chosen, metrics = super().choose(run, step)
        pool, seed = run.tasks.pool, seed_of(run.config.seed, "dual_role", step)
        assert pool is not None  # the config has self-questioning
        rng = random.Random(seed)
        starts = {task.id: task for task in pool.seeds}
        known = [task for task in pool.tasks.values() if task.meta.get("source") in starts]
        asked: dict[str, Task] = {}  # by the id of the example, whose proposals are compared
        for example in rng.sample(known, min(self.examples, len(known))):
            query = self.query.replace("{example}", example.query)
            probe = probe_of(starts[example.meta["source"]])
            asked[example.id] = replace(probe, id=f"proposal/{example.id}", query=query)
        sampling = sampling_of(run.config)
        jobs = jobs_of(asked.values(), self.proposals, sampling, seed, "proposal", draw=step)
        played = gather_rollouts(run, jobs, "proposals")
        acting = [n for n, t in enumerate(played) if actions_of(t)]
        proposals = [(starts[played[n].task.meta["entry"]], actions_of(played[n])) for n in acting]
        new = grow(run, lambda *_: proposals, len(played), "dual_role", step)
        # Whoever repeats a proposal has proposed nothing.
        ids = {acting[n]: task.id for n, task in new.items()}
        self.proposed = [(t, ids.get(n, "")) for n, t in enumerate(played) if not t.broken]
        first = [task for task in new.values() if task.id in pool.tasks]
        others = [task for task in chosen[step] if task.id not in ids.values()]
        chosen[step] = (first + others)[: run.config.rollout.tasks]
        return chosen, metrics

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        super().credit(run, trajectories, step)
        solved: dict[str, list[float]] = {}
        for t in grading.counted(run.config, trajectories):
            solved.setdefault(t.task.id, []).append(float(t.success))
        # A task that was left out, or whose attempts all broke off, says nothing of its proposal.
        self.proposed = [(t, id) for t, id in self.proposed if not id or id in solved]
        for t, id in self.proposed:
            reward = self.reward(t, id, solved.get(id, []))
            t.evaluation = Evaluation(reward, reward > 0, low=UNREADABLE, high=1.0)
        proposals = [t for t, _ in self.proposed]
        batch = Batch.of(proposals, step)
        give(proposals, self.weight * self.compare(batch.outcome_N, batch.group_N))
        self.figures["dual_role/tasks"] = sum(bool(id) for _, id in self.proposed)
        self.figures["dual_role/proposals"] = len(proposals)
        if proposals:
            self.figures["dual_role/reward"] = float(batch.outcome_N.mean())

    def compare(self, reward_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
        """Return the advantages of a step's proposals, (N,): standardised in their groups."""
        return grpo(reward_N, group_N)

    def reward(self, proposal: Trajectory, id: str, solved: Sequence[float]) -> float:
        """Return what a proposal is rewarded with (the paper's equations 4 and 6): 1 - the share of
        attempts that solve its task, but 0 if none does.

        id: of its task, "" if there is none. solved: 1 for each attempt that did, 0 for the others.
        """
        if not id:
            return USELESS if actions_of(proposal) else UNREADABLE
        rate = float(np.mean(solved))
        return 1 - rate if rate else 0.0

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the proposals."""
        return [t for t, _ in self.proposed]


def actions_of(trajectory: Trajectory) -> list[str]:
    """Return the actions of a rollout that call something."""
    return calling(turn.action for turn in trajectory.turns)
