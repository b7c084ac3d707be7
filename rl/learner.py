"""The optimizer step on a mini-batch, and the log-probabilities of packed rows, jitted and sharded.

Both loop over micro-batches, and the trip count is data: fewer rows need no recompilation. Every
token's weight in the loss is known before the loop starts, so the size of a micro-batch changes
memory and speed, not the result. `rl.forward` has the pass through the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import lora, qwen
from models import mesh as meshes
from rl import losses, optim
from rl.forward import Forward, Rows, device_batch, over_micro_batches, token_logp
from rl.packing import Packed

State = dict[str, Any]
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement and precision of the training state.

    rules: logical axes to mesh axes, see models/mesh.py. master: dtype of the trained parameters;
    bfloat16 is rounded stochastically, so that updates smaller than its resolution add up. offload:
    keep the optimizer's moments in host memory between updates. lora: train adapters instead of the
    weights.
    """

    rules: Mapping[str, str] = dataclasses.field(default_factory=lambda: meshes.RULES)
    master: str = "float32"
    offload: bool = False
    lora: lora.LoRA | None = None


PLAIN = Layout()


# --- the state ------------------------------------------------------------------------------------


def state_shardings(
    config: qwen.Config, optimizer: optax.GradientTransformation, mesh: Mesh | None, layout: Layout
) -> State | None:
    """Return the sharding of each part of the state: moments like their parameters, counters
    replicated."""
    if mesh is None:
        return None
    base = meshes.places(qwen.weights(config), mesh, layout.rules)
    params = meshes.places(qwen.weights(config, layout.lora), mesh, layout.rules)
    replicated = NamedSharding(mesh, PartitionSpec())
    moments = _in_memory("pinned_host", params) if layout.offload else params
    opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, qwen.shapes(config, layout.master, layout.lora)), moments,
        transform_non_params=lambda _: replicated,
    )  # fmt: skip
    state = {"params": params, "opt": opt, "step": replicated, "skipped": replicated}
    return state | {"base": base} if layout.lora else state


def _in_memory(kind: str, shardings: Any) -> Any:
    """Return the same shardings in another kind of memory."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), shardings)


def state_shapes(
    config: qwen.Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    layout: Layout = PLAIN,
    *,
    frozen_dtype: Any = jnp.float32,
) -> State:
    """Return the state as ShapeDtypeStructs with their shardings, to compile an update without any
    weights.

    frozen_dtype: dtype of the weights that adapters are added to.
    """
    params = qwen.shapes(config, layout.master, layout.lora)
    state = jax.eval_shape(partial(_new_state, optimizer), params)
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
    layout: Layout = PLAIN,
    *,
    seed: int = 0,
) -> State:
    """Return {"params", "opt", "step": calls of update, "skipped": calls that changed nothing},
    placed on the mesh.

    With adapters, "params" are the adapters, drawn from `seed`, and "base" the given weights in
    their dtype.
    """
    base, shardings = {}, state_shardings(config, optimizer, mesh, layout)
    if layout.lora:
        base, params = {"base": params}, qwen.init(config, seed, lora=layout.lora)
        if shardings is not None:
            base = meshes.put(base, {"base": shardings.pop("base")})
    if shardings is not None:
        params = meshes.put(params, shardings["params"])
    params = jax.tree.map(lambda x: x.astype(layout.master, copy=False), params)
    return jax.jit(partial(_new_state, optimizer), out_shardings=shardings)(params) | base


def _new_state(optimizer: optax.GradientTransformation, params: qwen.Params) -> State:
    zero = jnp.zeros((), jnp.int32)
    return {
        "params": params,
        "opt": optimizer.init(_wide(params)),
        "step": zero,
        "skipped": zero + 0,
    }


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def whole(state: State, layout: Layout = PLAIN) -> qwen.Params:
    """Return the parameters as `LogP` takes them, with adapters separate from the frozen
    weights."""
    params = state["params"]
    return lora.join(state["base"], params, layout.lora) if layout.lora else params


def merged(state: State, layout: Layout = PLAIN) -> qwen.Params:
    """Return the policy as plain parameters, with adapters added to their weights, for engines and
    exports."""
    params = state["params"]
    return lora.merge(state["base"], params, layout.lora) if layout.lora else params


def updates(state: State) -> int:
    """Return how many updates made this state; -1 if one that did not end has consumed it."""
    try:
        return int(state["step"])
    except RuntimeError:  # the array was deleted, or never computed
        return -1


# --- the two programs -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Update:
    """One optimizer step on one mini-batch: `update(state, packed) -> (state, metrics)`, see
    `make_update`. The state is donated."""

    # the compiled function of the state, the arrays of `device_batch`, position, seed and head
    jitted: Any
    forward: Forward
    weights: Callable[[Packed], np.ndarray]  # of the tokens in the loss, (R, T) float32
    needs_reference: bool
    keep_logp: bool

    def __call__(
        self, state: State, packed: Packed, *, position: float | None = None, seed: int = 0
    ) -> tuple[State, Metrics]:
        """Make the step.

        position: where the schedule of the learning rate stands, in updates; None = after as many
        as the state has seen. seed: of the noise with which bfloat16 masters are rounded.

        Raises ValueError for a mini-batch without rows, or without the log-probabilities that a KL
        penalty needs.
        """
        if packed.rows == 0:
            raise ValueError("an update needs at least one row: every rollout was dropped")
        if self.needs_reference and packed.ref_logp_RT is None:
            raise ValueError(
                "a KL penalty (kl_coef) needs packed.ref_logp_RT, the reference's log-probabilities"
            )
        place = state["step"] if position is None else position
        weighted = dataclasses.replace(packed, weight_RT=self.weights(packed))
        arrays = _arrays(weighted, self.forward)
        place, noise = np.float32(place), np.uint32(seed)
        state, metrics = self.jitted(state, arrays, place, noise, packed.head_D)
        if self.keep_logp:
            metrics["logp_RT"] = _on_host(metrics["logp_RT"], packed)
        return state, metrics


@dataclasses.dataclass(frozen=True)
class LogP:
    """`logp(params, packed) -> logp_RT`: float32 on the host, 0 at tokens that do not train."""

    jitted: Any  # the compiled function of the parameters and the arrays of `device_batch`
    forward: Forward

    def __call__(self, params: qwen.Params, packed: Packed) -> np.ndarray:
        return _on_host(self.jitted(params, _arrays(packed, self.forward)), packed)


def _arrays(packed: Packed, forward: Forward) -> Rows:
    return device_batch(packed, forward.mesh, forward.micro, forward.capacity_rows)


def _on_host(x_MrT: Array, packed: Packed) -> np.ndarray:
    """Return the rows of `packed`, (R, T), from those of all micro-batches."""
    return np.asarray(x_MrT).reshape(-1, x_MrT.shape[-1])[: packed.rows]


def _replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Return the replicated sharding, for values that the host reads."""
    return None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec())


