"""The tasks of one step: originals and synthetic ones in a given ratio (eq. 12 of the AgentEvolver paper)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from envs.world import Task
from rl.seeds import seed_of


def mixture(
    original: Sequence[Task],
    synthetic: Sequence[Task],
    *,
    step: int,
    n: int,
    ratio: float,
    seed: int,
    weights: Sequence[float] | None = None,
) -> list[Task]:
    """`n` different tasks for a step, `round(ratio * n)` of them synthetic; decided by `seed` and `step` alone.

    Originals come in epochs: each is drawn once before any comes again. Synthetic ones come in epochs too, or with
    `weights` (one per task, not negative) are drawn in proportion to them without replacement. `ratio` 0 switches
    synthetic tasks off, 1 leaves no others. Raises ValueError where there are fewer tasks than asked for.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio is the share of synthetic tasks, between 0 and 1; got {ratio}")
    of_synthetic = round(ratio * n)
    for name, tasks, wanted in (("original", original, n - of_synthetic), ("synthetic", synthetic, of_synthetic)):
        if len(tasks) < wanted:
            raise ValueError(
                f"a step of {n} tasks at ratio {ratio:g} needs {wanted} {name} tasks, there are {len(tasks)}"
            )
    chosen = [original[i] for i in _epochs(len(original), n - of_synthetic, step, seed_of(seed, "original"))]
    if weights is None:
        drawn = _epochs(len(synthetic), of_synthetic, step, seed_of(seed, "synthetic"))
    else:
        drawn = _weighted(np.asarray(weights, float), of_synthetic, seed_of(seed, "synthetic", step))
    chosen += [synthetic[i] for i in drawn]
    order = np.random.default_rng(seed_of(seed, "order", step)).permutation(len(chosen))
    return [chosen[i] for i in order]


def _weighted(weights_N: np.ndarray, n: int, seed: int) -> list[int]:
    """Without replacement, in proportion to the weights; weight 0 comes last (Efraimidis and Spirakis' keys)."""
    if weights_N.ndim != 1 or not np.all(weights_N >= 0.0):
        raise ValueError("weights must be one number per synthetic task, none negative")
    uniform_N = np.random.default_rng(seed).random(len(weights_N))
    keys_N = np.where(weights_N > 0, np.log(uniform_N) / np.maximum(weights_N, 1e-300), -np.inf)
    return [int(i) for i in np.lexsort((uniform_N, keys_N))[::-1][:n]]


def _epochs(size: int, n: int, step: int, seed: int) -> list[int]:
    """What `step` gets when `size` things are dealt `n` at a time, epoch after epoch, none twice in a step."""
    if n == 0:
        return []
    first, last = step * n, step * n + n
    dealt: list[int] = []
    for epoch in range(first // size, (last - 1) // size + 1):
        dealt += _epoch(size, n, epoch, seed)
    start = first - (first // size) * size
    return dealt[start : start + n]


@lru_cache(maxsize=4096)
def _epoch(size: int, n: int, epoch: int, seed: int) -> tuple[int, ...]:
    """A permutation whose first places avoid what the step that it shares with the epoch before has drawn already."""
    order = [int(i) for i in np.random.default_rng(seed_of(seed, "epoch", epoch)).permutation(size)]
    begun = (epoch * size) % n
    if epoch == 0 or begun == 0:
        return tuple(order)
    drawn = set(_epoch(size, n, epoch - 1, seed)[size - begun :])
    new = [i for i in order if i not in drawn]
    head = list(itertools.islice(new, n - begun))
    return (*head, *(i for i in order if i not in set(head)))
