"""Tests of attention: every implementation against the naive one, forward and backward, and the
choice among them."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models import mesh as meshes
from tests.models.helpers import assert_close, with_devices


def naive(q, k, v, segments):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("rthd,rshd->rhts", q, k) / np.sqrt(q.shape[-1])
    order = jnp.arange(q.shape[1])
    own, prompts = segments % 65536, segments // 65536
    of_prompt = (prompts[:, :, None] == own[:, None]) & (prompts[:, :, None] > 0)
    mask = ((own[:, :, None] == own[:, None]) | of_prompt) & (order[:, None] >= order)
    return jnp.einsum(
        "rhts,rshd->rthd", jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf)), v
    )


def inputs(t, rows=2, share=False):
    """Return (q, k, v, segments) and weights of the outputs, of 4 heads and 2 of keys and values.
    share: segments 2 and 3 attend to segment 1 too."""
    rng = np.random.default_rng(t)
    drawn = (rng.normal(size=(rows, t, heads, 16)) for heads in (4, 2, 2, 4))
    q, k, v, weight = (x.astype(np.float32) for x in drawn)
    segments = np.sort(rng.integers(0, 4, (rows, t)), axis=1).astype(np.int32)
    if share:
        segments = attention.sharing(segments, np.where(segments > 1, 1, 0).astype(np.int32))
    return (q, k, v, segments), weight


def both(f, arrays, weight):
    """Return (out, gradients by q, k and v)."""
    *qkv, segments = arrays

    def loss(*qkv):
        out = f(*qkv, segments)
        return jnp.sum(out * weight), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, gradients


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("t", [1, 64, 150])
def test_blockwise(t, share):
    batch = inputs(t, share=share)
    assert_close(both(attention.blockwise, *batch), both(naive, *batch))


def test_blockwise_of_long_rows_takes_a_few_queries_at_a_time(monkeypatch):
    want = both(attention.blockwise, *inputs(150, share=True))
    monkeypatch.setattr(attention, "SCORES", 16 * 1024)
    assert_close(both(attention.blockwise, *inputs(150, share=True)), want, atol=1e-5)


def test_blockwise_memory_is_linear_in_the_length():
    def scratch(t):
        shapes = [(1, t, heads, 16) for heads in (8, 4, 4)]
        qkv = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        segments = jax.ShapeDtypeStruct((1, t), jnp.int32)
        loss = lambda q, k, v, s: jnp.sum(attention.blockwise(q, k, v, s).astype(jnp.float32))
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    most = 12 * attention.SCORES + 40 * 32768 * 8 * 16 * 4
    assert scratch(32768) < most, "all scores would be 34 GB"


def test_the_kernel_of_tpus_interpreted(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    interpreted = partial(kernel.make_splash_mqa_single_device, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mqa_single_device", interpreted)
    f = partial(attention.attention, implementation="splash")
    arrays = inputs(200, rows=1)
    assert_close(both(f, *arrays), both(naive, *arrays), atol=2e-3)


dot_product_attention = jax.nn.dot_product_attention


def product_of_xla(*qkv, implementation, **options):
    """Compute XLA's product in place of cuDNN's."""
    assert implementation == "cudnn"
    return dot_product_attention(*qkv, **options)


@pytest.mark.parametrize("t", [33, 34])
def test_cudnn_pads_rows_to_an_even_length(monkeypatch, t):
    seen = []

    def product(q, *kv, **options):
        seen.append(q.shape[1])
        return product_of_xla(q, *kv, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", product)
    assert_close(both(attention.cudnn, *inputs(t)), both(naive, *inputs(t)), atol=2e-3)
    assert seen and set(seen) == {34}


def packed_kernel(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, **options):
    """Compute what cuDNN's packed layout is documented to, in jax's own reading of the offsets:
    attention within each segment of the joined rows, and nothing defined elsewhere."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    assert options["mask_type"].name == "PADDING_CAUSAL" and options["qkv_layout"] == "BTNH"
    assert scale == q.shape[-1] ** -0.5
    lengths, _, offsets, _ = fused._fix_seqlen_offsets(
        q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, k
    )
    begins = offsets.ravel() // (q.shape[2] * q.shape[3])
    token = jnp.arange(q.shape[0] * q.shape[1])
    segments = jnp.zeros(len(token), jnp.int32)
    for m, (begin, length) in enumerate(zip(begins, lengths.ravel()), 1):
        segments = jnp.where((token >= begin) & (token < begin + length), m, segments)
    joined = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    out = jnp.where(segments[:, None, None] > 0, naive(*joined, segments[None]), jnp.nan)
    return out.reshape(q.shape)


