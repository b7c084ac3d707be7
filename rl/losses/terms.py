"""Terms that losses share: ratios, weights of tokens, KL estimates, importance weights.

Arrays are (R, T), rows of tokens. A row is one sequence, or several that `segments_RT` numbers (0 =
padding).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# exp(20) = 5e8: beyond what any clip lets through, far below the overflow of float32
LOG_RATIO_LIMIT = 20.0
CHANNEL = "channel/"  # begins the names of `Tokens.channels` among the arrays of a mini-batch
AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# Metrics: the values of tokens and the mask of those that are averaged, so that micro-batches can
# be added up.
Stats = Mapping[str, tuple[Array, Array]]


class Channels(dict[str, Array]):
    """Arrays by name, which say what there is if a loss reads another one."""

    def __missing__(self, name: str) -> Array:
        there = ", ".join(sorted(self))
        raise KeyError(f"no turn and no recipe writes the channel {name!r}; there are {there}")


class Tokens(NamedTuple):
    """The arguments of a loss, (R, T) each. All but `segments_RT` are 0 outside the mask.

    Log-probabilities are those of the sampled tokens.
    """

    logp_RT: Array  # float32, of the policy being trained; has a gradient
    old_logp_RT: Array  # float32, of the policy that the ratio is taken against
    advantage_RT: Array  # float32
    guided_RT: Array  # bool: tokens of guided rollouts
    segments_RT: Array  # int32: 1, 2, ... for the sequences of a row, 0 = padding
    mask_RT: Array  # bool: tokens that train
    # {name: float32}: "entropy" of the policy being trained, "value" of the state that a token was
    # written in, with a gradient, if there is a critic, "ref_logp" of the reference policy if there
    # is one, and what turns have in `Turn.channels`
    channels: Mapping[str, Array] = {}

    @property
    def log_ratio_RT(self) -> Array:
        """log pi / pi_old, float32, see `log_ratio`."""
        return log_ratio(self.logp_RT, self.old_logp_RT, self.mask_RT)


def segment_sum(value_RT: Array, segments_RT: Array) -> Array:
    """Return, for each token, the sum over its own segment of its own row. (R, T) -> (R, T)."""
    segments = value_RT.shape[1] + 1

    def row(value_T: Array, segments_T: Array) -> Array:
        return jax.ops.segment_sum(value_T, segments_T, num_segments=segments)[segments_T]

    return jax.vmap(row)(value_RT, segments_RT)


def aggregation_weights(
    mask_RT: np.ndarray,
    rollout_RT: np.ndarray | None = None,
    *,
    aggregate: str = "token-mean",
    max_tokens: int = 1,
) -> np.ndarray:
    """Return one weight per token, (R, T) float32, such that loss = sum(weight * token_loss).

    - "token-mean": the mean over all trained tokens of the batch (DAPO, arXiv 2503.14476).
    - "seq-mean-token-sum": the mean over rollouts of the sums over their tokens.
    - "seq-mean-token-mean": the mean over rollouts of the means over their tokens (GRPO, arXiv
      2402.03300).
    - "seq-mean-token-sum-norm": the sum over all tokens, divided by the number of rollouts and by
      `max_tokens`, the most tokens that one can generate (Dr. GRPO, arXiv 2503.20783).

    `rollout_RT` holds an integer per token that is equal for the tokens of one rollout, in whatever
    samples and rows they are; rollouts without trained tokens do not count. Without it every row is
    a rollout, even an empty one.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate={aggregate!r}: choose one of {', '.join(AGGREGATES)}")
    on_RT = np.asarray(mask_RT) > 0
    mask_RT = on_RT.astype(np.float32)
    if aggregate == "token-mean":
        return mask_RT / np.maximum(mask_RT.sum(), 1)
    if rollout_RT is None:
        rollout_RT, rollouts = np.arange(len(mask_RT))[:, None] + 0 * on_RT, len(mask_RT)
    else:
        rollouts = max(len(np.unique(rollout_RT[on_RT])), 1)
    if aggregate == "seq-mean-token-mean":
        tokens_N = np.bincount(rollout_RT[on_RT], minlength=1)
        mask_RT = mask_RT / np.maximum(tokens_N, 1)[rollout_RT * on_RT]
    elif aggregate == "seq-mean-token-sum-norm":
        mask_RT = mask_RT / max_tokens
    return (mask_RT / rollouts).astype(np.float32)


