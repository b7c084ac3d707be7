"""Tests of the model: packing, masks, caches, chunked log-probabilities, memory."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from models import qwen
from rl.engines.jax import kv_cache
from tests.models.helpers import assert_close, assert_equal, token_logp

CONFIG = qwen.Config(vocab=61, d_model=24, layers=2, heads=4, kv_heads=2, head_dim=6, d_ff=40)
QWEN3 = qwen.Config(61, 24, 2, 4, 2, 8, 40, tied=False, qkv_bias=False, qk_norm=True)


def hidden(config, params, *rows_RT):
    return qwen.merge(config, params).hidden(*rows_RT)


FUNCTIONS = (kv_cache.for_decoding, kv_cache.extend, hidden)
DECODING, EXTEND, HIDDEN = (jax.jit(functools.partial(function, CONFIG)) for function in FUNCTIONS)


@pytest.fixture(scope="module")
def params():
    return qwen.init(CONFIG, 0)


# The published sizes.
@pytest.mark.parametrize(
    "name, count",
    [
        ("0.5b", 494_032_768),
        ("1.5b", 1_543_714_304),
        ("3b", 3_085_938_688),
        ("7b", 7_615_616_512),
        ("14b", 14_770_033_664),
        ("32b", 32_763_876_352),
        ("72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, count):
    assert qwen.parameter_count(qwen.PRESETS[name]) == count


@pytest.mark.parametrize("config", [CONFIG, QWEN3])
def test_init_follows_the_declaration_and_the_seed(config):
    a, b, other = qwen.init(config, 3), qwen.init(config, 3), qwen.init(config, 4)
    shapes = jax.tree.map(lambda w: w.shape, qwen.weights(config))
    assert jax.tree.map(jnp.shape, a) == shapes
    assert_equal(a, b)
    assert not np.array_equal(a["embed"], other["embed"])
    assert qwen.init(config, 3, jnp.bfloat16)["layers"]["attention"]["q"].dtype == jnp.bfloat16


# --- attention and packing ------------------------------------------------------------------------


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_packed_sequence_has_the_states_it_has_alone(params, lengths, seed):
    width = 48
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab, (2, width))
    packed, alone = np.zeros((2, 2, 1, width), np.int32)
    start = 0
    for i, n in enumerate(lengths):
        packed[0, 0, start : start + n], packed[1, 0, start : start + n] = np.arange(n), i + 1
        start += n
    everything = HIDDEN(params, tokens[:1], packed[0], packed[1])[0]
    n = lengths[-1]
    last = slice(start - n, start)
    alone[0, 0, :n], alone[1, 0, :n] = np.arange(n), 1
    row = tokens[1:].copy()  # other padding, too
    row[0, :n] = tokens[0, last]
    np.testing.assert_allclose(
        everything[last], HIDDEN(params, row, alone[0], alone[1])[0, :n], atol=2e-5
    )


def test_bfloat16(params):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (1, 9))
    args = tokens, np.arange(9)[None], np.ones((1, 9), int)

    def loss(params):
        h_RTD = qwen.merge(CONFIG, params).hidden(*args, dtype=jnp.bfloat16)
        return jnp.sum(h_RTD.astype(jnp.float32) ** 2), h_RTD

    gradient, half_RTD = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert half_RTD.dtype == jnp.bfloat16
    np.testing.assert_allclose(half_RTD.astype(np.float32), HIDDEN(params, *args), atol=0.1)
    types = {g.dtype for g in jax.tree.leaves(gradient)}
    assert types == {jnp.dtype("float32")}, "gradients of float32 weights"


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("n, chunk, used", [(50, 16, 33), (48, 16, 33), (7, 100, 30), (5, 1, 33)])
def test_token_logp_equals_the_full_softmax_over_the_rows_with_a_token(n, chunk, used):
    rng = np.random.default_rng(0)
    h_ND, w_DV = (rng.normal(size=size).astype(np.float32) for size in ((n, 8), (8, 33)))
    targets_N, weight_N = rng.integers(0, used, n), rng.normal(size=n).astype(np.float32)

    def naive(h, w):
        full = jax.nn.log_softmax(h @ w[:, :used] / 0.7)
        return full[np.arange(n), targets_N], -jnp.sum(jnp.exp(full) * full, axis=-1)

    def ours(h, w):
        return token_logp(h, w, targets_N, temperature=0.7, chunk=chunk, unused=33 - used)

    @jax.jit
    def everything(h, w):
        gradients = [
            jax.grad(lambda h, w, f=f: jnp.sum(f(h, w)[0] * weight_N), (0, 1))(h, w)
            for f in (ours, naive)
        ]
        of_entropy = jax.grad(lambda h, w: jnp.sum(ours(h, w)[1]), (0, 1))(h, w)
        return (ours(h, w), naive(h, w)), gradients, of_entropy

    values, gradients, of_entropy = everything(h_ND, w_DV)
    assert_close(*values, atol=1e-5)
    assert_close(*gradients, atol=1e-5)
    assert not any(map(np.any, of_entropy)), "the entropy is a metric, not a loss"


def test_token_logp_never_holds_the_logits_of_all_tokens():
    """The compiled gradient's scratch memory grows with N x D, not with N x V."""
    d, vocab, chunk = 8, 4096, 64

    def scratch(n: int) -> int:
        shapes = [((n, d), jnp.float32), ((d, vocab), jnp.float32), ((n,), jnp.int32)]
        loss = lambda h, w, t: jnp.sum(token_logp(h, w, t, chunk=chunk)[0])
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = scratch(1024), scratch(8192)
    # a few copies of h, where logits would be 512 times h
    assert large - small < 8 * (8192 - 1024) * d * 4
    assert small < 8 * chunk * vocab * 4


