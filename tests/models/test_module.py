"""Tests of the model as Flax's users know modules: its state, shardings, shapes, and training with
Flax's own tools."""

import inspect
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AbstractMesh
from numpy.testing import assert_allclose, assert_array_equal

from models import hf, lora, qwen
from models import mesh as meshes
from models.qwen import PRESETS, Qwen
from tests.models.helpers import assert_equal
from tests.models.test_qwen import CONFIG, QWEN3

TOKENS_RT = jnp.arange(12).reshape(2, 6)
# Axes of size 1 split nothing; ours leaves them out.
MESH = AbstractMesh((2, 2, 2, 2), meshes.AXES)
RULES = [(axis, tuple(names.split(","))) for axis, names in meshes.RULES.items() if names]
RULES.append(("layers", None))


def test_the_module_holds_the_parameters_and_computes_their_logits():
    params = qwen.init(CONFIG, 0)
    model = qwen.merge(CONFIG, params)
    assert jax.tree.structure(model.params) == jax.tree.structure(params)
    assert_equal(model.params, params)
    positions_RT = jnp.tile(jnp.arange(6), (2, 1))
    h_RTD = qwen.merge(CONFIG, params).hidden(TOKENS_RT, positions_RT, jnp.ones_like(TOKENS_RT))
    inside = jax.jit(lambda p: qwen.merge(CONFIG, p)(TOKENS_RT))(params)
    assert inside.shape == (2, 6, CONFIG.vocab) and inside.dtype == jnp.float32
    assert_allclose(inside, h_RTD @ qwen.unembed(CONFIG, params), atol=1e-5)
    half = model(TOKENS_RT, dtype=jnp.bfloat16)
    assert half.dtype == jnp.float32
    assert_allclose(half, inside, atol=0.1)


@pytest.mark.parametrize("config", [CONFIG, QWEN3])
def test_a_new_module_has_the_declared_shapes_and_deviations(config):
    model = Qwen(config, rngs=nnx.Rngs(0))
    declared = qwen.by_name(qwen.weights(config))
    values = qwen.by_name(model.params)
    assert values.keys() == declared.keys()
    for name, weight in declared.items():
        assert values[name].shape == weight.shape
        if weight.std:
            spread = float(jnp.std(values[name])) / weight.std
            assert abs(spread - 1) < 4 / math.sqrt(2 * values[name].size), name
        else:
            assert_array_equal(values[name], float(weight.std is None))
    per_layer = values["layers.q"]
    assert not np.array_equal(per_layer[0], per_layer[1])
    assert np.isfinite(model(TOKENS_RT)).all()


def test_flax_derives_the_shardings_that_the_mesh_gives():
    state = nnx.state(qwen.abstract(PRESETS["7b"], None), nnx.Param)
    with logical_axis_rules(RULES):
        found = nnx.to_pure_dict(nnx.get_named_sharding(state, MESH))
    expected = meshes.places(qwen.weights(PRESETS["7b"]), MESH)
    shapes = qwen.shapes(PRESETS["7b"])
    same = jax.tree.map(
        lambda a, b, shape: a.is_equivalent_to(b, len(shape.shape)), found, expected, shapes
    )
    assert all(jax.tree.leaves(same)) and len(jax.tree.leaves(same)) == 15


def test_the_idioms_in_the_document_work(tmp_path, capsys):
    """The module is displayed, planned, sharded, and trained by plain optax on its state, in the
    lines that docs/models.md shows."""
    folder, rules, mesh, optimizer, tokens_RT = tmp_path, RULES, MESH, optax.sgd(0.5), TOKENS_RT
    hf.save(folder, CONFIG, qwen.init(CONFIG, 0))
    model = Qwen.load(folder)
    nnx.display(model)
    plan = nnx.state(nnx.eval_shape(lambda: Qwen(PRESETS["72b"], rngs=nnx.Rngs(0))), nnx.Param)
    with logical_axis_rules(rules):
        places = nnx.get_named_sharding(plan, mesh)
    graphdef, params = nnx.split(model, nnx.Param)
    gradients = jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p)(tokens_RT).var()))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    nnx.update(model, optax.apply_updates(params, updates))
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    shown = re.search(r"\n\n((?:    .*\n){3,10})", text[text.index("## In Flax") :])[1]
    own = inspect.getsource(test_the_idioms_in_the_document_work).splitlines()
    assert {line.partition("  # ")[0] for line in shown.splitlines()} <= set(own)
    displayed = capsys.readouterr().out
    assert "MLP(" in displayed and "out_sharding=('layers', 'mlp', 'embed')" in displayed
    assert nnx.to_pure_dict(places)["layers"]["attention"]["q"].spec[2] == "tensor"
    before = Qwen.load(folder).params
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), before, model.params)
    assert min(jax.tree.leaves(moved)) > 0


def test_adapters_are_lora_parameters_that_change_nothing_at_first():
    adapters = lora.LoRA(3, targets=("q", "down"))
    model = Qwen(CONFIG, rngs=nnx.Rngs(0), lora=adapters)
    state = nnx.state(model, nnx.LoRAParam)
    assert set(qwen.by_name(nnx.to_pure_dict(state))) == {
        f"layers.{name}_lora_{side}" for name, side in itertools.product(("q", "down"), "ab")
    }
    base = {k: v for k, v in qwen.by_name(model.params).items() if "_lora_" not in k}
    plain = qwen.merge(CONFIG, qwen.nested(CONFIG, base))
    assert_array_equal(model(TOKENS_RT), plain(TOKENS_RT))
    again = qwen.merge(CONFIG, model.params)  # the adapters are found among the parameters
    assert_array_equal(again(TOKENS_RT), model(TOKENS_RT))


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
    assert_equal(Qwen.load(tmp_path / "b").params, model.params)
