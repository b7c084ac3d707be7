"""Packing of samples into rows of one length: first-fit-decreasing and deterministic; no sample is
cut or dropped.

The rollouts of a task begin with the same prompt, and all prompts of a world with its tools. With
`share`, a row holds such a beginning once, and the tokens that follow it in each sample attend to
it too (models/attention.py). The result of a forward pass is the same, for fewer tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.samples import Sample
from rl.trajectory import Turn

# Samples that share a beginning: (its tokens, the indices of the samples).
Families = list[tuple[int, list[int]]]


class SampleTooLong(ValueError):
    """A sample that does not fit into a row. `rl.samples.drop_reasons` excludes such rollouts
    beforehand, as overlong."""


@dataclass
class Packed:
    """Rows of tokens as (R, T) arrays. Padding is 0 in every array but `sample_RT` and
    `version_RT`, where it is -1."""

    tokens_RT: np.ndarray  # int32
    positions_RT: np.ndarray  # int32, from 0 within each sample
    # int32: 1, 2, ... for the samples and the shared prompts of a row, 0 = padding
    segments_RT: np.ndarray
    mask_RT: np.ndarray  # bool: tokens that train
    # float32: log-probability of each token when it was sampled; NaN = unknown
    logp_RT: np.ndarray
    advantage_RT: np.ndarray  # float32
    guided_RT: np.ndarray  # bool
    sample_RT: np.ndarray  # int32: index into the packed samples
    # int32: version of the weights that sampled each token, -1 outside the mask
    version_RT: np.ndarray
    envs: tuple[str, ...] = ()  # the environment of each packed sample
    # those whose generations the samples hold, in order, if the caller knows them
    turns: tuple[Turn, ...] = ()
    # the rollout, as an integer, that each packed sample is a part of; () = each is a whole one
    rollouts: tuple[int, ...] = ()
    # the guided samples among these, in the same order, if they need a pass of their own
    guided_alone: Packed | None = None
    weight_RT: np.ndarray | None = None  # float32: of each token in the loss, once it is known
    # the denominator of the ratio; None = logp_RT, NaN = what the update itself computes
    old_logp_RT: np.ndarray | None = None
    ref_logp_RT: np.ndarray | None = None  # of the reference policy, if a KL penalty needs it
    # {name: float32}, see `Tokens.channels`; a sample without the channel has 0
    channels: dict[str, np.ndarray] = field(default_factory=dict)
    # (D + 1,) float32: a head of values, see `forward.values`; None = the loss finds no values
    head_D: np.ndarray | None = None
    # int32: segment of each token's shared prompt, 0 = none; None = none at all
    prompts_RT: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.tokens_RT.shape[0]

    @property
    def fill(self) -> float:
        """Fraction of the positions that hold a token."""
        return float(np.mean(self.segments_RT > 0)) if self.segments_RT.size else 0.0

    @property
    def rollout_RT(self) -> np.ndarray:
        """The rollout of each token, -1 in padding."""
        if not self.rollouts:
            return self.sample_RT
        return np.where(self.sample_RT < 0, -1, np.array(self.rollouts)[self.sample_RT])

    def trained(self, value_RT: np.ndarray) -> np.ndarray:
        """Return the values at the tokens that train, (n,): sample by sample as they were packed,
        in token order."""
        # no sample is split between rows
        order = np.argsort(self.sample_RT[self.mask_RT], kind="stable")
        return value_RT[self.mask_RT][order]

    def placed(self, value_n: np.ndarray) -> np.ndarray:
        """Undo `trained`: return (R, T) with the values at the tokens that train, 0 elsewhere."""
        value_RT = np.zeros(self.mask_RT.shape, np.float32)
        places_n = self.trained(np.arange(self.mask_RT.size).reshape(self.mask_RT.shape))
        value_RT.flat[places_n] = value_n
        return value_RT


def assign(lengths: Sequence[int], row: int, most: int = 0) -> list[list[int]]:
    """Return the indices of the items in each row of `row` tokens and at most `most` items (0 = any
    number), by first-fit-decreasing. Ties keep their order.

    Each item has at most `row` tokens.
    """
    lengths_N = np.asarray(lengths, np.int64).reshape(-1)
    rows: list[list[int]] = []
    room_R = np.zeros(lengths_N.size, np.int64)
    for item in np.argsort(-lengths_N, kind="stable"):
        length = lengths_N[item]
        fits_R = room_R[: len(rows)] >= length
        r = int(np.argmax(fits_R)) if fits_R.any() else len(rows)
        if r == len(rows):
            rows.append([])
            room_R[r] = row
        rows[r].append(int(item))
        room_R[r] = -1 if len(rows[r]) == most else room_R[r] - length
    return rows


def pack(samples: Sequence[Sample], row: int, *, share: bool = False, most: int = 0) -> Packed:
    """Pack samples, each whole, into rows of `row` tokens by first-fit-decreasing. Raises
    SampleTooLong.

    most: samples of a row; 0 = any number. Not together with `share`.
    share: let the samples of a row share what their prompts begin with. The last token of a prompt
    stays with each sample, because its first trained token is predicted from the position before.
    """
    for i, sample in enumerate(samples):
        if len(sample) > row:
            raise SampleTooLong(f"sample {i} has {len(sample)} tokens, a row {row}")
    choices: list[Families] = [[(0, [item]) for item in range(len(samples))]]
    choices += _families(samples, row) if share else []

    def assigned(families: Families) -> tuple[list[list[int]], Families]:
        return assign([_tokens([family], samples) for family in families], row, most), families

    # Rows take time, and those of fewer tokens may be more of them, as a family is not cut.
    packings = map(assigned, choices)
    rows, families = min(packings, key=lambda one: (len(one[0]), _tokens(one[1], samples)))

    def empty(dtype: type, fill: int = 0) -> np.ndarray:
        return np.full((len(rows), row), fill, dtype)

    names = dict.fromkeys(itertools.chain.from_iterable(sample.channels for sample in samples))
    packed = Packed(
        tokens_RT=empty(np.int32),
        positions_RT=empty(np.int32),
        segments_RT=empty(np.int32),
        mask_RT=empty(bool),
        logp_RT=empty(np.float32),
        advantage_RT=empty(np.float32),
        guided_RT=empty(bool),
        sample_RT=empty(np.int32, -1),
        version_RT=empty(np.int32, -1),
        envs=tuple(sample.env for sample in samples),
        channels={name: empty(np.float32) for name in names},
    )
    prompts_RT = empty(np.int32)
    packed.prompts_RT = prompts_RT if share else None
    for r, chosen in enumerate(rows):
        start, segment = 0, 0
        for shared, items in (families[family] for family in chosen):
            pieces = [(item, shared, len(samples[item])) for item in items]
            if shared:
                pieces.insert(0, (items[0], 0, shared))
            prompt = segment + 1  # the segment of the shared prompt
            for item, begin, end in pieces:
                sample, part, segment = samples[item], slice(begin, end), segment + 1
                here = r, slice(start, start + end - begin)
                for name in ("tokens", "mask", "logp", "advantage", "version"):
                    getattr(packed, f"{name}_RT")[here] = getattr(sample, name)[part]
                for name, value in sample.channels.items():
                    packed.channels[name][here] = value[part]
                packed.positions_RT[here] = np.arange(begin, end)
                packed.segments_RT[here] = segment
                packed.guided_RT[here] = sample.guided
                packed.sample_RT[here] = item
                if begin:
                    prompts_RT[here] = prompt
                start += end - begin
    return packed


def _families(samples: Sequence[Sample], row: int) -> list[Families]:
    """Return two choices of (tokens of what they share, indices of the samples), each of at most
    `row` tokens, in order: samples of the same prompt share all of it, or all samples share what
    all prompts begin with, such as the tools."""
    by_prompt: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        by_prompt.setdefault(sample.tokens[: _prompt(sample)].tobytes(), []).append(i)
    apart = [(_prompt(samples[items[0]]), items) for items in by_prompt.values()]
    together = [(beginning_of(samples), list(range(len(samples))))]
    return [_in_rows(families, samples, row) for families in (apart, together)]


def _in_rows(families: Families, samples: Sequence[Sample], row: int) -> Families:
    """Cut families of more than `row` tokens, each part with the shared tokens of its own."""
    cut: Families = []
    for shared, items in families:
        room = 0
        for i in items:
            own = len(samples[i]) - shared
            if own > room or not shared:
                cut.append((shared, []))
                room = row - shared
            cut[-1][1].append(i)
            room -= own
    return [(shared if len(items) > 1 else 0, items) for shared, items in cut]


def _tokens(families: Families, samples: Sequence[Sample]) -> int:
    """Return the tokens of all families."""
    return sum(s + sum(len(samples[i]) - s for i in items) for s, items in families)


def beginning_of(samples: Sequence[Sample]) -> int:
    """Return how many tokens all prompts begin with alike, without the last token of each; 0 if
    there are no samples."""
    if not samples:
        return 0
    first = samples[0].tokens
    alike = min(_prompt(sample) for sample in samples)
    for sample in samples[1:]:
        differ = first[:alike] != sample.tokens[:alike]
        alike = int(np.argmax(differ)) if differ.any() else alike
    return alike


def _prompt(sample: Sample) -> int:
    """Return the tokens of a sample's prompt, without the last one."""
    return max(int(np.argmax(sample.mask)) - 1, 0)
