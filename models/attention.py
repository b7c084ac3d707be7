"""Causal attention within packed segments: one function with several implementations.

`blockwise` is plain XLA and runs on any backend; the kernels of `cudnn` are for GPUs,
`splash` for TPUs; `ring` is for rows whose tokens are sharded over the mesh's sequence axis. All
compute the same function and gradient; `auto` chooses by device, dtype and head width.

Shapes: R packed rows, T tokens, S keys, H query heads, K key/value heads, G = H / K, h head width.

Several segments may share a prompt, a segment of its own before them in the row: their ids are then
`sharing(segment, prompt)`, and they attend to it as to their own earlier tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

IMPLEMENTATIONS = (
    "auto", "blockwise", "cudnn", "cudnn_apart", "cudnn_packed", "splash", "ring",
)  # fmt: skip
SCORES = 1 << 26  # largest number of scores held at once for long rows: 256 MiB
Residuals = tuple[Array, ...]  # q, k, v, segments, out, log-sum-exp
Gradients = tuple[Array, Array, Array, None]  # of q, k, v, segments
SAVED = "attention"  # the name of what the forward pass keeps for the backward pass
# primitives of kernels that return the same: of cuDNN's, and of TPUs'
KERNELS = ("dot_product_attention_fwd_wrapper", "pallas_call")
PACKS_FROM = (0, 11, 1)  # the first jax with which `cudnn_packed` runs
LANES = 128  # tile size of splash, in tokens and in head coordinates
# kernels that compare ids as they are, or take lengths: their segments cannot share a prompt
WHOLE_IDS = ("cudnn_apart", "cudnn_packed", "splash")


def attention(
    q: Array,
    k: Array,
    v: Array,
    segments_RT: Array,
    *,
    implementation: str = "auto",
    most_segments: int = 0,
    mesh: Mesh | None = None,
) -> Array:
    """Apply softmax attention from each token to itself and to the earlier tokens of its segment.

    q_RTHh, k_RTKh, v_RTKh, segments_RT (int) -> out_RTHh, in the dtype of v. Query head i uses
    key/value head i // G.

    Args:
      implementation: one of `IMPLEMENTATIONS`; those for GPUs need bfloat16 or float16.
      most_segments: of a row, none of which shares a prompt; 0 = any number, which may share.
      mesh: of the arrays, with the axes of models/mesh.py; None = one device.
    """
    chosen = choose(implementation, mesh, q.dtype, q.shape[-1], most_segments)
    kernels: dict[str, Callable[..., Array]] = {
        "cudnn": cudnn,
        "cudnn_apart": partial(cudnn_apart, most_segments=most_segments),
        "cudnn_packed": partial(cudnn_packed, most_segments=most_segments),
        "splash": splash,
    }
    local = kernels.get(chosen, blockwise)
    if mesh is None or mesh.size == 1:
        return local(q, k, v, segments_RT)
    # Use shard_map explicitly: XLA cannot partition custom kernels and would all-gather their
    # inputs.
    heads = PartitionSpec(("data", "fsdp"), "sequence", "tensor", None)
    rows = PartitionSpec(("data", "fsdp"), "sequence")
    if mesh.shape["sequence"] > 1:
        local = partial(ring, axis="sequence")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )(q, k, v, segments_RT)


def choose(
    implementation: str, mesh: Mesh | None, dtype: Any, head_dim: int, most_segments: int = 0
) -> str:
    """Return `implementation`, with "auto" resolved for these devices. Raises ValueError.

    most_segments: as in `attention`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention {implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}"
        )
    sharded_rows = mesh is not None and mesh.shape["sequence"] > 1
    if sharded_rows and implementation not in ("auto", "ring"):
        raise ValueError(
            f"attention {implementation!r} needs whole rows; a mesh with sequence > 1 needs 'ring'"
        )
    if implementation in ("cudnn_apart", "cudnn_packed") and not most_segments:
        raise ValueError(f"attention {implementation!r} needs most_segments, the most of a row")
    if implementation != "auto":
        return implementation
    if sharded_rows:
        return "ring"
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if runs_cudnn(device.platform, dtype, head_dim):
        if not most_segments:
            return "cudnn"
        return "cudnn_packed" if packs(device) else "cudnn_apart"
    half = jnp.dtype(dtype).itemsize == 2
    return "splash" if device.platform == "tpu" and half else "blockwise"


def runs_cudnn(platform: str, dtype: Any, head_dim: int) -> bool:
    """Return True if cuDNN's kernels take heads of this width on devices of this platform."""
    half = jnp.dtype(dtype).itemsize == 2
    return platform in ("gpu", "cuda") and half and head_dim % 8 == 0 and head_dim <= 128


