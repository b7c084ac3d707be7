"""The phases of a training step, as the methods of a small class: the plug `recipe`.

The loop (`evolver.loop.iterate`) calls them in this order. Each does by default what the functions
of `evolver.phases` do; a subclass overrides those that its idea changes, in one file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics, Played
from evolver.parts import Parts
from evolver.phases import extraction, learning, refill, rollouts, tasks
from rl.learner import State
from rl.packing import Packed
from rl.trajectory import Trajectory

RECIPES = {
    "standard": "evolver.recipes:Recipe",
    "sirius": "evolver.recipes.sirius:Sirius",
    "reinforce_pp": "evolver.recipes.reinforce_pp:ReinforcePP",
    "webrl": "evolver.recipes.webrl:WebRL",
    "tree": "evolver.recipes.tree:Tree",
    "critic": "evolver.recipes.critic:Critic",
    "separate_critic": "evolver.recipes.separate_critic:SeparateCritic",
    "coevolve": "evolver.recipes.coevolve:CoEvolve",
    "evolutionary": "evolver.recipes.evolutionary:Evolutionary",
    "dual_role": "evolver.recipes.dual_role:DualRole",
    "multi_agent": "evolver.recipes.multi_agent:MultiAgent",
    "demonstrated": "evolver.recipes.demonstrated:Demonstrated",
}

Chosen = rollouts.Chosen


@dataclass(eq=False)
class Recipe:
    """The standard step. `step` is the number of the training step, from 1."""

    parts: Parts
    # the recipe's own metrics since the last call of `metrics`
    figures: Metrics = field(default_factory=Metrics, init=False)
    weighs = False  # True: there is a `weigh`, which may read the `old_logp_RT` of all mini-batches
    needs_reference = False  # True: `weigh` reads `ref_logp_RT`, whatever `loss.kl_coef` is
    passes = 0  # further passes over the rows of a step; for the plan
    networks = 1  # those that train; for the plan

    # Return {step: its tasks} of the steps whose rollouts begin now, and metrics: of this one or,
    # with `rollout.async_depth`, of later ones.
    choose = staticmethod(tasks.choose)

    def roll_out(self, run: Run, chosen: Chosen, step: int) -> Played:
        """Return the step's rollouts, judged, and metrics."""
        trajectories, metrics = rollouts.roll_out(run, chosen, step)
        rollouts.show_faults(run, trajectories, step)
        return refill.refill(run, trajectories, step, metrics)

    # Score the outcomes of whole groups and label their turns, in place: a function of the grader
    # and the trajectories. With `rollout.async_depth` threads call it, as groups end.
    judge = staticmethod(grading.grade)

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        """Write the reward of each rollout and the advantage of each turn."""
        grading.shape(run.config, run.reward, trajectories, step)
        grading.assign(run.config, run.estimator, trajectories, step)

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return further trajectories that train in this step, with the advantages of their turns.

        They have a place of their own in the ledger (`ledger/extra`) and in the view (the kind
        "extra"); no figure of the step's rollouts counts them, and nothing is remembered of them.
        """
        return []

    @staticmethod
    def trains(trajectory: Trajectory) -> bool:
        """Return False for a rollout that has no signal, whatever its group has."""
        return True

    # Return the mini-batches, why each trajectory does not train (None if it does; those of `extra`
    # come last), and metrics.
    select = staticmethod(learning.select)

    # Keep what the rollouts say about tasks and experience. Return metrics.
    remember = staticmethod(extraction.remember)

    # Update the policy. Nothing may end the run in here. Return metrics.
    learn = staticmethod(learning.learn)

    def __init_subclass__(cls, **arguments: Any):
        super().__init_subclass__(**arguments)
        cls.weighs = cls.weigh is not Recipe.weigh

    def weigh(self, batches: Sequence[Packed]) -> Metrics:
        """Change the advantages or the channels of tokens, in place, now that `old_logp_RT` and
        `ref_logp_RT` are known, just before the update. Return metrics."""
        return {}

    def metrics(self) -> Metrics:
        """Return `figures`, and begin new ones."""
        figures, self.figures = self.figures, Metrics()
        return figures

    def state(self) -> Any:
        """Return everything that later steps depend on, as JSON values."""
        return None

    def load_state(self, state: Any) -> None:
        """Continue from what `state` returned."""

    def arrays(self, run: Run) -> State:
        """Return the arrays that later steps depend on, a pytree which a checkpoint holds."""
        return {}

    def load_arrays(self, run: Run, arrays: State) -> None:
        """Continue from what `arrays` returned."""


def give(trajectories: Iterable[Trajectory], advantage_N: Iterable[float]) -> None:
    """Write an advantage into all turns of each rollout."""
    for trajectory, advantage in zip(trajectories, advantage_N, strict=True):
        for turn in trajectory.turns:
            turn.advantage = float(advantage)
