"""The update: one jitted, donated, sharded step per mini-batch, and the log-probabilities of packed rows.

Both walk over micro-batches in a loop whose trip count is data, so another number of rows needs no new program, and
both send only the hidden states of tokens that train through the unembedding. Every token's weight in the loss is known
before the loop starts: the size of a micro-batch changes memory and speed, not the result.

Letters: M micro-batches of r rows of T tokens; S shards of the batch; n = r * T / S tokens per shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import loops, lora, qwen
from models import mesh as meshes
from rl import losses, optim
from rl.packing import Packed

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the state is kept.

    rules: logical axes to mesh axes, see models/mesh.py. master: dtype of what is trained; in bfloat16 it is rounded
    stochastically, so that updates smaller than its steps add up. offload: the optimizer's moments stay in the host's
    memory between updates. lora: train adapters instead of the weights.
    """

    rules: Mapping[str, str] = dataclasses.field(default_factory=lambda: meshes.RULES)
    master: str = "float32"
    offload: bool = False
    lora: lora.LoRA | None = None


def state_shardings(
    config: qwen.Config, optimizer: optax.GradientTransformation, mesh: Mesh | None, layout: Layout | None = None
) -> State | None:
    """Where each part of the state lives: the moments of a parameter with the parameter, counters everywhere."""
    if mesh is None:
        return None
    layout = layout or Layout()
    base = meshes.shardings(config, mesh, layout.rules)
    params, shapes = base, qwen.shapes(config)
    if layout.lora:
        params = meshes.places(lora.weights(config, layout.lora), mesh, layout.rules)
        shapes = lora.shapes(config, layout.lora)
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = params
    if layout.offload:
        moments = jax.tree.map(lambda where: where.with_memory_kind("pinned_host"), params)
    opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, where: where, jax.eval_shape(optimizer.init, shapes), moments,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    state = {"params": params, "opt": opt, "step": everywhere, "skipped": everywhere}
    return state | {"base": base} if layout.lora else state


def state_shapes(
    config: qwen.Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    layout: Layout | None = None,
    *,
    frozen_dtype: Any = jnp.float32,
) -> State:
    """The state as ShapeDtypeStructs with their shardings, to compile an update without any weights.

    frozen_dtype: of the weights that adapters are added to.
    """
    layout = layout or Layout()
    shapes = qwen.shapes(config, layout.master)
    if layout.lora:
        shapes = lora.shapes(config, layout.lora, layout.master)
    state = jax.eval_shape(partial(_new_state, optimizer), shapes)
    if layout.lora:
        state["base"] = qwen.shapes(config, frozen_dtype)
    if mesh is None:
        return state
    places = state_shardings(config, optimizer, mesh, layout)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, places)


def bytes_per_device(state: State) -> dict[str, int]:
    """Bytes that a device keeps of a state given as ShapeDtypeStructs: {"device": ..., "pinned_host": ...}."""
    kept = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(state):
        where = x.sharding
        size = math.prod(where.shard_shape(x.shape) if where else x.shape) * x.dtype.itemsize
        kept["pinned_host" if where and where.memory_kind == "pinned_host" else "device"] += size
    return kept


def init_state(
    config: qwen.Config,
    params: qwen.Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    *,
    seed: int = 0,
) -> State:
    """{"params", "opt", "step": updates asked for, "skipped": of those, not applied}, placed on the mesh.

    With adapters, "params" are these, drawn from `seed`, and "base" the weights given, in their dtype.
    """
    layout, base = layout or Layout(), None
    shardings = state_shardings(config, optimizer, mesh, layout)
    if layout.lora:
        base, params = params, lora.init(config, layout.lora, seed)
        if mesh is not None:
            base = meshes.put(base, shardings.pop("base"))
    if mesh is not None:
        params = meshes.put(params, shardings["params"])
    master = jnp.dtype(layout.master)
    if any(x.dtype != master for x in jax.tree.leaves(params)):
        params = jax.tree.map(lambda x: x.astype(master), params)
    state = jax.jit(partial(_new_state, optimizer), out_shardings=shardings)(params)
    return state if base is None else state | {"base": base}


