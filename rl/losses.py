"""Policy losses: pure functions of arrays, (R, T) = rows of tokens.

Everything is per token until the last line. `aggregation_weights` turns "mean over tokens", "mean over sequences" and
so on into one weight per token, so a loss is sum(weight * token_loss) and cutting a batch into micro-batches cannot
change it. A row is a sequence, or holds several, named by `segments_RT` (0 = padding).

What a masked token holds, NaN and infinity included, never reaches a value or a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond what any clip lets through, far below what float32 overflows at
AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# A metric of many tokens: values_RT and the tokens it averages over, so that micro-batches can be added up.
Stats = Mapping[str, tuple[jax.Array, jax.Array]]


def masked_mean(value_RT: jax.Array, mask_RT: jax.Array) -> jax.Array:
    """Mean of the values under a mask; 0 where the mask is empty."""
    mask_RT = mask_RT.astype(jnp.float32)
    return jnp.sum(jnp.where(mask_RT > 0, value_RT, 0) * mask_RT) / jnp.maximum(jnp.sum(mask_RT), 1)


def segment_sum(value_RT: jax.Array, segments_RT: jax.Array) -> jax.Array:
    """For each token, the sum over its own segment of its own row. (R, T) -> (R, T)."""
    length = value_RT.shape[1]

    def row(value_T, segments_T):
        return jax.ops.segment_sum(value_T, segments_T, num_segments=length + 1)[segments_T]

    return jax.vmap(row)(value_RT, segments_RT)


def aggregation_weights(mask_RT, segments_RT=None, *, aggregate: str = "token-mean", horizon: int | None = None):
    """One weight per token, (R, T) float32, such that loss = sum(weight * token_loss).

    - "token-mean": every trained token of the batch alike (DAPO, arXiv 2503.14476).
    - "seq-mean-token-sum": sequences alike, their tokens added.
    - "seq-mean-token-mean": sequences alike, their tokens averaged (GRPO, arXiv 2402.03300).
    - "seq-mean-token-sum-norm": all tokens added, over the constant `horizon` (Dr. GRPO, arXiv 2503.20783);
      by default the length of a row.

    Without `segments_RT` every row is a sequence, an empty one included; with it, every segment that trains.
    """
    mask_RT = mask_RT.astype(jnp.float32)
    if aggregate == "token-mean":
        return mask_RT / jnp.maximum(jnp.sum(mask_RT), 1)
    if aggregate == "seq-mean-token-sum-norm":
        return mask_RT / (horizon or mask_RT.shape[1])
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate={aggregate!r}: choose one of {', '.join(AGGREGATES)}")
    if segments_RT is None:
        length_RT = jnp.broadcast_to(jnp.sum(mask_RT, axis=1, keepdims=True), mask_RT.shape)
        sequences = mask_RT.shape[0]
    else:
        length_RT = segment_sum(mask_RT, segments_RT)
        sequences = jnp.maximum(jnp.sum(mask_RT / jnp.maximum(length_RT, 1)), 1)
    if aggregate == "seq-mean-token-mean":
        mask_RT = mask_RT / jnp.maximum(length_RT, 1)
    return mask_RT / sequences


def log_ratio(logp_RT, old_logp_RT, mask_RT):
    """log pi / pi_old of trained tokens, within +-20 so that its exponential and gradient stay finite; 0 elsewhere."""
    delta_RT = jnp.where(mask_RT > 0, logp_RT, 0) - jnp.where(mask_RT > 0, old_logp_RT, 0)
    return jnp.clip(delta_RT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(log_ratio_RT, mask_RT, segments_RT=None):
    """GSPO's ratio on every token: the mean of the log-ratios of its sequence (arXiv 2507.18071, equations 7 and 14).

    The gradient of a token goes through its own log-ratio (GSPO-token): the same sum where a sequence has one
    advantage, and the credit of a step stays with its tokens where it has several.
    """
    if segments_RT is None:
        segments_RT = jnp.ones(mask_RT.shape, jnp.int32)
    mask_RT = mask_RT.astype(jnp.float32)
    length_RT = segment_sum(mask_RT, segments_RT)
    mean_RT = segment_sum(log_ratio_RT * mask_RT, segments_RT) / jnp.maximum(length_RT, 1)
    return jax.lax.stop_gradient(mean_RT - log_ratio_RT) + log_ratio_RT


def clipped_loss(
    log_ratio_RT,
    advantage_RT,
    guided_RT,
    *,
    clip_low: float,
    clip_high: float,
    clip_high_guided: float,
    dual_clip: float | None,
):
    """PPO's clipped surrogate per token, negated: (loss_RT, clipped_RT, dual_clipped_RT), the last two boolean.

    max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, equation 7; two bounds: DAPO, arXiv 2503.14476).
    Guided tokens take `clip_high_guided` as their upper bound: selective boosting (AgentEvolver, arXiv 2511.10395,
    equation 17); the bound acts on A > 0 only, whatever the token. `dual_clip` c > 1 bounds the loss of A < 0 by
    -A c (arXiv 1912.09729); None leaves it out.
    """
    ratio_RT = jnp.exp(log_ratio_RT)
    high_RT = 1 + jnp.where(guided_RT > 0, clip_high_guided, clip_high)
    free_RT = -advantage_RT * ratio_RT
    bound_RT = -advantage_RT * jnp.clip(ratio_RT, 1 - clip_low, high_RT)
    loss_RT, clipped_RT = jnp.maximum(free_RT, bound_RT), bound_RT > free_RT
    if dual_clip is None:
        return loss_RT, clipped_RT, jnp.zeros_like(clipped_RT)
    ceiling_RT = -advantage_RT * dual_clip
    dual_RT = (advantage_RT < 0) & (loss_RT > ceiling_RT)
    return jnp.where(dual_RT, ceiling_RT, loss_RT), clipped_RT, dual_RT


def cispo_loss(logp_RT, log_ratio_RT, advantage_RT, guided_RT, *, clip_high: float, clip_high_guided: float):
    """-sg(min(r, 1 + high)) A log pi per token, and where the bound acts (CISPO, arXiv 2506.13585, equation 4).

    The ratio weighs the gradient and is not differentiated, so no token ever loses its gradient. As in the paper's
    runs there is no lower bound.
    """
    ratio_RT = jnp.exp(log_ratio_RT)
    high_RT = 1 + jnp.where(guided_RT > 0, clip_high_guided, clip_high)
    weight_RT = jax.lax.stop_gradient(jnp.minimum(ratio_RT, high_RT))
    return -weight_RT * advantage_RT * logp_RT, ratio_RT > high_RT


def kl_penalty(logp_RT, ref_logp_RT, mask_RT, *, kind: str = "k3"):
    """Per-token estimate of KL(pi || ref) from the sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log ref - log pi:
    - "k1" = -d. Unbiased value; as a loss its gradient is 0 on average, so it belongs into a reward.
    - "k2" = d^2 / 2. Biased value; on policy its gradient is the unbiased gradient of KL(pi || ref).
    - "k3" = exp(d) - d - 1, at most 10. Unbiased value, low variance; on policy its gradient is that of
      KL(ref || pi) instead. The reference of AgentEvolver uses it.
    """
    d_RT = log_ratio(ref_logp_RT, logp_RT, mask_RT)
    if kind == "k1":
        return -d_RT
    if kind == "k2":
        return 0.5 * d_RT**2
    if kind == "k3":
        return jnp.clip(jnp.exp(d_RT) - d_RT - 1, -10.0, 10.0)
    raise ValueError(f"kind={kind!r}: choose k1, k2 or k3")


def importance_weight(
    old_logp_RT,
    sampled_logp_RT,
    mask_RT,
    segments_RT=None,
    *,
    cap: float,
    level: str = "token",
    band: tuple[float, float] | None = None,
):
    """Truncated importance sampling: (weight_RT, kept_RT), weight = min(r, cap) without gradient, 0 where not kept.

    r = pi_old / pi_sampled, of each token ("token") or the product over the tokens of its sequence ("sequence").
    Corrects for an engine whose probabilities are not the learner's (Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025). Exactly 1 where `old` is what the engine reported. With `band`
    = (low, high) tokens, or sequences, with r outside of it are masked: beyond some gap a weight only adds variance.
    """
    ratio_RT = log_ratio(old_logp_RT, sampled_logp_RT, mask_RT)
    if level == "sequence":
        if segments_RT is None:
            segments_RT = jnp.ones(mask_RT.shape, jnp.int32)
        total_RT = segment_sum(ratio_RT, segments_RT)
        ratio_RT = jnp.where(mask_RT > 0, jnp.clip(total_RT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0)
    elif level != "token":
        raise ValueError(f"level={level!r}: choose token or sequence")
    ratio_RT = jax.lax.stop_gradient(jnp.exp(ratio_RT))
    kept_RT = jnp.ones(ratio_RT.shape, bool)
    if band is not None:
        kept_RT = (mask_RT <= 0) | ((ratio_RT >= band[0]) & (ratio_RT <= band[1]))
    return jnp.where(kept_RT, jnp.minimum(ratio_RT, cap), 0), kept_RT


def mismatch(learner_logp_RT, sampled_logp_RT, mask_RT) -> Stats:
    """How far the learner's log-probabilities are from those the engine sampled with: KL(engine || learner) and |d|."""
    d_RT = jax.lax.stop_gradient(log_ratio(learner_logp_RT, sampled_logp_RT, mask_RT))
    return {"mismatch/kl": (jnp.exp(d_RT) - d_RT - 1, mask_RT), "mismatch/abs": (jnp.abs(d_RT), mask_RT)}


