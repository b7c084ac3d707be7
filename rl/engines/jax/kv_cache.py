"""The model with a key/value cache, for rollouts: a layout of the weights that decoding reads fast,
the cache, and the call that appends tokens to it.

Shapes: B cache rows, T tokens, S cache positions, D width, H query heads, K key/value heads, F
feed-forward width, V vocabulary.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from models import attention
from models.qwen import (
    Config,
    Params,
    Weight,
    by_name,
    rms_norm,
    rope,
    rope_table,
    unembed,
    weights,
)
from rl.engines.jax import flash
from rl.rounding import stochastic

Cache = dict[str, tuple[Array, ...]]
JOINED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
}


def for_decoding(
    config: Config,
    params: Params,
    dtype: Any = jnp.float32,
    matrix_dtype: Any = None,
    key: Array | None = None,
) -> Params:
    """Return the weights in the layout that `extend` reads: matrices in `matrix_dtype` (None =
    dtype), others in `dtype`. With a key, float32 matrices become bfloat16 by stochastic rounding
    (rl/rounding.py).

    {"embed", "norm", "unembed" (D, V), "layers": a tuple of dicts}. Layers are separate, and
    matrices that share an input are concatenated. Without this, XLA's CPU code would copy every
    slice of a stacked weight at each decoding step.
    """

    numbers = itertools.count()

    def cast(weight: Weight, array: Array) -> Array:
        inner = weight.axes[1:] if weight.axes[0] == "layers" else weight.axes
        if "embed" not in inner or len(inner) == 1:
            return array.astype(dtype)
        wanted = jnp.dtype(matrix_dtype or dtype)
        if key is None or array.dtype != jnp.float32 or wanted != jnp.bfloat16:
            return array.astype(wanted)
        return stochastic(array, jax.random.fold_in(key, next(numbers)))

    declared = by_name(weights(config))
    flat = {name: cast(declared[name], array) for name, array in by_name(params).items()}
    layers = {name.removeprefix("layers."): a for name, a in flat.items() if "." in name}

    def layer(number: int) -> Params:
        w = {name: array[number] for name, array in layers.items()}
        w["o"] = w["o"].reshape(-1, config.d_model)
        for name, parts in JOINED.items():
            if parts[0] in w:
                rows = () if name == "qkv_bias" else (config.d_model,)
                w[name] = jnp.concatenate([w.pop(n).reshape(*rows, -1) for n in parts], axis=-1)
        return w

    return {
        "embed": flat["embed"],
        "norm": flat["norm"],
        "unembed": unembed(config, flat),
        "layers": tuple(map(layer, range(config.layers))),
    }


def init_cache(
    config: Config, slots: int, length: int, dtype: Any = jnp.float32, *, transposed: bool = True
) -> Cache:
    """Return an empty cache for `slots` sequences of up to `length` tokens.

    {"k": per layer (slots, K, h, length), "v": per layer (slots, K, length, h)}. Keys are stored
    transposed, as the product that computes the scores on a CPU reads them. If not `transposed`,
    "k_by_position", in the shape of "v", takes the place of "k": accelerators read it as it is.
    """
    by_position = (length, config.head_dim)
    keys = {"k": by_position[::-1]} if transposed else {"k_by_position": by_position}
    shapes = keys | {"v": by_position}
    return {
        name: tuple(
            jnp.zeros((slots, config.kv_heads, *shape), dtype) for _ in range(config.layers)
        )
        for name, shape in shapes.items()
    }


def fuses(config: Config, platform: str, *dtypes: Any) -> bool:
    """Return True if `extend` should use cuDNN's kernels. dtypes: of computation and cache."""
    same = len({jnp.dtype(dtype) for dtype in dtypes}) == 1
    return same and attention.runs_cudnn(platform, dtypes[0], config.head_dim)


