"""PPO with a critic that is a network of its own (Schulman et al., arXiv 1707.06347).

It begins as a copy of the policy. Its layers learn from its own loss alone, (V - G)^2 at the first
token of each turn, on the mini-batches of the policy's updates; its head is fitted in closed form,
as in `evolver.recipes.critic`. Its state and that of its optimizer lie beside the policy's, and are
saved with them.

    config.recipe.name = "separate_critic"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from evolver.build import Run
from evolver.learner import Learner, make_learner
from evolver.metrics import Metrics, timed
from evolver.phases import learning
from evolver.recipes.critic import Critic
from rl.bounds import NotNegative
from rl.learner import State
from rl.losses.terms import Stats, Tokens
from rl.packing import Packed


@dataclass(eq=False, kw_only=True)
class SeparateCritic(Critic):
    """A critic that shares nothing with the policy but, with adapters, the frozen weights.

    lr: the critic's highest learning rate; 0 = the policy's. discount: factor on the rewards of
    each later turn. decay: lambda of GAE; 0 trusts the critic alone, 1 the outcomes alone. ridge:
    how much the critic's head resists a change. rewards: see `turn_rewards`.
    """

    lr: NotNegative = 0.0
    gives_values = False  # the policy's loss sees no values
    networks = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.critic: Learner | None = None

    def judging(self, run: Run) -> Learner:
        policy, critic = run.learner, self.critic
        if critic is None:
            # With adapters, both networks read one copy of the frozen weights.
            begin = policy.state.get("base") or jax.tree.map(jnp.copy, policy.state["params"])
            mesh = policy.update.forward.mesh
            assert mesh
            config = critic_config(run.config, self.lr)
            self.critic = critic = make_learner(config, policy.shape, begin, mesh)
        if "base" in policy.state:  # an update consumes the state that it was given
            critic.state["base"] = policy.state["base"]
        return critic

    def weigh(self, batches: Sequence[Packed]) -> Metrics:
        return {}

    def learn(self, run: Run, batches: Sequence[Packed], step: int) -> Metrics:
        """Update the policy, then the critic."""
        metrics = super().learn(run, batches, step)
        super().weigh(batches)
        critic = self.judging(run)
        with timed("critic") as seconds:
            updates = learning.updates(run, critic, batches, step)
            errors = [values["critic/error"] for _, values in updates]
        if "base" in run.learner.state:
            run.learner.state["base"] = critic.state["base"]
        if errors:
            metrics["critic/error"] = sum(errors) / len(errors)
        return metrics | seconds

    def arrays(self, run: Run) -> State:
        return self.judging(run).saved

    def load_arrays(self, run: Run, arrays: State) -> None:
        self.judging(run).restore(arrays)


def critic_config(config: ConfigDict, lr: float) -> Any:
    """Return the config that the critic's learner is made from: its loss, without the terms that
    are about a policy."""
    own: Any = config.copy_and_resolve_references()
    own.loss.name, own.loss.args = f"{__name__}:squared_error", ConfigDict()
    own.loss.kl_coef = own.loss.entropy_coef = own.loss.importance_cap = 0.0
    own.optim.lr = lr or own.optim.lr
    return own


def squared_error(tokens: Tokens) -> tuple[jax.Array, Stats]:
    """Return (V - G)^2 at the first token of each turn, see `rl.losses.actor_critic`."""
    judged_RT = tokens.channels["judged"]
    error_RT = (tokens.channels["value"] - tokens.channels["return"]) ** 2
    return judged_RT * error_RT, {"critic/error": (error_RT, judged_RT > 0)}
