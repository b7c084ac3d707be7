"""Parity with `transformers`: with logits it computed once (make_golden.py) and, if torch is
installed, live."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import hf, qwen
from models.hf_config import transformers
from models.rope import Llama3
from rl.engines.jax import kv_cache
from tests.models.helpers import assert_close, assert_equal, edit, noise

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))
ATOL = 1e-4  # of `assert_close`: float32, on logits of order 10


@pytest.fixture(scope="module", params=GOLDEN, ids=lambda path: path.stem)
def golden(request, tmp_path_factory):
    """Return (arrays, config, params), with the weights loaded from a checkpoint directory."""
    arrays = dict(np.load(request.param))
    folder = tmp_path_factory.mktemp(request.param.stem)
    (folder / "config.json").write_text(str(arrays["config"]))
    weights = {
        key.removeprefix("weights/"): array.astype(np.float32)
        for key, array in arrays.items()
        if key.startswith("weights/")
    }
    save_file(weights, folder / "model.safetensors")
    return arrays, *hf.load(folder)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens_RT, positions_RT=None, segments_RT=None):
    return qwen.merge(config, params)(tokens_RT, positions_RT, segments_RT)


def sequences(arrays) -> list[np.ndarray]:
    lengths = (23, 14, 9)
    assert sum(lengths) == len(arrays["tokens"])
    return np.split(arrays["tokens"], np.cumsum(lengths)[:-1])


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch(golden, side):
    arrays, config, params = golden
    ids = sequences(arrays)
    tokens, positions, segments = np.zeros((3, len(ids), max(map(len, ids))), np.int32)
    for row, i in enumerate(ids):
        where = slice(0, len(i)) if side == "right" else slice(tokens.shape[1] - len(i), None)
        tokens[row, where], positions[row, where], segments[row, where] = i, np.arange(len(i)), 1
    got = np.asarray(logits(config, params, tokens, positions, segments))[segments > 0]
    assert_close(got, arrays[side])


def test_packed_row(golden):
    """Sequences in one row do not attend to each other."""
    arrays, config, params = golden
    ids = sequences(arrays)
    positions = np.concatenate([np.arange(len(i)) for i in ids])
    segments = np.repeat(np.arange(len(ids)) + 1, [len(i) for i in ids])
    pad = lambda a: np.pad(a, (0, 5))[None]
    got = logits(config, params, pad(arrays["tokens"]), pad(positions), pad(segments))
    assert_close(got[0, : len(segments)], arrays["alone"])


def test_cached_decoding(golden):
    """Prefill in two pieces, then token by token."""
    arrays, config, params = golden
    ids = sequences(arrays)[0]
    extend = jax.jit(functools.partial(kv_cache.extend, config))
    weights, cache = kv_cache.for_decoding(config, params), kv_cache.init_cache(config, 1, 32)
    start, got = 0, {}
    for piece in (5, 6, *[1] * (len(ids) - 11)):
        tokens = np.zeros((1, 8 if piece > 1 else 1), np.int32)
        tokens[0, :piece] = ids[start : start + piece]
        h_BD, cache = extend(weights, cache, tokens, jnp.array([start]), jnp.array([piece]))
        start += piece
        got[start - 1] = np.asarray(h_BD @ weights["unembed"])[0]
    assert_close(np.stack(list(got.values())), arrays["cached"][list(got)])


def test_golden_arrays_depend_on_the_epsilon_of_norms(golden):
    """The golden arrays distinguish 1e-5 from 1e-6, a common confusion between Qwen's sizes."""
    arrays, config, params = golden
    if config.rms_eps != 1e-5:
        pytest.skip("this variant's embedding is not small")
    ids = sequences(arrays)[0][None]
    got = logits(dataclasses.replace(config, rms_eps=1e-6), params, ids)[0]
    assert np.abs(got - arrays["alone"][: ids.shape[1]]).max() > 100 * ATOL


