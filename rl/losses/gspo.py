"""GSPO (arXiv 2507.18071): PPO's surrogate with the ratio of the whole sequence."""

import jax
import jax.numpy as jnp
from jax import Array

from rl.bounds import Fraction, NotNegative
from rl.losses.ppo import clipped_surrogate
from rl.losses.terms import Stats, Tokens, segment_sum


def gspo(
    tokens: Tokens,
    *,
    clip_low: Fraction = 0.28,
    clip_high: NotNegative = 0.28,
    clip_high_guided: NotNegative = 0.6,
    dual_clip: NotNegative | None = 3.0,
) -> tuple[Array, Stats]:
    """Return the clipped surrogate of `sequence_log_ratio`, with `clip_low`, `clip_high`,
    `clip_high_guided` and `dual_clip` as in `ppo`.

    The defaults are PPO's too: the paper clips much more tightly, at clip_low=3e-4 and
    clip_high=4e-4.
    """
    ratio_RT = sequence_log_ratio(tokens.log_ratio_RT, tokens.mask_RT, tokens.segments_RT)
    return clipped_surrogate(tokens, ratio_RT, clip_low, clip_high, clip_high_guided, dual_clip)


def sequence_log_ratio(log_ratio_RT: Array, mask_RT: Array, segments_RT: Array) -> Array:
    """Return, on every token, the mean of the log-ratios of its sequence (equations 7 and 14).

    The gradient of a token flows through its own log-ratio (GSPO-token). The sum is the same if a
    sequence has a single advantage, and each turn keeps its own credit if it has several.
    """
    mask_RT = mask_RT.astype(jnp.float32)
    length_RT = segment_sum(mask_RT, segments_RT)
    mean_RT = segment_sum(log_ratio_RT * mask_RT, segments_RT) / jnp.maximum(length_RT, 1)
    return jax.lax.stop_gradient(mean_RT - log_ratio_RT) + log_ratio_RT
