"""PPO with a critic that shares the policy's layers (Schulman et al., arXiv 1707.06347, equation
9).

    config.recipe.name = "critic"
    config.loss.name = "actor_critic"
"""

from jax import Array

from rl.bounds import Fraction, NotNegative, Positive
from rl.losses.ppo import ppo
from rl.losses.terms import Stats, Tokens


def actor_critic(
    tokens: Tokens,
    *,
    value_coef: Positive = 0.5,
    clip_low: Fraction = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = 0.0,
) -> tuple[Array, Stats]:
    """Return the clipped surrogate of PPO + value_coef (V - G)^2 at the first token of each turn,
    which is written in the state that the critic judges. G is the return, in the channel "return";
    the channel "judged" is 1 at these tokens and 0 at others.

    value_coef: c1 of the paper. clip_low, clip_high, dual_clip: as for ppo.
    """
    loss_RT, stats = ppo(
        tokens, clip_low=clip_low, clip_high=clip_high, clip_high_guided=clip_high,
        dual_clip=dual_clip,
    )  # fmt: skip
    judged_RT = tokens.channels["judged"]
    error_RT = (tokens.channels["value"] - tokens.channels["return"]) ** 2
    metrics = {**stats, "critic/error": (error_RT, judged_RT > 0)}
    return loss_RT + value_coef * judged_RT * error_RT, metrics


actor_critic.needs_values = True  # type: ignore[attr-defined]
