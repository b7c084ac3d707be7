"""The optimizer step on a mini-batch, and the log-probabilities of packed rows, jitted and sharded.

Both loop over micro-batches, and the trip count is data: fewer rows need no recompilation. Both
send only the hidden states of tokens that train through the unembedding. Every token's weight in
the loss is known before the loop starts, so the size of a micro-batch changes memory and speed, not
the result.

Letters: M micro-batches of r rows of T tokens; S shards of the batch; n = r * T / S tokens per
shard.
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
from models.attention import WHOLE_IDS, choose, sharing
from rl import losses, optim
from rl.packing import Packed

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement and precision of the training state.

    rules: logical axes to mesh axes, see models/mesh.py. master: dtype of the trained parameters;
    bfloat16 is rounded
    stochastically, so that updates smaller than its resolution add up. offload: keep the
    optimizer's moments in host
    memory between updates. lora: train adapters instead of the weights.
    """

    rules: Mapping[str, str] = dataclasses.field(default_factory=lambda: meshes.RULES)
    master: str = "float32"
    offload: bool = False
    lora: lora.LoRA | None = None


def state_shardings(
    config: qwen.Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    layout: Layout | None = None,
) -> State | None:
    """Return the sharding of each part of the state: moments like their parameters, counters
    replicated."""
    if mesh is None:
        return None
    layout = layout or Layout()
    base = meshes.shardings(config, mesh, layout.rules)
    params, shapes = base, qwen.shapes(config)
    if layout.lora:
        params = meshes.places(lora.weights(config, layout.lora), mesh, layout.rules)
        shapes = lora.shapes(config, layout.lora)
    replicated = NamedSharding(mesh, PartitionSpec())
    moments = _in_memory("pinned_host", params) if layout.offload else params
    opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, jax.eval_shape(optimizer.init, shapes), moments,
        transform_non_params=lambda _: replicated,
    )  # fmt: skip
    state = {"params": params, "opt": opt, "step": replicated, "skipped": replicated}
    return state | {"base": base} if layout.lora else state


def state_shapes(
    config: qwen.Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    layout: Layout | None = None,
    *,
    frozen_dtype: Any = jnp.float32,
) -> State:
    """Return the state as ShapeDtypeStructs with their shardings, to compile an update without any
    weights.

    frozen_dtype: dtype of the weights that adapters are added to.
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
    shardings = state_shardings(config, optimizer, mesh, layout)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )


def init_state(
    config: qwen.Config,
    params: qwen.Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    *,
    seed: int = 0,
) -> State:
    """Return {"params", "opt", "step": calls of update, "skipped": calls that changed nothing},
    placed on the mesh.

    With adapters, "params" are the adapters, drawn from `seed`, and "base" the given weights in
    their dtype.
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
    """Return the parameters as `make_logp`'s function takes them, with adapters separate from the
    frozen weights."""
    return (
        lora.join(state["base"], state["params"], layout.lora)
        if "base" in state
        else state["params"]
    )


def trained(state: State) -> State:
    """Return the part of the state that a checkpoint needs: all but the constant weights that
    adapters are added to."""
    return {name: part for name, part in state.items() if name != "base"}


def merged(state: State, layout: Layout | None = None) -> qwen.Params:
    """Return the policy as plain parameters, with adapters added to their weights, for engines and
    exports."""
    return (
        lora.merge(state["base"], state["params"], layout.lora)
        if "base" in state
        else state["params"]
    )