def packs(device: Any) -> bool:
    """Return whether `cudnn_packed` runs on a device: on Hopper GPUs and later ones.

    Before 0.11.1, jax computed the offsets of grouped keys from the number of query heads.
    """
    capability = getattr(device, "compute_capability", "0")
    return float(capability) >= 9 and jax.__version_info__ >= PACKS_FROM


def sharing(segments_RT: Array, prompts_RT: Array) -> Array:
    """Return ids of segments below 2^15 that attend to segment `prompts_RT` too; 0 = to themselves
    alone."""
    return segments_RT + (prompts_RT << 16)


def _visible(queries: Array, keys: Array) -> Array:
    """Return (R, T, S): the segment of the key in (R, S) is that of the query in (R, T), or its
    shared prompt."""
    own, prompts = queries & 0xFFFF, queries >> 16
    prompts = jnp.where(prompts > 0, prompts, own)  # padding is no prompt of those without one
    keys = (keys & 0xFFFF)[:, None]
    return (own[:, :, None] == keys) | (prompts[:, :, None] == keys)


# --- blocks of queries, in plain XLA --------------------------------------------------------------


class Keys(NamedTuple):
    """Tokens of each row to which queries attend, from position `start` of the row."""

    k_RKSh: Array
    v_RKSh: Array
    segments_RS: Array
    start: Array | int = 0


def blockwise(q: Array, k: Array, v: Array, segments_RT: Array) -> Array:
    """Compute `attention` on any backend.

    Each block of queries is multiplied with the keys up to its end. As in FlashAttention
    (arXiv:2205.14135) the backward pass recomputes the probabilities from their log-sum-exp, so
    that memory is linear in T except for one block of scores.
    """
    return _heads_last(_attention(*_grouped(q, k, v), segments_RT))


