"""Stochastic rounding of weights to bfloat16."""

import jax
import jax.numpy as jnp
from jax import Array


def stochastic(x: Array, key: Array) -> Array:
    """Return float32 x in bfloat16, rounded up or down with probabilities that make it exact in
    expectation.

    Rounding to the nearest would lose every update below 1/512 of a weight or, where weights lie
    halfway between two values, as those of a quantised checkpoint often do, make many times as much
    of it. The direction depends on `key` and on the position in the array, not on the sharding.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    short = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), short, x).astype(jnp.bfloat16)
