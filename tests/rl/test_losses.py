"""Losses and gradients against a slow reference written from the formulas; both must always be
finite."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rl import losses
from rl.losses import terms
from rl.losses.cispo import cispo
from rl.losses.gspo import gspo, sequence_log_ratio
from rl.losses.nll import nll
from rl.losses.ppo import ppo

MOST = 40  # tokens that a rollout can generate


def masked_mean(value_RT, mask_RT):
    """Return the mean of the values under a mask, 0 if it is empty."""
    return jnp.sum(jnp.where(mask_RT > 0, value_RT, 0)) / jnp.maximum(jnp.sum(mask_RT > 0), 1)


def policy_loss(
    logp, old, advantage, mask=None, guided=None, *, aggregate="token-mean", loss=ppo, **args
):
    """Return the loss of a whole batch whose rows are sequences, and the means of its metrics.
    Everything trains and nothing is guided, unless it is said."""
    segments = np.ones(old.shape, np.int32)
    mask, guided = segments if mask is None else mask, 0 * segments if guided is None else guided
    tokens = losses.Tokens(logp, old, advantage, guided, segments, mask)
    loss_RT, stats = losses.guarded(partial(loss, **args), tokens)
    means = {name: masked_mean(*pair) for name, pair in stats.items()}
    weight_RT = losses.aggregation_weights(mask, aggregate=aggregate, max_tokens=MOST)
    return jnp.sum(weight_RT * loss_RT), means


def slow_policy_loss(logp, old, advantage, mask, guided, low, high, high_guided, dual, aggregate):
    """Compute the reference's token loss and aggregation, one token at a time in Python floats."""

    def clipped(a, ratio, upper):
        first = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + upper))
        return min(-a * dual, first) if dual is not None and a < 0 else first

    rows = []
    for row in zip(logp, old, advantage, guided):
        bounds = [(a, math.exp(x - y), high_guided if g else high) for x, y, a, g in zip(*row)]
        rows.append([clipped(*of_token) for of_token in bounds])
    sums = [math.fsum(v for v, m in zip(row, ms) if m) for row, ms in zip(rows, mask)]
    counts = [sum(map(bool, ms)) for ms in mask]
    if aggregate == "token-mean":
        return math.fsum(sums) / max(sum(counts), 1)
    if aggregate == "seq-mean-token-sum":
        return math.fsum(sums) / len(rows)
    if aggregate == "seq-mean-token-mean":
        return math.fsum(s / max(c, 1) for s, c in zip(sums, counts)) / len(rows)
    return math.fsum(sums) / len(rows) / MOST


def grad_of_loss(logp, *batch, **options):
    return jax.grad(lambda x: policy_loss(x, *batch, **options)[0])(jnp.asarray(logp))


def batch_of(like, **given):
    """Return arrays of a mini-batch, in which everything trains with an advantage of 1 and nothing
    is guided, with those that are given in their place."""
    ones = jnp.ones(like.shape)
    plain = {"mask": ones, "advantage": ones, "guided": 0 * ones, "segments": ones.astype(int)}
    return plain | {"logp": 0 * ones, "old_logp": 0 * ones} | given


def random_batch(seed):
    rng, shape = np.random.default_rng(seed), (4, 9)
    logp, old = -rng.exponential(1, shape), -rng.exponential(1, shape)
    logp = old + 0.7 * (logp - old)
    mask = rng.random(shape) < rng.random((4, 1))
    guided = np.broadcast_to(rng.random((4, 1)) < 0.5, shape)
    return [np.asarray(x, np.float32) for x in (logp, old, rng.normal(size=shape), mask, guided)]


@given(
    st.integers(0, 10**6),
    st.sampled_from(losses.AGGREGATES),
    st.sampled_from([(0.2, 0.28, 0.6, 3.0), (0.2, 0.28, 1.0, None), (0.1, 0.1, 0.1, 1.5)]),
)
def test_policy_loss_reference(seed, aggregate, bounds):
    batch = random_batch(seed)
    names = ("clip_low", "clip_high", "clip_high_guided", "dual_clip")
    options = dict(zip(names, bounds)) | {"aggregate": aggregate}
    got, metrics = policy_loss(*batch, **options)
    want = slow_policy_loss(*[x.tolist() for x in batch], *bounds, aggregate)
    assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(v) for v in metrics.values())