def _new_state(optimizer: optax.GradientTransformation, params: qwen.Params) -> State:
    zero = jnp.zeros((), jnp.int32)
    opt = optimizer.init(jax.tree.map(_wide, params))
    return {"params": params, "opt": opt, "step": zero, "skipped": zero + 0}


def _wide(x):
    return x.astype(jnp.float32)


def whole(state: State, layout: Layout | None = None) -> qwen.Params:
    """What `make_logp`'s function takes: the parameters, with adapters beside the weights they are added to."""
    return lora.join(state["base"], state["params"], layout.lora) if "base" in state else state["params"]


def trained(state: State) -> State:
    """What a checkpoint has to hold: all but the weights that adapters are added to, which do not change."""
    return {name: part for name, part in state.items() if name != "base"}


def merged(state: State, layout: Layout | None = None) -> qwen.Params:
    """The policy as ordinary parameters: for engines and exports."""
    return lora.merge(state["base"], state["params"], layout.lora) if "base" in state else state["params"]


def make_update(
    config: qwen.Config,
    mesh: Mesh | None,
    *,
    optimizer: optax.GradientTransformation,
    micro_rows: int,
    capacity_rows: int = 0,
    temperature: float = 1.0,
    aggregate: str = "token-mean",
    horizon: int | None = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attend: str = "auto",
    layout: Layout | None = None,
    chunk: int = 1024,
    widths: int = 1,
    **loss: Any,
) -> Callable[[State, Packed], tuple[State, dict[str, jax.Array]]]:
    """Make `update(state, packed) -> (state, metrics)`: one optimizer step on one mini-batch, consuming the old state.

    Args:
      config, mesh: the model, and the devices; None = one device.
      optimizer: see `rl.optim`.
      micro_rows: rows per forward and backward pass; a multiple of the devices that rows are spread over.
      capacity_rows: a program is made for a power of two of micro-batches and for at least this many rows. Name the
        most there will be, and there is one program.
      temperature: what the log-probabilities are taken at.
      aggregate, horizon: see `losses.aggregation_weights`, over the whole mini-batch.
      dtype, remat, attend: of the forward pass, see `qwen.hidden`. layout: how the state is kept.
      chunk: tokens that a device puts through the unembedding at once.
      widths: so many widths of rows are compiled for, from half of T to T; a micro-batch is cut to the narrowest one
        that holds its tokens. The result is the same.
      loss: see `losses.token_loss`.

    Metrics are scalars on the device. "loss" is what was minimised, "grad_norm" before clipping, "skipped" is 1 when
    either was not finite: then parameters and optimizer stay as they were. "tokens" trained. The others are means
    over trained tokens, see `losses`; "ratio/max", "importance_weight/max" and "mismatch/max" (largest
    |log pi - log pi_sampled|) are maxima. "mismatch/*" is the gap between engine and learner as long as the weights
    are those that sampled.
    """
    _check_rows(mesh, micro_rows)
    _check_widths(mesh, widths)
    layout = layout or Layout()
    shardings = state_shardings(config, optimizer, mesh, layout)
    entropy_gradient = bool(loss.get("entropy_coef"))

    def micro_loss(params, base, micro):
        if base is not None:
            params = lora.join(base, params, layout.lora)
        logp_RT, entropy_RT = _logp(
            config, params, micro, mesh, temperature=temperature, dtype=dtype, remat=remat, attend=attend,
            chunk=chunk, entropy_gradient=entropy_gradient,
        )  # fmt: skip
        loss_RT, stats = losses.token_loss(logp_RT, entropy_RT, micro, **loss)
        peaks = {} if loss.get("objective") == "nll" else _peaks(logp_RT, micro, loss)
        return jnp.sum(micro["weight"] * loss_RT), (_sums(stats), peaks)

    def step(state, batch):
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in ("mask", "segments")}
        weight = losses.aggregation_weights(flat["mask"], flat["segments"], aggregate=aggregate, horizon=horizon)
        batch = batch | {"weight": weight.reshape(batch["mask"].shape)}

        def grad(params, micro):
            result, grads = jax.value_and_grad(micro_loss, has_aux=True)(params, state.get("base"), micro)
            return result, jax.tree.map(_wide, grads)

        def body(_, micro, totals):
            (loss, (sums, peaks)), grads = _cut_to_width(partial(grad, state["params"]), micro, widths)
            added = jax.tree.map(jnp.add, totals[:3], (loss, sums, grads))
            return *added, jax.tree.map(jnp.maximum, totals[3], peaks)

        first = jax.tree.map(lambda x: x[0], batch)
        (loss, (sums, peaks)), grads = jax.eval_shape(grad, state["params"], first)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, sums, grads, peaks))
        loss, sums, grads, peaks = loops.each(batch, _trips(batch), body, start)
        means = {name: total / jnp.maximum(count, 1) for name, (total, count) in sums.items()}
        near = _on_device(shardings["opt"]) if layout.offload and mesh is not None else None
        return _apply(state, optimizer, loss, grads, means | peaks | {"tokens": jnp.sum(batch["mask"])}, near)

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, _everywhere(mesh)))

    def update(state, packed):
        if packed.rows == 0:
            raise ValueError("an update needs at least one row: every rollout was dropped")
        if loss.get("kl_coef") and packed.ref_logp_RT is None:
            raise ValueError("a KL penalty (kl_coef) needs packed.ref_logp_RT, the reference's log-probabilities")
        return jitted(state, _batch(packed, mesh, micro_rows, capacity_rows))

    update.jitted = jitted
    return update


