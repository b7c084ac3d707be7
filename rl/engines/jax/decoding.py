"""Jitted functions of the JAX engine: prefill and decode over slots of a KV cache, with sampling
inside.

`weights` come from `kv_cache.for_decoding`. The cache argument is donated; the caller continues
with the returned one.

Shapes: B rows of a call, T new tokens, N decoded tokens, V vocabulary, S stop tokens. Each row
names its slot in the cache. The slot number one past the last marks an idle row: its reads are
arbitrary and its writes are dropped.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen
from models.logp import logits
from rl.engines.jax import kv_cache

Array = jax.Array | np.ndarray


class Draw(NamedTuple):
    """Sampling settings of each row."""

    temperature: Array  # (B,) float32; 0 = greedy
    top_p: Array  # (B,) float32
    top_k: Array  # (B,) int32; 0 = all
    seed: Array  # (B, 2) uint32: high and low half of the request's seed
    token_index: Array  # (B,) int32: index of the next token within its generation
    allowed: Array | None = None  # (B, V) bool: the tokens that may come next; None = all


class Rows(NamedTuple):
    """Rows to decode. The last sampled `token` of a row is not yet in the cache; it goes to
    `position`."""

    slot: Array  # (B,) int32
    token: Array  # (B,) int32
    position: Array  # (B,) int32
    budget: Array  # (B,) int32: tokens that the row may still generate; 0 = idle
    stop: Array  # (B, S) int32, padded with -1
    draw: Draw


def sample(
    logits_BV: jax.Array, draw: Draw, *, truncate: bool, u_B: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (token_B, logp_B float32). A row's uniform is fold_in(key(seed), index), independent
    of other rows.

    logp is log_softmax(logits / temperature) at the token (temperature 1 for a greedy row), not
    renormalised by top-p and top-k, but to the tokens that `draw.allowed` leaves. truncate: static,
    True if any row uses top-p or top-k; tokens tied at the cut are kept. u_B: uniforms drawn by the
    caller.
    """
    if draw.allowed is not None:
        logits_BV = jnp.where(draw.allowed, logits_BV, -jnp.inf)
    greedy = draw.temperature <= 0
    z = logits_BV.astype(jnp.float32) / jnp.where(greedy, 1.0, draw.temperature)[:, None]
    z = z - jnp.max(z, axis=-1, keepdims=True)
    p = jnp.exp(z)
    total = jnp.sum(p, axis=-1)
    kept = jnp.where(z >= _cut(z, draw)[:, None], p, 0.0) if truncate else p
    vocab = z.shape[1]
    # argmax; XLA's own is slow on CPUs
    best = jnp.min(jnp.where(z == 0, jnp.arange(vocab), vocab - 1), axis=-1)
    u_B = uniform(draw, draw.token_index) if u_B is None else u_B
    token = jnp.where(greedy, best, _draw_from(kept, u_B)).astype(jnp.int32)
    return token, jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0] - jnp.log(total)


def uniform(draw: Draw, index: Array) -> jax.Array:
    """Return uniform numbers in [0, 1), one per row and token index in its generation. Shape: (B,)
    or (B, N)."""
    keys = jax.random.wrap_key_data(jnp.asarray(draw.seed), impl="threefry2x32")
    per_token = jax.vmap(
        lambda key, index: jax.random.uniform(jax.random.fold_in(key, index)), (None, 0)
    )
    return jax.vmap(per_token)(keys, index.reshape(len(index), -1)).reshape(index.shape)


