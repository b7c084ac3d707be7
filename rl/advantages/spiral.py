"""Role-conditioned advantage estimation of SPIRAL (Liu et al., "SPIRAL: Self-Play on Zero-Sum Games
Incentivizes Reasoning via Multi-Agent Multi-Turn Reinforcement Learning", arXiv 2506.24119).

The paper reports that self-play of Kuhn poker raises Qwen3-4B-Base by 8.6% in mathematics and 8.4%
in general reasoning, and that without baselines of roles its thoughts collapse.
"""

from typing import Any

import numpy as np

from rl.advantages.batch import Batch
from rl.bounds import Fraction


class Spiral:
    """Return of a player minus a moving mean of what this player of this game got (section 3.3):
    b <- decay b + (1 - decay) R, A = R - b. All turns of a player in a game have one advantage.

    The world says in `info["player"]` who took a turn, and in the task's `meta` whose score the
    outcome is ("player") and which "game" it is. What one player wins the other loses.
    """

    needs_labels = False

    def __init__(self, *, decay: Fraction = 0.95):
        """decay: of the baselines."""
        self.decay = decay
        self.baseline: dict[str, float] = {}  # by game and player

    def __call__(self, batch: Batch) -> np.ndarray:
        advantage_NK = np.zeros(batch.on_NK.shape)
        for n, trajectory in enumerate(batch.trajectories):
            task, evaluation = trajectory.task, trajectory.evaluation
            # A turn that a limit cut off before the world saw it has no info.
            players = [turn.info.get("player") for turn in trajectory.turns]
            if any(p is None and turn.info for p, turn in zip(players, trajectory.turns)):
                raise ValueError(f"the world of task {task.id} does not say whose turn it was")
            own = {None: 0.0}
            for player in sorted({p for p in players if p is not None}):
                value = float(batch.outcome_N[n])
                if player != task.meta.get("player", 0):
                    value = evaluation.low + evaluation.high - value
                key = f"{task.meta.get('game', task.env)}/{player}"
                before = self.baseline.get(key, 0.0)
                self.baseline[key] = self.decay * before + (1 - self.decay) * value
                own[player] = value - self.baseline[key]
            advantage_NK[n, : len(players)] = [own[player] for player in players]
        return advantage_NK

    def state(self) -> Any:
        """Return the baselines."""
        return self.baseline

    def load_state(self, state: Any) -> None:
        """Continue from what `state` returned."""
        self.baseline = dict(state)