def test_policy_loss_worked_example():
    """The guided row of the reference's example, as far as its figures determine it (A = 0.5, three
    tokens train)."""
    delta = np.array([[0.9, 0.0, -2.0, 0.4]], np.float32)
    ones, mask = np.ones((1, 4), np.float32), np.array([[1, 1, 1, 0]], np.float32)
    loss, metrics = policy_loss(delta, 0 * delta, 0.5 * ones, mask, ones)
    assert_allclose([loss, metrics["loss/guided"]], [-0.4558892] * 2, atol=1e-6)
    assert metrics["loss/on"] == 0
    assert_allclose(metrics["clip_fraction/guided"], 1 / 3, atol=1e-6)
    assert_allclose(metrics["kl_old"], (2.0 - 0.9) / 3, atol=1e-6)


def test_dual_clip_bounds_the_loss_and_stops_its_gradient():
    def loss(logp, dual_clip):
        one = jnp.ones((1, 1))
        return policy_loss(logp, 0 * one, -one, dual_clip=dual_clip)[0]

    far = jnp.log(jnp.array([[5.0]]))
    assert_allclose(loss(far, 3.0), 3.0, rtol=1e-6)
    assert_allclose(loss(far, None), 5.0, rtol=1e-6)
    assert jax.grad(loss)(far, 3.0) == 0
    assert_allclose(jax.grad(loss)(far, None), [[5.0]], rtol=1e-6)
    assert loss(far, 0) == loss(far, None)


def test_the_first_step_is_the_policy_gradient():
    """On policy the ratio is exactly 1, where all branches tie; the gradient is still -A /
    tokens."""
    _, old, advantage, mask, guided = random_batch(3)
    got = grad_of_loss(old, old, advantage, mask, guided)
    assert_allclose(got, -advantage * mask / mask.sum(), atol=1e-6)


# --- finite, always -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [ppo, gspo, partial(ppo, dual_clip=0), partial(gspo, dual_clip=0), cispo]
)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_any_gap_between_policies_gives_finite_value_and_gradient(loss, sign):
    ends = [[-1e30, 0], [-500, 1], [-88, 0], [88, -1], [500, 0], [1e30, 0], [1e30, -1e30]]
    gap, ones = jnp.array(ends), jnp.ones((len(ends), 2))
    old = -ones

    @jax.jit
    def mean(x):
        return policy_loss(x, old, sign * ones, loss=loss)[0]

    value, gradient = jax.value_and_grad(mean)(old + gap)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def careless(tokens):
    """A loss that is NaN, and has a gradient of NaN, at every token whose log-probability is 0."""
    loss_RT = tokens.advantage_RT * jnp.sqrt(-tokens.logp_RT) / tokens.logp_RT
    return loss_RT, {"careless": (loss_RT, tokens.segments_RT)}


@pytest.mark.parametrize("loss", [ppo, gspo, cispo, nll, careless])
@pytest.mark.parametrize("aggregate", losses.AGGREGATES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_tokens_reach_neither_value_nor_gradient(loss, aggregate, poison):
    logp, old, advantage, mask, guided = (jnp.asarray(x) for x in random_batch(5))

    @partial(jax.value_and_grad, has_aux=True)
    def total(x, old, advantage):
        return policy_loss(x, old, advantage, mask, guided, aggregate=aggregate, loss=loss)

    arrays = logp, old, advantage
    (clean, metrics), gradient = total(*arrays)
    (value, metrics_2), gradient_2 = total(*(jnp.where(mask > 0, x, poison) for x in arrays))
    assert clean == value and np.isfinite(value)
    assert_array_equal(gradient, gradient_2)
    assert not np.asarray(gradient_2)[np.asarray(mask) == 0].any()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), metrics, metrics_2))


@pytest.mark.parametrize("aggregate", losses.AGGREGATES)
def test_an_empty_mask_gives_zero(aggregate):
    logp, old, advantage, mask, guided = random_batch(0)
    loss, metrics = policy_loss(logp, old, advantage, 0 * mask, guided, aggregate=aggregate)
    assert loss == 0 and not any(metrics.values())


# --- aggregation ----------------------------------------------------------------------------------


# Four rollouts of 3, 5, 4 and 2 tokens, in rows of pieces: (rollout, its tokens).
PIECES = {
    "two to a row": [[(0, slice(3)), (1, slice(5))], [(2, slice(4)), (3, slice(2))]],
    "some in several rows": [
        [(1, slice(2, 5)), (0, slice(3))], [(3, slice(2)), (2, slice(1))], [(1, slice(2))],
        [(2, slice(1, 4))],
    ],
}  # fmt: skip


