"""Qwen2.5 and, by a few flags, dense Qwen3, Llama, Mistral and SmolLM3, as Flax NNX modules.

    model = Qwen(PRESETS["tiny"], rngs=nnx.Rngs(0))     # or Qwen.load("a checkpoint's directory")
    logits_RTV = model(tokens_RT)

Each `nnx.Param` declares its shape, its logical axes (`out_sharding`) and the deviation of its
initial values (`std`) once. Initialisation, sharding (models/mesh.py), checkpoints (models/hf.py),
adapters (models/lora.py) and plans are derived from that. The layers are one `Block`, whose
parameters are stacked on a leading axis and scanned.

Outside of `jit` the parameters are a nested dict of arrays, as `nnx.to_pure_dict` returns it;
`merge` makes it a model again inside. So no call of a jitted function flattens a module.

Shapes: R packed rows, B cache rows, T tokens, S cache positions, L layers, D width, H query heads,
h width of a head, K key/value heads, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.attention import KERNELS, SAVED
from models.attention import attention as packed_attention
from models.logp import logits
from models.rope import Llama3, Yarn

# the number of input axes of each matrix of a layer
INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
Params = dict[str, Any]


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
    no_rope: tuple[int, ...] = ()  # layers that do not rotate queries and keys, as in SmolLM3
    unused: int = 0  # last rows of the embedding, of which no tokenizer's id is: never predicted


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The matrices that get an adapter, its rank, and its scale alpha / rank."""

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = tuple(INPUTS)

    def __post_init__(self) -> None:
        if not self.targets or not INPUTS.keys() >= set(self.targets):
            raise ValueError(f"LoRA targets {self.targets!r}: choose from {', '.join(INPUTS)}")
        if self.rank < 1:
            raise ValueError(f"LoRA rank {self.rank}: must be at least 1")


# The models that may begin with random weights, by the first fields of `Config`.
TABLE = """
             vocab  d_model layers heads kv_heads head_dim  d_ff
tiny          1024      128      2     4        2       32    384
mini          1024      128      3     4        2       32    384
reader        2048      256      8     8        4       32    768
0.5b        151936      896     24    14        2       64   4864
1.5b        151936     1536     28    12        2      128   8960
3b          151936     2048     36    16        2      128  11008
7b          152064     3584     28    28        4      128  18944
14b         152064     5120     48    40        8      128  13824
32b         152064     5120     64    40        8      128  27648
72b         152064     8192     80    64        8      128  29568
qwen3-0.6b  151936     1024     28    16        8      128   3072
qwen3-1.7b  151936     2048     28    16        8      128   6144
qwen3-4b    151936     2560     36    32        8      128   9728
qwen3-8b    151936     4096     36    32        8      128  12288
qwen3-14b   151936     5120     40    40        8      128  17408
qwen3-32b   151936     5120     64    64        8      128  25600
"""


def _preset(name: str, *sizes: str) -> Config:
    """Return the Config of a row: wide models have a head of their own, and all dense Qwen3 ones
    norms of queries and keys, and no biases."""
    shape: dict[str, Any] = dict(zip(_FIELDS, map(int, sizes)))
    qwen3 = name.startswith("qwen3")
    return Config(
        **shape, tied=shape["d_model"] < 3000, qkv_bias=not qwen3, qk_norm=qwen3,
        max_positions=40960 if qwen3 else 32768,
    )  # fmt: skip


_FIELDS, *_ROWS = map(str.split, TABLE.strip().splitlines())
PRESETS = {row[0]: _preset(*row) for row in _ROWS}

_POLICIES = jax.checkpoint_policies
# What attention returns, as its own gradient needs it: to save the output alone would save nothing,
# because the kernel would run again for its log-sum-exp.
_ATTENTION = _POLICIES.save_from_both_policies(
    _POLICIES.save_only_these_names(SAVED), lambda primitive, *_, **__: primitive.name in KERNELS
)
# What each layer saves for the backward pass, besides its input; the rest is recomputed.
REMAT = {
    "none": None,  # everything
    "full": _POLICIES.nothing_saveable,  # nothing: a third more compute
    "attention": _ATTENTION,
    # also the outputs of the matrix products
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
}