LLAMA = qwen.Config(96, 72, 2, 9, 3, 8, 48, rope_theta=1e5, rms_eps=1e-5, qkv_bias=False)
LIVE = {
    "qwen2": qwen.Config(96, 32, 2, 4, 2, 8, 48, rms_eps=1e-5),
    "qwen3": qwen.Config(
        96, 32, 2, 4, 2, 8, 48, tied=False, qkv_bias=False, qk_norm=True, rms_eps=1e-5
    ),
    "llama": LLAMA,
    "llama 2": dataclasses.replace(LLAMA, kv_heads=9, tied=False),
    "llama with a head size of its own": dataclasses.replace(LLAMA, head_dim=16, tied=False),
    "llama with scaled rope": dataclasses.replace(
        LLAMA, rope_scaling=Llama3(4.0, 1.0, 4.0, 16), rope_theta=100.0
    ),
    "smollm3": dataclasses.replace(LLAMA, layers=4, no_rope=(1, 3)),
    "mistral": dataclasses.replace(LLAMA, tied=False),
}


def theirs(folder, config, params, change=None):
    """Return the model that `transformers` loads from our checkpoint, after a change of its
    config.json."""
    pytest.importorskip("torch")
    hf.save(folder, config, params)
    edit(folder / "config.json", change or {})
    return transformers().AutoModelForCausalLM.from_pretrained(folder)


def logits_of(model, ids) -> np.ndarray:
    """Return the logits of a model of `transformers`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("kind", LIVE)
def test_live_round_trip_through_transformers(tmp_path, monkeypatch, kind):
    """`transformers` loads our checkpoint, and we its; logits and gradients are equal, also after a
    step."""
    torch = pytest.importorskip("torch")
    config = LIVE[kind]
    params = noise(qwen.shapes(config), 0.3)
    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    # Mistral is saved as Llama, of which it is one.
    change = {"model_type": kind, "sliding_window": None} if kind == "mistral" else None
    model = theirs(tmp_path / "ours", config, params, change)
    ids = np.random.default_rng(0).integers(0, config.vocab, (2, 33))
    assert_close(logits(config, params, ids), logits_of(model, ids))

    model.save_pretrained(tmp_path / "theirs")
    record = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert record["model_type"] == kind.split()[0]
    loaded_config, loaded = hf.load(tmp_path / "theirs")
    assert loaded_config == config
    assert_equal(loaded, params)

    def loss(params):
        logp = jax.nn.log_softmax(logits(config, params, ids))
        return -jnp.take_along_axis(logp[:, :-1], ids[:, 1:, None], axis=-1).mean()

    grads = jax.grad(loss)(params)
    model(torch.tensor(ids), labels=torch.tensor(ids)).loss.backward()
    weights = dict(model.named_parameters())
    for name, grad in hf.to_hf(config, grads):
        np.testing.assert_allclose(grad, weights[name].grad.numpy(), atol=1e-5, rtol=1e-4)
    trained = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    model = theirs(tmp_path / "trained", config, trained)
    assert_close(logits(config, trained, ids), logits_of(model, ids))


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default", "rope_theta": 100.0}])
def test_live_long_context_recipe(tmp_path, parameters):
    """Qwen's recipe for long contexts, `rope_scaling` of type yarn in config.json, with and without
    rope_parameters."""
    config = qwen.Config(96, 32, 2, 2, 1, 16, 48, tied=False, rope_theta=100.0, max_positions=64)
    recipe = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    change = {"rope_parameters": parameters, "rope_scaling": recipe}
    model = theirs(tmp_path, config, noise(qwen.shapes(config), 0.3), change)
    ids = np.random.default_rng(0).integers(0, config.vocab, (1, 150))
    expected = logits_of(model, ids)
    scaled, loaded = hf.load(tmp_path)
    assert_close(logits(scaled, loaded, ids), expected)
    assert np.abs(logits(config, loaded, ids) - expected).max() > 100 * ATOL