@pytest.mark.parametrize("aggregate", losses.AGGREGATES)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("width", [9, 18])
def test_a_rollout_weighs_as_one_wherever_its_tokens_are(aggregate, pieces, width):
    """Compare rollouts in rows of their own with the same packed into rows with padding."""
    value = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    place, number = np.arange(9), np.tile(np.arange(4)[:, None], 9)
    mask = ((place > 0) & (place < [[3], [5], [4], [2]])).astype(np.float32)
    alone = (losses.aggregation_weights(mask, aggregate=aggregate) * value).sum()

    def packed(array):
        rows = [np.concatenate([array[part] for part in row]) for row in PIECES[pieces]]
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows])

    weights = losses.aggregation_weights(packed(mask), packed(number), aggregate=aggregate)
    assert_allclose((weights * packed(value)).sum(), alone, rtol=1e-5)


def test_unknown_names_raise():
    ones = np.ones((2, 4))
    with pytest.raises(ValueError, match="token-mean"):
        losses.aggregation_weights(ones, aggregate="mean")
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        terms.kl_penalty(ones, ones, ones, kl_estimator="k4")


def test_a_loss_of_the_wrong_shape_raises():
    ones = np.ones((2, 4))
    with pytest.raises(ValueError, match=r"returned shape \(\); expected one .* token, \(2, 4\)"):
        policy_loss(*[ones] * 5, loss=lambda tokens: (jnp.sum(tokens.logp_RT), {}))


def test_the_registry_names_the_losses():
    for name, loss in (("ppo", ppo), ("gspo", gspo), ("cispo", cispo), ("nll", nll)):
        assert losses.LOSSES[name] == f"{loss.__module__}:{loss.__name__}"


# --- variants -------------------------------------------------------------------------------------


def test_a_loss_finds_channels_of_tokens_and_those_of_the_learner():
    """Distillation: the log-ratio to a teacher, on tokens whose entropy is high."""

    def distil(tokens):
        seen.update(tokens.channels)
        on_RT = tokens.channels["entropy"] > 0.5
        return jnp.where(on_RT, tokens.logp_RT - tokens.channels["teacher"], 0.0), {}

    seen = {}
    logp_RT, entropy_RT = jnp.array([[-3.0, -3.0, 0]]), jnp.array([[0.9, 0.1, 0]])
    batch = batch_of(logp_RT, mask=jnp.array([[1, 1, 0]]), ref_logp=jnp.full((1, 3), -4.0))
    batch["channel/teacher"] = jnp.array([[-1.0, -2.0, jnp.nan]])
    loss_RT, _ = losses.token_loss(distil, logp_RT, entropy_RT, batch)
    assert_allclose(loss_RT, [[-2.0, 0, 0]])
    assert set(seen) == {"teacher", "entropy", "ref_logp"}
    assert_array_equal(seen["teacher"], [[-1, -2, 0]])  # nothing outside the mask
    del batch["channel/teacher"]
    with pytest.raises(KeyError, match="writes the channel 'teacher'; there are entropy, ref_logp"):
        losses.token_loss(distil, logp_RT, entropy_RT, batch)

    def value(entropy_RT):
        loss = lambda tokens: (tokens.channels["entropy"], {})
        return losses.token_loss(loss, logp_RT, entropy_RT, batch)[0].sum()

    assert_array_equal(jax.grad(value)(entropy_RT), 0)


def test_gspo_ratio_is_that_of_the_sequence():
    """Check two segments of one row, and GSPO's own gradient for a constant advantage."""
    delta, mask = jnp.array([[0.3, 9.0, -0.1, 0.5, 0.2]]), jnp.array([[1, 0, 1, 1, 1]])
    segments = jnp.array([[1, 1, 1, 2, 2]])
    got = sequence_log_ratio(delta, mask, segments)
    assert_allclose(got[0, [0, 2, 3, 4]], [0.1, 0.1, 0.35, 0.35], atol=1e-6)

    old, advantage = jnp.full((1, 4), -1.0), jnp.full((1, 4), 0.7)
    logp = old + jnp.array([[0.01, -0.02, 0.03, 0.0]])
    options = {"loss": gspo, "clip_low": 0.1, "clip_high": 0.1, "aggregate": "seq-mean-token-mean"}

    def paper(x):
        return -0.7 * jnp.exp(jnp.mean(x - old))

    value = policy_loss(logp, old, advantage, **options)[0]
    assert_allclose(value, paper(logp), rtol=1e-6)
    gradient = grad_of_loss(logp, old, advantage, **options)
    assert_allclose(gradient, jax.grad(paper)(logp), rtol=1e-5)


