"""Packing keeps every token, fills rows, and is deterministic."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import packing
from rl.samples import Sample


def sample(rng, n, guided=False):
    mask = rng.random(n) < 0.5
    mask[:1] = False
    return Sample(
        rng.integers(1, 100, n), mask, logp=np.where(mask, -rng.random(n), 0),
        advantage=np.where(mask, rng.normal(size=n), 0), guided=guided,
    )  # fmt: skip


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(0, 1000))
def test_every_sample_is_whole_in_one_row(lengths, seed):
    rng = np.random.default_rng(seed)
    batch = [sample(rng, n, guided=bool(rng.integers(2))) for n in lengths]
    packed = packing.pack(batch, 20)
    for names, dtype in (
        (("tokens", "segments", "positions"), np.int32),
        (("mask", "guided"), bool),
    ):
        assert {getattr(packed, f"{name}_RT").dtype for name in names} == {np.dtype(dtype)}
    for i, s in enumerate(batch):
        r, t = np.nonzero(packed.sample_RT == i)
        assert len(set(r)) == 1 and (np.diff(t) == 1).all() and len(t) == len(s)
        here = (r[0], slice(t[0], t[-1] + 1))
        for name in ("tokens", "mask", "logp", "advantage", "version", "guided"):
            assert (getattr(packed, f"{name}_RT")[here] == getattr(s, name)).all(), name
        np.testing.assert_array_equal(packed.positions_RT[here], np.arange(len(s)))
        assert len(set(packed.segments_RT[here])) == 1
    padding = packed.sample_RT < 0
    assert (~padding).sum() == sum(lengths)
    for name in ("tokens", "positions", "segments", "mask", "logp"):
        assert not getattr(packed, f"{name}_RT")[padding].any()
    # 1, 2, ... in the order of the row
    for segments, samples in zip(packed.segments_RT, packed.sample_RT):
        used = segments[segments > 0]
        assert list(dict.fromkeys(used)) == list(range(1, len(set(samples[samples >= 0])) + 1))


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_full_if_lengths_permit(seed):
    rng = np.random.default_rng(seed)
    for lengths in (
        rng.integers(20, 450, 300),
        rng.integers(20, 300, 200),
        rng.lognormal(5, 0.6, 300).clip(1, 512),
    ):
        rows = packing.assign(lengths.astype(int), 512)
        assert lengths.astype(int).sum() / (len(rows) * 512) >= 0.95


def test_rows_are_as_few_as_possible_if_lengths_do_not_permit():
    """Two samples of more than half a row never share one."""
    assert len(packing.assign([300] * 7 + [200, 100], 512)) == 7


def test_fill_and_rows():
    rng = np.random.default_rng(0)
    packed = packing.pack([sample(rng, n) for n in (6, 5, 4, 4)], 10)
    assert (packed.rows, packed.fill) == (2, 0.95)
    nothing = packing.pack([], 10)
    assert (nothing.rows, nothing.fill, nothing.tokens_RT.shape) == (0, 0.0, (0, 10))


def test_packing_is_deterministic():
    lengths = [5, 3, 5, 3, 5, 2]
    assert packing.assign(lengths, 10) == [[0, 2], [4, 1, 5], [3]]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_row_holds_no_more_samples_than_asked(most):
    rows = packing.assign([1] * 20 + [9, 9, 5], 10, most)
    assert max(map(len, rows)) == most
    assert sorted(itertools.chain(*rows)) == list(range(23))
    assert packing.assign([1] * 20, 10, 0) == packing.assign([1] * 20, 10)


def test_a_sample_that_is_too_long_raises():
    rng = np.random.default_rng(0)
    with pytest.raises(packing.SampleTooLong, match="sample 1 has 11 tokens, a row 10"):
        packing.pack([sample(rng, 4), sample(rng, 11)], 10)
