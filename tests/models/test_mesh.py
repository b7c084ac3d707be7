"""Tests of meshes and shardings, on eight simulated devices."""

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from models import mesh as meshes
from models import qwen
from tests.models.helpers import with_devices


def placed(name, rules=meshes.RULES, **shape):
    mesh = AbstractMesh(tuple(shape.get(axis, 1) for axis in meshes.AXES), meshes.AXES)
    return meshes.places(qwen.weights(qwen.PRESETS[name]), mesh, rules)


def test_every_weight_gets_a_sharding():
    places = placed("14b", fsdp=8, tensor=8)
    assert places["layers"]["attention"]["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert places["layers"]["mlp"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert places["unembed"].spec == PartitionSpec("tensor", "fsdp")


TWICE = {"tensor": 2, "rules": meshes.RULES | {"embed": "tensor"}}


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("7b", {"tensor": 8}, "tensor=8 does not divide heads=28"),
        ("7b", {"tensor": 8}, "tensor=8 does not divide kv_heads=4"),
        ("tiny", {"fsdp": 3}, "fsdp=3 does not divide embed=128"),
        ("tiny", TWICE, "tensor would split two axes of one weight, vocab and embed"),
    ],
)
def test_axes_that_cannot_be_split_are_named(name, options, complaint):
    with pytest.raises(meshes.MeshError, match=complaint):
        placed(name, **options)


@pytest.mark.parametrize(
    "shape, complaint",
    [
        ({"data": 512}, "data=512 x fsdp=1 x tensor=1 x sequence=1 needs 512 devices"),
        ({"model": 2}, "unknown mesh axis model"),
        ({"data": 0}, "sizes are positive"),
        ({"data": -1, "fsdp": -1}, "at most one is -1"),
    ],
)
def test_impossible_meshes_are_refused(shape, complaint):
    with pytest.raises(meshes.MeshError, match=complaint):
        meshes.make_mesh(shape)


EIGHT_DEVICES = """
import sys
from concurrent.futures import ThreadPoolExecutor
import jax, numpy as np
from models import hf, mesh, qwen
from rl.engines.vllm.transfer import copy_into
from tests.models.helpers import token_logp

config = qwen.Config(vocab=64, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)
_, alone = hf.load(sys.argv[1])
tokens = np.random.default_rng(0).integers(0, 64, (8, 16))
batch = tokens, np.tile(np.arange(16), (8, 1)), np.ones_like(tokens)

def loss(params, tokens, positions, segments):
    h = qwen.merge(config, params).hidden(tokens, positions, segments).reshape(-1, 16)
    return token_logp(h, qwen.unembed(config, params), tokens.reshape(-1), chunk=16)[0].mean()

pool = ThreadPoolExecutor(4)
expected = jax.jit(jax.value_and_grad(loss))(alone, *batch)
for shape in ({"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "sequence": 2}):
    m = mesh.make_mesh(shape)
    _, params = hf.load(sys.argv[1], mesh=m)
    places = mesh.places(qwen.weights(config), m)
    jax.tree.map(lambda a, s: np.testing.assert_equal(a.sharding, s), params, places)
    jax.tree.map(np.testing.assert_array_equal, params, alone)
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
    got = step(params, *(jax.device_put(x, mesh.rows(m)) for x in batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)
    for (_, weight), (_, own) in zip(hf.outgoing(config, params), hf.outgoing(config, alone), strict=True):
        out = np.full(weight.shape, np.nan, np.float32)
        copy_into(out, weight, pool)
        np.testing.assert_array_equal(out, own)
    hf.save(sys.argv[2], config, params)
    jax.tree.map(np.testing.assert_array_equal, hf.load(sys.argv[2])[1], alone)
assert mesh.make_mesh({"data": -1, "tensor": 2}).shape["data"] == 4
print("equal")
"""


def test_eight_devices_read_write_and_compute_the_same(tmp_path):
    from models import hf

    config = qwen.Config(vocab=64, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)
    hf.save(tmp_path / "in", config, qwen.init(config, 0))
    folders = str(tmp_path / "in"), str(tmp_path / "out")
    assert with_devices(EIGHT_DEVICES, *folders).endswith("equal\n")