# --- parameters -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one parameter, a leaf of trees. `std` is that of its normal initialiser;
    None means ones."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float | None = None


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    std: float | None = None,
    kind: type[nnx.Param[Array]] = nnx.Param,
) -> nnx.Param[Array]:
    """Return a parameter of random values that carries its declaration, see `Weight`."""
    if std:
        value = std * jax.random.normal(rngs.params(), shape)
    else:
        value = jnp.full(shape, float(std is None))
    # Arrays are placed by models/mesh.py, not where a module is made.
    return kind(value, out_sharding=axes, std=std, eager_sharding=False)


def add_adapters(module: nnx.Module, rngs: nnx.Rngs, lora: LoRA | None) -> None:
    """Give a module's target matrices the parameters `NAME_lora_a` (normal) and `NAME_lora_b`
    (zeros)."""
    if lora is None:
        return
    for name in lora.targets:
        if not hasattr(module, name):
            continue
        matrix, cut, rank = getattr(module, name), INPUTS[name], lora.rank
        shape, axes = matrix.shape, matrix.out_sharding
        a = (*shape[:cut], rank), (*axes[:cut], "rank"), math.prod(shape[:cut]) ** -0.5
        b = (rank, *shape[cut:]), ("rank", *axes[cut:]), 0.0
        setattr(module, f"{name}_lora_a", parameter(rngs, *a, nnx.LoRAParam))
        setattr(module, f"{name}_lora_b", parameter(rngs, *b, nnx.LoRAParam))


def linear(module: nnx.Module, name: str, x: Array, equation: str) -> Array:
    """Multiply x by the matrix `name` of a module, and add the product with its adapter if there is
    one (models/lora.py)."""
    y = jnp.einsum(equation, x, getattr(module, name)[...].astype(x.dtype))
    if not hasattr(module, f"{name}_lora_a"):
        return y
    a, b = (getattr(module, f"{name}_lora_{side}")[...].astype(x.dtype) for side in "ab")
    inputs, matrix = equation.split(",")
    low = jnp.einsum(f"{inputs},{matrix[: INPUTS[name]]}r->...r", x, a)
    return y + jnp.tensordot(low, b, 1)


