"""Attention from new tokens to a cache by cuDNN's kernels, which read each row's own length and
hold no scores.

Shapes: B rows, T new tokens, S cache positions, H query heads, K key/value heads, G = H / K, h head
width, P pieces.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

# Most positions that one block of the GPU reads when a row has one new token: rows times heads are
# too few for all of a GPU's processors, and rows of different lengths would leave them idle.
PIECE = 512


def attend(q: Array, k: Array, v: Array, cached: tuple[Array, Array], *lengths_B: Array) -> Array:
    """Attend from q_BTHh to the tokens before them in the cache, and to k_BTKh and v_BTKh of the
    new tokens themselves up to each one; return out_BTD' with the heads concatenated (D' = H h).

    cached: k_BKSh and v_BKSh, in which the new tokens have been written. lengths_B: the positions
    before the new tokens, and the number of new tokens, of each row. An idle row, of 0 new tokens,
    reads nothing if T is 1; what belongs to no token is finite.
    """
    b, t, heads, head_dim = q.shape
    starts_B, new_B = lengths_B
    if t == 1:
        out = _one(q[:, 0], *cached, jnp.where(new_B > 0, starts_B + 1, 0))
    else:
        out = _many(q, k, v, *cached, starts_B)
    return out.astype(q.dtype).reshape(b, t, heads * head_dim)


def _one(q_BHh: Array, k_BKSh: Array, v_BKSh: Array, lengths_B: Array) -> Array:
    """Attend from one token a row to the first positions of its cache, each piece of which is a
    sequence of its own to the kernel. The query heads of a key head are the sequence's queries, so
    that its keys are read once."""
    b, kv_heads, length, head_dim = k_BKSh.shape
    piece = math.gcd(length, PIECE) if length % 128 == 0 else length
    pieces = length // piece
    shape = (b, kv_heads, pieces)
    lengths_BP = jnp.clip(lengths_B[:, None] - piece * jnp.arange(pieces), 0, piece)
    lengths_BKP = jnp.broadcast_to(lengths_BP[:, None], shape)
    q = q_BHh.reshape(b, kv_heads, 1, -1, head_dim)
    q = jnp.broadcast_to(q, (*shape, *q.shape[3:]))
    q_N, k_N, v_N = (
        x.reshape(-1, 1, size, head_dim)
        for x, size in ((q, q.shape[3]), (k_BKSh, piece), (v_BKSh, piece))
    )
    out, lse = _kernel(q_N, k_N, v_N, "PADDING", lengths_BKP.reshape(-1))
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
    return _merged(out, lse, lengths_BKP[..., None] > 0, axis=2)


def _many(q: Array, k: Array, v: Array, k_BKSh: Array, v_BKSh: Array, starts_B: Array) -> Array:
    """Attend to the earlier positions and to the new tokens in one call each, as the kernel's
    causal mask begins at the first key."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    before, before_lse = _kernel(q, k_BKSh, v_BKSh, "PADDING", starts_B)
    new, new_lse = _kernel(q, k, v, "CAUSAL")
    present_B = starts_B > 0
    present = jnp.stack([present_B, jnp.ones_like(present_B)])[:, :, None, None]
    out = _merged(jnp.stack([before, new]), jnp.stack([before_lse, new_lse]), present, axis=0)
    return out.swapaxes(1, 2)


def _kernel(q: Array, k: Array, v: Array, mask: str, lengths_N: Array | None = None) -> Any:
    """Return (out_NHTh, log-sum-exp_NHT) of q_NHTh, k_NKSh and v_NKSh.

    lengths_N: each row's keys; the outputs of a row of none are undefined.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    given = None if lengths_N is None else jnp.where(lengths_N > 0, q.shape[2], 0)
    return fused.dot_product_attention(
        q, k, v, q_seqlen=given, kv_seqlen=lengths_N, scale=q.shape[-1] ** -0.5,
        mask_type=fused.MaskType[mask], qkv_layout="BNTH", return_residual=True,
    )  # fmt: skip


def _merged(out: Array, lse: Array, present: Array, *, axis: int) -> Array:
    """Merge parts of a softmax's mean along an axis by their log-sum-exps; 0 where none is
    present."""
    lse = jnp.where(present, lse, -jnp.inf)
    top = jnp.maximum(lse.max(axis, keepdims=True), -1e30)
    share = jnp.exp(lse - top)
    mean = jnp.where(present[..., None], out.astype(jnp.float32), 0) * share[..., None]
    return mean.sum(axis) / jnp.maximum(share.sum(axis), 1e-30)[..., None]
