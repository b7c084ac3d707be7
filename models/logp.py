"""Logits, and log-probabilities of chosen tokens without the logits of all of them at once.

Shapes: N tokens, C chunks of S tokens, D width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from models import loops

NEVER = -1e30  # the logit of a row without a token; an infinity would make entropies NaN


def logits(h: Array, w_DV: Array, temperature: Any = 1.0, unused: int = 0) -> Array:
    """Return h_..D @ w_DV / temperature in float32, without a chance for the last `unused` rows of
    the vocabulary."""
    y = jnp.dot(h, w_DV.astype(h.dtype), preferred_element_type=jnp.float32) / temperature
    return jnp.where(jnp.arange(y.shape[-1]) < y.shape[-1] - unused, y, NEVER) if unused else y


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def chunked_logp(
    h_CSD: Array,
    w_DV: Array,
    targets_CS: Array,
    temperature: float,
    count: Array | int,
    unused: int = 0,
) -> tuple[Array, Array]:
    """Return the log-probability of each target and the entropy of each distribution, float32, of
    the first `count` of C chunks of S tokens: (logp_CS, entropy_CS), 0 in the other chunks.

    Forward and backward hold the logits of one chunk at a time; only their log-sum-exp is saved for
    the backward pass. The entropy has no gradient. unused: see `logits`.
    """
    return _chunked_logp_forward(h_CSD, w_DV, targets_CS, temperature, count, unused)[0]


def _chunked_logp_forward(*inputs: Any) -> tuple[tuple[Array, Array], tuple]:
    h_CSD, wide_DV, targets_CS, temperature, count, unused = inputs
    w_DV = wide_DV.astype(h_CSD.dtype)  # once, and not for each chunk

    def add_chunk(i: Array, chunk: Any, out: Any) -> Any:
        h, targets = chunk
        y = logits(h, w_DV, temperature, unused)
        lse = jax.nn.logsumexp(y, axis=-1)
        logp = y - lse[:, None]
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        new = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0], entropy, lse
        return tuple(y.at[i].set(x) for y, x in zip(out, new))

    start = (jnp.zeros(targets_CS.shape, jnp.float32),) * 3
    logp, entropy, lse = loops.fold((h_CSD, targets_CS), count, add_chunk, start)
    like = jnp.zeros((), wide_DV.dtype)
    return (logp, entropy), (h_CSD, w_DV, like, targets_CS, temperature, count, lse)


def _chunked_logp_backward(unused: int, residuals: tuple, gradients: Any) -> tuple:
    h_CSD, w_DV, like, targets_CS, temperature, count, lse_CS = residuals

    def add_chunk(i: Array, chunk: Any, out: Any) -> Any:
        dw, dh_CSD = out
        h, targets, lse, g = chunk
        probs = jnp.exp(logits(h, w_DV, temperature, unused) - lse[:, None])
        onehot = targets[:, None] == jnp.arange(probs.shape[-1])
        dlogits = ((onehot - probs) * (g / temperature)[:, None]).astype(h.dtype)
        dw = dw + jnp.dot(h.T, dlogits, preferred_element_type=jnp.float32)
        return dw, dh_CSD.at[i].set(dlogits @ w_DV.T)

    start = jnp.zeros(w_DV.shape, jnp.float32), jnp.zeros_like(h_CSD)
    dw, dh = loops.fold((h_CSD, targets_CS, lse_CS, gradients[0]), count, add_chunk, start)
    return dh, dw.astype(like.dtype), None, None, None


chunked_logp.defvjp(_chunked_logp_forward, _chunked_logp_backward)