def policy_token_loss(
    logp_RT,
    old_logp_RT,
    advantage_RT,
    mask_RT,
    guided_RT,
    segments_RT=None,
    *,
    objective: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_high_guided: float = 0.6,
    dual_clip: float | None = 3.0,
) -> tuple[jax.Array, Stats]:
    """The policy loss of each token, (R, T) float32 and 0 outside the mask, and its metrics.

    `objective` is "ppo" (`clipped_loss`), "gspo" (the same with `sequence_log_ratio`; its paper clips at 3e-4 and
    4e-4) or "cispo" (`cispo_loss`). Log-probabilities are those of the tokens that were sampled.
    """
    on_RT = mask_RT > 0
    guided_RT = on_RT & (guided_RT > 0)
    advantage_RT = jnp.where(on_RT, advantage_RT, 0)
    ratio_RT = log_ratio(logp_RT, old_logp_RT, mask_RT)
    clip = dict(clip_low=clip_low, clip_high=clip_high, clip_high_guided=clip_high_guided, dual_clip=dual_clip)
    if objective == "cispo":
        logp_RT = jnp.where(on_RT, logp_RT, 0)
        high = dict(clip_high=clip_high, clip_high_guided=clip_high_guided)
        loss_RT, clipped_RT = cispo_loss(logp_RT, ratio_RT, advantage_RT, guided_RT, **high)
        dual_RT = jnp.zeros_like(clipped_RT)
    elif objective in ("ppo", "gspo"):
        used_RT = ratio_RT if objective == "ppo" else sequence_log_ratio(ratio_RT, mask_RT, segments_RT)
        loss_RT, clipped_RT, dual_RT = clipped_loss(used_RT, advantage_RT, guided_RT, **clip)
    else:
        raise ValueError(f"objective={objective!r}: choose ppo, gspo or cispo")
    loss_RT = jnp.where(on_RT, loss_RT, 0)
    own_RT = on_RT & ~guided_RT
    stats = {
        "loss/on": (loss_RT, own_RT),
        "loss/guided": (loss_RT, guided_RT),
        "clip_fraction/on": (clipped_RT, own_RT),
        "clip_fraction/guided": (clipped_RT, guided_RT),
        "clip_fraction/dual": (dual_RT, on_RT),
        "kl_old": (-ratio_RT, on_RT),
        "ratio": (jnp.exp(ratio_RT), on_RT),
    }
    return loss_RT, jax.lax.stop_gradient(stats)


