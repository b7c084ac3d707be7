"""Qwen2.5 and, by two flags, dense Qwen3 and Llama, as functions of a plain dict of arrays.

`weights` declares each weight once: its shape, logical axes and initialiser. Initialisation,
sharding (models/mesh.py) and checkpoints (models/hf.py) are derived from it. Layers are stacked on
a leading axis. models/module.py wraps these functions in a Flax NNX module.

Shapes: R packed rows, B cache rows, T tokens, S cache positions, L layers, D width, H query heads,
K key/value heads, F feed-forward width, V vocabulary, N tokens of any arrangement.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.attention import attention as attend
from models.rope import Llama3, Yarn, factors

INPUTS = {
    "q": 1,
    "k": 1,
    "v": 1,
    "o": 2,
    "gate": 1,
    "up": 1,
    "down": 1,
}  # a layer's matrices: number of input axes
Params = dict[str, Any]
Cache = dict[str, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a model. It is hashable, so that it can be a static argument of `jit`."""

    vocab: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    max_positions: int = 32768
    rope_scaling: Yarn | Llama3 | None = None
    unused: int = 0  # last rows of the embedding, of which no tokenizer's id is: never predicted


def _qwen3(d_model: int, layers: int, heads: int, d_ff: int, tied: bool = True) -> Config:
    """Return a Qwen3 dense shape: heads of width 128, 8 key/value heads, norms of queries and keys,
    no biases."""
    return Config(
        151936,
        d_model,
        layers,
        heads,
        8,
        128,
        d_ff,
        tied=tied,
        qkv_bias=False,
        qk_norm=True,
        max_positions=40960,
    )