def make_update(
    config: qwen.Config,
    mesh: Mesh | None,
    *,
    optimizer: optax.GradientTransformation,
    loss: losses.TokenLoss,
    micro: int,
    capacity_rows: int = 0,
    temperature: float = 1.0,
    aggregate: str = "token-mean",
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention: str = "auto",
    layout: Layout | None = None,
    chunk: int = 1024,
    widths: int = 1,
    keep_logp: bool = False,
    **terms: Any,
) -> Callable[[State, Packed], tuple[State, dict[str, jax.Array]]]:
    """Return `update(state, packed) -> (state, metrics)`: one optimizer step on one mini-batch. The
    state is donated.

    Args:
      config, mesh: the model and its devices; a mesh of None means one device.
      optimizer: see `rl.optim`.
      loss: see `rl.losses`; its arguments are bound.
      micro: rows per forward and backward pass; a multiple of the number of devices that share the
      rows.
      capacity_rows: the number of micro-batches is rounded up to a power of two, or to what holds
        this many rows. Given the largest number of rows that will occur, only one program is
        compiled.
      temperature: the temperature of the log-probabilities.
      aggregate: see `losses.aggregation_weights`; applies to the whole mini-batch.
      dtype, remat, attention: of the forward pass, see `qwen.hidden`.
      layout: placement and precision of the state.
      chunk: tokens that a device puts through the unembedding at once.
      widths: number of row widths to compile, evenly spaced in (T / 2, T]. A micro-batch is cut to
        the narrowest that holds its tokens, which does not change the result.
      keep_logp: also return, as the metric "logp_RT", the log-probabilities that the update
        computed: (R, T) float32 on the host, 0 at tokens that do not train.
      terms: the KL penalty, entropy bonus and importance weights, see `losses.token_loss`.

    Metrics are scalars on the device. "loss" is the minimised value, "grad_norm" the norm before
    clipping. "skipped" is
    1 if either is not finite: then parameters and optimizer stay as they were. "tokens" is the
    number of trained tokens. The others are means over trained tokens, see `rl.losses`, except the
    maxima "ratio/max", "importance_weight/max" and "mismatch/max" (of |log pi - log pi_sampled|).
    While the weights are still those that sampled, "mismatch/*" measures the gap between engine and
    learner.
    """
    _check_rows(mesh, micro)
    _check_widths(mesh, widths)
    layout = layout or Layout()
    shardings = state_shardings(config, optimizer, mesh, layout)
    on_device = (
        _in_memory("device", shardings["opt"]) if layout.offload and mesh is not None else None
    )
    forward = partial(
        _logp, config, mesh=mesh, temperature=temperature, dtype=dtype, remat=remat, attention=attention, chunk=chunk,
        entropy_gradient=bool(terms.get("entropy_coef")),
    )  # fmt: skip
    gradient = partial(_gradient, partial(_micro_loss, forward, loss, terms, layout.lora))

    def step(state, batch):
        mask_RT, segments_RT = (
            batch[name].reshape(-1, batch[name].shape[-1]) for name in ("mask", "segments")
        )
        weight_RT = losses.aggregation_weights(mask_RT, segments_RT, aggregate=aggregate)
        batch = batch | {"weight": weight_RT.reshape(batch["mask"].shape)}
        total, sums, grads, maxima, logp = _accumulated(
            partial(gradient, state), batch, widths, keep_logp
        )
        metrics = {name: added / jnp.maximum(count, 1) for name, (added, count) in sums.items()}
        metrics |= maxima | logp | {"tokens": jnp.sum(batch["mask"])}
        return _apply(state, optimizer, total, grads, metrics, on_device)

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, _replicated(mesh)))

    def update(state, packed):
        if packed.rows == 0:
            raise ValueError("an update needs at least one row: every rollout was dropped")
        if terms.get("kl_coef") and packed.ref_logp_RT is None:
            raise ValueError(
                "a KL penalty (kl_coef) needs packed.ref_logp_RT, the reference's log-probabilities"
            )
        state, metrics = jitted(state, device_batch(packed, mesh, micro, capacity_rows))
        if keep_logp:
            logp = np.asarray(metrics["logp_RT"])
            metrics["logp_RT"] = logp.reshape(-1, logp.shape[-1])[: packed.rows]
        return state, metrics

    update.jitted = jitted
    return update


