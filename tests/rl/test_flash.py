"""Attention to a cache by cuDNN's kernels, with their documented results computed here instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import qwen
from rl.engines.jax import decoding, flash, kv_cache


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """Put in place of cuDNN's kernel what it is documented to compute. Results are undefined where
    it is told to compute nothing, and keys beyond a length are never read."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def product(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout, return_residual):
        assert qkv_layout == "BNTH" and return_residual
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = scale * jnp.einsum("nhtx,nhsx->nhts", q, k)
        if mask_type.name == "CAUSAL":
            assert q_seqlen is None and kv_seqlen is None
            seen = jnp.tri(*scores.shape[-2:], dtype=bool)
        else:
            assert mask_type.name == "PADDING"
            seen = jnp.arange(scores.shape[-1]) < kv_seqlen[:, None, None, None]
            v = jnp.where(jnp.swapaxes(seen, 2, 3), v, 0)
        scores = jnp.where(seen, scores, -jnp.inf)
        out = jnp.einsum("nhts,nhsx->nhtx", jax.nn.softmax(scores), v)
        lse = jax.nn.logsumexp(scores, axis=-1)
        if q_seqlen is not None:
            told = (jnp.arange(scores.shape[2]) < q_seqlen[:, None])[:, None]
            out, lse = jnp.where(told[..., None], out, jnp.nan), jnp.where(told, lse, jnp.nan)
        return out.astype(dtype["out"]), lse

    dtype = {"out": jnp.float32}
    monkeypatch.setattr(fused, "dot_product_attention", product)
    return dtype


def naive(q_BTHh, k_BKSh, v_BKSh, starts_B):
    """Return the same in float64, from the definition."""
    b, t, heads, head_dim = q_BTHh.shape
    out = np.zeros(q_BTHh.shape)
    for index in np.ndindex(b, t, heads):
        row, token, head = index
        end = starts_B[row] + token + 1
        k, v = (x[row, head * k_BKSh.shape[1] // heads, :end] for x in (k_BKSh, v_BKSh))
        p = np.exp(k @ q_BTHh[index] / np.sqrt(head_dim))
        out[index] = p @ v / p.sum()
    return out.reshape(b, t, -1)


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-7)])
@pytest.mark.parametrize("t, length", [(1, 1024), (1, 2048), (1, 640), (1, 37), (9, 640), (9, 37)])
@pytest.mark.parametrize("groups", [4, 5, 7])
def test_each_row_attends_to_its_own_length(kernel, groups, t, length, dtype, error):
    """Rows without earlier tokens, with one, with some and with a full cache, and an idle one,
    whose cache and the positions after the others hold no numbers."""
    kernel["out"] = dtype
    rng = np.random.default_rng(0)
    starts = np.array([0, 1, length // 2, length - t, length // 3])
    new = np.array([t, t, t, t, 0])
    sizes = {"q": (5, t, 2 * groups, 16), "k": (5, 2, length, 16), "v": (5, 2, length, 16)}
    q, k, v = (np.float64(rng.normal(size=size).astype(dtype)) for size in sizes.values())
    want = naive(q, k, v, starts)
    held = np.arange(length) < (starts + t * (new > 0))[:, None]
    held &= (new > 0)[:, None]
    taken = np.minimum(starts[:, None] + np.arange(t), length - 1)[:, None, :, None]
    own = (jnp.asarray(np.take_along_axis(x, taken, 2).swapaxes(1, 2), dtype) for x in (k, v))
    cached = tuple(jnp.asarray(np.where(held[:, None, :, None], x, np.nan), dtype) for x in (k, v))
    out = jax.jit(flash.attend)(jnp.asarray(q, dtype), *own, cached, starts, new)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.float64(out)[:4], want[:4], atol=error, rtol=error)
    assert t > 1 or not np.any(out[4]), "an idle row reads nothing"


def test_prompts_in_pieces_and_tokens_are_the_same_with_and_without():
    """With both caches; one row has one piece of its prompt, one stops early."""
    config = qwen.PRESETS["tiny"]
    weights = kv_cache.for_decoding(config, qwen.init(config, 0))
    rng = np.random.default_rng(1)
    rows, line = 4, np.arange(4, dtype=np.int32)
    ones = np.ones(rows, np.float32)
    draw = decoding.Draw(
        ones, ones, 0 * line, np.stack([line, line], 1).astype(np.uint32), 0 * line
    )
    prompts = rng.integers(0, config.vocab, (2, rows, 16)).astype(np.int32)
    counts = np.array([[16, 16, 9, 3], [16, 1, 5, 0]], np.int32)
    found = []
    for transposed, fused in ((True, False), (False, False), (False, True)):
        cache = kv_cache.init_cache(config, rows, 128, transposed=transposed)
        start = token = np.zeros(rows, np.int32)
        for tokens, count in zip(prompts, counts):
            sampled, _, cache = decoding.prefill(
                weights, cache, line, tokens, start, count, draw, config=config, window=64,
                truncate=False, fused=fused,
            )  # fmt: skip
            token = np.where(count > 0, sampled, token)
            start = start + count
        lines = decoding.Rows(
            line, token, start, np.array([8, 3, 8, 8], np.int32),
            np.full((rows, 1), -1, np.int32), draw._replace(token_index=line * 0 + 1),
        )  # fmt: skip
        tokens, logps, *_ = decoding.decode(
            weights, cache, lines, np.int32(rows), config=config, window=64, block=8,
            truncate=False, in_place=not transposed, fused=fused,
        )  # fmt: skip
        found.append((np.asarray(tokens), np.asarray(logps)))
    for tokens, logps in found[1:]:
        np.testing.assert_array_equal(tokens, found[0][0])
        alive = tokens >= 0
        np.testing.assert_allclose(logps[alive], found[0][1][alive], atol=1e-5)
