"""The update against a slow oracle on whole logits; micro-batches and row widths must not change
it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from evolver.phases import learning
from models import qwen
from rl import forward, learner, losses, optim, packing
from rl.forward import Forward
from rl.losses.gspo import gspo
from rl.losses.nll import nll
from rl.losses.ppo import ppo
from rl.samples import Sample
from tests.models.helpers import assert_close, assert_equal

CONFIG = qwen.Config(vocab=40, d_model=16, layers=1, heads=4, kv_heads=2, head_dim=8, d_ff=32)
ROW = 24
DESCENT = optax.sgd(1.0)
FORWARD = Forward(CONFIG, micro=2, capacity_rows=8)


@functools.cache
def params():
    return jax.jit(lambda: qwen.init(CONFIG, 0))()


def batch(rows=5, seed=0):
    """Return packed samples, several to a row; half of the tokens train, and every other sample is
    guided."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, n in enumerate(rng.integers(4, ROW // 2, 4 * rows)):
        mask = rng.random(n) < 0.5
        mask[0] = False
        logp, advantage = -3.6 + 0.4 * rng.normal(size=n), rng.normal(size=n)
        sample = Sample(
            rng.integers(1, CONFIG.vocab, n), mask, logp=logp * mask,
            advantage=advantage * mask, guided=bool(i % 2),
        )  # fmt: skip
        samples.append(sample)
    packed = packing.pack(samples, ROW)
    kept = {
        name: array[:rows]
        for name, array in vars(packed).items()
        if name.endswith("_RT") and array is not None
    }
    packed = dataclasses.replace(packed, **kept)
    assert packed.rows == rows
    noise = 0.3 * rng.normal(size=packed.logp_RT.shape).astype(np.float32)
    packed.old_logp_RT, packed.ref_logp_RT = packed.logp_RT + noise, packed.logp_RT - noise
    return packed


