"""The update: one jitted, donated, sharded step per mini-batch, and the log-probabilities of packed rows.

Both walk over micro-batches in a loop whose trip count is data, so another number of rows needs no new program, and
both send only the hidden states of tokens that train through the unembedding. Every token's weight in the loss is known
before the loop starts: the size of a micro-batch changes memory and speed, not the result.

Letters: M micro-batches of r rows of T tokens; S shards of the batch; n = r * T / S tokens per shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import mesh as meshes
from models import qwen
from rl import losses
from rl.packing import Packed

State = dict[str, Any]


def state_shardings(config: qwen.Config, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> State | None:
    """Where each part of the state lives: the moments of a parameter with the parameter, counters everywhere."""
    if mesh is None:
        return None
    params = meshes.shardings(config, mesh)
    shapes = jax.eval_shape(partial(qwen.init, config, 0))
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, where: where, jax.eval_shape(optimizer.init, shapes), params,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    return {"params": params, "opt": opt, "step": everywhere, "skipped": everywhere}


def init_state(
    config: qwen.Config, params: qwen.Params, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> State:
    """{"params", "opt", "step": updates asked for, "skipped": of those, not applied}, placed on the mesh."""

    def make(params):
        zero = jnp.zeros((), jnp.int32)
        return {"params": params, "opt": optimizer.init(params), "step": zero, "skipped": zero + 0}

    shardings = state_shardings(config, optimizer, mesh)
    if mesh is not None:
        params = jax.device_put(params, shardings["params"])
    return jax.jit(make, out_shardings=shardings)(params)


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
    remat: bool = False,
    chunk: int = 1024,
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
      dtype, remat: of the forward pass, see `qwen.hidden`. chunk: tokens per pass through the unembedding.
      loss: see `losses.token_loss`.

    Metrics are scalars on the device. "loss" is what was minimised, "grad_norm" before clipping, "skipped" is 1 when
    either was not finite: then parameters and optimizer stay as they were. "tokens" trained. The others are means
    over trained tokens, see `losses`; "ratio/max" and "mismatch/max" (largest |log pi - log pi_sampled|) are maxima.
    "mismatch/*" is the gap between engine and learner as long as the weights are those that sampled.
    """
    shards = _check_shards(mesh, micro_rows)
    entropy_gradient = bool(loss.get("entropy_coef"))

    def micro_loss(params, micro):
        logp_RT, entropy_RT = _logp(
            config, params, micro, shards, temperature=temperature, dtype=dtype, remat=remat, chunk=chunk,
            entropy_gradient=entropy_gradient,
        )  # fmt: skip
        loss_RT, stats = losses.token_loss(logp_RT, entropy_RT, micro, **loss)
        peaks = {} if loss.get("objective") == "nll" else _peaks(logp_RT, micro)
        return jnp.sum(micro["weight"] * loss_RT), (_sums(stats), peaks)

    def step(state, batch):
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in ("mask", "segments")}
        weight = losses.aggregation_weights(flat["mask"], flat["segments"], aggregate=aggregate, horizon=horizon)
        batch = batch | {"weight": weight.reshape(batch["mask"].shape)}
        grad = jax.value_and_grad(micro_loss, has_aux=True)

        def body(i, totals):
            (loss, (sums, peaks)), grads = grad(state["params"], _micro(batch, i))
            added = jax.tree.map(jnp.add, totals[:3], (loss, sums, grads))
            return *added, jax.tree.map(jnp.maximum, totals[3], peaks)

        (loss, (sums, peaks)), grads = jax.eval_shape(grad, state["params"], _micro(batch, 0))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, sums, grads, peaks))
        loss, sums, grads, peaks = jax.lax.fori_loop(0, _trips(batch), body, start)
        means = {name: total / jnp.maximum(count, 1) for name, (total, count) in sums.items()}
        return _apply(state, optimizer, loss, grads, means | peaks | {"tokens": jnp.sum(batch["mask"])})

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(config, optimizer, mesh), None))

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
    chunk: int = 1024,
) -> Callable[[qwen.Params, Packed], np.ndarray]:
    """Make `logp(params, packed) -> logp_RT`: float32 on the host, 0 where nothing trains. Arguments: `make_update`."""
    shards = _check_shards(mesh, micro_rows)

    def score(params, batch):
        def body(i, out):
            logp, _ = _logp(config, params, _micro(batch, i), shards, temperature=temperature, dtype=dtype, chunk=chunk)
            return jax.lax.dynamic_update_index_in_dim(out, logp, i, 0)

        return jax.lax.fori_loop(0, _trips(batch), body, jnp.zeros(batch["mask"].shape, jnp.float32))

    jitted = jax.jit(score)

    def logp(params, packed):
        out = jitted(params, _batch(packed, mesh, micro_rows, capacity_rows))
        return np.asarray(out).reshape(-1, out.shape[-1])[: packed.rows]

    logp.jitted = jitted
    return logp


# --- batches ---------------------------------------------------------------------------------------------------------