# --- the layer ------------------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Apply RMSNorm over the last axis: computed in float32, cast back, then scaled, in the same
    order as Qwen2."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_table(config: Config, length: int, positions: Array) -> tuple[Array, Array]:
    """Return (cos, sin) of the angles of positions below `length`, (*positions.shape, head_dim/2)
    in float32: bfloat16 angles are imprecise.

    They are looked up in a table, because XLA's CPU code would recompute them for each use and
    head.
    """
    width, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    frequencies, scale = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width), 1.0
    if scaling is not None:
        frequencies *= jnp.asarray(scaling.factors(width, theta), jnp.float32)
        scale = scaling.attention_factor
    angles_Th = jnp.arange(length)[:, None].astype(jnp.float32) * frequencies
    return (scale * jnp.cos(angles_Th))[positions], (scale * jnp.sin(angles_Th))[positions]


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x_..TXh (X heads). Coordinate i is paired with i + head_dim/2."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """The projections of grouped-query attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, lora: LoRA | None = None):
        self.config = c = config
        embed, heads, kv_heads = c.d_model, (c.heads, c.head_dim), (c.kv_heads, c.head_dim)
        fan_in = embed**-0.5
        # smaller for the matrices that add to the residual stream
        out = (c.heads * c.head_dim) ** -0.5 * (2 * c.layers) ** -0.5
        self.q = parameter(rngs, (embed, *heads), ("embed", "heads", None), fan_in)
        self.k = parameter(rngs, (embed, *kv_heads), ("embed", "kv_heads", None), fan_in)
        self.v = parameter(rngs, (embed, *kv_heads), ("embed", "kv_heads", None), fan_in)
        self.o = parameter(rngs, (*heads, embed), ("heads", None, "embed"), out)
        if c.qkv_bias:
            self.q_bias = parameter(rngs, heads, ("heads", None), 0.0)
            self.k_bias = parameter(rngs, kv_heads, ("kv_heads", None), 0.0)
            self.v_bias = parameter(rngs, kv_heads, ("kv_heads", None), 0.0)
        if c.qk_norm:
            self.q_norm = parameter(rngs, (c.head_dim,), (None,))
            self.k_norm = parameter(rngs, (c.head_dim,), (None,))
        add_adapters(self, rngs, lora)

    def qkv(self, x: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        """Map normed x_..TD to rotated q_..THh and k_..TKh, and v_..TKh."""
        q, k, v = (linear(self, name, x, "...d,dnh->...nh") for name in "qkv")
        if self.config.qkv_bias:
            q, k, v = (
                y + getattr(self, f"{name}_bias")[...].astype(x.dtype)
                for y, name in zip((q, k, v), "qkv")
            )
        if self.config.qk_norm:
            q = rms_norm(q, self.q_norm[...], self.config.rms_eps)
            k = rms_norm(k, self.k_norm[...], self.config.rms_eps)
        return rope(q, cos, sin), rope(k, cos, sin), v

    def output(self, attended: Array) -> Array:
        """Map the attended values of all heads, ..THh, to ..TD."""
        return linear(self, "o", attended, "...nh,nhd->...d")


class MLP(nnx.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, lora: LoRA | None = None):
        c, fan_in = config, config.d_model**-0.5
        out = c.d_ff**-0.5 * (2 * c.layers) ** -0.5
        self.gate = parameter(rngs, (c.d_model, c.d_ff), ("embed", "mlp"), fan_in)
        self.up = parameter(rngs, (c.d_model, c.d_ff), ("embed", "mlp"), fan_in)
        self.down = parameter(rngs, (c.d_ff, c.d_model), ("mlp", "embed"), out)
        add_adapters(self, rngs, lora)

    def __call__(self, x: Array) -> Array:
        gate, up = (linear(self, name, x, "...d,df->...f") for name in ("gate", "up"))
        return linear(self, "down", jax.nn.silu(gate) * up, "...f,fd->...d")


class Block(nnx.Module):
    """One layer: attention and feed-forward, each of a normed input and added to it."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, lora: LoRA | None = None):
        self.config = config
        self.attn_norm = parameter(rngs, (config.d_model,), ("embed",))
        self.attention = Attention(config, rngs=rngs, lora=lora)
        self.mlp_norm = parameter(rngs, (config.d_model,), ("embed",))
        self.mlp = MLP(config, rngs=rngs, lora=lora)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Callable[..., Array]) -> Array:
        """Return x_..TD after the layer. attend: a function of q, k and v."""
        eps = self.config.rms_eps
        q, k, v = self.attention.qkv(rms_norm(x, self.attn_norm[...], eps), cos, sin)
        x = x + self.attention.output(attend(q, k, v))
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], eps))


# --- the model ------------------------------------------------------------------------------------


class Qwen(nnx.Module):
    """A decoder-only language model. With `lora`, its matrices have adapters, of type
    `nnx.LoRAParam`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, lora: LoRA | None = None):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs, lora=lora)

        table = (config.vocab, config.d_model), ("vocab", "embed"), config.d_model**-0.5
        self.config = config
        self.embed = parameter(rngs, *table)
        self.layers = stacked(rngs)
        self.norm = parameter(rngs, (config.d_model,), ("embed",))
        if not config.tied:
            self.unembed = parameter(rngs, *table)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Qwen:
        """Load a checkpoint; `options` and errors are those of `hf.load`."""
        from models import hf  # it imports this module

        return merge(*hf.load(path, **options))

    @property
    def params(self) -> Params:
        """Return the parameters as the nested dict of arrays that `merge` takes."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(
        self,
        tokens_RT: Array,
        positions_RT: Array | None = None,
        segments_RT: Array | None = None,
        **options: Any,
    ) -> Array:
        """Return logits_RTV in float32. Without positions and segments, each row is one sequence
        without padding.

        `options` are those of `hidden`. All logits exist at once; `logp.chunked_logp` avoids that
        for long rows.
        """
        if positions_RT is None:
            positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)
        if segments_RT is None:
            segments_RT = jnp.ones_like(tokens_RT)
        h_RTD = self.hidden(tokens_RT, positions_RT, segments_RT, **options)
        return logits(h_RTD, unembed(self.config, self.params), unused=self.config.unused)

    def hidden(
        self,
        tokens_RT: Array,
        positions_RT: Array,
        segments_RT: Array,
        *,
        dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
        most_segments: int = 0,
        mesh: Mesh | None = None,
    ) -> Array:
        """Return the hidden states h_RTD after the final norm, in `dtype`.

        positions_RT count from 0 within each sequence; segments_RT number the sequences of a row,
        0 = padding. Each token attends to itself and to earlier tokens of the row that belong to
        its segment.
        remat: a name in `REMAT`. attention, most_segments: see `attention.attention`. mesh: of the
        arguments; None = one device.
        """
        config = self.config
        # On one device everything but attention works on a single axis of tokens: XLA's CPU code
        # takes twice as long for the gradient of a matrix when it sums over two. On a mesh the two
        # axes are sharded differently and stay separate.
        single, shape = mesh is None or mesh.size == 1, tokens_RT.shape

        def one_axis(x: Array) -> Array:
            return x.reshape(-1, *x.shape[2:]) if single else x

        def two_axes(x: Array) -> Array:
            return x.reshape(*shape, *x.shape[1:]) if single else x

        def attend(*qkv: Array) -> Array:
            q, k, v = map(two_axes, qkv)
            out_RTHh = packed_attention(
                q, k, v, segments_RT, implementation=attention, most_segments=most_segments,
                mesh=mesh,
            )  # fmt: skip
            return one_axis(out_RTHh)

        cos, sin = rope_table(config, shape[1], one_axis(positions_RT))
        graphdef, stacked = nnx.split(self.layers)
        rotates_L = None
        if config.no_rope:
            rotates_L = jnp.array([number not in config.no_rope for number in range(config.layers)])

        def layer(x: Array, inputs: tuple[nnx.State, Array | None]) -> tuple[Array, None]:
            weights, rotates = inputs
            block = nnx.merge(graphdef, _gathered(weights, x.dtype, mesh))
            turn = cos, sin
            if rotates is not None:
                turn = jnp.where(rotates, cos, 1.0), jnp.where(rotates, sin, 0.0)
            return _spread(block(x, *turn, attend), mesh), None

        if remat != "none":
            layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT[remat])
        # Whole rows of the table: otherwise the compiler would gather the results of look-ups. The
        # cast comes after them: in `dtype` the gradients of a frequent token would lose precision.
        table = _split(self.embed[...], mesh, "tensor", None)
        x = _spread(table[one_axis(tokens_RT)].astype(dtype), mesh)
        # Few layers are unrolled, because XLA's CPU loops copy their stacked operands.
        unroll = config.layers if config.layers <= 4 else 1
        x, _ = jax.lax.scan(layer, x, (stacked, rotates_L), unroll=unroll)
        return two_axes(rms_norm(x, self.norm[...], config.rms_eps))


def _split(x: Array, mesh: Mesh | None, *axes: Any) -> Array:
    """Constrain an array to be split over these axes of a mesh; None = whole."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def _spread(x_RTD: Array, mesh: Mesh | None) -> Array:
    """Shard rows over data and fsdp, tokens over sequence; the compiler might otherwise shard them
    like the weights."""
    return _split(x_RTD, mesh, ("data", "fsdp"), "sequence", None)


