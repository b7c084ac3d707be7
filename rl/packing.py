"""Packing of samples into rows of one length: first-fit-decreasing and deterministic; no sample is cut or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.samples import Sample
from rl.trajectory import Turn


class SampleTooLong(ValueError):
    """A sample that does not fit into a row. `rl.samples.fates` excludes such rollouts beforehand, as overlong."""


@dataclass
class Packed:
    """Rows of tokens as (R, T) arrays. Padding is 0 in every array but `sample_RT` and `version_RT`, where it is -1."""

    tokens_RT: np.ndarray  # int32
    positions_RT: np.ndarray  # int32, from 0 within each sample
    segments_RT: np.ndarray  # int32: 1, 2, ... for the samples of a row, 0 = padding
    mask_RT: np.ndarray  # bool: tokens that train
    logp_RT: np.ndarray  # float32: log-probability of each token when it was sampled
    advantage_RT: np.ndarray  # float32
    guided_RT: np.ndarray  # bool
    sample_RT: np.ndarray  # int32: index into the packed samples
    version_RT: np.ndarray | None = None  # int32: version of the weights that sampled each token, -1 outside the mask
    envs: tuple[str, ...] = ()  # the environment of each packed sample
    turns: tuple[Turn, ...] = ()  # those whose generations the samples hold, in order, if the caller knows them
    old_logp_RT: np.ndarray | None = None  # the denominator of the ratio; None = logp_RT
    ref_logp_RT: np.ndarray | None = None  # of the reference policy, if a KL penalty needs it

    @property
    def rows(self) -> int:
        return self.tokens_RT.shape[0]

    @property
    def fill(self) -> float:
        """Fraction of the positions that hold a token."""
        return float(np.mean(self.segments_RT > 0)) if self.segments_RT.size else 0.0

    def trained(self, value_RT: np.ndarray) -> np.ndarray:
        """Return the values at the tokens that train, (n,): sample by sample as they were packed, in token order."""
        order = np.argsort(self.sample_RT[self.mask_RT], kind="stable")  # no sample is split between rows
        return value_RT[self.mask_RT][order]


def assign(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Return the indices of the items in each row of `row` tokens, by first-fit-decreasing. Ties keep their order."""
    lengths_N = np.asarray(lengths, np.int64).reshape(-1)
    rows: list[list[int]] = []
    room_R = np.zeros(lengths_N.size, np.int64)
    for item in np.argsort(-lengths_N, kind="stable"):
        length = lengths_N[item]
        if length > row:
            raise SampleTooLong(f"sample {item} has {length} tokens, a row {row}")
        fits_R = room_R[: len(rows)] >= length
        r = int(np.argmax(fits_R)) if fits_R.any() else len(rows)
        if r == len(rows):
            rows.append([])
            room_R[r] = row
        rows[r].append(int(item))
        room_R[r] -= length
    return rows


def pack(samples: Sequence[Sample], row: int) -> Packed:
    """Pack samples, each whole, into rows of `row` tokens by first-fit-decreasing. Raises SampleTooLong."""
    rows = assign([len(sample) for sample in samples], row)

    def empty(dtype, fill=0):
        return np.full((len(rows), row), fill, dtype)

    packed = Packed(
        tokens_RT=empty(np.int32), positions_RT=empty(np.int32), segments_RT=empty(np.int32), mask_RT=empty(bool),
        logp_RT=empty(np.float32), advantage_RT=empty(np.float32), guided_RT=empty(bool), sample_RT=empty(np.int32, -1),
        version_RT=empty(np.int32, -1), envs=tuple(sample.env for sample in samples),
    )  # fmt: skip
    for r, items in enumerate(rows):
        start = 0
        for segment, item in enumerate(items, 1):
            sample = samples[item]
            here = slice(start, start + len(sample))
            packed.tokens_RT[r, here] = sample.tokens
            packed.positions_RT[r, here] = np.arange(len(sample))
            packed.segments_RT[r, here] = segment
            packed.mask_RT[r, here] = sample.mask
            packed.logp_RT[r, here] = sample.logp
            packed.advantage_RT[r, here] = sample.advantage
            packed.guided_RT[r, here] = sample.guided
            packed.sample_RT[r, here] = item
            packed.version_RT[r, here] = sample.version
            start += len(sample)
    return packed
