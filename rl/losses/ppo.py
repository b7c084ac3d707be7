"""PPO's clipped surrogate (arXiv 1707.06347), with two bounds (DAPO, arXiv 2503.14476) and a dual
clip."""

import jax.numpy as jnp
from jax import Array

from rl.bounds import Fraction, NotNegative
from rl.losses.terms import Stats, Tokens, clip_metrics


def ppo(
    tokens: Tokens,
    *,
    clip_low: Fraction = 0.28,
    clip_high: NotNegative = 0.28,
    clip_high_guided: NotNegative = 0.6,
    dual_clip: NotNegative | None = 3.0,
) -> tuple[Array, Stats]:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = pi / pi_old of the token
    (equation 7).

    Guided tokens take `clip_high_guided` as their upper bound: selective boosting (AgentEvolver,
    arXiv 2511.10395, equation 17). An upper bound acts where A > 0. Where A < 0, the loss is at
    most -A `dual_clip` (arXiv 1912.09729); 0 or None leaves that bound out.
    """
    return clipped_surrogate(
        tokens, tokens.log_ratio_RT, clip_low, clip_high, clip_high_guided, dual_clip
    )


def clipped_surrogate(
    tokens: Tokens,
    log_ratio_RT: Array,
    clip_low: float,
    clip_high: float,
    clip_high_guided: float,
    dual_clip: float | None,
) -> tuple[Array, Stats]:
    """Return the clipped surrogate of any ratio, negated; for the arguments see `ppo`."""
    ratio_RT, advantage_RT = jnp.exp(log_ratio_RT), tokens.advantage_RT
    high_RT = 1 + jnp.where(tokens.guided_RT, clip_high_guided, clip_high)
    free_RT = -advantage_RT * ratio_RT
    bound_RT = -advantage_RT * jnp.clip(ratio_RT, 1 - clip_low, high_RT)
    loss_RT, clipped_RT = jnp.maximum(free_RT, bound_RT), bound_RT > free_RT
    if not dual_clip:
        return loss_RT, clip_metrics(tokens, clipped_RT, jnp.zeros_like(clipped_RT))
    ceiling_RT = -advantage_RT * dual_clip
    dual_RT = (advantage_RT < 0) & (loss_RT > ceiling_RT)
    return jnp.where(dual_RT, ceiling_RT, loss_RT), clip_metrics(tokens, clipped_RT, dual_RT)