# --- the cache ------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(pieces=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_extend_in_any_pieces_equals_the_whole(params, pieces, seed):
    """Rows of different lengths beside an idle one, in padded pieces, then one token each."""
    rows, width = 3, 32
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab, (rows, width))
    # row b appends [b, i] in call i
    lengths = np.stack([pieces, rng.permutation(pieces), np.zeros_like(pieces)])
    weights = DECODING(params)
    cache, starts = kv_cache.init_cache(CONFIG, rows, width), np.zeros(rows, int)
    for n in lengths.T:
        new = np.stack([np.pad(tokens[b], (0, 7))[starts[b] : starts[b] + 7] for b in range(rows)])
        h_BD, cache = EXTEND(weights, cache, new, starts, n)
        starts = starts + n
    positions = np.tile(np.arange(width), (rows, 1))
    h_RTD = HIDDEN(params, tokens, positions, np.ones_like(tokens))
    np.testing.assert_allclose(h_BD[:2], h_RTD[np.arange(2), starts[:2] - 1], atol=2e-5)
    new = tokens[np.arange(rows), starts][:, None]
    h_BD, cache = EXTEND(weights, cache, new, starts, np.array([1, 1, 0]))
    np.testing.assert_allclose(h_BD[:2], h_RTD[np.arange(2), starts[:2]], atol=2e-5)
    assert np.all(np.isfinite(h_BD)), "an idle row is finite"
    assert not any(np.any(array[2]) for array in jax.tree.leaves(cache)), "and writes nothing"


def test_extend_writes_nothing_beyond_the_cache_or_the_length(params):
    cache = kv_cache.init_cache(CONFIG, 1, 8)
    tokens = jnp.ones((1, 4), jnp.int32)
    _, cache = EXTEND(DECODING(params), cache, tokens, jnp.array([6]), jnp.array([2]))
    for name, other in (("k", (0, 1)), ("v", (0, 2))):
        written = np.any(np.asarray(cache[name][0][0]) != 0, axis=other)
        assert np.flatnonzero(written).tolist() == [6, 7]


def test_decoding_weights_follow_small_updates_and_exact_weights_stay():
    """A quantised checkpoint has weights halfway between two bfloat16 values, and others have none
    but such values."""
    params = jax.tree.map(lambda x: jnp.full_like(x, 1 + 2**-8), qwen.init(QWEN3, 0))
    moved = jax.tree.map(lambda x: x + 2**-12, params)

    def gate(params, key=None):
        weights = kv_cache.for_decoding(QWEN3, params, matrix_dtype=jnp.bfloat16, key=key)
        return float(weights["layers"][0]["gate_up"].astype(jnp.float32).mean())

    assert gate(moved) - gate(params) == 2**-7, "to the nearest, 32 times the update"
    keys = [jax.random.key(i) for i in range(20)]
    for whole in (params, moved):
        want = float(whole["norm"][0])
        assert abs(np.mean([gate(whole, key) for key in keys]) - want) < 2e-4
    exact = jax.tree.map(lambda x: jnp.full_like(x, 1 + 2**-7), params)
    assert gate(exact, keys[0]) == 1 + 2**-7
    weights = kv_cache.for_decoding(QWEN3, moved, matrix_dtype=jnp.bfloat16, key=keys[0])
    assert weights["norm"].dtype == jnp.float32 and weights["embed"].dtype == jnp.bfloat16