PRESETS = {
    "tiny": Config(1024, 128, 2, 4, 2, 32, 384),
    "mini": Config(1024, 128, 3, 4, 2, 32, 384),
    "0.5b": Config(151936, 896, 24, 14, 2, 64, 4864),
    "1.5b": Config(151936, 1536, 28, 12, 2, 128, 8960),
    "3b": Config(151936, 2048, 36, 16, 2, 128, 11008),
    "7b": Config(152064, 3584, 28, 28, 4, 128, 18944, tied=False),
    "14b": Config(152064, 5120, 48, 40, 8, 128, 13824, tied=False),
    "32b": Config(152064, 5120, 64, 40, 8, 128, 27648, tied=False),
    "72b": Config(152064, 8192, 80, 64, 8, 128, 29568, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
}

# What each layer saves for the backward pass, besides its input; the rest is recomputed.
REMAT = {
    "none": None,  # everything
    "full": jax.checkpoint_policies.nothing_saveable,  # nothing: a third more compute
    "attention": jax.checkpoint_policies.save_only_these_names(
        "attention"
    ),  # the output of attention
    # the outputs of the matrix products
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Weight(NamedTuple):
    """One weight. `std` is that of its normal initialiser; None means ones for a norm and zeros for
    anything else."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float | None = None


def weights(config: Config) -> dict[str, Any]:
    """Return the nested dict of `Weight`s that `params` mirrors. Matrices map their first axes to
    their last ones."""
    c = config
    fan_in, out = (
        c.d_model**-0.5,
        (2 * c.layers) ** -0.5,
    )  # smaller for the matrices that add to the residual stream

    def stacked(
        shape: tuple[int, ...], axes: tuple[str | None, ...], std: float | None = None
    ) -> Weight:
        return Weight((c.layers, *shape), ("layers", *axes), std)

    layer = {
        "attn_norm": stacked((c.d_model,), ("embed",)),
        "q": stacked((c.d_model, c.heads, c.head_dim), ("embed", "heads", None), fan_in),
        "k": stacked((c.d_model, c.kv_heads, c.head_dim), ("embed", "kv_heads", None), fan_in),
        "v": stacked((c.d_model, c.kv_heads, c.head_dim), ("embed", "kv_heads", None), fan_in),
        "o": stacked(
            (c.heads, c.head_dim, c.d_model),
            ("heads", None, "embed"),
            (c.heads * c.head_dim) ** -0.5 * out,
        ),
        "mlp_norm": stacked((c.d_model,), ("embed",)),
        "gate": stacked((c.d_model, c.d_ff), ("embed", "mlp"), fan_in),
        "up": stacked((c.d_model, c.d_ff), ("embed", "mlp"), fan_in),
        "down": stacked((c.d_ff, c.d_model), ("mlp", "embed"), c.d_ff**-0.5 * out),
    }
    if c.qkv_bias:
        layer["q_bias"] = stacked((c.heads, c.head_dim), ("heads", None))
        layer["k_bias"] = stacked((c.kv_heads, c.head_dim), ("kv_heads", None))
        layer["v_bias"] = stacked((c.kv_heads, c.head_dim), ("kv_heads", None))
    if c.qk_norm:
        layer["q_norm"] = stacked((c.head_dim,), (None,))
        layer["k_norm"] = stacked((c.head_dim,), (None,))
    tree = {
        "embed": Weight((c.vocab, c.d_model), ("vocab", "embed"), fan_in),
        "layers": layer,
        "norm": Weight((c.d_model,), ("embed",)),
    }
    if not c.tied:
        tree["unembed"] = Weight((c.vocab, c.d_model), ("vocab", "embed"), fan_in)
    return tree


def is_weight(leaf: Any) -> bool:
    """Return True for a `Weight`, which tree functions must treat as a leaf although it is a
    tuple."""
    return isinstance(leaf, Weight)


def parameter_count(config: Config) -> int:
    """Return the number of parameters, embeddings included."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(weights(config), is_leaf=is_weight))


def shapes(config: Config, dtype: Any = jnp.float32) -> Any:
    """Return `params` as ShapeDtypeStructs, for planning and compiling without weights."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype), weights(config), is_leaf=is_weight
    )


def init(config: Config, seed: int, dtype: Any = jnp.float32) -> Params:
    """Return random weights as a nested dict of `dtype` arrays. The same seed gives the same
    weights."""
    return draw(weights(config), seed, dtype)


def draw(declared: Any, seed: int, dtype: Any = jnp.float32) -> Any:
    """Return random arrays for a tree of `Weight`s.

    They are drawn by NumPy, with one stream per weight and layer, because XLA would take seconds to
    compile a draw for each shape.
    """

    def array(path: Any, weight: Weight, index: int) -> jax.Array:
        if not weight.std:
            ones = weight.std is None and path[-1].key.endswith("norm")
            return jnp.asarray(np.full(weight.shape, float(ones), np.float32), dtype)
        layers = weight.shape[0] if weight.axes[0] == "layers" else 1
        streams = (np.random.default_rng((seed, index, layer)) for layer in range(layers))
        drawn = np.stack(
            [s.standard_normal(math.prod(weight.shape) // layers, np.float32) for s in streams]
        )
        return jnp.asarray(np.float32(weight.std) * drawn.reshape(weight.shape), dtype)

    index = itertools.count()
    return jax.tree.map_with_path(
        lambda path, w: array(path, w, next(index)), declared, is_leaf=is_weight
    )


def unembed(config: Config, params: Params) -> jax.Array:
    """Return the output head, w_DV."""
    return params["embed" if config.tied else "unembed"].T


# --- the layer ------------------------------------------------------------------------------------


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Apply RMSNorm over the last axis: computed in float32, cast back, then scaled, in the same
    order as Qwen2."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_angles(
    positions: jax.Array, head_dim: int, theta: float, scaling: Yarn | Llama3 | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (cos, sin) of shape (*positions.shape, head_dim/2) in float32; bfloat16 angles are
    imprecise."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequencies *= jnp.asarray(factors(head_dim, theta, scaling), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    if scaling is not None:
        return scaling.attention * jnp.cos(angles), scaling.attention * jnp.sin(angles)
    return jnp.cos(angles), jnp.sin(angles)


def rope_table(config: Config, length: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Look up `rope_angles` of positions below `length`; XLA's CPU code would recompute them for
    each use and head."""
    cos_Th, sin_Th = rope_angles(
        jnp.arange(length), config.head_dim, config.rope_theta, config.rope_scaling
    )
    return cos_Th[positions], sin_Th[positions]


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x_..TXh (X heads). Coordinate i is paired with i + head_dim/2."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _qkv(
    c: Config, w: Params, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, ...]:
    """Map x_..TD to rotated q_..THh and k_..TKh, and v_..TKh."""
    x = rms_norm(x, w["attn_norm"], c.rms_eps)
    q, k, v = (_linear(w, name, x, "...d,dnh->...nh") for name in "qkv")
    if c.qkv_bias:
        q, k, v = (y + w[name + "_bias"].astype(x.dtype) for y, name in zip((q, k, v), "qkv"))
    if c.qk_norm:
        q, k = rms_norm(q, w["q_norm"], c.rms_eps), rms_norm(k, w["k_norm"], c.rms_eps)
    return rope(q, cos, sin), rope(k, cos, sin), v


def _after_attention(c: Config, w: Params, x: jax.Array, out: jax.Array) -> jax.Array:
    """Compute the rest of the layer: output projection and feed-forward, each added to x_..TD."""
    x = x + _linear(w, "o", out, "...nh,nhd->...d")
    y = rms_norm(x, w["mlp_norm"], c.rms_eps)
    gate, up = _linear(w, "gate", y, "...d,df->...f"), _linear(w, "up", y, "...d,df->...f")
    return x + _linear(w, "down", jax.nn.silu(gate) * up, "...f,fd->...d")


def _linear(w: Params, name: str, x: jax.Array, equation: str) -> jax.Array:
    """Multiply x by the matrix `name`, and add the product with its adapter if there is one
    (models/lora.py)."""
    y = jnp.einsum(equation, x, w[name].astype(x.dtype))
    if name + "_lora_a" not in w:
        return y
    inputs, rest = equation.split(",")
    weight, outputs = rest.split("->")
    taken = "".join(axis for axis in weight if axis not in outputs)
    given = weight.removeprefix(taken)
    low = jnp.einsum(f"{inputs},{taken}r->...r", x, w[name + "_lora_a"].astype(x.dtype))
    return y + jnp.einsum(f"...r,r{given}->{outputs}", low, w[name + "_lora_b"].astype(x.dtype))


# --- packed rows: training and scoring ------------------------------------------------------------


def hidden(
    config: Config,
    params: Params,
    tokens_RT: jax.Array,
    positions_RT: jax.Array,
    segments_RT: jax.Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the hidden states h_RTD after the final norm, in `dtype`.

    positions_RT count from 0 within each sequence; segments_RT number the sequences of a row, 0 =
    padding. Each token attends to itself and to earlier tokens of the row that belong to its
    segment.
    remat: a name in `REMAT`. attention: one of `attention.IMPLEMENTATIONS`. mesh: of the arguments;
    None = one device.
    """

    # On one device everything but attention works on a single axis of tokens: XLA's CPU code takes
    # twice as long for the gradient of a matrix when it sums over two. On a mesh the two axes are
    # sharded differently and stay separate.
    single, shape = mesh is None or mesh.size == 1, tokens_RT.shape

    def one_axis(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]) if single else x

    def two_axes(x: jax.Array) -> jax.Array:
        return x.reshape(*shape, *x.shape[1:]) if single else x

    cos, sin = rope_table(config, shape[1], one_axis(positions_RT))

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        w = _gathered(config, w, x.dtype, mesh)
        q, k, v = (two_axes(y) for y in _qkv(config, w, x, cos, sin))
        out = one_axis(attend(q, k, v, segments_RT, implementation=attention, mesh=mesh))
        if remat != "none":
            out = checkpoint_name(out, "attention")
        return _spread(_after_attention(config, w, x, out), mesh), None

    if remat != "none":
        layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT[remat])
    x = _spread(_table(params["embed"], mesh)[one_axis(tokens_RT)].astype(dtype), mesh)
    # Few layers are unrolled, because XLA's CPU loops copy their stacked operands.
    x, _ = jax.lax.scan(
        layer, x, params["layers"], unroll=config.layers if config.layers <= 4 else 1
    )
    return two_axes(rms_norm(x, params["norm"], config.rms_eps))


def _gathered(config: Config, w: Params, dtype: Any, mesh: Mesh | None) -> Params:
    """Constrain a layer's weights for their use: in `dtype`, split over the tensor axis only.

    Without the constraint the compiler would keep the weights sharded and sum partial activations
    over all devices, which are far larger. With it, weights are gathered in `dtype` and their
    gradients reduce-scattered.
    """
    if mesh is None or mesh.size == 1:
        return w
    declared = weights(config)["layers"]

    def gather(name: str, array: jax.Array) -> jax.Array:
        if name not in declared:
            return array
        spec = (
            "tensor" if axis in ("heads", "kv_heads", "mlp") else None
            for axis in declared[name].axes[1:]
        )
        return jax.lax.with_sharding_constraint(
            array.astype(dtype), NamedSharding(mesh, PartitionSpec(*spec))
        )

    return {name: gather(name, array) for name, array in w.items()}


def _table(embed_VD: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Constrain the embedding table to whole rows; otherwise the compiler would gather the results
    of look-ups.

    The table is not cast to the computation's dtype, in which the gradients of a frequent token
    would lose precision.
    """
    if mesh is None or mesh.size == 1:
        return embed_VD
    return jax.lax.with_sharding_constraint(
        embed_VD, NamedSharding(mesh, PartitionSpec("tensor", None))
    )


def _spread(x_RTD: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Shard rows over data and fsdp, tokens over sequence; the compiler might otherwise shard them
    like the weights."""
    if mesh is None or mesh.size == 1:
        return x_RTD
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence", None))
    return jax.lax.with_sharding_constraint(x_RTD, where)
