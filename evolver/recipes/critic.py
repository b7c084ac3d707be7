"""PPO with a critic (Schulman et al., arXiv 1707.06347) and GAE (Schulman et al., "High-Dimensional
Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438): what a turn is worth
is compared with what was expected before it.

The first paper reports that PPO does better than other methods of online policy gradients. There
the critic is a network of its own, or shares its layers with the policy; here its layers are the
policy's, which its loss changes only with the loss `actor_critic`, and its head is fitted in closed
form: no second model in memory, and no learning rate. In `separate_critic` the critic is a network
of its own.

    config.recipe.name = "critic"
    config.loss.name = "actor_critic"  # or another, which leaves the critic's loss out
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from evolver import grading
from evolver.build import Run
from evolver.learner import Learner
from evolver.metrics import Metrics
from evolver.phases.learning import in_rows, training_turns
from evolver.recipes import Recipe
from rl.advantages.batch import Batch
from rl.advantages.returns import Rewards, turn_rewards
from rl.bounds import Fraction, Positive
from rl.forward import Forward, Rows, device_batch, hidden
from rl.learner import whole
from rl.packing import Packed
from rl.samples import overlong, samples
from rl.trajectory import Trajectory


@dataclass(eq=False, kw_only=True)
class Critic(Recipe):
    """Trains on advantages over the value of the turn's state; the plug `advantage` is not asked.

    The critic is fitted on a step after it has judged it, so that no advantage depends on a value
    that has seen its own outcome.

    discount: factor on the rewards of each later turn. decay: lambda of GAE; 0 trusts the critic
    alone, 1 the outcomes alone. ridge: how much the critic resists a change; the larger, the more
    steps its values are a mean of. rewards: see `turn_rewards`.
    """

    discount: Fraction = 1.0
    decay: Fraction = 0.95
    ridge: Positive = 1.0
    rewards: Rewards = "outcome"
    gives_values = True  # to losses that need them; the config is checked for it
    passes = 1

    def __post_init__(self) -> None:
        self.weight_D: np.ndarray | None = None  # and the bias, last

    def credit(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
        grading.shape(run.config, run.reward, trajectories, step)
        row = run.config.learner.row
        counted = grading.counted(run.config, trajectories)
        fit = [t for t in counted if not overlong(t, row=row)]
        batch = Batch.of(fit, step)
        on_NK = np.zeros(batch.on_NK.shape, bool)
        for n, trajectory in enumerate(fit):
            on_NK[n, : len(trajectory.turns)] = [turn.trains for turn in trajectory.turns]
        if not on_NK.any():
            return
        state_nD = features(states(run.config, self.judging(run), fit))
        if self.weight_D is None:
            self.weight_D = np.zeros(state_nD.shape[1])
        value_NK = np.zeros(on_NK.shape)
        value_NK[on_NK] = value_n = state_nD @ self.weight_D
        reward_NK = turn_rewards(batch, self.rewards)
        advantage_NK = gae(reward_NK, value_NK, on_NK, self.discount, self.decay)
        advantage_n = advantage_NK[on_NK]
        return_n = advantage_n + value_n
        self.weight_D = fitted(self.weight_D, state_nD, return_n, self.ridge)
        self.figures["critic/value"] = float(value_n.mean())
        if return_n.std() > 0:
            self.figures["critic/explained"] = float(1 - advantage_n.var() / return_n.var())
        advantage_n = (advantage_n - advantage_n.mean()) / (advantage_n.std() + 1e-8)
        turns = training_turns(fit)
        for turn, advantage, value in zip(turns, advantage_n, return_n, strict=True):
            turn.advantage = float(advantage)
            later = [0.0] * (len(turn.completion.tokens) - 1)
            turn.channels |= {"return": [float(value), *later], "judged": [1.0, *later]}

    def judging(self, run: Run) -> Learner:
        """Return the learner whose network sees the states that are judged."""
        return run.learner

    def weigh(self, batches: Sequence[Packed]) -> Metrics:
        """Give the loss the values of states, by the head that was fitted on this step."""
        if self.weight_D is not None:
            for batch in batches:
                batch.head_D = self.weight_D.astype(np.float32)
        return {}

    def state(self) -> Any:
        return None if self.weight_D is None else self.weight_D.tolist()

    def load_state(self, state: Any) -> None:
        self.weight_D = None if state is None else np.array(state)


def gae(
    reward_NK: np.ndarray, value_NK: np.ndarray, on_NK: np.ndarray, discount: float, decay: float
) -> np.ndarray:
    """Return A_k = delta_k + discount decay A_k+1 with delta_k = r_k + discount V_k+1 - V_k (GAE,
    equation 16), 0 at turns that are not `on`, whose rewards belong to the turn before."""
    advantage_NK = np.zeros(reward_NK.shape)
    value_N = after_N = np.zeros(len(reward_NK))  # of the next turn: its value, its advantage
    for k in reversed(range(reward_NK.shape[1])):
        on_N, expected_N = on_NK[:, k], reward_NK[:, k] + discount * value_N
        own_N = expected_N - value_NK[:, k] + discount * decay * after_N
        advantage_NK[:, k] = np.where(on_N, own_N, 0.0)
        value_N = np.where(on_N, value_NK[:, k], expected_N)
        after_N = np.where(on_N, own_N, after_N)
    return advantage_NK


def fitted(
    weight_D: np.ndarray, state_nD: np.ndarray, return_n: np.ndarray, ridge: float
) -> np.ndarray:
    """Return the minimum over w of |state w - return|^2 + ridge |w - weight|^2: solved for as many
    unknowns as there are turns, which are fewer than those of a wide model."""
    gram_nn = state_nD @ state_nD.T + ridge * np.eye(len(state_nD))
    return weight_D + state_nD.T @ np.linalg.solve(gram_nn, return_n - state_nD @ weight_D)


def features(state_nD: np.ndarray) -> np.ndarray:
    """Return states of a length near 1, whatever the width of the model is, and a constant 1: what
    `rl.forward.values` multiplies a head with."""
    scaled_nD = state_nD.astype(np.float64) / np.sqrt(state_nD.shape[1])
    return np.concatenate([scaled_nD, np.ones((len(state_nD), 1))], axis=1)


def states(config: Any, learner: Learner, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return a network's last hidden state before each turn that trains, (n, D) float32: what the
    policy knows when it begins to speak, without experience."""
    forward = learner.logp.forward
    packed = in_rows(config, list(itertools.chain.from_iterable(map(samples, trajectories))))
    turns = training_turns(trajectories)
    ends = np.cumsum([len(turn.completion.tokens) for turn in turns])
    width = packed.tokens_RT.shape[1]
    place_RT = np.arange(packed.rows)[:, None] * width + np.arange(width)
    before_n = packed.trained(place_RT)[[0, *ends[:-1]]] - 1
    part_n, at_n = np.divmod(before_n, forward.micro * width)
    most = int(np.bincount(part_n).max())
    at_P = np.zeros(1 << (most - 1).bit_length(), np.int32)  # few lengths, few programs
    params = whole(learner.state, learner.layout)
    batch = device_batch(packed, forward.mesh, forward.micro, forward.capacity_rows)
    found_nD = np.empty((len(turns), learner.shape.d_model), np.float32)
    for i in np.unique(part_n):
        own_n = part_n == i
        at_P[: own_n.sum()] = at_n[own_n]
        h_PD = np.asarray(hidden_at(forward, params, batch, np.int32(i), at_P))
        found_nD[own_n] = h_PD[: own_n.sum()]
    return found_nD


@partial(jax.jit, static_argnums=0)
def hidden_at(
    forward: Forward, params: Any, batch: Rows, i: np.int32, at_P: np.ndarray
) -> jax.Array:
    """Return the last hidden states of the i-th micro-batch at some places of its flat rows, (P, D)
    float32."""
    h_RTD = hidden(forward, params, {name: array_MRT[i] for name, array_MRT in batch.items()})
    h_PD = h_RTD.reshape(-1, h_RTD.shape[-1])[at_P].astype(jnp.float32)
    if forward.mesh is None or forward.mesh.size == 1:
        return h_PD
    return jax.lax.with_sharding_constraint(h_PD, NamedSharding(forward.mesh, PartitionSpec()))
