"""SiriuS (Zhao et al., "SiriuS: Self-improving Multi-agent Systems via Bootstrapped Reasoning",
arXiv 2502.04780): fine-tuning on successes, and on failures that were repaired.

Each failed rollout is tried again with feedback in its prompt; what then succeeds trains as if the
policy had found it unaided, without the feedback. The paper reports 2.9 to 22 points of accuracy in
reasoning and biomedical questions. Here the feedback is the task's reference solution, where the
paper asks a language model that knows the answer, and one policy plays every role.

    config.recipe.name = "sirius"
    config.loss.name = "nll"
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evolver.build import Run
from evolver.phases.rollouts import graded_rollouts, sampling_of
from evolver.recipes import Recipe, give
from rl.bounds import Count
from rl.rollout import Job
from rl.seeds import seed_of
from rl.trajectory import Trajectory


def succeeded(trajectory: Trajectory) -> bool:
    """Return True for a whole rollout that succeeded."""
    return trajectory.success and not trajectory.broken


@dataclass(eq=False, kw_only=True)
class Sirius(Recipe):
    """Trains on successes, and on failures that succeed with feedback.

    attempts: repairs of each failed rollout. feedback: the words that a repair is shown, in the
    place of experience; "{solution}" is the reference.
    """

    attempts: Count = 1
    feedback: str = "This succeeds: {solution}"
    trains = staticmethod(succeeded)

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        give(trajectories, map(succeeded, trajectories))

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the repairs that succeed."""
        failed = [t for t in trajectories if t.task.reference and not (t.broken or succeeded(t))]
        pairs = itertools.product(failed, range(self.attempts))
        jobs = [self.repair(run, failure, i, step) for failure, i in pairs]
        grader = replace(run.grader, turns=None)
        played, _ = graded_rollouts(run, jobs, "repairs", grader) if jobs else ([], None)
        self.credit(run, played, step)
        kept = [t for t in played if succeeded(t)]
        self.figures |= {"sirius/failed": len(failed), "sirius/repaired": len(kept)}
        return kept

    def repair(self, run: Run, failure: Trajectory, number: int, step: int) -> Job:
        """Return the rollout that tries a failed one again, for the `number`-th time."""
        words = self.feedback.replace("{solution}", " ".join(failure.task.reference))
        seed = seed_of(run.config.seed, "repair", step, failure.task.id, failure.rollout, number)
        place = self.attempts * failure.rollout + number
        shown = [("sirius/feedback", words)]
        return Job(failure.task, place, seed, sampling_of(run.config), shown, failure.draw)
