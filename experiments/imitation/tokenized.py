"""Demonstrations as tokens: made and tokenized by one process per core, and kept in a folder until
a policy has imitated them."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evolver.config import plugs
from evolver.imitating import NothingFits, samples_of
from experiments.imitation import demonstrations
from models.tokenizer import Tokenizer
from rl.samples import Sample

NAMES = ("tokens_n", "mask_n", "lengths_S", "flags_N2")  # of the arrays in a file
CHUNK = 200  # demonstrations that a process makes at a time


class Tokenized(NamedTuple):
    """Samples of demonstrations; the flags of all demonstrations, also of those that do not fit a
    row."""

    samples: list[Sample]
    success_N: np.ndarray
    hinted_N: np.ndarray

    def described(self) -> str:
        """Return how many of them succeed, with or without a hint."""
        all_hinted = self.hinted_N.all()
        success = self.success_N[self.hinted_N == all_hinted].mean()
        return f"{success:.1%} {'with' if all_hinted else 'without'} a hint"


def tokenized(config: Any, care: float, folder: Path) -> Tokenized:
    """Return the demonstrations of an agent that takes this care, with the tokenizer of a folder,
    where they are written; or read, if they were. Raises NothingFits."""
    path = folder / f"care-{care:g}.npz"
    if not path.exists():
        partial = path.with_suffix(".part.npz")
        arrays: dict[str, Any] = dict(zip(NAMES, _made(config, care, folder)))
        np.savez_compressed(partial, **arrays)
        partial.replace(path)
    with np.load(path) as there:
        ends_S = np.cumsum(there["lengths_S"])[:-1]
        tokens, masks = (np.split(there[name], ends_S) for name in NAMES[:2])
        success_N, hinted_N = there["flags_N2"].T
    return Tokenized(list(map(Sample, tokens, masks)), success_N, hinted_N)


def _made(config: Any, care: float, folder: Path) -> list[np.ndarray]:
    """Make the demonstrations. They depend on the config and the tokenizer only."""
    planned = demonstrations.planned(config)
    work = [planned[i : i + CHUNK] for i in range(0, len(planned), CHUNK)]
    processes = min(len(work), os.cpu_count() or 1)
    tokenize = functools.partial(_tokenize, config, care, str(folder))
    if processes == 1:
        made = list(map(tokenize, work))
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as workers:
            made = list(workers.map(tokenize, work))
    arrays = list(map(np.concatenate, zip(*made)))
    if not len(arrays[2]):
        _tokenize(config, care, str(folder), work[0], forgive=False)  # raises NothingFits
    return arrays


def _tokenize(
    config: Any, care: float, folder: str, work: Sequence[tuple[int, bool]], forgive: bool = True
) -> list[np.ndarray]:
    """Return the arrays of planned demonstrations, with the tokenizer of a folder and the prompts
    of the config's template. Raises NothingFits, unless told to `forgive` that none fits a row."""
    c = config
    template = plugs.plug("template", c.template.name, c.template.args.to_dict())
    episodes = [demonstrations.demonstrate(c, care, *one) for one in work]
    try:
        samples = samples_of(episodes, _tokenizer(folder), c.row, template)
    except NothingFits:
        if not forgive:
            raise
        samples = []
    none = np.empty(0, np.int32)
    return [
        np.concatenate([none, *(sample.tokens for sample in samples)]).astype(np.int32),
        np.concatenate([none, *(sample.mask for sample in samples)]).astype(bool),
        np.array([len(sample) for sample in samples], np.int64),
        np.array([(episode["success"], episode["hinted"]) for episode in episodes], bool),
    ]


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.load(folder)
