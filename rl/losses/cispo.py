"""CISPO (arXiv 2506.13585, equation 4): the clipped ratio weights the gradient and is not
differentiated."""

import jax
import jax.numpy as jnp
from jax import Array

from rl.bounds import NotNegative
from rl.losses.terms import Stats, Tokens, clip_metrics


def cispo(
    tokens: Tokens, *, clip_high: NotNegative = 0.28, clip_high_guided: NotNegative = 0.6
) -> tuple[Array, Stats]:
    """Return -sg(min(r, 1 + clip_high)) A log pi with r = pi / pi_old, so that no token loses its
    gradient.

    Guided tokens with A > 0 take `clip_high_guided` as their bound: selective boosting
    (AgentEvolver, arXiv 2511.10395, equation 17). As in the runs of the paper there is no lower
    bound.
    """
    ratio_RT = jnp.exp(tokens.log_ratio_RT)
    boosted_RT = tokens.guided_RT & (tokens.advantage_RT > 0)
    high_RT = 1 + jnp.where(boosted_RT, clip_high_guided, clip_high)
    weight_RT = jax.lax.stop_gradient(jnp.minimum(ratio_RT, high_RT))
    clipped_RT = ratio_RT > high_RT
    metrics = clip_metrics(tokens, clipped_RT, jnp.zeros_like(clipped_RT))
    return -weight_RT * tokens.advantage_RT * tokens.logp_RT, metrics
