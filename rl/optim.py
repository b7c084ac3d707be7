"""AdamW, and Muon for imitation, with gradient clipping and a learning-rate schedule, from
optax."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from models import qwen
from rl import rounding


def schedule(
    *, lr: float, schedule: str = "constant", warmup: int = 0, steps: int = 0, final: float = 0.0
) -> optax.Schedule:
    """Return a function update -> learning rate: a linear warm-up, then constant or a decay to
    `final * lr` at `steps`.

    The warm-up is 1/w, 2/w, ..., 1, so that the first update has an effect.
    """
    schedules = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, final * lr, steps - warmup),
        "cosine": lambda: optax.cosine_decay_schedule(lr, steps - warmup, alpha=final),
    }
    if schedule not in schedules:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(schedules)}")
    if schedule != "constant" and steps <= warmup:
        raise ValueError(f"schedule={schedule!r} needs steps > warmup, got {steps} and {warmup}")
    after = schedules[schedule]()
    if not warmup:
        return after
    rise = optax.linear_schedule(lr / warmup, lr, warmup - 1)
    return optax.join_schedules([rise, after], [warmup])


def _scaled_by(rate: float | optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that multiplies updates by the rate at `position`."""
    rate_at = rate if callable(rate) else optax.constant_schedule(rate)

    def update(updates: Any, state: Any, params: Any = None, *, position: Any, **_: Any) -> Any:
        return jax.tree.map(lambda x: rate_at(position) * x, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def decayed(params: Any) -> Any:
    """Return a tree of bool, True for parameters with weight decay: matrices and embeddings, not
    norms and biases.

    The names decide, not the number of axes: stacked norms and biases have several axes too.
    """
    return jax.tree.map_with_path(
        lambda path, _: not path[-1].key.endswith(("norm", "bias")), params
    )


def optimizer(
    *,
    lr: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """Return AdamW after clipping by the global norm (0 = no clipping).

    lr: a number, or a `schedule`, whose update is the `position` that `update` is given by name: it
    follows the run, not the updates that were made.
    """
    adam = optax.adamw(1.0, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
    return _clipped(clip, adam, _scaled_by(lr))


def _clipped(clip: float, *steps: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(*([clip_by_norm(clip)] if clip else []), *steps)


def global_norm(gradients: Any) -> jax.Array:
    """Return the norm of all gradients together. Their squares are added in the order of the
    parameters' names: the sum depends on its order, and so would on the modules of the model."""
    return optax.global_norm(qwen.by_name(gradients))


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` with the norm of `global_norm`."""

    def clipped(updates: Any, params: Any = None) -> Any:
        norm = global_norm(updates)
        return jax.tree.map(
            lambda x: jnp.where(norm < limit, x, (x / norm.astype(x.dtype)) * limit), updates
        )

    return optax.stateless(clipped)


def muon(
    *,
    lr: float | optax.Schedule,
    adam_lr: float | optax.Schedule,
    b2: float = 0.999,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """Return Muon (Jordan et al. 2024) for the matrices of the layers at `lr`, and Adam for
    embeddings, norms and biases at `adam_lr`; both rates as in `optimizer`.

    Both follow clipping by the global norm (0 = no clipping). From random weights Muon learns to
    copy in about half of AdamW's updates; fine-tuning starts after that phase and gains nothing
    from it.
    """

    def kinds(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: "muon" if path[-1].key in qwen.INPUTS else "adam", params
        )

    def axes(path: Any, matrix: jax.Array) -> optax.contrib.MuonDimensionNumbers:
        outputs = 1 + qwen.INPUTS[path[-1].key]  # behind the axes of the layers and of the inputs
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(1, outputs)), tuple(range(outputs, matrix.ndim))
        )

    # optax's Muon has an Adam for the other parameters too, with Nesterov's momentum like its own.
    matrices = optax.contrib.muon(
        1.0, muon_weight_dimension_numbers=partial(jax.tree.map_with_path, axes)
    )
    transforms = {
        "muon": optax.chain(matrices, _scaled_by(lr)),
        "adam": optax.chain(optax.adam(1.0, b2=b2), _scaled_by(adam_lr)),
    }
    return _clipped(clip, optax.partition(transforms, kinds))


def rounded(params: Any, like: Any, key: jax.Array) -> Any:
    """Return float32 `params` in the dtypes of `like`, with stochastic rounding to bfloat16
    (rl/rounding.py)."""
    names = qwen.by_name(params)
    keys = dict(zip(names, jax.random.split(key, len(names))))

    def rounded_leaf(path: Any, x: jax.Array, old: jax.Array) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return x.astype(old.dtype)
        return rounding.stochastic(x, keys[qwen.name_of(path)])

    return jax.tree.map_with_path(rounded_leaf, params, like)