def _check_shards(mesh: Mesh | None, micro_rows: int) -> int:
    """How many shards rows are spread over."""
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    if micro_rows < 1 or micro_rows % shards:
        raise ValueError(
            f"micro_rows={micro_rows} must be a multiple of {shards}, the devices that rows are spread over"
        )
    return shards


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
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec)))


def _micro(batch: dict[str, jax.Array], i) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_index_in_dim(array, i, 0, keepdims=False) for name, array in batch.items()}


def _trips(batch: dict[str, jax.Array]) -> jax.Array:
    """Micro-batches that hold anything; packing leaves the empty ones at the end."""
    return jnp.sum(jnp.any(batch["segments"] > 0, axis=(1, 2)))


# --- log-probabilities of the tokens that train ----------------------------------------------------------------------


def _logp(
    config, params, micro, shards: int, *, temperature, dtype, chunk: int, remat: bool = False,
    entropy_gradient: bool = False,
):  # fmt: skip
    """(logp_RT, entropy_RT) of a micro-batch, 0 where a token does not train.

    The trained tokens of each shard move to its front, and go through the unembedding `chunk` at a time; chunks without
    any are skipped.
    """
    h_RTD = qwen.hidden(
        config, params, micro["tokens"], micro["positions"], micro["segments"], dtype=dtype, remat=remat
    )
    w_DV = qwen.unembed(config, params)
    mask_Sn = micro["mask"].reshape(shards, -1)
    n = mask_Sn.shape[1]
    front_Sn, back_Sn = _compaction(mask_Sn)
    # The token at t is predicted from t - 1. The first token of a row never trains, so no row reads from another.
    h_SnD = _permute(h_RTD.reshape(shards, n, -1), (front_Sn - 1) % n, jnp.roll(back_Sn, -1, axis=1))
    targets_Sn = jnp.take_along_axis(micro["tokens"].reshape(shards, n), front_Sn, axis=1)

    size = min(n, max(1, chunk // shards))
    chunks = -(-n // size)
    pad = ((0, 0), (0, chunks * size - n))
    h_CSsD = jnp.pad(h_SnD, (*pad, (0, 0))).reshape(shards, chunks, size, -1).swapaxes(0, 1)
    targets_CSs = jnp.pad(targets_Sn, pad).reshape(shards, chunks, size).swapaxes(0, 1)
    trained = jnp.max(jnp.sum(mask_Sn, axis=1))

    def through(h_SsD, targets_Ss):
        h_ND, targets_N = h_SsD.reshape(shards * size, -1), targets_Ss.reshape(-1)
        logp_N, entropy_N = qwen.token_logp(h_ND, w_DV, targets_N, temperature=temperature, chunk=shards * size)
        if entropy_gradient:
            entropy_N = _entropy(h_ND, w_DV, temperature)
        return logp_N.reshape(shards, size), entropy_N.reshape(shards, size)

    @jax.checkpoint  # else every chunk would keep a copy of w_DV for its backward pass
    def one(_, xs):
        start, h_SsD, targets_Ss = xs
        nothing = jnp.zeros((shards, size), jnp.float32)
        skip = lambda *_: (nothing, nothing)  # noqa: E731
        return None, jax.lax.cond(start < trained, through, skip, h_SsD, targets_Ss)

    _, pair = jax.lax.scan(one, None, (size * jnp.arange(chunks), h_CSsD, targets_CSs))
    on_RT = micro["mask"] > 0

    def spread(y_CSs):
        y_Sn = _permute(y_CSs.swapaxes(0, 1).reshape(shards, -1)[:, :n], back_Sn, front_Sn)
        return jnp.where(on_RT, y_Sn.reshape(on_RT.shape), 0)

    return spread(pair[0]), spread(pair[1])


def _entropy(h_ND, w_DV, temperature):
    """Entropy of each distribution, with its gradient."""
    logits = jnp.dot(h_ND, w_DV.astype(h_ND.dtype), preferred_element_type=jnp.float32) / temperature
    logp = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


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


def _peaks(logp_RT, micro) -> dict[str, jax.Array]:
    own_RT = (micro["mask"] > 0) & ~(micro["guided"] > 0)
    ratio = jnp.exp(losses.log_ratio(logp_RT, micro["old_logp"], micro["mask"]))
    gap = jnp.abs(losses.log_ratio(logp_RT, micro["logp"], own_RT))
    return jax.lax.stop_gradient({"ratio/max": jnp.max(ratio), "mismatch/max": jnp.max(gap)})


def _apply(state, optimizer, loss, grads, metrics):
    """One optimizer step, or none at all if the loss or the gradient is not finite."""
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    moved = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    kept = {"params": state["params"], "opt": state["opt"]}
    skipped = 1 - finite.astype(jnp.int32)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, kept)
    new |= {"step": state["step"] + 1, "skipped": state["skipped"] + skipped}
    return new, metrics | {"loss": loss, "grad_norm": norm, "skipped": skipped}
