"""AdamW, and Muon for imitation, with gradient clipping and a learning-rate schedule, put together from optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

SCHEDULES = ("constant", "linear", "cosine")


def schedule(
    *, learning_rate: float, decay: str = "constant", warmup_steps: int = 0, total_steps: int = 0, final: float = 0.0
) -> optax.Schedule:
    """Learning rate by update: a linear warm-up, then constant, or falling to `final * learning_rate` at `total_steps`.

    The first update already moves: warm-up goes 1/w, 2/w, ..., 1.
    """
    if decay not in SCHEDULES:
        raise ValueError(f"decay={decay!r}: choose one of {', '.join(SCHEDULES)}")
    if decay != "constant" and total_steps <= warmup_steps:
        raise ValueError(f"decay={decay!r} needs total_steps > warmup_steps, got {total_steps} and {warmup_steps}")
    after = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, final * learning_rate, total_steps - warmup_steps),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, total_steps - warmup_steps, alpha=final),
    }[decay]()
    if warmup_steps <= 1:
        return after
    warmup = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps])


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on, a tree of bool: matrices and embeddings, neither norms nor biases.

    By name: stacked layers give norms and biases a second axis, so the shape does not tell.
    """
    return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "bias")), params)


def optimizer(
    *,
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm (None = none); `learning_rate` is a number or a `schedule`."""
    adamw = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
    return adamw if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), adamw)


# Of the stacked matrices of the layers: (axes of the input, axes of the output).
MATRICES = {
    "q": ((1,), (2, 3)),
    "k": ((1,), (2, 3)),
    "v": ((1,), (2, 3)),
    "o": ((1, 2), (3,)),
    "gate": ((1,), (2,)),
    "up": ((1,), (2,)),
    "down": ((1,), (2,)),
}


def muon(
    *,
    learning_rate: float | optax.Schedule,
    adam_learning_rate: float | optax.Schedule,
    b2: float = 0.999,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, Adam for embeddings, norms and biases.

    From random weights it learns to copy in about half of AdamW's updates; fine-tuning has no such phase to hurry.
    """

    def dimensions(params: Any) -> Any:
        def one(path: Any, _: Any) -> Any:
            axes = MATRICES.get(path[-1].key)
            return axes and optax.contrib.MuonDimensionNumbers(*axes)

        return jax.tree.map_with_path(one, params)

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.contrib.muon(
            learning_rate,
            adam_b2=b2,
            adam_learning_rate=adam_learning_rate,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def rounded(params: Any, like: Any, key: jax.Array) -> Any:
    """float32 `params` in the dtypes of `like`; to bfloat16 by chance, up or down, so that the expectation is exact.

    Rounding to the nearest would lose every update below 1/512 of a weight. Which way each goes depends on `key` and on
    its place in the array, not on how it is sharded.
    """
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))

    def one(x: jax.Array, old: jax.Array, key: jax.Array) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return x.astype(old.dtype)
        noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        short = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), short, x).astype(jnp.bfloat16)

    return jax.tree.unflatten(tree, [one(*args) for args in zip(leaves, jax.tree.leaves(like), keys)])
