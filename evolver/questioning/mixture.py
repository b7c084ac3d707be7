"""The tasks of one step: originals and synthetic ones in a given ratio (eq. 12 of the AgentEvolver
paper)."""

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
    share: float,
    seed: int,
    weights: Sequence[float] | None = None,
) -> list[Task]:
    """Return `n` different tasks for a step, `round(share * n)` of them synthetic, determined by
    `seed` and `step`.

    Originals come in epochs: each is drawn once before any is drawn again. Synthetic tasks come in
    epochs too or, with `weights` (one per task, not negative), are drawn in proportion to them
    without replacement. Raises ValueError if there are fewer tasks than needed or if `share` is
    outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is the fraction of synthetic tasks, between 0 and 1; got {share}")
    n_synthetic = round(share * n)
    for name, tasks, needed in (
        ("original", original, n - n_synthetic),
        ("synthetic", synthetic, n_synthetic),
    ):
        if len(tasks) < needed:
            raise ValueError(
                f"a step of {n} tasks with share {share:g} needs {needed} {name} tasks, there are {len(tasks)}"
            )
    chosen = [
        original[i]
        for i in _in_epochs(len(original), n - n_synthetic, step, seed_of(seed, "original"))
    ]
    if weights is None:
        drawn = _in_epochs(len(synthetic), n_synthetic, step, seed_of(seed, "synthetic"))
    else:
        drawn = _by_weight(
            np.asarray(weights, float), n_synthetic, seed_of(seed, "synthetic", step)
        )
    chosen += [synthetic[i] for i in drawn]
    order = np.random.default_rng(seed_of(seed, "order", step)).permutation(len(chosen))
    return [chosen[i] for i in order]


def _by_weight(weights_N: np.ndarray, n: int, seed: int) -> list[int]:
    """Draw n indices in proportion to the weights, without replacement; weight 0 comes last.

    Uses the keys of Efraimidis and Spirakis (2006).
    """
    if weights_N.ndim != 1 or not np.all(weights_N >= 0.0):
        raise ValueError("weights must be one number per synthetic task, none negative")
    uniform_N = np.random.default_rng(seed).random(len(weights_N))
    keys_N = np.where(weights_N > 0, np.log(uniform_N) / np.maximum(weights_N, 1e-300), -np.inf)
    return [int(i) for i in np.lexsort((uniform_N, keys_N))[::-1][:n]]


def _in_epochs(size: int, n: int, step: int, seed: int) -> list[int]:
    """Return the n indices of `step` when range(size) is drawn in shuffled epochs, n per step, none
    twice in a step."""
    if n == 0:
        return []
    first, last = step * n, step * n + n
    for epoch in range(
        (last - 1) // size
    ):  # each needs the one before it, and recursion is limited
        _epoch(size, n, epoch, seed)
    dealt: list[int] = []
    for epoch in range(first // size, (last - 1) // size + 1):
        dealt += _epoch(size, n, epoch, seed)
    start = first - (first // size) * size
    return dealt[start : start + n]


@lru_cache(maxsize=4096)
def _epoch(size: int, n: int, epoch: int, seed: int) -> tuple[int, ...]:
    """Return a permutation of range(size).

    If a step spans two epochs, the permutation of the second starts with indices that the step has
    not drawn yet.
    """
    order = [int(i) for i in np.random.default_rng(seed_of(seed, "epoch", epoch)).permutation(size)]
    begun = (epoch * size) % n
    if epoch == 0 or begun == 0:
        return tuple(order)
    drawn = set(_epoch(size, n, epoch - 1, seed)[size - begun :])
    new = [i for i in order if i not in drawn]
    head = list(itertools.islice(new, n - begun))
    return (*head, *(i for i in order if i not in set(head)))