def test_gspo_keeps_the_credit_of_a_turn_with_its_tokens():
    old = jnp.zeros((1, 2))
    gradient = grad_of_loss(old, old, jnp.array([[1.0, 0.0]]), loss=gspo)
    assert_allclose(gradient, [[-0.5, 0.0]], atol=1e-6)


@pytest.mark.parametrize("guided, bound", [(0, 1.28), (1, 1.6)])
def test_cispo_weights_every_gradient_and_drops_none(guided, bound):
    advantage, ratio = jnp.array([[1.0, -2.0, 3.0]]), jnp.array([[0.5, 1.1, 4.0]])
    old = jnp.zeros((1, 3))
    gradient = grad_of_loss(jnp.log(ratio), old, advantage, guided=guided + old, loss=cispo)
    assert_allclose(gradient, -advantage * jnp.minimum(ratio, bound) / 3, rtol=1e-5)


def test_cispo_boosts_guided_tokens_with_positive_advantages_only():
    old, ones = jnp.zeros((1, 4)), jnp.ones((1, 4), bool)
    logp, advantage = jnp.log(jnp.full((1, 4), 1.5)), jnp.array([[1.0, -1.0, 1.0, -1.0]])
    batch = logp, old, advantage, ones, jnp.array([[True, True, False, False]])
    want = -advantage * jnp.array([[1.5, 1.28, 1.28, 1.28]]) / 4
    assert_allclose(grad_of_loss(*batch, loss=cispo), want, rtol=1e-5)
    metrics = policy_loss(*batch, loss=cispo)[1]
    assert float(metrics["clip_fraction/guided"]) == 0.5 and float(metrics["clip_fraction/on"]) == 1


@pytest.mark.parametrize(
    "kind, value, gradient", [("k1", True, None), ("k2", False, "reverse"), ("k3", True, "forward")]
)
def test_kl_estimators_are_unbiased_where_they_say_so(kind, value, gradient):
    """Compare exact expectations over a small vocabulary: the value, and the gradient at the
    sampling policy."""
    logits, ref = jnp.array([0.3, -0.5, 0.9]), jax.nn.log_softmax(jnp.array([0.1, 0.4, -0.2]))
    ones = jnp.ones(3)

    def reverse(x):
        logp = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def forward(x):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(x)))

    def expected(x):
        """Return the mean estimate over tokens from the policy; the draw itself is not
        differentiated."""
        logp = jax.nn.log_softmax(x)
        estimates = terms.kl_penalty(logp, ref, ones, kl_estimator=kind)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * estimates)

    assert np.isclose(expected(logits), reverse(logits), atol=1e-6) == value
    gradients = {"reverse": jax.grad(reverse), "forward": jax.grad(forward), None: jnp.zeros_like}
    want = gradients[gradient](logits)
    assert_allclose(jax.grad(expected)(logits), want, atol=1e-6)


def test_kl_is_bounded_and_blind_to_masked_tokens():
    logp, ref = jnp.array([[-200.0, jnp.nan, -1.0]]), jnp.array([[-1.0, 0.0, -1.0]])
    mask = jnp.array([[1, 0, 1]])

    def penalty(x, kind="k3"):
        return terms.kl_penalty(x, ref, mask, kl_estimator=kind)

    for kind in ("k1", "k2", "k3"):
        assert np.isfinite(jax.grad(lambda x, kind=kind: penalty(x, kind).sum())(logp)).all()
    assert_allclose(penalty(logp), [[10.0, 0.0, 0.0]])


FREE = dict(importance_cap=2.0, importance_level="token", importance_low=0, importance_high=0)


def test_importance_weight_is_truncated_and_has_no_gradient():
    old, sampled = jnp.log(jnp.array([[0.5, 0.4, 0.01]])), jnp.log(jnp.array([[0.1, 0.5, 0.01]]))
    mask = jnp.array([[1, 1, 1]])
    weight, kept = terms.importance_weight(old, sampled, mask, mask, **FREE)
    assert_allclose(weight, [[2.0, 0.8, 1.0]], rtol=1e-5)
    assert kept.all()

    def total(x):
        return terms.importance_weight(x, sampled, mask, mask, **FREE)[0].sum()

    assert not jax.grad(total)(old).any()