def policy_loss(
    logp_RT,
    old_logp_RT,
    advantage_RT,
    mask_RT,
    guided_RT,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_high_guided: float = 0.6,
    dual_clip: float | None = 3.0,
    aggregate: str = "token-mean",
    objective: str = "ppo",
    horizon: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a whole batch whose rows are sequences: (scalar, metrics).

    Args:
      logp_RT, old_logp_RT, advantage_RT: float.
      mask_RT: 1 on trained tokens. guided_RT: 1 where the rollout was guided.
      clip_low, clip_high, clip_high_guided, dual_clip: see `clipped_loss`.
      aggregate, horizon: see `aggregation_weights`. objective: see `policy_token_loss`.

    Metrics are means over trained tokens: "loss/on" and "clip_fraction/on" over those of unguided rollouts,
    "loss/guided" and "clip_fraction/guided" over the others; "clip_fraction/dual", "kl_old" (-log ratio) and "ratio"
    over all.
    """
    clip = dict(clip_low=clip_low, clip_high=clip_high, clip_high_guided=clip_high_guided, dual_clip=dual_clip)
    loss_RT, stats = policy_token_loss(
        logp_RT, old_logp_RT, advantage_RT, mask_RT, guided_RT, objective=objective, **clip
    )
    weight_RT = aggregation_weights(mask_RT, aggregate=aggregate, horizon=horizon)
    return jnp.sum(weight_RT * loss_RT), {name: masked_mean(*pair) for name, pair in stats.items()}


def token_loss(
    logp_RT,
    entropy_RT,
    batch: Mapping[str, jax.Array],
    *,
    objective: str = "ppo",
    kl_coef: float = 0.0,
    kl: str = "k3",
    entropy_coef: float = 0.0,
    importance_cap: float | None = None,
    importance_level: str = "token",
    importance_band: tuple[float, float] | None = None,
    **clip: float | None,
) -> tuple[jax.Array, Stats]:
    """Everything a training step minimises, per token: (loss_RT, metrics).

    Args:
      logp_RT, entropy_RT: of the policy being trained, at the tokens of the batch.
      batch: (R, T) arrays "mask", "segments", "guided", "advantage", "logp" (sampled with), "old_logp" (what the
        ratio is against), "ref_logp".
      objective: "nll" for imitation, or one of `policy_token_loss`, which takes `clip`.
      kl_coef, kl: weight and kind of `kl_penalty`. entropy_coef: weight of an entropy bonus.
      importance_cap, importance_level, importance_band: of `importance_weight`, on tokens of unguided rollouts; a cap
        of None leaves the weights out.
    """
    mask_RT = batch["mask"]
    on_RT = mask_RT > 0
    stats = {"entropy": (entropy_RT, mask_RT)}
    if objective == "nll":
        loss_RT = -jnp.where(on_RT, logp_RT, 0)
    else:
        old_RT, advantage_RT = batch["old_logp"], batch["advantage"]
        loss_RT, policy_stats = policy_token_loss(
            logp_RT, old_RT, advantage_RT, mask_RT, batch["guided"], batch["segments"], objective=objective, **clip
        )
        # A guided rollout was sampled under another prompt: its log-probabilities differ by more than the engine's.
        own_RT = on_RT & ~(batch["guided"] > 0)
        stats |= policy_stats | mismatch(logp_RT, batch["logp"], own_RT)
        if importance_cap is not None:
            weight_RT, kept_RT = importance_weight(
                old_RT, batch["logp"], own_RT, batch["segments"],
                cap=importance_cap, level=importance_level, band=importance_band,
            )  # fmt: skip
            loss_RT = weight_RT * loss_RT
            stats["importance_weight"] = (weight_RT, mask_RT)
            if importance_band is not None:
                gap_RT = mismatch(old_RT, batch["logp"], own_RT)["mismatch/kl"][0]
                stats["importance_masked"] = (~kept_RT, own_RT)
                stats["mismatch/kl_kept"] = (gap_RT, own_RT & kept_RT)
                stats["mismatch/kl_masked"] = (gap_RT, own_RT & ~kept_RT)
    if kl_coef:
        kl_RT = kl_penalty(logp_RT, batch["ref_logp"], mask_RT, kind=kl)
        loss_RT = loss_RT + kl_coef * kl_RT
        stats["kl_ref"] = (kl_RT, mask_RT)
    if entropy_coef:
        loss_RT = loss_RT - entropy_coef * jnp.where(on_RT, entropy_RT, 0)
    return loss_RT, jax.lax.stop_gradient(stats)