def make_logp(
    config: qwen.Config,
    mesh: Mesh | None,
    *,
    micro: int,
    capacity_rows: int = 0,
    temperature: float = 1.0,
    dtype: Any = jnp.float32,
    attention: str = "auto",
    chunk: int = 1024,
    widths: int = 1,
) -> Callable[[qwen.Params, Packed], np.ndarray]:
    """Return `logp(params, packed) -> logp_RT`: float32 on the host, 0 at tokens that do not train.

    The arguments are those of `make_update`.
    """
    _check_rows(mesh, micro)
    _check_widths(mesh, widths)
    forward = partial(
        _logp,
        config,
        mesh=mesh,
        temperature=temperature,
        dtype=dtype,
        attention=attention,
        chunk=chunk,
    )

    def score(params, batch):
        def padded_logp(rows):
            logp_RT, _ = forward(params, rows)
            return jnp.pad(logp_RT, ((0, 0), (0, batch["mask"].shape[2] - logp_RT.shape[1])))

        def body(i, rows, out):
            return jax.lax.dynamic_update_index_in_dim(
                out, _cut_to_width(padded_logp, rows, widths), i, 0
            )

        return loops.fold(batch, _trips(batch), body, jnp.zeros(batch["mask"].shape, jnp.float32))

    jitted = jax.jit(score, out_shardings=_replicated(mesh))

    def logp(params, packed):
        out = jitted(params, device_batch(packed, mesh, micro, capacity_rows))
        return np.asarray(out).reshape(-1, out.shape[-1])[: packed.rows]

    logp.jitted = jitted
    return logp


# --- batches --------------------------------------------------------------------------------------


def _check_rows(mesh: Mesh | None, micro: int) -> None:
    shards, _ = _cuts(mesh)
    if micro < 1 or micro % shards:
        raise ValueError(
            f"micro={micro} must be a multiple of {shards}, the number of devices that share the rows"
        )


def _check_widths(mesh: Mesh | None, widths: int) -> None:
    if widths < 1 or (widths > 1 and _cuts(mesh)[1] > 1):
        raise ValueError(
            f"widths={widths} must be at least 1, and 1 on a mesh whose sequence axis splits the rows"
        )


def _replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Return the replicated sharding, for values that the host reads."""
    return None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec())


def _in_memory(kind: str, shardings: Any) -> Any:
    """Return the same shardings in another kind of memory."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), shardings)


