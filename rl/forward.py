"""The forward pass of the learner: packed rows on the devices, and the log-probabilities of the
tokens that train.

Only the hidden states of these tokens go through the unembedding, a chunk at a time, so logits of
whole rows never exist.

Letters: M micro-batches of r rows of T tokens; S shards of the batch; n = r * T / S tokens per
shard; C chunks of s tokens of every shard.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import loops, qwen
from models import mesh as meshes
from models.attention import WHOLE_IDS, choose, sharing
from models.logp import chunked_logp, logits
from rl.losses.terms import CHANNEL
from rl.packing import Packed

Rows = dict[str, Array]  # the arrays of a micro-batch, (r, T), or of all of them, (M, r, T)
# those of packed rows that go to the devices, with the channels
ARRAYS = (
    "tokens", "positions", "segments", "mask", "guided", "advantage", "logp", "old_logp",
    "ref_logp", "prompts", "weight",
)  # fmt: skip
Totals = tuple[Any, Any, Any]  # trees of sums, of maxima, and of values per token


@dataclass(frozen=True)
class Forward:
    """The model, and how packed rows go through it. Raises ValueError for numbers that do not fit
    the mesh.

    config, mesh: the model and its devices; a mesh of None means one device.
    micro: rows per pass; a multiple of the number of devices that share the rows.
    capacity_rows: the number of micro-batches is rounded up to a power of two, or to what holds
      this many rows. Given the largest number of rows that will occur, only one program is
      compiled.
    temperature: the temperature of the log-probabilities.
    dtype, remat, attention, most_segments: see `Qwen.hidden`.
    chunk: tokens that a device puts through the unembedding at once.
    widths: number of row widths to compile, evenly spaced in (T / 2, T]. A micro-batch is cut to
      the narrowest that holds its tokens, which does not change the result.
    """

    config: qwen.Config
    mesh: Mesh | None = None
    _: KW_ONLY
    micro: int
    capacity_rows: int = 0
    temperature: float = 1.0
    dtype: Any = jnp.float32
    remat: str = "none"
    attention: str = "auto"
    most_segments: int = 0
    chunk: int = 1024
    widths: int = 1

    def __post_init__(self) -> None:
        shards, columns = _cuts(self.mesh)
        if self.micro < 1 or self.micro % shards:
            raise ValueError(
                f"micro={self.micro} must be a multiple of {shards}, the number of devices that"
                " share the rows"
            )
        if self.widths < 1 or (self.widths > 1 and columns > 1):
            raise ValueError(
                f"widths={self.widths} must be at least 1, and 1 on a mesh whose sequence axis"
                " splits the rows"
            )


def _cuts(mesh: Mesh | None) -> tuple[int, int]:
    """Return the number of pieces that the rows, and the tokens of a row, are cut into."""
    if mesh is None:
        return 1, 1
    return mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"]


# --- micro-batches --------------------------------------------------------------------------------


def device_batch(packed: Packed, mesh: Mesh | None, micro: int, capacity_rows: int) -> Rows:
    """Return the arrays of packed rows as (M, r, T) on the devices, with empty rows up to M
    micro-batches.

    M is a power of two, or the number of micro-batches that hold `capacity_rows`.
    """
    micro_batches = -(-max(packed.rows, capacity_rows, 1) // micro)
    if packed.rows > capacity_rows:
        micro_batches = 1 << (micro_batches - 1).bit_length()
    rows, width = micro_batches * micro, packed.tokens_RT.shape[1]
    arrays: dict[str, np.ndarray | None] = {name: getattr(packed, f"{name}_RT") for name in ARRAYS}
    arrays["old_logp"] = packed.logp_RT if packed.old_logp_RT is None else packed.old_logp_RT
    arrays |= {CHANNEL + name: value_RT for name, value_RT in packed.channels.items()}
    batch: dict[str, Any] = {}
    for name, array in arrays.items():
        if array is not None:
            if array.shape != packed.tokens_RT.shape:
                raise ValueError(
                    f"{name.removeprefix(CHANNEL)} has the shape {array.shape}; the rows have"
                    f" {packed.tokens_RT.shape} tokens"
                )
            padded = np.zeros((rows, width), array.dtype)
            padded[: packed.rows] = array
            batch[name] = padded.reshape(micro_batches, micro, width)
    if mesh is None:
        return batch
    if width % mesh.shape["sequence"]:
        raise ValueError(
            f"rows of {width} tokens cannot be cut into sequence={mesh.shape['sequence']} pieces"
        )
    sharding = NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec))
    return meshes.put(batch, dict.fromkeys(batch, sharding))


def over_micro_batches(work: Callable[[Rows], Totals], batch: Rows, widths: int) -> Totals:
    """Return (sums, maxima, rows) over all micro-batches of what `work` returns for each: trees of
    arrays, of which the last holds (r, T) arrays, stacked as (M, r, T)."""
    width = batch["mask"].shape[2]

    def padded(x_RT: Array) -> Array:
        return jnp.pad(x_RT, ((0, 0), (0, width - x_RT.shape[1])))

    def of_rows(rows: Rows) -> Totals:
        added, maxima, kept = work(rows)
        return added, maxima, jax.tree.map(padded, kept)

    def body(i: Array, rows: Rows, totals: Totals) -> Totals:
        new = _cut_to_width(of_rows, rows, widths)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return (
            jax.tree.map(jnp.add, totals[0], new[0]),
            jax.tree.map(jnp.maximum, totals[1], new[1]),
            jax.tree.map(put, totals[2], new[2]),
        )

    shapes = jax.eval_shape(of_rows, jax.tree.map(lambda x: x[0], batch))
    *zeros, kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    stacked = jax.tree.map(lambda x: jnp.zeros((len(batch["mask"]), *x.shape), x.dtype), kept)
    # the empty micro-batches are at the end
    trips = jnp.sum(jnp.any(batch["segments"] > 0, axis=(1, 2)))
    return loops.fold(batch, trips, body, (*zeros, stacked))


def _cut_to_width(work: Callable[[Rows], Any], rows: Rows, widths: int) -> Any:
    """Return work(rows) on the narrowest of `widths` widths, between half a row and a row, that
    holds the tokens."""
    full = rows["segments"].shape[1]
    choices = sorted({-(-full * (widths + n) // (2 * widths)) for n in range(1, widths + 1)})
    if len(choices) == 1:
        return work(rows)

    def cut(n: int, rows: Rows) -> Any:
        return work({name: x[:, :n] for name, x in rows.items()})

    used = jnp.max(jnp.where(rows["segments"] > 0, 1 + jnp.arange(full), 0))
    branches = [partial(cut, n) for n in choices]
    return jax.lax.switch(jnp.sum(used > jnp.array(choices[:-1])), branches, rows)


# --- log-probabilities of the tokens that train ---------------------------------------------------


def token_logp(
    forward: Forward,
    params: qwen.Params,
    rows: Rows,
    *,
    entropy_gradient: bool = False,
    head_D: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return (logp_RT, entropy_RT, value_RT), float32, of the rows of a micro-batch, 0 at tokens
    that do not train.

    The trained tokens of each shard move to its front and go through the unembedding `chunk` at a
    time; chunks without trained tokens are skipped. entropy_gradient: the entropy is
    differentiated. head_D: of the values of the states in which tokens were written, see `values`;
    without one, there are none.
    """
    cuts = _cuts(forward.mesh)
    shards, columns = math.prod(cuts), cuts[1]
    h_RTD = hidden(forward, params, rows)
    w_DV = _gathered(qwen.unembed(forward.config, params), forward)
    mask_Sn = _cut(rows["mask"], *cuts)
    n = mask_Sn.shape[1]
    front_Sn, back_Sn = _compaction(mask_Sn)
    # The token at t is predicted from t - 1. The first token of a row never trains, so no row reads
    # from another row.
    if columns == 1:
        h_SnD = h_RTD.reshape(shards, n, -1)
        h_SnD = _permute(h_SnD, (front_Sn - 1) % n, jnp.roll(back_Sn, -1, axis=1))
    else:
        h_SnD = _permute(_cut(jnp.roll(h_RTD, 1, axis=1), *cuts), front_Sn, back_Sn)
    targets_Sn = jnp.take_along_axis(_cut(rows["tokens"], *cuts), front_Sn, axis=1)

    size = min(n, forward.chunk)
    chunks = -(-n // size)
    pad = ((0, 0), (0, chunks * size - n))
    h_CSsD = jnp.pad(h_SnD, (*pad, (0, 0))).reshape(shards, chunks, size, -1).swapaxes(0, 1)
    targets_CSs = jnp.pad(targets_Sn, pad).reshape(shards, chunks, size).swapaxes(0, 1)
    trained = jnp.max(jnp.sum(mask_Sn, axis=1))

    def unembed(
        h_CSsD: Array, targets_CSs: Array, trained: Array, w_DV: Array
    ) -> tuple[Array, Array]:
        # S: all shards, or under shard_map the one of this device
        w_DV = w_DV.astype(jnp.float32)  # its gradients are summed over chunks in float32
        count = -(-trained // size)
        h_CND = h_CSsD.reshape(chunks, -1, h_CSsD.shape[-1])
        targets_CN = targets_CSs.reshape(chunks, -1)
        temperature, unused = forward.temperature, forward.config.unused
        logp_CN, entropy_CN = chunked_logp(h_CND, w_DV, targets_CN, temperature, count, unused)
        if entropy_gradient:
            entropy_CN = _entropy(h_CND, w_DV, temperature, count, unused)
        return logp_CN.reshape(targets_CSs.shape), entropy_CN.reshape(targets_CSs.shape)

    on_RT = rows["mask"] > 0

    def in_place(y_Sn: Array) -> Array:
        y_Sn = _permute(y_Sn, back_Sn, front_Sn)
        return jnp.where(on_RT, _joined(y_Sn, on_RT.shape, *cuts), 0)

    def of_chunks(y_CSs: Array) -> Array:
        return in_place(y_CSs.swapaxes(0, 1).reshape(shards, -1)[:, :n])

    logp_CSs, entropy_CSs = _on_shards(unembed, forward.mesh)(h_CSsD, targets_CSs, trained, w_DV)
    value_RT = None if head_D is None else in_place(values(h_SnD, head_D))
    return of_chunks(logp_CSs), of_chunks(entropy_CSs), value_RT


def values(h_nD: Array, head_D: Array) -> Array:
    """Return h w / sqrt(D) + b, float32: what a linear head (w, b) of D + 1 numbers says of hidden
    states. The factor makes the scale of w independent of the width of the model."""
    scaled_nD = h_nD.astype(jnp.float32) / math.sqrt(h_nD.shape[-1])
    return scaled_nD @ head_D[:-1] + head_D[-1]


def hidden(forward: Forward, params: qwen.Params, rows: Rows) -> Array:
    """Return the last hidden state of every token, (r, T, D)."""
    segments_RT, mesh, kernel = rows["segments"], forward.mesh, forward.attention
    most = 0 if "prompts" in rows else forward.most_segments
    if "prompts" in rows:
        if kernel == "auto":
            kernel = choose(kernel, mesh, forward.dtype, forward.config.head_dim)
        if kernel in WHOLE_IDS:
            raise ValueError(
                f"samples cannot share a prompt with attention={kernel!r}; choose 'blockwise' or"
                " 'cudnn'"
            )
        segments_RT = sharing(segments_RT, rows["prompts"])
    return qwen.merge(forward.config, params).hidden(
        rows["tokens"], rows["positions"], segments_RT, dtype=forward.dtype,
        remat=forward.remat, attention=kernel, most_segments=most, mesh=mesh,
    )  # fmt: skip


def _gathered(w_DV: Array, forward: Forward) -> Array:
    """Return the output head split over the vocabulary only, so that it is gathered once and not
    for every chunk."""
    mesh = forward.mesh
    if mesh is None or mesh.size == 1:
        return w_DV
    where = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    return jax.lax.with_sharding_constraint(w_DV.astype(forward.dtype), where)


def _on_shards(unembed: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Return `unembed` under shard_map, so that the head's gradient is summed over shards once and
    not per chunk."""
    sizes = {} if mesh is None else mesh.shape
    axes = tuple(axis for axis in ("data", "fsdp", "sequence") if sizes.get(axis, 1) > 1)
    if not axes:  # also on a mesh with only a tensor axis: XLA cannot partition a sum over no axes
        return unembed
    split, replicated = PartitionSpec(None, axes), PartitionSpec()
    return jax.shard_map(
        unembed, mesh=mesh, in_specs=(split, split, replicated, replicated), out_specs=split,
        axis_names=set(axes), check_vma=False,
    )  # fmt: skip


def _cut(x_RT: Array, rows: int, columns: int) -> Array:
    """Return (R, T, ...) as (rows * columns, n, ...): the tokens that each device holds, in one
    axis."""
    r, t, *rest = x_RT.shape
    x = x_RT.reshape(rows, r // rows, columns, t // columns, *rest)
    return x.swapaxes(1, 2).reshape(rows * columns, -1, *rest)


def _joined(x_Sn: Array, shape: tuple[int, ...], rows: int, columns: int) -> Array:
    """Undo `_cut`."""
    r, t = shape
    return x_Sn.reshape(rows, columns, r // rows, t // columns).swapaxes(1, 2).reshape(shape)


def _entropy(h_CND: Array, w_DV: Array, temperature: float, count: Array, unused: int) -> Array:
    """Return the entropy of each distribution, differentiable, and 0 in the chunks from `count`
    on."""

    def entropy(h_ND: Array) -> Array:
        logp_NV = jax.nn.log_softmax(logits(h_ND, w_DV, temperature, unused))
        return -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)

    def nothing(h_ND: Array) -> Array:
        return jnp.zeros(len(h_ND), jnp.float32)

    @jax.checkpoint  # without it, every chunk would keep a copy of w_DV for its backward pass
    def of_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        i, h_ND = chunk
        return None, jax.lax.cond(i < count, entropy, nothing, h_ND)

    return jax.lax.scan(of_chunk, None, (jnp.arange(len(h_CND)), h_CND))[1]


def _compaction(mask_Sn: Array) -> tuple[Array, Array]:
    """Return the permutation that moves trained tokens to the front in their order, and its
    inverse."""
    on_Sn = mask_Sn > 0
    trained_Sn = jnp.cumsum(on_Sn, axis=1)
    others_Sn = jnp.cumsum(~on_Sn, axis=1) + trained_Sn[:, -1:]
    back_Sn = jnp.where(on_Sn, trained_Sn, others_Sn) - 1
    return jnp.argsort(~on_Sn, axis=1, stable=True), back_Sn


@jax.custom_vjp
def _permute(x_Sn: Array, index_Sn: Array, inverse_Sn: Array) -> Array:
    """Return x[s, index[s]]. The gradient is the inverse permutation: a gather, where JAX would use
    a scatter."""
    return jax.vmap(lambda x, index: x[index])(x_Sn, index_Sn)


_permute.defvjp(
    lambda x, index, inverse: (_permute(x, index, inverse), (index, inverse)),
    lambda saved, g: (_permute(g, saved[1], saved[0]), None, None),
)