def _grouped(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return scaled q_RKGTh, k_RKTh and v_RKTh."""
    r, t, _, head_dim = q.shape
    q = (q * head_dim**-0.5).reshape(r, t, k.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


def _heads_last(out_RKGTh: Array) -> Array:
    out = out_RKGTh.transpose(0, 3, 1, 2, 4)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def _attention_forward(q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Residuals]:
    parts = []
    for rows, keys in _blocks(k, v, segments):
        parts.append(_attend(keys, rows.start, segments[:, rows], q[:, :, :, rows]))
    joined = (jnp.concatenate(part, axis=3) for part in zip(*parts))
    out, lse = (checkpoint_name(part, SAVED) for part in joined)
    return out, (q, k, v, segments, out, lse)


def _attention_backward(residuals: Residuals, dout: Array) -> Gradients:
    q, k, v, segments, out, lse = residuals
    queries = q, lse, _delta(out, dout), dout
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rows, keys in _blocks(k, v, segments):
        block, seen = (x[:, :, :, rows] for x in queries), slice(rows.stop)
        (more_k, more_v), dq_block = _gradients(keys, rows.start, segments[:, rows], *block)
        dq.append(dq_block.astype(q.dtype))
        dk, dv = dk.at[:, :, seen].add(more_k), dv.at[:, :, seen].add(more_v)
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention = jax.custom_vjp(lambda *arrays: _attention_forward(*arrays)[0])
_attention.defvjp(_attention_forward, _attention_backward)


def _blocks(k: Array, v: Array, segments: Array) -> Iterator[tuple[slice, Keys]]:
    """Yield blocks of queries, each with the keys up to its end: small enough that scores stay in a
    CPU's cache, few enough to compile quickly."""
    t = k.shape[2]
    size = max(64, -(-t // 8))
    for start in range(0, t, size):
        end = min(start + size, t)
        yield slice(start, end), Keys(k[:, :, :end], v[:, :, :end], segments[:, :end])


def _delta(out: Array, dout: Array) -> Array:
    """Return the dot products over h in float32. A matrix product is faster here than XLA's sum
    over a short axis."""
    return jnp.einsum("...h,...h->...", out.astype(jnp.float32), dout.astype(jnp.float32))


# --- a block of queries and the keys that it may see ----------------------------------------------


def _attend(keys: Keys, start: Array | int, segments: Array, q: Array) -> tuple[Array, Array]:
    """Return (the mean of v by the softmax of the scores, in the dtype of v; their log-sum-exp) of
    queries from position `start`."""

    def attend(none: None, start: Array | int, segments: Array, q: Array) -> tuple[None, Any]:
        scores = _scores(keys, start, segments, q)
        top = scores.max(-1, keepdims=True)
        probs = jnp.exp(scores - top)
        total = probs.sum(-1, keepdims=True)
        out = _batched(probs.astype(keys.v_RKSh.dtype), keys.v_RKSh) / total
        return none, (out.astype(keys.v_RKSh.dtype), (top + jnp.log(total))[..., 0])

    return _in_pieces(attend, None, keys, start, segments, q)[1]


def _gradients(
    keys: Keys, start: Array | int, *queries: Array, totals: tuple[Array, ...] = ()
) -> tuple[tuple[Array, Array], Array]:
    """Return (totals + (dk, dv), dq) in float32.

    queries: segments, q, lse, delta and dout of queries from position `start`; lse and delta cover
    all keys.
    """
    k, v, *_ = keys

    def add(totals: Any, start: Array | int, segments: Array, q: Array, *of_q: Array) -> Any:
        lse, delta, dout = of_q
        probs = jnp.exp(_scores(keys, start, segments, q) - lse[..., None])
        dscores = (probs * (_batched(dout, v.swapaxes(2, 3)) - delta[..., None])).astype(k.dtype)
        dk = totals[0] + _batched_transposed(q, dscores)
        dv = totals[1] + _batched_transposed(dout, probs.astype(v.dtype))
        return (dk, dv), _batched(dscores, k)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    return _in_pieces(add, totals or zeros, keys, start, *queries)


def _in_pieces(
    body: Callable[..., Any], totals: Any, keys: Keys, start: Array | int, *queries: Array
) -> Any:
    """Return `body(totals, start, *queries)`, a pair of totals and outputs, computed for so few
    queries at a time that at most `SCORES` scores exist.

    queries: their segments, q_RKGTh, and other arrays with the axes of q.
    """
    r, kv_heads, groups, size = queries[1].shape[:4]
    most = max(16, SCORES // (r * kv_heads * groups * keys.k_RKSh.shape[2]))
    if most >= size:
        return body(totals, start, *queries)
    step = max(d for d in range(1, most + 1) if size % d == 0)

    def piece(totals: Any, i: Array) -> Any:
        taken = (jax.lax.dynamic_slice_in_dim(x, i, step, min(x.ndim - 1, 3)) for x in queries)
        return body(totals, start + i, *taken)

    def joined(x: Array) -> Array:
        """Concatenate pieces (n, R, K, G, step, ...) into (R, K, G, n * step, ...)."""
        return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], size, *x.shape[5:])

    totals, outs = jax.lax.scan(piece, totals, jnp.arange(0, size, step))
    return totals, jax.tree.map(joined, outs)


def _scores(keys: Keys, start: Array | int, segments: Array, q: Array) -> Array:
    """Return masked scores (R, K, G, t, S) in float32 of queries from position `start`."""
    order_q = start + jnp.arange(q.shape[3])
    order_k = keys.start + jnp.arange(keys.k_RKSh.shape[2])
    mask = _visible(segments, keys.segments_RS) & (order_q[:, None] >= order_k)
    return jnp.where(mask[:, None, None], _batched(q, keys.k_RKSh.swapaxes(2, 3)), -1e30)


def _batched(a: Array, b: Array) -> Array:
    """Return a_RKGtx @ b_RKxy as (R, K, G, t, y) in float32, with the groups as further rows of one
    product."""
    r, kv_heads, groups, t, x = a.shape
    out = jnp.matmul(a.reshape(r, kv_heads, groups * t, x), b, preferred_element_type=jnp.float32)
    return out.reshape(r, kv_heads, groups, t, -1)


def _batched_transposed(a: Array, b: Array) -> Array:
    """Return b_RKGty^T @ a_RKGtx, summed over the groups, as (R, K, y, x) in float32.

    It is written as (a^T b)^T with a barrier after a^T: XLA would otherwise fold both transposes
    into a product that reads the large b by columns, which is several times slower on a CPU.
    """
    r, kv_heads, groups, t, x = a.shape
    a = jax.lax.optimization_barrier(a.reshape(r, kv_heads, groups * t, x).swapaxes(2, 3))
    b = b.reshape(r, kv_heads, groups * t, -1)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).swapaxes(2, 3)


# --- rows sharded over a mesh axis ----------------------------------------------------------------


def ring(q: Array, k: Array, v: Array, segments_RT: Array, *, axis: str) -> Array:
    """Compute `attention` inside `shard_map`, with T in pieces along the mesh axis `axis`
    (arXiv:2310.01889).

    Keys and values travel around the ring, and partial results are merged by their log-sum-exps.
    Devices skip keys that come after their queries, so the last device of the ring has the most
    work.
    """
    return _heads_last(_ring(*_grouped(q, k, v), segments_RT, axis))


def _ring_forward(
    q: Array, k: Array, v: Array, segments: Array, axis: str
) -> tuple[Array, Residuals]:
    def add(results: Any, start: Array, keys: Keys) -> Any:
        out, lse = results
        keys = keys._replace(v_RKSh=keys.v_RKSh.astype(jnp.float32))
        more, more_lse = _attend(keys, start, segments, q)
        total = jnp.logaddexp(lse, more_lse)
        old, new = jnp.exp(lse - total)[..., None], jnp.exp(more_lse - total)[..., None]
        return (out * old + more * new, total), ()

    # Its own keys come first, of which each query sees one: the start has no weight from then on.
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -1e30, jnp.float32)
    (out, lse), _ = _around(axis, (k, v, segments), add, start)
    out, lse = (checkpoint_name(part, SAVED) for part in (out.astype(v.dtype), lse))
    return out, (q, k, v, segments, out, lse)