def slow_logp(params, packed, temperature=1.0):
    """Return (logp_RT, entropy_RT) from the logits of every token, 0 where a token does not
    train."""
    h = qwen.merge(CONFIG, params).hidden(packed.tokens_RT, packed.positions_RT, packed.segments_RT)
    every = jax.nn.log_softmax(h @ qwen.unembed(CONFIG, params) / temperature)
    before = jnp.pad(every, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    logp = jnp.take_along_axis(before, packed.tokens_RT[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(before) * before, axis=-1)
    return jnp.where(packed.mask_RT, logp, 0), jnp.where(packed.mask_RT, entropy, 0)


def slow_loss(params, packed, *, loss=ppo, aggregate="token-mean", temperature=1.0, **terms):
    logp, entropy = slow_logp(params, packed, temperature)
    arrays = {name.removesuffix("_RT"): array for name, array in vars(packed).items()}
    loss_RT, _ = losses.token_loss(loss, logp, entropy, arrays, **terms)
    weights = losses.aggregation_weights(packed.mask_RT, packed.rollout_RT, aggregate=aggregate)
    return jnp.sum(weights * loss_RT)


@functools.cache
def make_update(**options):
    """Return plain descent at rate 1 for up to 8 rows; cached, so that tests share compiled
    programs."""
    fields = {name: options.pop(name) for name in vars(FORWARD).keys() & options}
    options = {"optimizer": DESCENT, "loss": ppo} | options
    return learner.make_update(dataclasses.replace(FORWARD, **fields), **options)


def fresh_state(optimizer=DESCENT):
    return learner.init_state(CONFIG, jax.tree.map(jnp.copy, params()), optimizer)


def gradient(packed, **options):
    """Return (gradient, metrics) of one update: descent at rate 1 moves the parameters by the
    gradient."""
    state, metrics = make_update(**options)(fresh_state(), packed)
    return jax.tree.map(jnp.subtract, params(), state["params"]), metrics


def test_logp_is_that_of_the_whole_softmax():
    logp = learner.make_logp(Forward(CONFIG, micro=2, temperature=0.7, chunk=8))
    for packed in (batch(rows=5), batch(rows=3, seed=1)):
        assert_close(logp(params(), packed), slow_logp(params(), packed, 0.7)[0], atol=1e-5)


EVERYTHING = dict(
    loss=gspo, aggregate="seq-mean-token-mean", temperature=0.7, chunk=8, kl_coef=0.1,
    entropy_coef=0.05, importance_cap=1.1,
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["ppo", "everything"])
def test_gradient_is_that_of_the_whole_loss(options):
    packed = batch()
    got, metrics = gradient(packed, **options)
    whole = {name: value for name, value in options.items() if name != "chunk"}
    slow = functools.partial(slow_loss, packed=packed, **whole)
    want_loss, want = jax.jit(jax.value_and_grad(slow))(params())
    assert_allclose(metrics["loss"], want_loss, atol=1e-6)
    assert_allclose(metrics["grad_norm"], optax.global_norm(want), rtol=1e-5)
    assert metrics["tokens"] == packed.mask_RT.sum()
    assert_close(got, want, atol=1e-5)


def assert_same_update(packed, options, plain):
    (got, metrics), (want, want_metrics) = (gradient(packed, **o) for o in (options, plain))
    assert_close(got, want, atol=1e-6)
    assert_close(metrics, want_metrics, atol=1e-5, rtol=1e-5)


def test_micro_batches_do_not_change_the_result():
    assert_same_update(batch(rows=5), {"micro": 3, "chunk": 5}, {})


def test_rows_cut_to_their_tokens_do_not_change_the_result():
    packed = batch()
    for row, tokens in enumerate((ROW, 5, 13, 18, 21)):
        packed.segments_RT[row, tokens:], packed.mask_RT[row, tokens:] = 0, False
    assert_same_update(packed, {"micro": 1, "widths": 2}, {"micro": 1})
    logp = learner.make_logp(Forward(CONFIG, micro=1, widths=2))
    assert_close(logp(params(), packed), slow_logp(params(), packed)[0], atol=1e-5)


@pytest.mark.parametrize("used, width", [(1, 15), (15, 15), (16, 18), (21, 21), (22, 24), (24, 24)])
def test_a_micro_batch_is_cut_to_the_narrowest_width_that_holds_it(used, width):
    segments = np.zeros((2, 24), np.int32)
    segments[0, :1], segments[1, :used] = 1, 1
    width_of = lambda rows: jnp.int32(rows["segments"].shape[1])
    assert forward._cut_to_width(width_of, {"segments": segments}, 4) == width


def test_another_number_of_rows_needs_no_new_program():
    update, state = make_update(), fresh_state()
    for rows in (1, 5, 8, 2):
        state, _ = update(state, batch(rows=rows))
    assert update.jitted._cache_size() == 1
    assert int(state["step"]) == 4


def test_metrics_measure_the_gap_to_the_engine():
    """The sampled log-probabilities equal the learner's own, except for a gap of 0.1 at one
    unguided token."""
    packed = batch()
    packed.logp_RT = np.array(slow_logp(params(), packed)[0])
    own = np.argwhere(packed.mask_RT & ~packed.guided_RT)
    packed.logp_RT[tuple(own[0])] -= 0.1
    # sampled under another prompt: not the engine's error
    packed.logp_RT[packed.guided_RT & packed.mask_RT] -= 5.0
    packed.old_logp_RT = None
    _, metrics = gradient(packed)
    assert_allclose(metrics["mismatch/max"], 0.1, atol=1e-5)
    assert_allclose(metrics["mismatch/abs"], 0.1 / len(own), atol=1e-5)
    assert 0 < metrics["mismatch/kl"] < 0.01
    assert metrics["ratio/max"] > 100
    assert metrics["clip_fraction/guided"] > 0 and metrics["entropy"] > 0


def test_metrics_of_a_subset_are_means_over_its_own_tokens_in_all_updates():
    plain, mixed = batch(rows=2), batch(rows=5)
    plain.guided_RT[:] = False
    measured = [gradient(packed)[1] for packed in (plain, mixed)]
    merged = learning.merged([{k: float(v) for k, v in m.items()} for m in measured])
    own = {"guided": lambda p: p.guided_RT, "on": lambda p: ~p.guided_RT}
    for name in ("clip_fraction/guided", "loss/guided", "loss/on", "entropy", "kl_old"):
        subset = own.get(name.partition("/")[2], lambda p: p.mask_RT)
        tokens = [(p.mask_RT & subset(p)).sum() for p in (plain, mixed)]
        expected = np.average([float(m[name]) for m in measured], weights=tokens)
        assert merged[name] == pytest.approx(expected, rel=1e-6), name
    assert merged["loss/guided"] == float(measured[1]["loss/guided"]) != 0
    assert not any(name.startswith("tokens") for name in merged)


@functools.cache
def imitation():
    rate = optim.schedule(lr=3e-2, schedule="cosine", warmup=5, steps=60)
    optimizer = optim.optimizer(lr=rate)
    return optimizer, make_update(optimizer=optimizer, loss=nll)


def pattern():
    return packing.pack([Sample(np.arange(ROW) % 5 + 1, np.arange(ROW) > 0)] * 3, ROW)


def test_imitation_learns_a_pattern():
    optimizer, update = imitation()
    state, packed, course = fresh_state(optimizer), pattern(), []
    for _ in range(60):
        state, metrics = update(state, packed)
        course.append(float(metrics["loss"]))
    assert course[0] > 3 and course[-1] < 0.1


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    optimizer, update = imitation()
    state = fresh_state(optimizer)
    state["params"]["norm"] = state["params"]["norm"].at[3].set(jnp.nan)
    before = jax.tree.map(np.array, (state["params"], state["opt"]))
    state, metrics = update(state, pattern())
    assert metrics["skipped"] == 1
    assert_equal(before, (state["params"], state["opt"]))
    assert (int(state["step"]), int(state["skipped"])) == (1, 1)
    state["params"]["norm"] = jnp.array(params()["norm"])
    state, metrics = update(state, pattern())
    assert metrics["skipped"] == 0 and np.isfinite(metrics["loss"])
    assert (int(state["step"]), int(state["skipped"])) == (2, 1)


def test_impossible_updates_raise():
    update = make_update(kl_coef=0.1)
    with pytest.raises(ValueError, match="at least one row"):
        update({}, packing.pack([], ROW))
    packed = batch()
    packed.ref_logp_RT = None
    with pytest.raises(ValueError, match="ref_logp_RT"):
        update({}, packed)
    with pytest.raises(ValueError, match="multiple of 1"):
        make_update(micro=0)
    with pytest.raises(ValueError, match="widths=0"):
        make_update(widths=0)


# --- the optimizer --------------------------------------------------------------------------------


def test_weight_decay_spares_norms_and_biases():
    spared = {"norm", "attn_norm", "mlp_norm", "q_bias", "k_bias", "v_bias"}
    decayed = optim.decayed(params())
    names = {path[-1].key for path, on in jax.tree.leaves_with_path(decayed) if not on}
    assert names == spared
    tx = optim.optimizer(lr=1.0, weight_decay=0.1)
    zero = jax.tree.map(jnp.zeros_like, params())
    updates, _ = tx.update(zero, tx.init(params()), params(), position=0)
    assert_allclose(updates["embed"], -0.1 * params()["embed"], rtol=1e-6)
    assert not updates["norm"].any()


@pytest.mark.parametrize(
    "options, at, want",
    [
        (dict(), [0, 100], [2, 2]),
        (dict(warmup=4), [0, 1, 3, 4, 9], [0.5, 1, 2, 2, 2]),
        (dict(schedule="linear", steps=10, final=0.5), [0, 5, 10, 20], [2, 1.5, 1, 1]),
        (dict(schedule="linear", warmup=1, steps=11), [0, 1, 2, 6, 11], [2, 2, 1.8, 1, 0]),
        (dict(schedule="cosine", warmup=2, steps=12), [0, 1, 2, 7, 12], [1, 2, 2, 1, 0]),
    ],
)
def test_schedules(options, at, want):
    schedule = optim.schedule(lr=2.0, **options)
    assert_allclose([schedule(i) for i in at], want, atol=1e-6)


def test_the_rate_is_that_of_the_position_whatever_was_done_before():
    rate = optim.schedule(lr=1.0, schedule="linear", steps=100)
    optimizer = optim.optimizer(lr=rate, weight_decay=0.0)
    update = make_update(optimizer=optimizer)

    def moved(**options):
        state, _ = update(fresh_state(optimizer), batch(), **options)
        return np.asarray(state["params"]["embed"] - params()["embed"], np.float64)

    assert_close(0.25 * moved(position=0), moved(position=75.0), atol=1e-6)
    assert not moved(position=100).any()
    assert_array_equal(moved(), moved(position=0))


def test_bfloat16_weights_are_rounded_with_the_noise_of_the_seed():
    layout = learner.Layout(master="bfloat16")
    state = functools.partial(learner.init_state, CONFIG, params(), DESCENT, None, layout)
    update = learner.make_update(FORWARD, optimizer=DESCENT, loss=ppo, layout=layout)
    first, same, other = (
        np.asarray(update(state(), batch(), seed=seed)[0]["params"]["embed"], np.float32)
        for seed in (1, 1, 2)
    )
    assert_array_equal(first, same)
    assert (first != other).any()


def test_impossible_schedules_raise():
    with pytest.raises(ValueError, match="constant, linear, cosine"):
        optim.schedule(lr=1.0, schedule="step")
    with pytest.raises(ValueError, match="steps > warmup"):
        optim.schedule(lr=1.0, schedule="cosine", warmup=5)


@pytest.mark.parametrize("widths", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_update_tells_the_logp_of_every_token_it_trained_on(widths):
    packed = batch(rows=5)
    state, metrics = make_update(keep_logp=True, widths=widths)(fresh_state(), packed)
    assert metrics["logp_RT"].shape == packed.mask_RT.shape
    assert_close(metrics["logp_RT"], slow_logp(params(), packed)[0], atol=1e-5)
    without, fewer = make_update(widths=widths)(fresh_state(), packed)
    assert_close(state["params"], without["params"], atol=1e-6)
    assert metrics.keys() - fewer.keys() == {"logp_RT"}
