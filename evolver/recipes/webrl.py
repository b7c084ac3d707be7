"""WebRL (Qi et al., "WebRL: Training LLM Web Agents via Self-Evolving Online Curriculum
Reinforcement Learning", arXiv 2411.02337): phases, each with new tasks made of the failures of the
last one, a KL to the policy of the last phase, and successes that train again.

The paper reports that Llama-3.1-8B goes from 4.8% to 42.4% in WebArena-Lite. There a language model
words the new tasks and judges them; here they ask for what failed rollouts did reach, and are
verified. There a critic gives advantages; here the plug `advantage` does, and a replayed success
has the advantage 1.

    config.recipe.name = "webrl"
    config.loss.name = "webrl"
    config.loss.renew_reference = 8  # the steps of a phase, `every`
    config.learner.max_staleness = 10**6  # replayed rollouts are old
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evolver.build import Run
from evolver.metrics import Metrics
from evolver.recipes import Chosen, Recipe, give
from evolver.recipes.proposals import Proposal, Starts, grow
from evolver.recipes.replay import ReplayBuffer
from rl.bounds import Count, CountOrZero, Fraction
from rl.learner import whole
from rl.packing import pack
from rl.samples import overlong, samples
from rl.seeds import seed_of
from rl.trajectory import Trajectory


@dataclass(eq=False, kw_only=True)
class WebRL(Recipe):
    """Trains in phases of `every` steps.

    proposals: most new tasks of a phase, which needs self-questioning. replays: successes of
    earlier steps that train again in each step. capacity: of their buffer. least, most: the mean
    probability per token, 1 / perplexity, that the policy gives them: what it would hardly do, or
    has learnt, does not train again.
    """

    every: Count = 8
    proposals: CountOrZero = 16
    replays: CountOrZero = 8
    capacity: Count = 64
    least: Fraction = 0.5
    most: Fraction = 0.95

    def __post_init__(self) -> None:
        self.buffer = ReplayBuffer(self.capacity)
        self.failed: list[Any] = []  # [id of the original task, actions] of the phase

    def choose(self, run: Run, step: int) -> tuple[Chosen, Metrics]:
        """Return the tasks of a step, which may be new ones: a phase begins with its curriculum."""
        pool = run.tasks.pool
        if pool and step > 1 and (step - 1) % self.every == 0 and self.failed and self.proposals:
            new = grow(run, self.failures, self.proposals, "webrl", step)
            self.figures["webrl/proposed"], self.failed = len(new), []
        return super().choose(run, step)

    def failures(self, starts: Starts, budget: int, rng: random.Random) -> Iterator[Proposal]:
        """Yield what failed rollouts did, in random order."""
        for start, actions in rng.sample(self.failed, len(self.failed)):
            if start in starts:
                yield starts[start], actions

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the successes that train again."""
        chosen = self.buffer.sample(self.replays, seed_of(run.config.seed, "replay", step))
        kept = [t for t in chosen if self.least <= confidence(run, t) <= self.most]
        give(kept, [1.0] * len(kept))
        self.figures |= {"webrl/buffer": len(self.buffer.kept), "webrl/replayed": len(kept)}
        row = run.config.learner.row
        solved = [t for t in trajectories if t.success and not t.broken]
        self.buffer.add(t for t in solved if not overlong(t, row=row))
        return kept

    def remember(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> Metrics:
        for t in trajectories:
            if not (t.broken or t.success):
                start = t.task.meta.get("source", t.task.id)
                self.failed.append([start, [turn.action for turn in t.turns]])
        return super().remember(run, trajectories, step)

    def state(self) -> Any:
        return {"failed": self.failed, "buffer": self.buffer.state()}

    def load_state(self, state: Any) -> None:
        self.failed = state["failed"]
        self.buffer.load_state(state["buffer"])


def confidence(run: Run, trajectory: Trajectory) -> float:
    """Return exp of the mean log-probability of a rollout's tokens by the current policy."""
    packed = pack(samples(trajectory), run.config.learner.row)
    logp_RT = run.learner.logp(whole(run.learner.state, run.learner.layout), packed)
    return float(np.exp(packed.trained(logp_RT).mean()))
