"""The jitted half of the JAX engine: prefill and decode over rows of a KV cache, and sampling inside both.

`weights` are those of `qwen.for_decoding`. The cache is donated: the caller goes on with the one that is returned.

Shapes: B rows of a call, T new tokens, N tokens decoded, V vocabulary, S stop tokens. A row names the slot of the
cache it works on; `slots` (one past the last) means an idle row, which reads anything and writes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen

Array = jax.Array | np.ndarray


class Draw(NamedTuple):
    """How each row samples."""

    temperature: Array  # (B,) float32; 0 = greedy
    top_p: Array  # (B,) float32
    top_k: Array  # (B,) int32; 0 = all
    seed: Array  # (B, 2) uint32: high and low half of the request's seed
    index: Array  # (B,) int32: index of the next token within its generation


class Rows(NamedTuple):
    """Rows to decode. Each one's `token` is sampled but not yet in the cache; it belongs at `position`."""

    slot: Array  # (B,) int32
    token: Array  # (B,) int32
    position: Array  # (B,) int32
    budget: Array  # (B,) int32: tokens it may still generate; 0 = idle
    stop: Array  # (B, S) int32, padded with -1
    draw: Draw


def sample(
    logits_BV: jax.Array, draw: Draw, *, truncate: bool, u_B: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(token_B, logp_B float32). A row's uniform is fold_in(key(seed), index): it depends on no other row.

    u_B: these uniforms, where they were drawn before.

    logp is log_softmax(logits / temperature) at the token, at temperature 1 for a greedy row, without the
    renormalisation of top-p and top-k. `truncate` (static) says whether any row uses them; ties at the cut stay in.
    """
    greedy = draw.temperature <= 0
    z = logits_BV.astype(jnp.float32) / jnp.where(greedy, 1.0, draw.temperature)[:, None]
    z = z - jnp.max(z, axis=-1, keepdims=True)
    p = jnp.exp(z)
    total = jnp.sum(p, axis=-1)
    kept = jnp.where(z >= _cut(z, draw)[:, None], p, 0.0) if truncate else p
    vocab = z.shape[1]
    best = jnp.min(jnp.where(z == 0, jnp.arange(vocab), vocab - 1), axis=-1)  # argmax, which XLA's CPU code does slowly
    u_B = uniform(draw, draw.index) if u_B is None else u_B
    token = jnp.where(greedy, best, _draw_from(kept, u_B)).astype(jnp.int32)
    return token, jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0] - jnp.log(total)


def uniform(draw: Draw, index: Array) -> jax.Array:
    """The uniforms of tokens index_B.. of each row's generation, in the shape of `index`."""
    keys = jax.random.wrap_key_data(jnp.asarray(draw.seed), impl="threefry2x32")
    one = jax.vmap(lambda key, index: jax.random.uniform(jax.random.fold_in(key, index)), (None, 0))
    return jax.vmap(one)(keys, index.reshape(len(index), -1)).reshape(index.shape)


def _cut(z_BV: jax.Array, draw: Draw) -> jax.Array:
    """The smallest logit that top-k, and then top-p over what top-k left, keep: cut_B."""
    vocab = z_BV.shape[1]
    sorted_BV = -jnp.sort(-z_BV, axis=-1)
    k = jnp.where(draw.top_k <= 0, vocab, jnp.minimum(draw.top_k, vocab))
    p = jnp.where(jnp.arange(vocab) < k[:, None], jnp.exp(sorted_BV), 0.0)
    before = jnp.cumsum(p, axis=-1) - p  # the mass in front of each token; the token that crosses top_p stays
    inside = (p > 0) & (before < draw.top_p[:, None] * jnp.sum(p, axis=-1, keepdims=True))
    last = jnp.maximum(jnp.sum(inside, axis=-1) - 1, 0)
    return jnp.take_along_axis(sorted_BV, last[:, None], axis=-1)[:, 0]


def _draw_from(p_BV: jax.Array, u_B: jax.Array) -> jax.Array:
    """Invert the cumulative sum of unnormalised p at u in [0, 1), in two levels: find the block, then the token.

    One uniform per row instead of V Gumbel draws, which cost as much as the model on a small one. Never returns a
    token of probability 0: at each level the target stays below the last partial sum.
    """
    rows, vocab = p_BV.shape
    size = 1 << max(4, round(np.log2(vocab) / 2))
    p = jnp.pad(p_BV, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
    blocks = jnp.cumsum(jnp.sum(p, axis=-1), axis=-1)
    block, rest = _invert(blocks, u_B * blocks[:, -1])
    inner = jnp.cumsum(jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0], axis=-1)
    return block * size + _invert(inner, rest)[0]


def _invert(cumulative: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index whose cumulative sum exceeds target, and what of target is left beyond the sum before it."""
    target = jnp.minimum(target, jnp.nextafter(cumulative[:, -1], 0.0))
    index = jnp.sum(cumulative <= target[:, None], axis=-1)
    before = jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0]
    return index, target - jnp.where(index > 0, before, 0.0)


_POSITIONS = {"k": 3, "v": 2}  # the axis of positions in each array of a cache


def _take(cache: qwen.Cache, slot_B: Array | None, window: int) -> qwen.Cache:
    """The first `window` positions of the rows' slots; slot_B None means every slot, in order."""

    def take(array: jax.Array, axis: int) -> jax.Array:
        array = jax.lax.slice_in_dim(array, 0, window, axis=axis)
        return array if slot_B is None else array.at[slot_B].get(mode="clip")

    return {name: tuple(take(array, _POSITIONS[name]) for array in arrays) for name, arrays in cache.items()}


def _put(cache: qwen.Cache, slot_B: Array, rows: qwen.Cache, first_B: Array, count: int) -> qwen.Cache:
    """Write `count` positions from first_B on of what `_take` took back to the slots. Idle rows are dropped.

    Only what is new: on a CPU whole windows take longer to write than a block of tokens to decode.
    """

    def put(array: jax.Array, row: jax.Array, axis: int) -> jax.Array:
        size = min(count, row.shape[axis])
        first = jnp.minimum(first_B, row.shape[axis] - size)  # what stands before is as the slot has it
        new = jax.vmap(lambda r, at: jax.lax.dynamic_slice_in_dim(r, at, size, axis - 1))(row, first)
        where = jax.lax.ScatterDimensionNumbers((1, 2, 3), (0,), (0, axis))
        index = jnp.stack([jnp.asarray(slot_B), first], axis=1)
        return jax.lax.scatter(array, index, new, where, mode="drop")

    return {
        name: tuple(put(array, row, _POSITIONS[name]) for array, row in zip(arrays, rows[name]))
        for name, arrays in cache.items()
    }


@partial(jax.jit, static_argnames="window", donate_argnames="cache")
def copy(cache: qwen.Cache, source_B: Array, slot_B: Array, *, window: int) -> qwen.Cache:
    """The cache after the first `window` positions of each slot of source_B were copied to that of slot_B."""
    rows = _take(cache, source_B, window)
    return _put(cache, slot_B, rows, np.zeros(len(slot_B), np.int32), window)


def _logits(weights: Any, h_BD: jax.Array) -> jax.Array:
    return jnp.dot(h_BD, weights["unembed"], preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnames=("config", "window", "truncate"), donate_argnames="cache")
def prefill(
    weights: Any,
    cache: qwen.Cache,
    slot_B: Array,
    tokens_BT: Array,
    start_B: Array,
    count_B: Array,
    draw: Draw,
    *,
    config: qwen.Config,
    window: int,
    truncate: bool,
) -> tuple[jax.Array, jax.Array, qwen.Cache]:
    """Put count_B of tokens_BT at start_B of each row's slot and sample what follows: (token_B, logp_B, cache)."""
    rows = _take(cache, slot_B, window)
    h_BD, rows = qwen.extend(config, weights, rows, tokens_BT, start_B, count_B)
    token_B, logp_B = sample(_logits(weights, h_BD), draw, truncate=truncate)
    return token_B, logp_B, _put(cache, slot_B, rows, start_B, tokens_BT.shape[1])


@partial(jax.jit, static_argnames=("config", "window", "block", "truncate", "in_place"), donate_argnames="cache")
def decode(
    weights: Any,
    cache: qwen.Cache,
    rows: Rows,
    leave: Array,
    *,
    config: qwen.Config,
    window: int,
    block: int,
    truncate: bool,
    in_place: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, qwen.Cache]:
    """Up to `block` tokens for every row, fewer once `leave` rows have finished: (tokens_NB, logp_NB, steps, cache).

    A row finishes by a stop token or an empty budget; its tokens after that are -1. N = block, of which `steps` ran.
    in_place: work on the cache itself, not on a copy of its window; the rows are all slots, in order. XLA's GPU code
    then reads the window as it is, while on a CPU the copy is what stays in the processor's caches.
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
        h_BD, work = qwen.extend(
            config, weights, work, token_B[:, None], rows.position + step, alive_B.astype(jnp.int32), window=window
        )
        token_B, logp_B = sample(_logits(weights, h_BD), rows.draw, truncate=truncate, u_B=u_NB[step])
        stopped_B = jnp.any(token_B[:, None] == rows.stop, axis=1)
        tokens_NB = tokens_NB.at[step].set(jnp.where(alive_B, token_B, -1))
        budget_B = jnp.where(stopped_B, 0, budget_B - alive_B)
        return step + 1, budget_B, token_B, work, tokens_NB, logp_NB.at[step].set(logp_B)

    # All at once: in the loop, drawing them would be a fifth of a small model's time.
    u_NB = uniform(rows.draw, rows.draw.index[:, None] + np.arange(block)).T
    shape = (block, len(rows.slot))
    work = cache if in_place else _take(cache, taken, window)
    start = (jnp.int32(0), jnp.asarray(rows.budget), jnp.asarray(rows.token), work)
    start += (jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
    step, _, _, work, tokens_NB, logp_NB = jax.lax.while_loop(unfinished, advance, start)
    return tokens_NB, logp_NB, step, work if in_place else _put(cache, rows.slot, work, rows.position, block)
