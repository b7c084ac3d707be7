"""Policy losses: pure functions of arrays, (R, T) = rows of tokens, that run under jit.

A loss takes `Tokens` and returns the loss of each token and its metrics; its keyword-only
parameters are the config's `loss.args`. The sum over tokens, the KL penalty, the entropy bonus,
importance weights and the other metrics stay outside, in `token_loss` and `rl.learner`.
`rl.losses.terms` has the terms that losses share.

    def reinforce(tokens, *, scale: Positive = 1.0):
        return -scale * tokens.advantage_RT * tokens.logp_RT, {}

The inputs of masked tokens, even NaN and infinity, never reach a value or a gradient: a loss sees 0
there, and its results there are discarded.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from rl.losses import terms
from rl.losses.terms import AGGREGATES, CHANNEL, Stats, Tokens, aggregation_weights

__all__ = [
    "AGGREGATES", "LOSSES", "Stats", "TokenLoss", "Tokens", "aggregation_weights", "guarded",
    "token_loss",
]  # fmt: skip

LOSSES = {
    name: f"rl.losses.{name}:{name}"
    for name in ("ppo", "gspo", "cispo", "nll", "webrl", "empo2", "actor_critic")
}


class TokenLoss(Protocol):
    """A loss with its arguments bound. It is traced by jit, so it must be a pure function of the
    arrays."""

    def __call__(self, tokens: Tokens, /) -> tuple[Array, Stats]:
        """Return (loss_RT float32, {name: (value_RT, mask_RT)}); a metric is the mean of its values
        under its mask."""


def guarded(loss: TokenLoss, tokens: Tokens) -> tuple[Array, Stats]:
    """Return the loss of each token, 0 outside the mask, and its metrics with those that every loss
    has.

    Masked tokens are 0 in the arguments too. With zeros in the result alone, a NaN among the
    arguments would still reach the gradient.
    """
    on_RT = tokens.mask_RT > 0
    logp_RT, old_RT, advantage_RT = (jnp.where(on_RT, x, 0) for x in tokens[:3])
    guided_RT, segments_RT = on_RT & (tokens.guided_RT > 0), tokens.segments_RT
    channels = terms.Channels({n: jnp.where(on_RT, x, 0) for n, x in tokens.channels.items()})
    clean = Tokens(logp_RT, old_RT, advantage_RT, guided_RT, segments_RT, on_RT, channels)
    result = loss(clean)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "a loss returns (loss_RT, metrics), {} if it has none; this one returned"
            f" {type(result)}"
        )
    loss_RT, stats = result
    if jnp.shape(loss_RT) != on_RT.shape:
        raise ValueError(
            f"the loss returned shape {jnp.shape(loss_RT)}; expected one number per token,"
            f" {on_RT.shape}"
        )
    loss_RT, ratio_RT = jnp.where(on_RT, loss_RT, 0), clean.log_ratio_RT
    common = {
        "loss/on": (loss_RT, on_RT & ~guided_RT),
        "loss/guided": (loss_RT, guided_RT),
        "kl_old": (-ratio_RT, on_RT),
        "ratio": (jnp.exp(ratio_RT), on_RT),
    }
    own = {name: (value_RT, on_RT & (mask_RT > 0)) for name, (value_RT, mask_RT) in stats.items()}
    return loss_RT, jax.lax.stop_gradient(common | own)


def token_loss(
    loss: TokenLoss,
    logp_RT: Array,
    entropy_RT: Array,
    batch: Mapping[str, Array],
    *,
    value_RT: Array | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    importance_cap: float = 0.0,
    importance_level: str = "token",
    importance_low: float = 0.0,
    importance_high: float = 0.0,
) -> tuple[Array, Stats]:
    """Return what a training step minimises, per token, and its metrics: (loss_RT, metrics).

    Args:
      loss: the loss with its arguments bound.
      logp_RT, entropy_RT: of the policy being trained, at the tokens of the batch.
      batch: (R, T) arrays "mask", "segments", "guided", "advantage", "logp" (at sampling, NaN =
        unknown), "old_logp" (the denominator of the ratio, NaN = `logp_RT` itself, before it is
        updated) and, for a KL penalty, "ref_logp".
      value_RT: of the states in which the tokens were written; None without a critic.
      kl_coef, kl_estimator: weight and kind of `kl_penalty`; 0 = none.
      entropy_coef: weight of an entropy bonus; 0 = none.
      importance_*: see `importance_weight`; they apply to tokens of unguided rollouts whose
        log-probability at sampling is known. A cap of 0 = no weights.
    """
    mask_RT, guided_RT, segments_RT = batch["mask"], batch["guided"], batch["segments"]
    sampled_RT, on_RT = batch["logp"], mask_RT > 0
    old_RT = batch["old_logp"]
    old_RT = jnp.where(jnp.isnan(old_RT), jax.lax.stop_gradient(logp_RT), old_RT)
    channels = {name[len(CHANNEL) :]: x for name, x in batch.items() if name.startswith(CHANNEL)}
    channels["entropy"] = jax.lax.stop_gradient(entropy_RT)
    if value_RT is not None:
        channels["value"] = value_RT
    if batch.get("ref_logp") is not None:
        channels["ref_logp"] = batch["ref_logp"]
    advantage_RT = batch["advantage"]
    tokens = Tokens(logp_RT, old_RT, advantage_RT, guided_RT, segments_RT, mask_RT, channels)
    loss_RT, stats = guarded(loss, tokens)
    # Guided rollouts were sampled under another prompt, so their gap to the engine's
    # log-probabilities is expected. Those of other tokens may be unknown.
    own_RT = on_RT & ~(guided_RT > 0) & ~jnp.isnan(sampled_RT)
    gap = terms.mismatch(logp_RT, sampled_RT, own_RT)
    stats = {"entropy": (entropy_RT, mask_RT), **stats, **gap}
    if importance_cap:
        weight_RT, kept_RT = terms.importance_weight(
            old_RT, sampled_RT, own_RT, segments_RT, importance_cap=importance_cap,
            importance_level=importance_level, importance_low=importance_low,
            importance_high=importance_high,
        )  # fmt: skip
        loss_RT = weight_RT * loss_RT
        stats["importance_weight"] = (weight_RT, mask_RT)
        if importance_low or importance_high:
            gap_RT = terms.mismatch(old_RT, sampled_RT, own_RT)["mismatch/kl"][0]
            stats["importance_masked"] = (~kept_RT, own_RT)
            stats["mismatch/kl_kept"] = (gap_RT, own_RT & kept_RT)
            stats["mismatch/kl_masked"] = (gap_RT, own_RT & ~kept_RT)
    if kl_coef:
        kl_RT = terms.kl_penalty(logp_RT, batch["ref_logp"], mask_RT, kl_estimator=kl_estimator)
        loss_RT = loss_RT + kl_coef * kl_RT
        stats["kl_ref"] = (kl_RT, mask_RT)
    if entropy_coef:
        loss_RT = loss_RT - entropy_coef * jnp.where(on_RT, entropy_RT, 0)
    return loss_RT, jax.lax.stop_gradient(stats)