def _gathered(weights: nnx.State, dtype: Any, mesh: Mesh | None) -> nnx.State:
    """Constrain a layer's weights for their use: in `dtype`, split over the tensor axis only.

    Without the constraint the compiler would keep the weights sharded and sum partial activations
    over all devices, which are far larger. With it, weights are gathered in `dtype` and their
    gradients reduce-scattered.
    """
    if mesh is None or mesh.size == 1:
        return weights

    def gather(weight: nnx.Variable[Array]) -> nnx.Variable[Array]:
        if isinstance(weight, nnx.LoRAParam):  # small enough to stay as they are
            return weight
        _, *axes = weight.out_sharding
        spec = ("tensor" if axis in ("heads", "kv_heads", "mlp") else None for axis in axes)
        return weight.replace(_split(weight[...].astype(dtype), mesh, *spec))

    return jax.tree.map(gather, weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


# --- parameters outside of the model --------------------------------------------------------------


@functools.cache
def abstract(config: Config, lora: LoRA | None) -> Qwen:
    """Return the model without arrays: ShapeDtypeStructs stand for them."""
    return nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0), lora=lora))


def weights(config: Config, lora: LoRA | None = None) -> dict[str, Any]:
    """Return the nested dict of `Weight`s that `params` mirrors, or with `lora` the one that the
    adapters mirror. Matrices map their first axes to their last ones."""
    state = nnx.state(abstract(config, lora), nnx.LoRAParam if lora else nnx.Param)
    return nnx.to_pure_dict(state, lambda param: Weight(param.shape, param.out_sharding, param.std))