def make_logp(forward: Forward) -> LogP:
    """Return the program that computes log-probabilities."""
    forward = dataclasses.replace(forward, remat="none")

    def score(params: qwen.Params, batch: Rows) -> Array:
        def work(rows: Rows) -> tuple[tuple[()], tuple[()], Array]:
            return (), (), token_logp(forward, params, rows)[0]

        return over_micro_batches(work, batch, forward.widths)[2]

    return LogP(jax.jit(score, out_shardings=_replicated(forward.mesh)), forward)


def make_update(
    forward: Forward,
    *,
    optimizer: optax.GradientTransformation,
    loss: losses.TokenLoss,
    aggregate: str = "token-mean",
    max_tokens: int = 1,
    layout: Layout = PLAIN,
    keep_logp: bool = False,
    **terms: Any,
) -> Update:
    """Return the program of one optimizer step on one mini-batch.

    Args:
      optimizer: see `rl.optim`.
      loss: see `rl.losses`; its arguments are bound.
      aggregate, max_tokens: see `losses.aggregation_weights`; they apply to the whole mini-batch.
      layout: placement and precision of the state.
      keep_logp: also return, as the metric "logp_RT", the log-probabilities that the update
        computed: (R, T) float32 on the host, 0 at tokens that do not train.
      terms: the KL penalty, entropy bonus and importance weights, see `losses.token_loss`.

    Metrics are scalars on the device. "loss" is the minimised value, "grad_norm" the norm before
    clipping. "skipped" is 1 if either is not finite: then parameters and optimizer stay as they
    were. "tokens" is the number of trained tokens. The others are means over trained tokens, see
    `rl.losses`, with "tokens/NAME" for the number of those that NAME is a mean of, except the
    maxima "ratio/max", "importance_weight/max" and "mismatch/max" (of
    |log pi - log pi_sampled|). While the weights are still those that sampled, "mismatch/*"
    measures the gap between engine and learner.
    """
    mesh = forward.mesh
    shardings = state_shardings(forward.config, optimizer, mesh, layout)
    on_device = None
    if layout.offload and shardings is not None:
        on_device = _in_memory("device", shardings["opt"])
    entropy_gradient = bool(terms.get("entropy_coef"))

    def weights(packed: Packed) -> np.ndarray:
        return losses.aggregation_weights(
            packed.mask_RT, packed.rollout_RT, aggregate=aggregate, max_tokens=max_tokens
        )

    def micro_loss(
        params: qwen.Params, base: qwen.Params, head_D: Array | None, rows: Rows
    ) -> tuple[Array, tuple[Any, Metrics, Array]]:
        """Return the loss of a micro-batch, the sums and maxima of its metrics, and its
        log-probabilities. base: what adapters are added to. head_D: of values, or None."""
        if layout.lora:
            params = lora.join(base, params, layout.lora)
        logp_RT, entropy_RT, value_RT = token_logp(
            forward, params, rows, entropy_gradient=entropy_gradient, head_D=head_D
        )
        loss_RT, stats = losses.token_loss(
            loss, logp_RT, entropy_RT, rows, value_RT=value_RT, **terms
        )
        kept = _sums(stats), _maxima(stats), jax.lax.stop_gradient(logp_RT)
        return jnp.sum(rows["weight"] * loss_RT), kept

    def step(
        state: State, batch: Rows, position: Array, seed: Array, head_D: Array | None = None
    ) -> tuple[State, Metrics]:
        def work(rows: Rows) -> tuple[Any, Metrics, Metrics]:
            gradient = jax.value_and_grad(micro_loss, has_aux=True)
            (value, (sums, maxima, logp_RT)), grads = gradient(
                state["params"], state.get("base", {}), head_D, rows
            )
            return (value, sums, _wide(grads)), maxima, {"logp_RT": logp_RT} if keep_logp else {}

        (value, sums, grads), maxima, kept = over_micro_batches(work, batch, forward.widths)
        metrics = {name: added / jnp.maximum(count, 1) for name, (added, count) in sums.items()}
        metrics |= {f"tokens/{name}": count for name, (_, count) in sums.items()}
        metrics |= maxima | kept | {"tokens": jnp.sum(batch["mask"])}
        return _apply(state, optimizer, position, seed, value, grads, metrics, on_device)

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, _replicated(mesh)))
    return Update(jitted, forward, weights, bool(terms.get("kl_coef")), keep_logp)