def _cuts(mesh: Mesh | None) -> tuple[int, int]:
    """Return the number of pieces that the rows, and the tokens of a row, are cut into."""
    return (
        (1, 1)
        if mesh is None
        else (mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"])
    )


def device_batch(
    packed: Packed, mesh: Mesh | None, micro: int, capacity_rows: int
) -> dict[str, jax.Array]:
    """Return the arrays of packed rows as (M, r, T) on the devices, with empty rows up to M
    micro-batches.

    M is a power of two, or the number of micro-batches that hold `capacity_rows`.
    """
    micro_batches = -(-max(packed.rows, capacity_rows, 1) // micro)
    if packed.rows > capacity_rows:
        micro_batches = 1 << (micro_batches - 1).bit_length()
    rows, width = micro_batches * micro, packed.tokens_RT.shape[1]
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
        "prompts": packed.prompts_RT,
    }
    batch = {}
    for name, array in arrays.items():
        if array is not None:
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


def _cut_to_width(
    work: Callable[[dict[str, jax.Array]], Any], rows: dict[str, jax.Array], widths: int
) -> Any:
    """Return work(rows) on the narrowest of `widths` widths, between half a row and a row, that
    holds the tokens."""
    full = rows["segments"].shape[1]
    choices = sorted({-(-full * (widths + n) // (2 * widths)) for n in range(1, widths + 1)})
    if len(choices) == 1:
        return work(rows)
    used = jnp.max(jnp.where(rows["segments"] > 0, 1 + jnp.arange(full), 0))
    branches = [
        partial(lambda n, rows: work({name: x[:, :n] for name, x in rows.items()}), n)
        for n in choices
    ]
    return jax.lax.switch(jnp.sum(used > jnp.array(choices[:-1])), branches, rows)


def _trips(batch: dict[str, jax.Array]) -> jax.Array:
    """Return the number of micro-batches that hold tokens; the empty ones are at the end."""
    return jnp.sum(jnp.any(batch["segments"] > 0, axis=(1, 2)))


def _accumulated(
    gradient: Callable[[dict[str, jax.Array]], Any],
    batch: dict[str, jax.Array],
    widths: int,
    keep_logp: bool,
) -> Any:
    """Return (loss, sums, gradients, maxima, {"logp_RT": (M, r, T)} or {}) over all micro-batches.

    `gradient` returns ((loss, (sums, maxima, logp_RT)), gradients) of one.
    """

    def of_rows(rows):
        (loss, (sums, maxima, logp_RT)), grads = gradient(rows)
        pad = ((0, 0), (0, batch["mask"].shape[2] - logp_RT.shape[1]))
        return loss, sums, grads, maxima, {"logp_RT": jnp.pad(logp_RT, pad)} if keep_logp else {}

    def body(i, rows, totals):
        new = _cut_to_width(of_rows, rows, widths)
        added = jax.tree.map(jnp.add, totals[:3], new[:3])
        kept = jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, i, 0), totals[4], new[4]
        )
        return *added, jax.tree.map(jnp.maximum, totals[3], new[3]), kept

    shapes = jax.eval_shape(of_rows, jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = (
        *zeros[:4],
        jax.tree.map(lambda x: jnp.zeros((len(batch["mask"]), *x.shape), x.dtype), zeros[4]),
    )
    return loops.fold(batch, _trips(batch), body, start)


# --- log-probabilities of the tokens that train ---------------------------------------------------


def _logp(
    config, params, rows, *, mesh: Mesh | None, temperature, dtype, chunk: int, attention: str, remat: str = "none",
    entropy_gradient: bool = False,
):  # fmt: skip
    """Return (logp_RT, entropy_RT) of the rows of a micro-batch, 0 at tokens that do not train.

    The trained tokens of each shard move to its front and go through the unembedding `chunk` at a
    time; chunks without trained tokens are skipped.
    """
    segments_RT = rows["segments"]
    if "prompts" in rows:
        if (kernel := choose(attention, mesh, dtype, config.head_dim)) in WHOLE_IDS:
            raise ValueError(
                f"samples cannot share a prompt with attention={kernel!r}; choose 'blockwise' or 'cudnn'"
            )
        segments_RT = sharing(segments_RT, rows["prompts"])
    h_RTD = qwen.hidden(
        config, params, rows["tokens"], rows["positions"], segments_RT, dtype=dtype, remat=remat, attention=attention,
        mesh=mesh,
    )  # fmt: skip
    w_DV = _gathered(qwen.unembed(config, params), mesh, dtype)
    cuts = _cuts(mesh)
    shards, columns = math.prod(cuts), cuts[1]
    mask_Sn = _cut(rows["mask"], *cuts)
    n = mask_Sn.shape[1]
    front_Sn, back_Sn = _compaction(mask_Sn)
    # The token at t is predicted from t - 1. The first token of a row never trains, so no row reads
    # from another row.
    if columns == 1:
        h_SnD = _permute(
            h_RTD.reshape(shards, n, -1), (front_Sn - 1) % n, jnp.roll(back_Sn, -1, axis=1)
        )
    else:
        h_SnD = _permute(_cut(jnp.roll(h_RTD, 1, axis=1), *cuts), front_Sn, back_Sn)
    targets_Sn = jnp.take_along_axis(_cut(rows["tokens"], *cuts), front_Sn, axis=1)

    size = min(n, max(1, chunk))
    chunks = -(-n // size)
    pad = ((0, 0), (0, chunks * size - n))
    h_CSsD = jnp.pad(h_SnD, (*pad, (0, 0))).reshape(shards, chunks, size, -1).swapaxes(0, 1)
    targets_CSs = jnp.pad(targets_Sn, pad).reshape(shards, chunks, size).swapaxes(0, 1)
    trained = jnp.max(jnp.sum(mask_Sn, axis=1))

    def unembed(h_CSsD, targets_CSs, trained, w_DV):
        shape = (
            targets_CSs.shape
        )  # the second axis: all shards, or under shard_map the one of this device
        w_DV = _wide(w_DV)  # so that its gradients are summed over chunks in float32
        count = -(-trained // size)
        h_CND, targets_CN = (
            h_CSsD.reshape(chunks, -1, h_CSsD.shape[-1]),
            targets_CSs.reshape(chunks, -1),
        )
        logp_CN, entropy_CN = qwen.chunked_logp(h_CND, w_DV, targets_CN, temperature, count)
        if entropy_gradient:
            entropy_CN = _entropy(h_CND, w_DV, temperature, count)
        return logp_CN.reshape(shape), entropy_CN.reshape(shape)

    logp_CSs, entropy_CSs = _on_shards(unembed, mesh)(h_CSsD, targets_CSs, trained, w_DV)
    on_RT = rows["mask"] > 0

    def in_place(y_CSs):
        y_Sn = _permute(y_CSs.swapaxes(0, 1).reshape(shards, -1)[:, :n], back_Sn, front_Sn)
        return jnp.where(on_RT, _joined(y_Sn, on_RT.shape, *cuts), 0)

    return in_place(logp_CSs), in_place(entropy_CSs)


def _gathered(w_DV, mesh: Mesh | None, dtype):
    """Return the output head split over the vocabulary only, so that it is gathered once and not
    for every chunk."""
    if mesh is None or mesh.size == 1:
        return w_DV
    return jax.lax.with_sharding_constraint(
        w_DV.astype(dtype), NamedSharding(mesh, PartitionSpec(None, "tensor"))
    )


def _on_shards(unembed, mesh: Mesh | None):
    """Return `unembed` under shard_map, so that the head's gradient is summed over shards once and
    not per chunk."""
    axes = (
        ()
        if mesh is None
        else tuple(axis for axis in ("data", "fsdp", "sequence") if mesh.shape[axis] > 1)
    )
    if not axes:  # also on a mesh with only a tensor axis: XLA cannot partition a sum over no axes
        return unembed
    split, replicated = PartitionSpec(None, axes), PartitionSpec()
    return jax.shard_map(
        unembed, mesh=mesh, in_specs=(split, split, replicated, replicated), out_specs=split, axis_names=set(axes),
        check_vma=False,
    )  # fmt: skip


def _cut(x_RT, rows: int, columns: int):
    """Return (R, T, ...) as (rows * columns, n, ...): the tokens that each device holds, in one
    axis."""
    if columns == 1:
        return x_RT.reshape(rows, -1, *x_RT.shape[2:])
    r, t, *rest = x_RT.shape
    return (
        x_RT.reshape(rows, r // rows, columns, t // columns, *rest)
        .swapaxes(1, 2)
        .reshape(rows * columns, -1, *rest)
    )


def _joined(x_Sn, shape: tuple[int, int], rows: int, columns: int):
    """Undo `_cut`."""
    if columns == 1:
        return x_Sn.reshape(shape)
    r, t = shape
    return x_Sn.reshape(rows, columns, r // rows, t // columns).swapaxes(1, 2).reshape(shape)


def _entropy(h_CND, w_DV, temperature, count):
    """Return the entropy of each distribution, differentiable, and 0 in the chunks from `count`
    on."""

    def entropy(h_ND):
        logits = (
            jnp.dot(h_ND, w_DV.astype(h_ND.dtype), preferred_element_type=jnp.float32) / temperature
        )
        logp = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    @jax.checkpoint  # without it, every chunk would keep a copy of w_DV for its backward pass
    def of_chunk(_, xs):
        i, h_ND = xs
        return None, jax.lax.cond(
            i < count, entropy, lambda h: jnp.zeros(len(h), jnp.float32), h_ND
        )

    return jax.lax.scan(of_chunk, None, (jnp.arange(len(h_CND)), h_CND))[1]


def _compaction(mask_Sn):
    """Return the permutation that moves trained tokens to the front in their order, and its
    inverse."""
    on_Sn = mask_Sn > 0
    trained_Sn = jnp.cumsum(on_Sn, axis=1)
    others_Sn = jnp.cumsum(~on_Sn, axis=1) + trained_Sn[:, -1:]
    back_Sn = jnp.where(on_Sn, trained_Sn, others_Sn) - 1
    return jnp.argsort(~on_Sn, axis=1, stable=True), back_Sn


@jax.custom_vjp
def _permute(x_Sn, index_Sn, inverse_Sn):
    """Return x[s, index[s]]. The gradient is the inverse permutation: a gather, where JAX would use
    a scatter."""
    return jax.vmap(lambda x, index: x[index])(x_Sn, index_Sn)


_permute.defvjp(
    lambda x, index, inverse: (_permute(x, index, inverse), (index, inverse)),
    lambda saved, g: (_permute(g, saved[1], saved[0]), None, None),
)


# --- loss, metrics and the optimizer --------------------------------------------------------------


def _micro_loss(
    forward,
    loss: losses.TokenLoss,
    terms: dict[str, Any],
    adapters: lora.LoRA | None,
    params,
    base,
    rows,
):
    """Return the loss of a micro-batch, the sums and maxima of its metrics, and its
    log-probabilities. base: what adapters are added to."""
    if base is not None:
        params = lora.join(base, params, adapters)
    logp_RT, entropy_RT = forward(params, rows)
    loss_RT, stats = losses.token_loss(loss, logp_RT, entropy_RT, rows, **terms)
    kept = _sums(stats), _maxima(stats), jax.lax.stop_gradient(logp_RT)
    return jnp.sum(rows["weight"] * loss_RT), kept


def _gradient(micro_loss: Callable[..., Any], state: State, rows: dict[str, jax.Array]) -> Any:
    """Return ((loss, (sums, maxima, logp_RT)), float32 gradients) of a micro-batch."""
    value, grads = jax.value_and_grad(micro_loss, has_aux=True)(
        state["params"], state.get("base"), rows
    )
    return value, jax.tree.map(_wide, grads)


def _sums(stats: losses.Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return the sum and the count of each metric, which add up over micro-batches."""
    sums = {}
    for name, (value_RT, mask_RT) in stats.items():
        on_RT = mask_RT > 0
        sums[name] = (
            jnp.sum(jnp.where(on_RT, value_RT, 0).astype(jnp.float32)),
            jnp.sum(on_RT).astype(jnp.float32),
        )
    return sums


def _maxima(stats: losses.Stats) -> dict[str, jax.Array]:
    """Return the largest ratio (at least 1), gap to the engine and importance weight of the tokens
    that train."""
    names = {
        "ratio": "ratio/max",
        "mismatch/abs": "mismatch/max",
        "importance_weight": "importance_weight/max",
    }
    masked = {"ratio": 1.0}
    return {
        names[name]: jnp.max(jnp.where(mask_RT > 0, value_RT, masked.get(name, 0)))
        for name, (value_RT, mask_RT) in stats.items()
        if name in names
    }


def _apply(state, optimizer, loss, grads, metrics, on_device):
    """Return the state and metrics after one optimizer step, which is skipped if loss or gradient
    is not finite.

    on_device: shardings that offloaded moments are moved to for the step; None = they are on the
    device already.
    """
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    opt = state["opt"] if on_device is None else jax.device_put(state["opt"], on_device)
    wide = jax.tree.map(_wide, state["params"])
    updates, new_opt = optimizer.update(grads, opt, wide)
    params = optax.apply_updates(wide, updates)
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves(state["params"])):
        params = optim.rounded(
            params, state["params"], jax.random.fold_in(jax.random.key(0), state["step"])
        )
    updated = {"params": params, "opt": new_opt}
    unchanged = {"params": state["params"], "opt": opt}
    skipped = 1 - finite.astype(jnp.int32)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), updated, unchanged)
    new |= {"step": state["step"] + 1, "skipped": state["skipped"] + skipped}
    new |= {"base": state["base"]} if "base" in state else {}
    return new, metrics | {"loss": loss, "grad_norm": norm, "skipped": skipped}