def packed_inputs(t):
    """Return the same as `inputs`, with segments numbered from 1 and padding after them: one row of
    one segment, one of padding alone, and rows of several."""
    (*qkv, _), weight = inputs(t, rows=4)
    cuts = np.random.default_rng(t).integers(0, 3, (4, t)).cumsum(axis=1) // 7
    segments = np.where(np.arange(t) < t - t // 5, cuts - cuts[:, :1] + 1, 0)
    segments[0] = 1
    segments[1] = 0
    return (*qkv, segments.astype(np.int32)), weight * (segments > 0)[..., None, None]


def assert_naive(kernel, t, spare=0):
    """Assert that a kernel computes attention within the segments of packed rows, and 0 in padding.
    spare: segments for which it has room, beside those of a row."""
    (*qkv, segments), weight = packed_inputs(t)
    kernel = partial(kernel, most_segments=spare + int(segments.max()))
    want, gradients = both(naive, (*qkv, segments), weight)
    want = jnp.where(segments[..., None, None] > 0, want, 0)
    assert_close(both(kernel, (*qkv, segments), weight), (want, gradients))


@pytest.mark.parametrize("t", [5, 40])
def test_cudnn_packed_tells_the_kernel_where_segments_lie(monkeypatch, t):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "dot_product_attention", packed_kernel)
    assert_naive(attention.cudnn_packed, t)


@pytest.mark.parametrize("t", [5, 40])
def test_cudnn_apart_computes_each_segment_as_a_sequence_of_its_own(monkeypatch, t):
    monkeypatch.setattr(jax.nn, "dot_product_attention", product_of_xla)
    assert_naive(attention.cudnn_apart, t, spare=1)


def test_what_cudnn_leaves_undefined_reaches_no_output_and_no_gradient(monkeypatch):
    """Beyond the length of a sequence, outputs and gradients may be anything."""

    def product(*qkv, query_seq_lengths, **options):
        there = (jnp.arange(qkv[0].shape[1]) < query_seq_lengths[:, None])[..., None, None]
        qkv = (_undefined_beyond(there, x) for x in qkv)
        out = product_of_xla(*qkv, query_seq_lengths=query_seq_lengths, **options)
        return jnp.where(there, out, jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", product)
    apart = partial(attention.cudnn_apart, most_segments=9)
    out, gradients = both(apart, *packed_inputs(40))
    assert all(np.isfinite(x).all() for x in (out, *gradients))


_undefined_beyond = jax.custom_vjp(lambda there, x: x)
_undefined_beyond.defvjp(
    lambda there, x: (x, there), lambda there, dx: (None, jnp.where(there, dx, jnp.nan))
)


@pytest.mark.parametrize("kernel", ["cudnn_apart", "cudnn_packed"])
def test_more_segments_than_a_kernel_takes_are_no_number(monkeypatch, kernel):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    for place in (fused, jax.nn):
        monkeypatch.setattr(place, "dot_product_attention", lambda q, *_, **__: jnp.zeros_like(q))
    (q, k, v, _), _ = inputs(5)
    segments = np.array([[1, 2, 3, 4, 5], [1, 1, 2, 3, 4]])
    out = getattr(attention, kernel)(q, k, v, segments, most_segments=4)
    assert np.isnan(out[0]).all() and (out[1] == 0).all()


def mesh_of(platform, sequence=1, capability="8.0"):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    return SimpleNamespace(shape={"sequence": sequence}, devices=np.array([device]))


def chosen(platform="cuda", dtype="bfloat16", head_dim=128, most_segments=0, **place):
    """Return what is chosen on a device of a mesh."""
    mesh = mesh_of(platform, **place)
    return attention.choose("auto", mesh, jnp.dtype(dtype), head_dim, most_segments)


@pytest.mark.parametrize(
    "kernel, case",
    [
        ("blockwise", {"platform": "cpu", "dtype": "float32"}),
        ("cudnn", {}),
        ("cudnn", {"capability": "9.0"}),
        ("cudnn_packed", {"capability": "9.0", "most_segments": 8}),
        ("cudnn_packed", {"capability": "10.3", "most_segments": 8}),
        ("cudnn_apart", {"most_segments": 8}),
        ("blockwise", {"dtype": "float32"}),
        ("blockwise", {"head_dim": 20}),
        ("blockwise", {"platform": "rocm", "head_dim": 64}),
        ("splash", {"platform": "tpu"}),
        ("ring", {"platform": "tpu", "sequence": 4}),
    ],
)
def test_auto(monkeypatch, kernel, case):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert chosen(**case) == kernel
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert chosen(**case) == kernel.replace("packed", "apart")


def test_unknown_and_unsuitable_implementations_are_refused():
    with pytest.raises(ValueError, match="choose one of auto, blockwise, cudnn"):
        attention.choose("flash", None, jnp.float32, 64)
    with pytest.raises(ValueError, match="needs 'ring'"):
        attention.choose("splash", mesh_of("tpu", 2), jnp.bfloat16, 128)


def ring_on_meshes():
    """Compare meshes with one device; called in a process with 8 simulated devices."""
    arrays, weight = inputs(160, rows=4, share=True)
    want = both(naive, arrays, weight)
    for shape in (
        {"sequence": 8},
        {"data": 2, "tensor": 2, "sequence": 2},
        {"fsdp": 4, "tensor": 2},
    ):
        mesh = meshes.make_mesh(shape)
        assert_close(both(partial(attention.attention, mesh=mesh), arrays, weight), want)
        attention.SCORES = 16 * 1024
    print("equal")


def test_ring_and_shards_equal_one_device():
    code = "from tests.models import test_attention as t; t.ring_on_meshes()"
    assert with_devices(code).endswith("equal\n")