def _sums(stats: losses.Stats) -> dict[str, tuple[Array, Array]]:
    """Return the sum and the count of each metric, which add up over micro-batches."""
    sums = {}
    for name, (value_RT, mask_RT) in stats.items():
        on_RT = mask_RT > 0
        added = jnp.sum(jnp.where(on_RT, value_RT, 0).astype(jnp.float32))
        sums[name] = added, jnp.sum(on_RT).astype(jnp.float32)
    return sums


def _maxima(stats: losses.Stats) -> Metrics:
    """Return the largest ratio (at least 1), gap to the engine and importance weight of the tokens
    that train."""
    maxima = {}
    for name, key, least in (
        ("ratio", "ratio/max", 1.0),
        ("mismatch/abs", "mismatch/max", 0),
        ("importance_weight", "importance_weight/max", 0),
    ):
        if name in stats:
            value_RT, mask_RT = stats[name]
            maxima[key] = jnp.max(jnp.where(mask_RT > 0, value_RT, least))
    return maxima


def _apply(
    state: State,
    optimizer: optax.GradientTransformation,
    position: Array,
    seed: Array,
    loss: Array,
    grads: qwen.Params,
    metrics: Metrics,
    on_device: Any,
) -> tuple[State, Metrics]:
    """Return the state and metrics after one optimizer step, which is skipped if loss or gradient
    is not finite.

    position, seed: see `Update`. on_device: shardings that offloaded moments are moved to for the
    step; None = they are on the device already.
    """
    norm = optim.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    opt = state["opt"] if on_device is None else jax.device_put(state["opt"], on_device)
    wide = _wide(state["params"])
    update = optax.with_extra_args_support(optimizer).update
    updates, new_opt = update(grads, opt, wide, position=position)
    params = optax.apply_updates(wide, updates)
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves(state["params"])):
        params = optim.rounded(params, state["params"], jax.random.key(seed))
    updated = {"params": params, "opt": new_opt}
    unchanged = {"params": state["params"], "opt": opt}
    skipped = 1 - finite.astype(jnp.int32)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), updated, unchanged)
    counters = {"step": state["step"] + 1, "skipped": state["skipped"] + skipped}
    return state | new | counters, metrics | {"loss": loss, "grad_norm": norm, "skipped": skipped}