def _cut(z_BV: jax.Array, draw: Draw) -> jax.Array:
    """Return cut_B, the smallest logit kept by top-k followed by top-p on the remaining tokens.
    z_BV: at most 0.

    A sort of the vocabulary would take ten times as long on a CPU. Both cuts are found bit by bit,
    because the bits of positive floats, read as integers, are in the order of the floats.
    """
    rows, vocab = z_BV.shape
    distance_BV = jax.lax.bitcast_convert_type(jnp.abs(z_BV), jnp.uint32)  # 0 = the likeliest
    p_BV, ones_BV = jnp.exp(z_BV), jnp.ones(z_BV.shape, jnp.int32)
    top_p = jnp.asarray(draw.top_p)

    def within(weight_BV: jax.Array, most_B: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(distance_BV <= most_B[:, None], weight_BV, 0), axis=-1)

    def nearest(weight_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
        """Return the smallest distance within which the weights reach what is wanted."""

        def add_bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
            bit = jnp.uint32(1) << (31 - i).astype(jnp.uint32)
            short_B = within(weight_BV, found_B + (bit - 1)) < wanted_B
            return jnp.where(short_B, found_B + bit, found_B)

        return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(rows, jnp.uint32))

    k_B = jnp.where(draw.top_k <= 0, vocab, jnp.minimum(draw.top_k, vocab))
    kth_B = nearest(ones_BV, k_B)
    # Of the tokens tied at rank k only so many count as make k.
    above_BV = distance_BV < kth_B[:, None]
    tied_B = k_B - jnp.sum(above_BV, axis=-1)
    p_kth_B = jnp.exp(-jax.lax.bitcast_convert_type(kth_B, jnp.float32))
    total_B = jnp.sum(jnp.where(above_BV, p_BV, 0), axis=-1) + tied_B * p_kth_B
    # The token that crosses top_p is kept. A top_p of 1 keeps all, also where sums are rounded.
    crossing_B = jnp.minimum(nearest(p_BV, top_p * total_B), kth_B)
    cut_B = jnp.where(top_p >= 1, kth_B, crossing_B)
    return -jax.lax.bitcast_convert_type(cut_B, jnp.float32)


def _draw_from(p_BV: jax.Array, u_B: jax.Array) -> jax.Array:
    """Invert the cumulative sum of unnormalised p at u in [0, 1) in two levels: find the block,
    then the token. A token of probability 0 is never returned.

    This needs one uniform per row; V Gumbel draws would cost as much as a small model's forward
    pass.
    """
    rows, vocab = p_BV.shape
    size = 1 << max(4, round(np.log2(vocab) / 2))
    p = jnp.pad(p_BV, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
    sums = jnp.sum(p, axis=-1)
    blocks = jnp.cumsum(sums, axis=-1)
    block, rest = _invert(sums, blocks, u_B * blocks[:, -1])
    inside = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]
    return block * size + _invert(inside, jnp.cumsum(inside, axis=-1), rest)[0]