def make_logp(
    config: qwen.Config,
    mesh: Mesh | None,
    *,
    micro_rows: int,
    capacity_rows: int = 0,
    temperature: float = 1.0,
    dtype: Any = jnp.float32,
    attend: str = "auto",
    chunk: int = 1024,
    widths: int = 1,
) -> Callable[[qwen.Params, Packed], np.ndarray]:
    """Make `logp(params, packed) -> logp_RT`: float32 on the host, 0 where nothing trains. Arguments: `make_update`."""
    _check_rows(mesh, micro_rows)
    _check_widths(mesh, widths)
    options = {"temperature": temperature, "dtype": dtype, "attend": attend, "chunk": chunk}

    def score(params, batch):
        def one(micro):
            logp_RT, _ = _logp(config, params, micro, mesh, **options)
            return jnp.pad(logp_RT, ((0, 0), (0, batch["mask"].shape[2] - logp_RT.shape[1])))

        def body(i, micro, out):
            return jax.lax.dynamic_update_index_in_dim(out, _cut_to_width(one, micro, widths), i, 0)

        return loops.each(batch, _trips(batch), body, jnp.zeros(batch["mask"].shape, jnp.float32))

    jitted = jax.jit(score, out_shardings=_everywhere(mesh))

    def logp(params, packed):
        out = jitted(params, _batch(packed, mesh, micro_rows, capacity_rows))
        return np.asarray(out).reshape(-1, out.shape[-1])[: packed.rows]

    logp.jitted = jitted
    return logp


# --- batches ---------------------------------------------------------------------------------------------------------


def _check_rows(mesh: Mesh | None, micro_rows: int) -> None:
    shards, _ = _cuts(mesh)
    if micro_rows < 1 or micro_rows % shards:
        raise ValueError(
            f"micro_rows={micro_rows} must be a multiple of {shards}, the devices that rows are spread over"
        )


def _check_widths(mesh: Mesh | None, widths: int) -> None:
    if widths < 1 or (widths > 1 and _cuts(mesh)[1] > 1):
        raise ValueError(f"widths={widths}: at least 1, and 1 where rows are spread over the mesh's sequence axis")


def _everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """For what the host reads: every process has to hold all of it."""
    return None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec())


