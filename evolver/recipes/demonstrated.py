"""Demonstrations among the rollouts: each step also imitates solutions of the explorer, first those
of its tasks that no rollout solved.

Updates by reward unlearn what a policy has imitated and seldom needs, since few rollouts show it
and failures that show it lower its probability: negative advantages can be scaled down to 0. A
term of imitation, as InstructGPT has one of pretraining (Ouyang et al., arXiv 2203.02155, equation
2), prevents that, and lets a group in which all fail teach something. A demonstration trains as a
guided rollout does, which is how LUFFY (Yan et al., arXiv 2504.14945) adds solutions of another
policy to groups: its old log-probabilities are the policy's own, so that its gradient is that of
-weight log pi until the ratio is clipped.

    config.recipe.name = "demonstrated"
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from envs.world import Evaluation, Task
from evolver.build import Run
from evolver.imitating import turns_of, with_other_ids
from evolver.processes import hosts
from evolver.questioning.tried import solution_of
from evolver.recipes import Recipe
from evolver.replaying import play
from rl.bounds import Count, Fraction, Positive
from rl.seeds import seed_of
from rl.trajectory import StopReason, Trajectory

SAID = "The explorer solved the task this way."  # shown in the view in the place of experience
OTHERWISE = "the world no longer scores it as a success"


def advantageous(trajectory: Trajectory) -> bool:
    """Return True if some turn of a rollout has an advantage that is not 0."""
    return any(turn.advantage for turn in trajectory.turns)


@dataclass(eq=False, kw_only=True)
class Demonstrated(Recipe):
    """Trains on rollouts and on solutions of synthetic tasks.

    solutions: demonstrations of a step, of as many tasks. weight: the advantage of their turns.
    negative: what negative advantages are multiplied by, and all of rollouts that did no better
    than their group; 0 trains only on what did better.
    """

    solutions: Count = 8
    weight: Positive = 2.0
    negative: Fraction = 1.0
    demonstrates = True  # the config is checked for it
    trains = staticmethod(advantageous)

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        """Write rewards and advantages, and scale the negative ones."""
        super().credit(run, trajectories, step)
        for turn in itertools.chain.from_iterable(t.turns for t in trajectories):
            # Labels praise turns of failures, too; without their blame, these would be imitated.
            won = turn.advantage if turn.outcome_advantage is None else turn.outcome_advantage
            if turn.advantage < 0 or won <= 0:
                turn.advantage *= self.negative

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the demonstrations."""
        solved = {t.task.id for t in trajectories if t.success}
        failed = {t.task.id: t.task for t in trajectories if t.task.id not in solved}
        pool = run.tasks.pool.tasks if run.tasks.pool else {}
        rng = random.Random(seed_of(run.config.seed, "demonstrations", step))
        others = [task for id, task in pool.items() if id not in failed]
        drawn = [*failed.values(), *rng.sample(others, min(self.solutions, len(others)))]
        # The references of a world's own tasks are other people's work, and are not shown.
        known = [task for task in drawn if task.origin == "synthetic" and task.reference]
        mine = hosts.share(known[: self.solutions])
        shown = hosts.gather_shares(hosts.together(lambda: self.demonstrations(run, mine, step)))
        found = [t for t in shown if t.success]
        for t in shown:
            if not t.success:
                run.progress.once("demonstrations", f"step {step}: a solution fails: {t.error}")
        self.figures["demonstrated/failed"] = len(failed)
        self.figures["demonstrated/lost"] = len(shown) - len(found)
        return found

    def demonstrations(self, run: Run, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        """Return the solutions of the tasks as rollouts that train. One that the world
        or the template fails on, or that the world no longer accepts, is not a success."""
        found = []
        with closing(run.make_world()) as world:
            for task in tasks:
                rng = random.Random(seed_of(run.config.seed, "ids", step, task.id))
                try:
                    episode = play(world, task, task.seed, solution_of(task))
                    found.append(self.rollout(run, task, with_other_ids(episode, rng)))
                except Exception as error:  # whatever code of a world or a template raises
                    lost = Trajectory(task, 0, task.seed, [], stop=StopReason.ENV_ERROR)
                    lost.error = f"{type(error).__name__}: {error}"
                    found.append(lost)
        return found

    def rollout(self, run: Run, task: Task, episode: dict[str, Any]) -> Trajectory:
        """Return an episode as a rollout that trains."""
        actor, won = run.actor, episode["success"]
        turns = asyncio.run(
            turns_of(episode["messages"], actor.tokenizer, episode["tools"], actor.context)
        )
        for turn in turns:
            turn.advantage = self.weight
            turn.completion = replace(turn.completion, version=actor.engine.version)
        return Trajectory(
            task, 0, task.seed, episode["messages"], turns, StopReason.DONE,
            Evaluation(float(won), won), experience=["demonstration"], injected=[SAID],
            tools=episode["tools"], error="" if won else OTHERWISE,
        )  # fmt: skip
