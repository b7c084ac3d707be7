"""Samples that share their prompt's tokens in a row train exactly like samples that each hold
them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models import attention
from rl import learner, packing
from rl.forward import Forward
from rl.losses.gspo import gspo
from rl.losses.ppo import ppo
from rl.samples import Sample
from tests.models.helpers import assert_close
from tests.rl.test_learner import CONFIG, ROW, gradient, params


def rollouts(rng, prompts, group, most=6, alike=0):
    """Return samples of `group` rollouts of each prompt, which begin with the same `alike` tokens;
    generations differ in length, and observations follow some."""
    batch, beginning = [], rng.integers(1, CONFIG.vocab, alike)
    for n in prompts:
        prompt = np.r_[beginning[:n], rng.integers(1, CONFIG.vocab, max(n - alike, 0))]
        for _ in range(group):
            own = rng.integers(1, most + 1)
            mask = np.r_[np.zeros(n, bool), True, rng.random(own - 1) < 0.7]
            tokens = np.r_[prompt, rng.integers(1, CONFIG.vocab, own)]
            logp = mask * (-3.6 + 0.4 * rng.normal(size=n + own))
            advantage = mask * rng.normal(size=n + own)
            guided = bool(rng.integers(2))
            batch.append(Sample(tokens, mask, logp=logp, advantage=advantage, guided=guided))
    return batch


@given(
    st.lists(st.integers(1, 12), max_size=5), st.integers(1, 5), st.integers(0, 9),
    st.integers(0, 1000),
)  # fmt: skip
@example([2, 10, 7, 4, 2], 1, 3, 0)  # sharing takes fewer tokens and more rows
def test_every_sample_is_a_prompt_of_its_row_and_what_follows_it(prompts, group, alike, seed):
    batch = rollouts(np.random.default_rng(seed), prompts, group, alike=alike)
    packed, apart = packing.pack(batch, 20, share=True), packing.pack(batch, 20)
    assert packed.rows <= apart.rows
    for r, (segments, prompts_) in enumerate(zip(packed.segments_RT, packed.prompts_RT)):
        for segment in range(1, segments.max() + 1):
            (own,) = np.nonzero(segments == segment)
            if not packed.mask_RT[r, own].any():
                continue
            prompt = prompts_[own[0]]
            whole = np.r_[np.nonzero(segments == prompt)[0], own] if prompt else own
            assert (np.diff(own) == 1).all() and (np.diff(whole) >= 1).all()
            sample = batch[packed.sample_RT[r, own[0]]]
            places = np.arange(len(sample))
            np.testing.assert_array_equal(packed.positions_RT[r, whole], places)
            for name in ("tokens", "mask", "advantage"):
                held = getattr(packed, f"{name}_RT")[r, whole]
                np.testing.assert_array_equal(held, getattr(sample, name), name)
            assert not packed.mask_RT[r, own[0]], (
                "the first token of a segment has nothing before it that predicts it"
            )
    np.testing.assert_array_equal(packed.trained(packed.logp_RT), apart.trained(apart.logp_RT))


def both(seed=0, prompts=(9, 5, 12, 1), group=4, alike=0):
    """Return the same samples packed with and without sharing."""
    batch = rollouts(np.random.default_rng(seed), prompts, group, alike=alike)
    return packing.pack(batch, ROW, share=True), packing.pack(batch, ROW)


@pytest.mark.parametrize("samples", [{}, {"prompts": [12] * 9, "group": 1, "alike": 10}])
def test_logp_is_that_of_whole_samples(samples):
    packed, apart = both(**samples)
    assert packed.rows < apart.rows
    logp = learner.make_logp(Forward(CONFIG, micro=2, chunk=8))
    got, want = (p.trained(logp(params(), p)) for p in (packed, apart))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "loss, aggregate",
    [(ppo, "seq-mean-token-mean"), pytest.param(gspo, "token-mean", marks=pytest.mark.slow)],
)
def test_gradient_is_that_of_whole_samples(loss, aggregate):
    packed, apart = both(1)
    (got, metrics), (want, expected) = (
        gradient(p, loss=loss, aggregate=aggregate, widths=2) for p in (packed, apart)
    )
    assert_close(got, want, atol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_padding_is_seen_by_no_token_with_or_without_a_prompt():
    segments, prompts = np.array([[1, 2, 3, 0, 0]]), np.array([[0, 1, 0, 0, 0]])
    ids = attention.sharing(segments, prompts)
    seen = np.asarray(attention._visible(ids, ids))[0].astype(int).tolist()
    assert seen[:3] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0]]


@pytest.mark.parametrize("kernel", attention.WHOLE_IDS)
def test_kernels_that_cannot_share_say_so(kernel):
    with pytest.raises(ValueError, match=f"cannot share a prompt with attention='{kernel}'"):
        learner.make_logp(Forward(CONFIG, micro=2, attention=kernel))(params(), both()[0])