def _cuts(mesh: Mesh | None) -> tuple[int, int]:
    """Into how many pieces the rows and the tokens of a batch are cut."""
    return (1, 1) if mesh is None else (mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"])


def _batch(packed: Packed, mesh: Mesh | None, micro_rows: int, capacity_rows: int) -> dict[str, jax.Array]:
    """Arrays (M, r, T) on the devices; M is a power of two or what `capacity_rows` asks for, the rest is padding."""
    micro_batches = -(-max(packed.rows, capacity_rows, 1) // micro_rows)
    if packed.rows > capacity_rows:
        micro_batches = 1 << (micro_batches - 1).bit_length()
    rows, width = micro_batches * micro_rows, packed.tokens_RT.shape[1]
    arrays = {
        "tokens": packed.tokens_RT,
        "positions": packed.positions_RT,
        "segments": packed.segments_RT,
        "mask": packed.mask_RT,
        "guided": packed.guided_RT,
        "advantage": packed.advantage_RT,
        "logp": packed.logp_RT,
        "old_logp": packed.logp_RT if packed.old_logp_RT is None else packed.old_logp_RT,
        "ref_logp": packed.ref_logp_RT,
    }
    batch = {}
    for name, array in arrays.items():
        if array is not None:
            padded = np.zeros((rows, width), array.dtype)
            padded[: packed.rows] = array
            batch[name] = padded.reshape(micro_batches, micro_rows, width)
    if mesh is None:
        return batch
    if width % mesh.shape["sequence"]:
        raise ValueError(f"rows of {width} tokens cannot be cut into sequence={mesh.shape['sequence']} pieces")
    where = NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec))
    return meshes.put(batch, dict.fromkeys(batch, where))