def _invert(p: jax.Array, cumulative: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index of positive p whose cumulative sum exceeds target, and target minus
    the sum before that index. If there is none, it is the first of those with the largest sum.

    Sums that are rounded in parallel may grow where p is 0, and may decrease.
    """
    possible, count = p > 0, p.shape[-1]
    largest = jnp.max(jnp.where(possible, cumulative, 0), axis=-1, keepdims=True)
    reached = (cumulative > target[:, None]) | (cumulative == largest)
    index = jnp.min(jnp.where(possible & reached, jnp.arange(count), count - 1), axis=-1)
    before = jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0]
    return index, target - jnp.where(index > 0, before, 0.0)


_POSITIONS = {"k": 3, "k_by_position": 2, "v": 2}  # the axis of positions in each array of a cache


def _take(cache: kv_cache.Cache, slot_B: Array | None, window: int) -> kv_cache.Cache:
    """Return the first `window` positions of the given slots; slot_B=None means every slot, in
    order."""

    def take(array: jax.Array, axis: int) -> jax.Array:
        array = jax.lax.slice_in_dim(array, 0, window, axis=axis)
        return array if slot_B is None else array.at[slot_B].get(mode="clip")

    return {
        name: tuple(take(array, _POSITIONS[name]) for array in arrays)
        for name, arrays in cache.items()
    }


def _put(
    cache: kv_cache.Cache, slot_B: Array, rows: kv_cache.Cache, first_B: Array, count: int
) -> kv_cache.Cache:
    """Write positions first_B .. first_B + count - 1 of `rows`, taken by `_take`, back to the
    slots; drop idle rows.

    Only new positions are written: on a CPU, writing whole windows takes longer than decoding a
    block of tokens.
    """

    def put(array: jax.Array, row: jax.Array, axis: int) -> jax.Array:
        size = min(count, row.shape[axis])
        # Positions before first_B equal those in the slot.
        first = jnp.minimum(first_B, row.shape[axis] - size)
        new = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1))(
            row, first
        )
        where = jax.lax.ScatterDimensionNumbers((1, 2, 3), (0,), (0, axis))
        index = jnp.stack([jnp.asarray(slot_B), first], axis=1)
        return jax.lax.scatter(array, index, new, where, mode="drop")

    return {
        name: tuple(put(array, row, _POSITIONS[name]) for array, row in zip(arrays, rows[name]))
        for name, arrays in cache.items()
    }


@partial(jax.jit, static_argnames="window", donate_argnames="cache")
def copy(cache: kv_cache.Cache, source_B: Array, slot_B: Array, *, window: int) -> kv_cache.Cache:
    """Return the cache with the first `window` positions of slots source_B copied to slots
    slot_B."""
    rows = _take(cache, source_B, window)
    return _put(cache, slot_B, rows, np.zeros(len(slot_B), np.int32), window)


def _logits(config: qwen.Config, weights: Any, h_BD: jax.Array) -> jax.Array:
    w_DV = weights["unembed"]
    return logits(h_BD.astype(w_DV.dtype), w_DV, unused=config.unused)


@partial(
    jax.jit, static_argnames=("config", "window", "truncate", "fused"), donate_argnames="cache"
)
def prefill(
    weights: Any,
    cache: kv_cache.Cache,
    slot_B: jax.Array,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    draw: Draw,
    *,
    config: qwen.Config,
    window: int,
    truncate: bool,
    fused: bool = False,
) -> tuple[jax.Array, jax.Array, kv_cache.Cache]:
    """Write count_B of tokens_BT at start_B of each slot and sample the next token; return
    (token_B, logp_B, cache). fused: see `kv_cache.extend`."""
    rows = _take(cache, slot_B, window)
    h_BD, rows = kv_cache.extend(config, weights, rows, tokens_BT, start_B, count_B, fused=fused)
    token_B, logp_B = sample(_logits(config, weights, h_BD), draw, truncate=truncate)
    return token_B, logp_B, _put(cache, slot_B, rows, start_B, tokens_BT.shape[1])


@partial(
    jax.jit,
    static_argnames=("config", "window", "block", "truncate", "in_place", "fused"),
    donate_argnames="cache",
)
def decode(
    weights: Any,
    cache: kv_cache.Cache,
    rows: Rows,
    leave: Array,
    *,
    config: qwen.Config,
    window: int,
    block: int,
    truncate: bool,
    in_place: bool,
    fused: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, kv_cache.Cache]:
    """Decode up to `block` tokens per row, fewer once `leave` rows finish; return (tokens_NB,
    logp_NB, steps, cache).

    N = block; `steps` of them ran. A row finishes at a stop token or when its budget is used up;
    its later tokens are -1. With `rows.draw.allowed` the block has one token.
    in_place: work on the cache itself instead of a copy of its window; the rows must be all slots,
    in order. This is faster on accelerators. On a CPU the copy is: XLA's products read no windows
    there, so each step would copy the windows of all layers. fused: see `kv_cache.extend`.
    """
    taken = None if len(rows.slot) == len(cache["v"][0]) else rows.slot
    live = jnp.sum(rows.budget > 0)

    def unfinished(state: tuple) -> jax.Array:
        step, budget_B = state[0], state[1]
        alive = jnp.sum(budget_B > 0)
        return (step < block) & (alive > 0) & (live - alive < leave)

    def advance(state: tuple) -> tuple:
        step, budget_B, token_B, work, tokens_NB, logp_NB = state
        alive_B = budget_B > 0
        h_BD, work = kv_cache.extend(
            config, weights, work, token_B[:, None], rows.position + step,
            alive_B.astype(jnp.int32), window=window, fused=fused,
        )  # fmt: skip
        logits_BV = _logits(config, weights, h_BD)
        token_B, logp_B = sample(logits_BV, rows.draw, truncate=truncate, u_B=u_NB[step])
        stopped_B = jnp.any(token_B[:, None] == rows.stop, axis=1)
        tokens_NB = tokens_NB.at[step].set(jnp.where(alive_B, token_B, -1))
        budget_B = jnp.where(stopped_B, 0, budget_B - alive_B)
        return step + 1, budget_B, token_B, work, tokens_NB, logp_NB.at[step].set(logp_B)

    # Draw all uniforms before the loop: inside it they take a fifth of a small model's time.
    u_NB = uniform(rows.draw, rows.draw.token_index[:, None] + np.arange(block)).T
    shape = (block, len(rows.slot))
    start = (
        jnp.int32(0), jnp.asarray(rows.budget), jnp.asarray(rows.token),
        cache if in_place else _take(cache, taken, window),
        jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32),
    )  # fmt: skip
    step, _, _, work, tokens_NB, logp_NB = jax.lax.while_loop(unfinished, advance, start)
    if not in_place:
        work = _put(cache, rows.slot, work, rows.position, block)
    return tokens_NB, logp_NB, step, work