def _ring_backward(axis: str, residuals: Residuals, dout: Array) -> Gradients:
    q, k, v, segments, out, lse = residuals
    delta = _delta(out, dout)

    def add(dq: Array, start: Array, keys: Keys, *totals: Array) -> Any:
        totals, more = _gradients(keys, start, segments, q, lse, delta, dout, totals=totals)
        return dq + more, totals

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, (dk, dv) = _around(axis, (k, v, segments), add, dq, dk, dv)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


def _around(axis: str, keys: Residuals, add: Callable[..., Any], local: Any, *moving: Array) -> Any:
    """Fold `local, moving = add(local, start, keys, *moving)` over the keys of all devices, which
    pass them on, and `moving` with them, after each turn. start: the position of its queries."""
    own, size, t = jax.lax.axis_index(axis), jax.lax.axis_size(axis), keys[0].shape[2]

    def turn(i: Array, carry: Any) -> Any:
        local, moving, (k, v, segments) = carry
        source = (own - i) % size
        held = Keys(k, v, segments, source * t)
        local, moving = jax.lax.cond(
            source <= own,
            lambda: add(local, own * t, held, *moving),
            lambda: (local, moving),
        )
        return local, *jax.lax.ppermute(
            (moving, (k, v, segments)), axis, [(i, (i + 1) % size) for i in range(size)]
        )

    return jax.lax.fori_loop(0, size, turn, (local, moving, keys))[:2]


_ring = jax.custom_vjp(lambda *given: _ring_forward(*given)[0], nondiff_argnums=(4,))
_ring.defvjp(_ring_forward, _ring_backward)


# --- kernels --------------------------------------------------------------------------------------


