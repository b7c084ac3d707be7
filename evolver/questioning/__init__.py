"""Self-questioning: synthetic tasks from exploring the environment (section 3 of the AgentEvolver
paper)."""

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from envs.world import Evaluation, Task, World
from evolver.metrics import Mechanism
from evolver.questioning.pool import TaskPool, mixture
from evolver.questioning.tasks import is_verified, probe_of, synthetic_task
from rl.trajectory import Trajectory

__all__ = [
    "EXPLORERS", "JUDGES", "WORDS", "Explorer", "OutcomeJudge", "TaskPool", "Verifier",
    "is_verified", "mixture", "probe_of", "synthetic_task",
]  # fmt: skip

EXPLORERS = {
    "curiosity": "evolver.questioning.curiosity:Curiosity",
    "llm": "evolver.questioning.llm:LlmExplorer",
}
WORDS = {
    "plain": "evolver.questioning.words:Plain",
    "inlined": "evolver.questioning.words:Inlined",
    "asked": "evolver.questioning.words:Asked",
    "model": "evolver.questioning.words:ByModel",
}
JUDGES = {
    "verifier": "evolver.questioning:Verifier",
    "naive": "evolver.questioning.judges:Naive",
    "principle": "evolver.questioning.judges:Principle",
    "reference": "evolver.questioning.judges:Reference",
}


class Explorer(Protocol):
    """Proposes synthetic tasks: the plug `questioning.explorer`.

    The pool pulls one task at a time. It rejects a task that repeats another one or whose reference
    does not solve it when executed, keeps it otherwise, and stops when it has kept `budget` tasks.

    An explorer may also have:
    - roles: the chat roles that it asks, a tuple of names;
    - state() and load_state(state): what it learnt, as JSON values. The pool saves it with its own
      state;
    - findings(): what it found out about the world, in one sentence, for a message that it found
      too few tasks.
    """

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterable[Task]:
        """Yield new tasks, preferably made by `synthetic_task`, and stop after a bounded effort.

        world: used by this explorer only. seeds: training tasks; only the worlds they start in may
        be used, so mask their queries by `probe_of`. budget: number of tasks wanted. rng: the only
        source of randomness.
        """
        ...


class OutcomeJudge(Mechanism, Protocol):
    """Scores attempts at synthetic tasks: the plug `questioning.judge`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `score`.
    """

    # False if the world's own evaluation counts, so that `score` is never called
    replaces_outcome: bool = True

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        """Return one evaluation per trajectory, or a string that says why it could not be judged.

        All trajectories are of synthetic tasks and none is broken. They are not changed: the caller
        writes the evaluations and excludes rollouts without one from training. Raises RunEnds
        (evolver/processes/interrupt.py) if the run cannot continue.
        """
        ...


class Verifier(OutcomeJudge):
    """Keeps the world's own evaluation, which checks a synthetic task by its verifier."""

    replaces_outcome = False

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        return [trajectory.reached for trajectory in trajectories]
