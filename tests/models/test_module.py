"""Tests of the Flax NNX module: the same weights and numbers as the functions, and training with
Flax's own tools."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import hf, qwen
from models.module import Qwen

CONFIG = qwen.Config(vocab=61, d_model=24, layers=2, heads=4, kv_heads=2, head_dim=6, d_ff=40)
TOKENS_RT = jnp.arange(12).reshape(2, 6)


def test_the_module_holds_the_parameters_and_computes_their_logits():
    params = qwen.init(CONFIG, 0)
    model = Qwen(CONFIG, params)
    assert jax.tree.structure(model.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    h_RTD = qwen.hidden(
        CONFIG, params, TOKENS_RT, jnp.tile(jnp.arange(6), (2, 1)), jnp.ones_like(TOKENS_RT)
    )
    inside = jax.jit(lambda p: Qwen(CONFIG, p)(TOKENS_RT))(params)
    assert inside.shape == (2, 6, CONFIG.vocab) and inside.dtype == jnp.float32
    np.testing.assert_allclose(inside, h_RTD @ qwen.unembed(CONFIG, params), atol=1e-5)
    half = model(TOKENS_RT, dtype=jnp.bfloat16)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, inside, atol=0.1)


def test_a_checkpoint_is_loaded_trained_by_flax_and_saved(tmp_path):
    hf.save(tmp_path / "a", CONFIG, qwen.init(CONFIG, 0))
    model = Qwen.load(tmp_path / "a")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model):
        logits_RTV = model(TOKENS_RT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_RTV, TOKENS_RT[:, 1:]).mean()

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    first, *_, last = [float(step(model, optimizer)) for _ in range(6)]
    assert last < first
    hf.save(tmp_path / "b", model.config, model.params)
    jax.tree.map(np.testing.assert_array_equal, Qwen.load(tmp_path / "b").params, model.params)