def merge(config: Config, params: Params) -> Qwen:
    """Return the model of some parameters, with adapters if they are among them. Inside of `jit`
    it costs nothing."""
    ranks = {
        name.partition(".")[2].removesuffix("_lora_a"): array.shape[-1]
        for name, array in by_name(params).items()
        if name.endswith("_lora_a")
    }
    lora = LoRA(max(ranks.values()), targets=tuple(ranks)) if ranks else None
    return nnx.merge(nnx.graphdef(abstract(config, lora)), params)


def name_of(path: Any) -> str:
    """Return "embed" or "layers.q" for the path of a parameter, whatever module it is in."""
    return ".".join(dict.fromkeys((path[0].key, path[-1].key)))


def by_name(params: Any) -> dict[str, Any]:
    """Return {name: parameter} of a nested dict, in the order of `name_of`: an order that stays if
    a parameter moves to another module."""
    leaves = jax.tree.leaves_with_path(params)
    return dict(sorted((name_of(path), leaf) for path, leaf in leaves))


def nested(config: Config, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict that `by_name` gives `flat` for."""
    return jax.tree.map_with_path(lambda path, _: flat[name_of(path)], weights(config))


def parameter_count(config: Config) -> int:
    """Return the number of parameters, embeddings included."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(weights(config)))


def shapes(config: Config, dtype: Any = jnp.float32, lora: LoRA | None = None) -> Any:
    """Return the tree of `weights` as ShapeDtypeStructs, for planning and compiling without
    arrays."""
    declared = weights(config, lora)
    return jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), declared)


def init(config: Config, seed: int, dtype: Any = jnp.float32, lora: LoRA | None = None) -> Params:
    """Return random arrays for the tree of `weights`; the same seed gives the same ones. Adapters
    leave the model unchanged: their B is zero.

    They are drawn by NumPy, with one stream and one thread per weight and layer, because XLA would
    take seconds to compile a draw for each shape.
    """
    declared = weights(config, lora)
    index = {name: number for number, name in enumerate(by_name(declared))}

    def array(path: Any, weight: Weight) -> Array:
        if not weight.std:
            return jnp.asarray(np.full(weight.shape, float(weight.std is None), dtype))
        layers = weight.shape[0] if weight.axes[0] == "layers" else 1
        size, key = math.prod(weight.shape) // layers, (seed, index[name_of(path)])

        def of_layer(layer: int) -> np.ndarray:
            drawn = np.random.default_rng((*key, layer)).standard_normal(size, np.float32)
            drawn *= np.float32(weight.std)
            return drawn.astype(dtype, copy=False)

        with ThreadPoolExecutor() as threads:
            value = np.stack(list(threads.map(of_layer, range(layers))))
        return jnp.asarray(value.reshape(weight.shape))

    return jax.tree.map_with_path(array, declared)


def unembed(config: Config, params: Params) -> Array:
    """Return the output head, w_DV."""
    return params["embed" if config.tied else "unembed"].T