def extend(
    config: Config,
    weights: Params,
    cache: Cache,
    tokens_BT: Array,
    starts_B: Array,
    lengths_B: Array,
    *,
    window: int | None = None,
    fused: bool = False,
) -> tuple[Array, Cache]:
    """Append tokens to the cached sequences, one per row; return (h_BD of each row's last new
    token, the new cache).

    Row b writes its first lengths_B[b] tokens at positions starts_B[b]...; earlier positions hold
    what previous calls wrote. A row of length 0 writes nothing and returns arbitrary finite values.
    Tokens past the end of the cache are dropped. weights: from `for_decoding`; the computation uses
    the dtype of their norms. window: attention reads the first `window` positions, which must
    include all positions written; None = all. fused: use cuDNN's kernels (rl/engines/jax/flash.py)
    on a cache that is not transposed; they read each row's own length, whatever the window.
    """
    rows, t = tokens_BT.shape
    length = cache["v"][0].shape[2]
    window = length if window is None else window
    positions_BT = starts_B[:, None] + jnp.arange(t)
    # what is written at `length`, out of bounds, is dropped
    write_at = jnp.where(jnp.arange(t) < lengths_B[:, None], positions_BT, length)
    mask_BTS = jnp.arange(window) <= positions_BT[:, :, None]
    cos, sin = rope_table(config, window, positions_BT)
    still = jnp.ones_like(cos), jnp.zeros_like(sin)
    row = jnp.arange(rows)[:, None]
    name, every = ("k" if "k" in cache else "k_by_position"), slice(None)
    if name == "k":
        places = {"k": (row, every, every, write_at), "v": (row, every, write_at)}
    else:
        # With the heads named, too, XLA writes in the layout that it reads. It would copy the whole
        # cache into another one on TPUs.
        whole = (row[..., None], jnp.arange(config.kv_heads), write_at[..., None])
        places = {name: whole, "v": whole}

    x = weights["embed"][tokens_BT].astype(weights["norm"].dtype)
    new_keys, values = [], []
    for number, (w, keys, v_BKSh) in enumerate(zip(weights["layers"], cache[name], cache["v"])):
        turn = still if number in config.no_rope else (cos, sin)
        q, k, v = _fused_qkv(config, w, x, *turn)
        keys = keys.at[places[name]].set(k.astype(keys.dtype), mode="drop")
        v_BKSh = v_BKSh.at[places["v"]].set(v.astype(v_BKSh.dtype), mode="drop")
        if fused:
            out = flash.attend(q, k, v, (keys, v_BKSh), starts_B, lengths_B)
        else:
            k_BKhS = keys if name == "k" else keys.swapaxes(2, 3)
            seen = k_BKhS[..., :window].astype(x.dtype), v_BKSh[:, :, :window].astype(x.dtype)
            out = _cached_attention(q, *seen, mask_BTS)
        x = x + product(out, w["o"])
        y = product(rms_norm(x, w["mlp_norm"], config.rms_eps), w["gate_up"])
        gate, up = jnp.split(y, 2, axis=-1)
        x = x + product(jax.nn.silu(gate) * up, w["down"])
        new_keys.append(keys)
        values.append(v_BKSh)
    last = jnp.maximum(lengths_B - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return rms_norm(x, weights["norm"], config.rms_eps), {name: tuple(new_keys), "v": tuple(values)}


def product(x: Array, w: Array) -> Array:
    """Return x_..D @ w_DF in the dtype of x. If w is of another dtype, x is rounded to it, and sums
    are in float32.

    A bfloat16 result would take XLA's slow path on CPUs, and so would w converted to float32:
    several times as long as this, where the processor multiplies bfloat16 matrices itself (AMX).
    """
    if x.dtype == w.dtype:
        return x @ w
    rows = x.astype(w.dtype).reshape(-1, x.shape[-1])
    y = jnp.dot(rows, w, preferred_element_type=jnp.float32)
    return y.astype(x.dtype).reshape(*x.shape[:-1], w.shape[-1])


def _fused_qkv(c: Config, w: Params, x: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
    """Compute `qwen.Attention.qkv` with one matrix product."""
    y = product(rms_norm(x, w["attn_norm"], c.rms_eps), w["qkv"])
    if c.qkv_bias:
        y = y + w["qkv_bias"]
    y = y.reshape(*y.shape[:-1], -1, c.head_dim)
    q, k, v = jnp.split(y, [c.heads, c.heads + c.kv_heads], axis=-2)
    if c.qk_norm:
        q, k = rms_norm(q, w["q_norm"], c.rms_eps), rms_norm(k, w["k_norm"], c.rms_eps)
    return rope(q, cos, sin), rope(k, cos, sin), v


def _cached_attention(q: Array, k_BKhS: Array, v_BKSh: Array, mask_BTS: Array) -> Array:
    """Attend from q_BTHh to the cache; return out_BTD' with the heads concatenated (D' = H h)."""
    b, t, heads, head_dim = q.shape
    kv_heads = v_BKSh.shape[1]
    q = (q * head_dim**-0.5).reshape(b, t, kv_heads, -1, head_dim).swapaxes(1, 2)
    rows = q.reshape(b, kv_heads, -1, head_dim)
    scores = jnp.matmul(rows, k_BKhS, preferred_element_type=jnp.float32)
    masked = jnp.where(mask_BTS[:, None, :, None], scores.reshape(*q.shape[:4], -1), -1e30)
    probs = jax.nn.softmax(masked, axis=-1).astype(v_BKSh.dtype)
    out = jnp.matmul(probs.reshape(*rows.shape[:3], -1), v_BKSh)
    return out.reshape(q.shape).swapaxes(1, 2).reshape(b, t, heads * head_dim)