def log_ratio(logp_RT: Array, old_logp_RT: Array, mask_RT: Array) -> Array:
    """Return log pi / pi_old of trained tokens, 0 elsewhere, within +-20 so that its exponential is
    finite."""
    delta_RT = jnp.where(mask_RT > 0, logp_RT, 0) - jnp.where(mask_RT > 0, old_logp_RT, 0)
    return jnp.clip(delta_RT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_metrics(tokens: Tokens, clipped_RT: Array, dual_clipped_RT: Array) -> Stats:
    """Return the metrics `clip_fraction/*` from the tokens, boolean, at which a clip and a dual
    clip act."""
    return {
        "clip_fraction/on": (clipped_RT, tokens.mask_RT & ~tokens.guided_RT),
        "clip_fraction/guided": (clipped_RT, tokens.guided_RT),
        "clip_fraction/dual": (dual_clipped_RT, tokens.mask_RT),
    }


def kl_penalty(logp_RT: Array, ref_logp_RT: Array, mask_RT: Array, *, kl_estimator: str) -> Array:
    """Return an estimate of KL(pi || ref) from each sampled token (Schulman, "Approximating KL
    divergence", 2020).

    With d = log ref - log pi:
    - "k1" = -d. Unbiased value, but as a loss its gradient is 0 on average: it belongs in a reward.
    - "k2" = d^2 / 2. Biased value; on policy its gradient is the unbiased gradient of
      KL(pi || ref).
    - "k3" = exp(d) - d - 1, at most 10. Unbiased value with a low variance; on policy its gradient
      is that of KL(ref || pi) instead. The reference implementation of AgentEvolver uses it.
    """
    d_RT = log_ratio(ref_logp_RT, logp_RT, mask_RT)
    if kl_estimator == "k1":
        return -d_RT
    if kl_estimator == "k2":
        return 0.5 * d_RT**2
    if kl_estimator == "k3":
        return jnp.clip(jnp.exp(d_RT) - d_RT - 1, -10.0, 10.0)
    raise ValueError(f"kl_estimator={kl_estimator!r}: choose k1, k2 or k3")


def importance_weight(
    old_logp_RT: Array,
    sampled_logp_RT: Array,
    mask_RT: Array,
    segments_RT: Array,
    *,
    importance_cap: float,
    importance_level: str,
    importance_low: float,
    importance_high: float,
) -> tuple[Array, Array]:
    """Return truncated importance weights (weight_RT, kept_RT): min(r, cap) without gradient, 0
    where not kept.

    r = pi_old / pi_sampled of each token ("token"), or its product over the tokens of a sequence
    ("sequence"). Corrects for an engine whose probabilities differ from the learner's (Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025). Exactly 1 where
    `old` is what the engine reported. Tokens, or sequences, whose r is below `importance_low` or
    above `importance_high` (0 = no bound) are not kept: with a gap that large, a weight would only
    add variance.
    """
    ratio_RT = log_ratio(old_logp_RT, sampled_logp_RT, mask_RT)
    if importance_level == "sequence":
        total_RT = segment_sum(ratio_RT, segments_RT)
        ratio_RT = jnp.where(mask_RT > 0, jnp.clip(total_RT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0)
    elif importance_level != "token":
        raise ValueError(f"importance_level={importance_level!r}: choose token or sequence")
    ratio_RT = jax.lax.stop_gradient(jnp.exp(ratio_RT))
    kept_RT = jnp.ones(ratio_RT.shape, bool)
    if importance_low or importance_high:
        within_RT = (ratio_RT >= importance_low) & (ratio_RT <= (importance_high or math.inf))
        kept_RT = (mask_RT <= 0) | within_RT
    return jnp.where(kept_RT, jnp.minimum(ratio_RT, importance_cap), 0), kept_RT


def mismatch(learner_logp_RT: Array, sampled_logp_RT: Array, mask_RT: Array) -> Stats:
    """Return metrics of the gap d between learner and engine log-probabilities: KL(engine ||
    learner) and |d|."""
    d_RT = jax.lax.stop_gradient(log_ratio(learner_logp_RT, sampled_logp_RT, mask_RT))
    return {
        "mismatch/kl": (jnp.exp(d_RT) - d_RT - 1, mask_RT),
        "mismatch/abs": (jnp.abs(d_RT), mask_RT),
    }
