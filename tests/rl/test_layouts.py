"""Mesh, placement of the state and rematerialisation must not change an update; and adapters."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file

from models import lora, qwen
from models import mesh as meshes
from rl import learner, optim
from rl.forward import Forward
from rl.learner import Layout
from rl.losses.ppo import ppo
from tests.models.helpers import assert_close, assert_equal, noise, with_devices
from tests.rl.test_learner import batch

CONFIG = qwen.Config(vocab=40, d_model=16, layers=2, heads=8, kv_heads=8, head_dim=4, d_ff=32)
ADAPTERS = lora.LoRA(rank=2, alpha=4.0, targets=("q", "o", "gate", "down"))


@functools.cache
def params():
    return qwen.init(CONFIG, 0)


def optimizer():
    # a large eps, so that Adam does not magnify rounding errors
    return optim.optimizer(lr=1e-2, eps=1e-2)


def mesh_of(shape):
    return meshes.make_mesh(dict(zip(meshes.AXES, shape)))


def places(state):
    return jax.tree.map(lambda x: (x.sharding, x.sharding.memory_kind), state)


def outcome(mesh=None, layout=learner.PLAIN, **options):
    """Return [metrics, log-probabilities, gradient, updated weights] of one update, on the host,
    and the state."""
    tx, packed = optimizer(), batch(rows=11)
    state = learner.init_state(CONFIG, jax.tree.map(jnp.copy, params()), tx, mesh, layout)
    before = places(state)
    forward = Forward(CONFIG, mesh, micro=8, chunk=5, **options)
    logp = learner.make_logp(forward)(learner.whole(state, layout), packed)
    update = learner.make_update(forward, optimizer=tx, loss=ppo, kl_coef=0.1, layout=layout)
    state, metrics = update(state, packed)
    assert mesh is None or places(state) == before
    moments = optax.tree_utils.tree_get(state["opt"], "mu")
    flat = [
        np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)])
        for tree in (moments, state["params"])
    ]
    return [{k: float(v) for k, v in metrics.items()}, logp.ravel(), flat[0] / 0.1, flat[1]], state


def assert_same(got, want, rounded=0.0):
    assert_close(got[0], want[0], atol=1e-5, rtol=1e-5 + rounded / 8)
    assert_allclose(got[1], want[1], atol=1e-5, rtol=1e-5)
    for a, b in zip(got[2:], want[2:]):
        atol = 1e-5 + rounded * np.abs(b).max() / 4
        assert_allclose(a, b, atol=atol, rtol=1e-5 + rounded)


def run(call: str):
    return with_devices(f"from tests.rl import test_layouts as t; t.{call}")


def on_meshes(shapes):
    """Compare meshes with one device; runs with 8 simulated devices."""
    want, _ = outcome()
    for shape in shapes:
        got, state = outcome(mesh_of(shape))
        assert_same(got, want)
        gate = state["params"]["layers"]["mlp"]["gate"]
        embed = optax.tree_utils.tree_get(state["opt"], "nu")["embed"]
        for x in (gate, embed):
            assert x.addressable_shards[0].data.size * np.prod(shape[1:]) == x.size
        print(shape, "equal", flush=True)


FEW = [(1, 2, 2, 2)]
EVERY = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(s) == 8 and s not in FEW]


def test_meshes_give_the_same_update_and_share_the_state():
    assert run(f"on_meshes({FEW})").count("equal") == len(FEW)


@pytest.mark.slow
def test_every_mesh_of_eight_devices_gives_the_same_update():
    assert len(EVERY) == 19
    assert run(f"on_meshes({EVERY})").count("equal") == len(EVERY)


LAYOUTS = [
    ("Layout(lora=ADAPTERS, offload=True)", (1, 2, 2, 2), 0.0),
    ("Layout(master='bfloat16')", (1, 2, 2, 2), 2**-7),
    ("Layout(offload=True)", (1, 8, 1, 1), 0.0),
]


def layout_on_a_mesh(layout, shape, rounded):
    """Compare a layout on a mesh with one device; runs with 8 simulated devices."""
    got, state = outcome(mesh_of(shape), layout, remat="full")
    assert_same(got, outcome(None, layout)[0], rounded)
    if layout.offload:
        moments = optax.tree_utils.tree_get(state["opt"], "mu")["layers"]
        for tree, kind in ((moments, "pinned_host"), (state["params"], "device")):
            assert {x.sharding.memory_kind for x in jax.tree.leaves(tree)} == {kind}
    print("equal")


@pytest.mark.parametrize(
    "layout,shape,rounded",
    [LAYOUTS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS[1:])],
)
def test_layouts_give_the_same_update_on_a_mesh(layout, shape, rounded):
    call = f"layout_on_a_mesh(t.{layout.replace('ADAPTERS', 't.ADAPTERS')}, {shape}, {rounded})"
    assert run(call).endswith("equal\n")


def test_rematerialisation_keeps_less_and_less_and_changes_nothing():
    config = qwen.Config(vocab=64, d_model=64, layers=6, heads=4, kv_heads=2, head_dim=16, d_ff=256)
    weights = noise(qwen.shapes(config), 0.1)
    tokens, places = np.arange(512)[None] ** 2 % 64, np.arange(512)[None]

    def gradient(remat):
        loss = lambda p, *a: jnp.mean(qwen.merge(config, p).hidden(*a, remat=remat) ** 2)
        args = weights, tokens, places, np.ones_like(tokens)
        compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
        flops = compiled.cost_analysis()["flops"]
        return compiled(*args), compiled.memory_analysis().temp_size_in_bytes, flops

    assert set(qwen.REMAT) == {"none", "dots", "attention", "full"}
    found, sizes, flops = zip(*map(gradient, ("none", "dots", "attention", "full")))
    assert list(flops) == sorted(flops) and flops[2] < 0.95 * flops[3]  # attention is not run again
    assert list(sizes) == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 2
    same = lambda a, b: assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
    for other in found[1:]:
        jax.tree.map(same, other, found[0])


@pytest.mark.slow
def test_update_memory_does_not_grow_with_vocabulary_times_length():
    """Compare the scratch memory of the compiled update with that of a longer row and of a larger
    head alone."""

    def scratch(vocab, row):
        config = qwen.Config(
            vocab=vocab, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32
        )
        tx = optax.sgd(1.0)
        forward = Forward(config, micro=1, chunk=64, remat="full")
        update = learner.make_update(forward, optimizer=tx, loss=ppo)
        rows = dict.fromkeys(("tokens", "positions", "segments"), np.int32)
        rows |= dict.fromkeys(("mask", "guided"), bool)
        rows |= dict.fromkeys(("advantage", "logp", "old_logp", "weight"), np.float32)
        args = {name: jax.ShapeDtypeStruct((1, 1, row), dtype) for name, dtype in rows.items()}
        state = learner.state_shapes(config, tx, None)
        lowered = update.jitted.lower(state, args, np.float32(0), np.uint32(0))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    both, small = scratch(16384, 4096), scratch(256, 1024)
    longer, larger = scratch(256, 4096) - small, scratch(16384, 1024) - small
    assert both - small < 1.1 * (longer + larger), "no term grows with the product"
    assert both - small - longer < 16384 * 4096 * 4 / 4, "one copy of the logits is 268 MB"


# --- rounding -------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_keeps_exact_values():
    x = {
        "a": jnp.full((4000,), 1.0 + 0.3 * 2**-7),
        "b": jnp.full((8,), 1.5),
        "c": jnp.array([jnp.inf, -2.0]),
    }
    like = jax.tree.map(lambda v: v.astype(jnp.bfloat16), x)
    got = optim.rounded(x, like, jax.random.key(0))
    values, counts = np.unique(np.asarray(got["a"], np.float32), return_counts=True)
    assert values.tolist() == [1.0, 1.0 + 2**-7] and abs(counts[1] / 4000 - 0.3) < 0.03
    assert_array_equal(np.asarray(got["b"], np.float32), 1.5)
    assert_array_equal(np.asarray(got["c"], np.float32), [np.inf, -2.0])


# --- adapters -------------------------------------------------------------------------------------


def test_adapters_start_at_zero_and_merge_into_the_weights(tmp_path):
    tokens = np.arange(12)[None] % CONFIG.vocab
    h = lambda p: qwen.merge(CONFIG, p).hidden(tokens, tokens, np.ones_like(tokens))
    fresh = qwen.init(CONFIG, 0, lora=ADAPTERS)
    adapters = noise(qwen.shapes(CONFIG, lora=ADAPTERS), 0.3, seed=1)
    assert_array_equal(h(lora.join(params(), fresh, ADAPTERS)), h(params()))
    joined = h(lora.join(params(), adapters, ADAPTERS))
    assert np.abs(joined - h(params())).max() > 0.1
    assert_allclose(h(lora.merge(params(), adapters, ADAPTERS)), joined, atol=1e-4)
    lora.save(tmp_path, adapters, ADAPTERS, base="Qwen/Qwen2.5-7B")
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
    a, b = (tensors[f"{stem}{side}.weight"] for side in "AB")
    both = lora.merge(params(), adapters, ADAPTERS), params()
    after, before = (tree["layers"]["attention"]["o"][1] for tree in both)
    merged = after - before
    added = record["lora_alpha"] / record["r"] * (b @ a)  # (out, in), as torch has it
    assert_allclose(added.T.reshape(merged.shape), merged, atol=1e-5)
    assert record["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj"]


def test_only_adapters_are_trained():
    got, state = outcome(layout=Layout(lora=ADAPTERS))
    assert_equal(state["base"], params())
    trained = qwen.by_name(state["params"])
    # they start at zero
    assert all(np.any(trained[f"layers.{name}_lora_b"]) for name in ADAPTERS.targets)
    assert len(got[3]) < qwen.parameter_count(CONFIG) / 5


def test_impossible_adapters_raise():
    with pytest.raises(ValueError, match="choose from q, k, v, o, gate, up, down"):
        lora.LoRA(rank=4, targets=("query",))
    with pytest.raises(ValueError, match="at least 1"):
        lora.LoRA(rank=0)