def _cut_to_width(work: Callable[[dict[str, jax.Array]], Any], micro: dict[str, jax.Array], widths: int) -> Any:
    """work(micro), without most columns behind its last token: `widths` programs, from half of a row to all of it."""
    full = micro["segments"].shape[1]
    choices = sorted({-(-full * (widths + n) // (2 * widths)) for n in range(1, widths + 1)})
    if len(choices) == 1:
        return work(micro)
    used = jnp.max(jnp.where(micro["segments"] > 0, 1 + jnp.arange(full), 0))
    branches = [partial(lambda n, micro: work({name: x[:, :n] for name, x in micro.items()}), n) for n in choices]
    return jax.lax.switch(jnp.sum(used > jnp.array(choices[:-1])), branches, micro)


def _trips(batch: dict[str, jax.Array]) -> jax.Array:
    """Micro-batches that hold anything; packing leaves the empty ones at the end."""
    return jnp.sum(jnp.any(batch["segments"] > 0, axis=(1, 2)))


# --- log-probabilities of the tokens that train ----------------------------------------------------------------------


def _logp(
    config, params, micro, mesh: Mesh | None, *, temperature, dtype, chunk: int, attend: str, remat: str = "none",
    entropy_gradient: bool = False,
):  # fmt: skip
    """(logp_RT, entropy_RT) of a micro-batch, 0 where a token does not train.

    The trained tokens of each shard move to its front, and go through the unembedding `chunk` at a time; chunks without
    any are skipped.
    """
    h_RTD = qwen.hidden(
        config, params, micro["tokens"], micro["positions"], micro["segments"], dtype=dtype, remat=remat,
        attend=attend, mesh=mesh,
    )  # fmt: skip
    w_DV = _gathered(qwen.unembed(config, params), mesh, dtype)
    rows, columns = _cuts(mesh)
    shards = rows * columns
    mask_Sn = _cut(micro["mask"], rows, columns)
    n = mask_Sn.shape[1]
    front_Sn, back_Sn = _compaction(mask_Sn)
    # The token at t is predicted from t - 1. The first token of a row never trains, so no row reads from another.
    if columns == 1:
        h_SnD = _permute(h_RTD.reshape(shards, n, -1), (front_Sn - 1) % n, jnp.roll(back_Sn, -1, axis=1))
    else:
        h_SnD = _permute(_cut(jnp.roll(h_RTD, 1, axis=1), rows, columns), front_Sn, back_Sn)
    targets_Sn = jnp.take_along_axis(_cut(micro["tokens"], rows, columns), front_Sn, axis=1)

    size = min(n, max(1, chunk))
    chunks = -(-n // size)
    pad = ((0, 0), (0, chunks * size - n))
    h_CSsD = jnp.pad(h_SnD, (*pad, (0, 0))).reshape(shards, chunks, size, -1).swapaxes(0, 1)
    targets_CSs = jnp.pad(targets_Sn, pad).reshape(shards, chunks, size).swapaxes(0, 1)
    trained = jnp.max(jnp.sum(mask_Sn, axis=1))

    def walk(h_CSsD, targets_CSs, trained, w_DV):
        shape = targets_CSs.shape  # the second axis: all shards, or on a mesh the one of this device
        w_DV = _wide(w_DV)  # so that its gradients are summed over chunks in float32
        count = -(-trained // size)
        h_CND, targets_CN = h_CSsD.reshape(chunks, -1, h_CSsD.shape[-1]), targets_CSs.reshape(chunks, -1)
        logp_CN, entropy_CN = qwen.chunked_logp(h_CND, w_DV, targets_CN, temperature, count)
        if entropy_gradient:
            entropy_CN = _entropy(h_CND, w_DV, temperature, count)
        return logp_CN.reshape(shape), entropy_CN.reshape(shape)

    pair = _on_shards(walk, mesh)(h_CSsD, targets_CSs, trained, w_DV)
    on_RT = micro["mask"] > 0

    def spread(y_CSs):
        y_Sn = _permute(y_CSs.swapaxes(0, 1).reshape(shards, -1)[:, :n], back_Sn, front_Sn)
        return jnp.where(on_RT, _joined(y_Sn, on_RT.shape, rows, columns), 0)

    return spread(pair[0]), spread(pair[1])


def _gathered(w_DV, mesh: Mesh | None, dtype):
    """The output head, split over the vocabulary only: gathered once, and not again for each chunk."""
    if mesh is None or mesh.size == 1:
        return w_DV
    return jax.lax.with_sharding_constraint(w_DV.astype(dtype), NamedSharding(mesh, PartitionSpec(None, "tensor")))


def _on_shards(walk, mesh: Mesh | None):
    """`walk` on each shard by itself: the gradient of the output head is summed over them once, and not per chunk."""
    axes = () if mesh is None else tuple(axis for axis in ("data", "fsdp", "sequence") if mesh.shape[axis] > 1)
    if not axes:  # nor on a mesh of tensor alone: XLA does not partition a sum over nothing
        return walk
    shards, everywhere = PartitionSpec(None, axes), PartitionSpec()
    return jax.shard_map(
        walk, mesh=mesh, in_specs=(shards, shards, everywhere, everywhere), out_specs=shards, axis_names=set(axes),
        check_vma=False,
    )  # fmt: skip


def _cut(x_RT, rows: int, columns: int):
    """(R, T, ...) as (rows * columns, n, ...): what each device holds, its tokens in a row."""
    if columns == 1:
        return x_RT.reshape(rows, -1, *x_RT.shape[2:])
    r, t, *rest = x_RT.shape
    return x_RT.reshape(rows, r // rows, columns, t // columns, *rest).swapaxes(1, 2).reshape(rows * columns, -1, *rest)


def _joined(x_Sn, shape: tuple[int, int], rows: int, columns: int):
    """The inverse of `_cut`."""
    if columns == 1:
        return x_Sn.reshape(shape)
    r, t = shape
    return x_Sn.reshape(rows, columns, r // rows, t // columns).swapaxes(1, 2).reshape(shape)


def _entropy(h_CND, w_DV, temperature, count):
    """Entropy of each distribution, with its gradient, 0 in the chunks from `count` on."""

    def through(h_ND):
        logits = jnp.dot(h_ND, w_DV.astype(h_ND.dtype), preferred_element_type=jnp.float32) / temperature
        logp = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    @jax.checkpoint  # else every chunk would keep a copy of w_DV for its backward pass
    def one(_, xs):
        i, h_ND = xs
        return None, jax.lax.cond(i < count, through, lambda h: jnp.zeros(len(h), jnp.float32), h_ND)

    return jax.lax.scan(one, None, (jnp.arange(len(h_CND)), h_CND))[1]


def _compaction(mask_Sn):
    """The permutation that brings trained tokens to the front in their order, and its inverse."""
    on_Sn = mask_Sn > 0
    trained_Sn = jnp.cumsum(on_Sn, axis=1)
    others_Sn = jnp.cumsum(~on_Sn, axis=1) + trained_Sn[:, -1:]
    back_Sn = jnp.where(on_Sn, trained_Sn, others_Sn) - 1
    return jnp.argsort(~on_Sn, axis=1, stable=True), back_Sn


@jax.custom_vjp
def _permute(x_Sn, index_Sn, inverse_Sn):
    """x[s, index[s]]. The gradient of a permutation is its inverse: a gather, where JAX would scatter."""
    return jax.vmap(lambda x, index: x[index])(x_Sn, index_Sn)


_permute.defvjp(
    lambda x, index, inverse: (_permute(x, index, inverse), (index, inverse)),
    lambda saved, g: (_permute(g, saved[1], saved[0]), None, None),
)


# --- metrics and the optimizer ---------------------------------------------------------------------------------------


def _sums(stats: losses.Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sum and count of each metric, so that micro-batches add up."""
    sums = {}
    for name, (value_RT, mask_RT) in stats.items():
        on_RT = mask_RT > 0
        sums[name] = (jnp.sum(jnp.where(on_RT, value_RT, 0).astype(jnp.float32)), jnp.sum(on_RT).astype(jnp.float32))
    return sums


def _peaks(logp_RT, micro, loss) -> dict[str, jax.Array]:
    own_RT = (micro["mask"] > 0) & ~(micro["guided"] > 0)
    ratio = jnp.exp(losses.log_ratio(logp_RT, micro["old_logp"], micro["mask"]))
    gap = jnp.abs(losses.log_ratio(logp_RT, micro["logp"], own_RT))
    peaks = {"ratio/max": jnp.max(ratio), "mismatch/max": jnp.max(gap)}
    if loss.get("importance_cap") is not None:
        options = {name.removeprefix("importance_"): loss[name] for name in loss if name.startswith("importance_")}
        weight_RT, _ = losses.importance_weight(
            micro["old_logp"], micro["logp"], own_RT, micro["segments"], **options
        )  # fmt: skip
        peaks["importance_weight/max"] = jnp.max(jnp.where(micro["mask"] > 0, weight_RT, 0))
    return jax.lax.stop_gradient(peaks)


def _apply(state, optimizer, loss, grads, metrics, near):
    """One optimizer step, or none at all if the loss or the gradient is not finite.

    near: where moments that wait in the host's memory are put for it; None = they are there.
    """
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    opt = state["opt"] if near is None else jax.device_put(state["opt"], near)
    wide = jax.tree.map(_wide, state["params"])
    updates, moved_opt = optimizer.update(grads, opt, wide)
    params = optax.apply_updates(wide, updates)
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves(state["params"])):
        params = optim.rounded(params, state["params"], jax.random.fold_in(jax.random.key(0), state["step"]))
    moved = {"params": params, "opt": moved_opt}
    kept = {"params": state["params"], "opt": opt}
    skipped = 1 - finite.astype(jnp.int32)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, kept)
    new |= {"step": state["step"] + 1, "skipped": state["skipped"] + skipped}
    new |= {"base": state["base"]} if "base" in state else {}
    return new, metrics | {"loss": loss, "grad_norm": norm, "skipped": skipped}


def _on_device(shardings):
    return jax.tree.map(lambda where: where.with_memory_kind("device"), shardings)