@pytest.mark.parametrize(
    "bounds, want",
    [
        ({"importance_high": 2.5, "importance_level": "sequence"}, [1.8, 1.8, 0, 0, 0, 1]),
        ({"importance_high": 2.5}, [1.2, 1.5, 0.5, 0.5, 0, 1]),
        ({}, [1.2, 1.5, 0.5, 0.5, 2.0, 1]),
    ],
)
def test_importance_weights_of_sequences_multiply_and_bounds_mask(bounds, want):
    ratio, sampled = jnp.array([[1.2, 1.5, 0.5, 0.5, 3.0, 7.0]]), jnp.full((1, 6), -3.0)
    segments, mask = jnp.array([[1, 1, 2, 2, 3, 0]]), jnp.array([[1, 1, 1, 1, 1, 0]])
    batch = jnp.log(ratio) - 3, sampled, mask, segments
    bounds = FREE | {"importance_low": 0.3} | bounds
    weight, kept = terms.importance_weight(*batch, **bounds)
    assert_allclose(weight, [want], rtol=1e-5)
    assert kept.tolist() == [[value > 0 for value in want]]
    with pytest.raises(ValueError, match="choose token or sequence"):
        terms.importance_weight(*batch, **bounds | {"importance_level": "word"})


def test_unknown_old_log_probabilities_are_those_before_the_update():
    """Their ratio is 1, its gradient that of the policy, and importance weights know them."""
    logp = jnp.array([[-1.0, -2.0, -0.5]])
    sampled = logp - 0.3

    def loss(logp, old):
        batch = batch_of(logp, logp=sampled, old_logp=old)
        value, stats = losses.token_loss(ppo, logp, 0 * logp, batch, importance_cap=2.0)
        return value.sum(), stats

    told, own = (jax.grad(loss, has_aux=True)(logp, old) for old in (logp, logp * jnp.nan))
    assert_array_equal(own[0], told[0])
    assert (own[0] < 0).all() and jax.tree.all(jax.tree.map(jnp.array_equal, own[1], told[1]))


def bounded(old, sampled, cap):
    """Return the metrics and the gradient of a batch at its old log-probabilities, whose importance
    weights are bounded by 0.5 and 2."""
    batch = batch_of(old, logp=sampled, old_logp=old)

    @partial(jax.grad, has_aux=True)
    def loss(logp):
        bounds = {"importance_cap": cap, "importance_low": 0.5, "importance_high": 2.0}
        value, stats = losses.token_loss(ppo, logp, 0 * logp, batch, **bounds)
        return value.sum(), stats

    gradient, stats = loss(old)
    return stats, gradient


def test_tokens_outside_the_bounds_have_no_gradient_and_metrics_of_their_own():
    sampled = jnp.full((1, 4), -1.0)
    stats, gradient = bounded(sampled + jnp.array([[0.0, 0.1, 2.0, -2.0]]), sampled, 2.0)
    assert (np.abs(gradient) > 0).tolist() == [[True, True, False, False]]
    names = ("importance_masked", "mismatch/kl_kept", "mismatch/kl_masked")
    means = [masked_mean(*stats[name]) for name in names]
    d = np.array([0.1, 2.0, -2.0])
    k3 = np.exp(d) - d - 1
    assert_allclose(means, [0.5, k3[0] / 2, k3[1:].mean()], rtol=1e-4)


def test_imitation_is_the_negative_log_likelihood_of_what_trains():
    logp, mask = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[1, 1, 0]])

    def loss(x):
        loss_RT, _ = losses.token_loss(nll, x, 0 * x, batch_of(mask, mask=mask))
        return jnp.sum(losses.aggregation_weights(mask) * loss_RT)

    value, gradient = jax.value_and_grad(loss)(logp)
    assert value == 1.5
    assert_array_equal(gradient, [[-0.5, -0.5, 0.0]])


def test_tokens_sampled_with_an_unknown_probability_have_weight_one_and_no_gap():
    old, sampled = jnp.array([[-1.0, -1.0, -7.0], [-1.5, -1.0, jnp.nan]])[:, None]
    stats, gradient = bounded(old, sampled, 9.0)
    assert_allclose(stats["importance_weight"][0], [[np.exp(0.5), 1, 1]], rtol=1e-5)
    assert gradient[0, 2] == gradient[0, 1] != 0
    assert masked_mean(*stats["mismatch/abs"]) == pytest.approx(0.25)