def cudnn(q: Array, k: Array, v: Array, segments_RT: Array) -> Array:
    """Compute `attention` with cuDNN's fused kernel. The mask of segments takes 2 T^2 bytes per
    row, for all layers.

    T is padded to an even number, because the backward pass of a masked kernel takes no other.
    """
    t = q.shape[1]
    q, k, v, segments_RT = _padded(t % 2, q, k, v, segments_RT)
    mask = _visible(segments_RT, segments_RT)[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    return out[:, :t]


def cudnn_packed(q: Array, k: Array, v: Array, segments_RT: Array, *, most_segments: int) -> Array:
    """Compute `attention` with cuDNN's kernel for packed rows, which computes nothing between
    segments and needs no mask. Rows of more than `most_segments` segments become NaN.

    The segments of a row are contiguous and numbered from 1; padding comes after them. The kernel
    leaves what belongs to padding undefined, hence the masks, whose gradients are masks too. Its
    backward pass holds two float32 copies of q for each of the `most_segments`: 28.6 GiB for 64 of
    them in a row of 16,384 tokens with 28 heads of 128.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    real_RT11 = (segments_RT > 0)[:, :, None, None]
    q, k, v = (jnp.where(real_RT11, x, 0) for x in (q, k, v))
    # with room for one segment jax would not take the layout for a packed one
    lengths_RM, offsets_RM = lengths_and_offsets(segments_RT, max(2, most_segments))
    out = fused.dot_product_attention(
        q, k, v, q_seqlen=lengths_RM, kv_seqlen=lengths_RM, q_offsets=offsets_RM,
        kv_offsets=offsets_RM, scale=q.shape[-1] ** -0.5, qkv_layout="BTNH",
        mask_type=fused.MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return jnp.where(real_RT11, _counted(out, segments_RT, most_segments), 0)


def cudnn_apart(q: Array, k: Array, v: Array, segments_RT: Array, *, most_segments: int) -> Array:
    """Compute `attention` with each segment as a sequence of its own, whose length cuDNN is told:
    like `cudnn_packed` it computes nothing between segments, also on GPUs before Hopper, and holds
    `most_segments` copies of q, k, v and the output. Rows of more segments become NaN."""
    (r, t), most = segments_RT.shape, most_segments
    lengths_RM, offsets_RM = lengths_and_offsets(segments_RT, most)
    begins_RM, owner_RT = offsets_RM[:, :-1], jnp.clip(segments_RT - 1, 0, most - 1)
    apart_RMT = begins_RM[:, :, None] + jnp.arange(t)
    together_RT = owner_RT * t + jnp.arange(t) - jnp.take_along_axis(begins_RM, owner_RT, axis=1)
    apart_RMT = jnp.where(jnp.arange(t) < lengths_RM[:, :, None], apart_RMT, -1)
    ways = apart_RMT.reshape(r, -1), jnp.where(segments_RT > 0, together_RT, -1)
    q, k, v = (_moved(x, *ways).reshape(r * most, t, *x.shape[2:]) for x in (q, k, v))
    # An absent segment has one token, of zeros: a sequence of none may give NaN.
    lengths_N = jnp.maximum(lengths_RM, 1).reshape(-1)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, query_seq_lengths=lengths_N, key_value_seq_lengths=lengths_N,
        implementation="cudnn",
    )  # fmt: skip
    out = _moved(out.reshape(r, most * t, *out.shape[2:]), *ways[::-1])
    return _counted(out, segments_RT, most)


@jax.custom_vjp
def _moved(x_RS: Array, from_RN: Array, back_RS: Array) -> Array:
    """Return the elements of each row at the places `from_RN`, 0 where they are -1. back_RS: where
    each element went. The gradient is read from there: XLA's own would add to all places."""
    moved = jnp.take_along_axis(x_RS, jnp.maximum(from_RN, 0)[..., None, None], axis=1)
    return jnp.where(from_RN[..., None, None] >= 0, moved, 0)


_moved.defvjp(
    lambda x, *ways: (_moved(x, *ways), ways),
    lambda ways, dout: (_moved(dout, *ways[::-1]), None, None),
)


def _counted(out: Array, segments_RT: Array, most: int) -> Array:
    """Return NaN for rows of more segments."""
    return jnp.where((segments_RT.max(axis=1) <= most)[:, None, None, None], out, jnp.nan)


def lengths_and_offsets(segments_RT: Array, most: int) -> tuple[Array, Array]:
    """Return int32 arrays of the lengths of each row's segments, (R, `most`), and of where they
    begin, (R, `most` + 1). Entries of absent segments are -1, and so is the last one.

    The end of a row's last segment must not be among the offsets: jax joins those of all rows, so
    that each later row would get the lengths of other segments.
    """
    own_RTM = segments_RT[:, :, None] == jnp.arange(1, most + 1)
    lengths_RM = jnp.sum(own_RTM, axis=1, dtype=jnp.int32)
    begins_RM = jnp.cumsum(lengths_RM, axis=1) - lengths_RM
    present_RM = lengths_RM > 0
    offsets_RM = jnp.pad(jnp.where(present_RM, begins_RM, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(present_RM, lengths_RM, -1), offsets_RM


def splash(q: Array, k: Array, v: Array, segments_RT: Array) -> Array:
    """Compute `attention` with JAX's Pallas kernel for TPUs. T and h are padded to whole tiles: h =
    64 wastes half."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    r, t, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q * head_dim**-0.5
    q, k, v, segments_RT = _padded(-t % LANES, q, k, v, segments_RT)
    q, k, v = (jnp.pad(x, (*[(0, 0)] * 3, (0, -head_dim % LANES))) for x in (q, k, v))
    length = q.shape[1]
    block = math.gcd(length, 512)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
        block_kv_dq=block,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * (heads // kv_heads))
    mqa = kernel.make_splash_mqa_single_device(mask, block_sizes=sizes)
    q = q.transpose(0, 2, 1, 3).reshape(r, kv_heads, heads // kv_heads, length, -1)
    ids = kernel.SegmentIds(segments_RT, segments_RT)
    over_heads = jax.vmap(mqa, in_axes=(0, 0, 0, None))
    out = jax.vmap(over_heads)(q, k.swapaxes(1, 2), v.swapaxes(1, 2), ids)
    return _heads_last(out)[:, :t, :, :head_dim]


def _padded(more: int, *arrays: Array) -> tuple[Array, ...]:
    """Append `more` tokens at the end, which no earlier token attends to."""
    return tuple(jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) for x in arrays)
