"""Host time of advantages, from outcomes and labels to one number per turn, for a full-size
training step.

    python -m experiments.bench.advantages [--trajectories=256] [--turns=30]

Prints the times of `adca` and of a Python loop over turns on the same arrays.
"""

import functools
import math
import statistics
from collections.abc import Callable

import numpy as np

from experiments import commands
from experiments.bench.harness import clocked
from rl.advantages.attribution import adca


def batch(n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return random outcomes, groups of 8, ragged labels and numbers of turns."""
    rng = np.random.default_rng(0)
    turns_N = rng.integers(k // 2, k + 1, n)
    label_NK = rng.choice(np.array([-1, 1], np.int8), (n, k)) * (np.arange(k) < turns_N[:, None])
    return rng.integers(0, 2, n).astype(np.float64), np.arange(n) // 8, label_NK, turns_N


def naive(
    outcome_N: np.ndarray,
    group_N: np.ndarray,
    label_NK: np.ndarray,
    turns_N: np.ndarray,
    alpha: float,
) -> np.ndarray:
    """Compute `adca(norm="reference")` for one group, one trajectory and one turn at a time."""
    result, mean_of = np.zeros(label_NK.shape), statistics.fmean
    for g in set(group_N.tolist()):
        members = [i for i in range(len(outcome_N)) if group_N[i] == g]
        value = {i: [0.2 * label_NK[i, j] for j in range(turns_N[i])] for i in members}
        mean = mean_of(map(mean_of, value.values()))
        var = mean_of(mean_of((x - mean) ** 2 for x in v) for v in value.values())
        outcome_mean = mean_of(outcome_N[i] for i in members)
        outcome_std = math.sqrt(mean_of((outcome_N[i] - outcome_mean) ** 2 for i in members))
        for i in members:
            total = 0.0
            if outcome_std > 1e-8:
                total = (outcome_N[i] - outcome_mean) / (outcome_std + 1e-12)
            for j in reversed(range(turns_N[i])):
                total += alpha * (value[i][j] - mean) / math.sqrt(var + 1e-8)
                result[i, j] = total
    return result


def median_ms(call: Callable[[], np.ndarray]) -> float:
    """Return the median time of nine calls in milliseconds."""
    return 1e3 * statistics.median(clocked(call, 9))


def main(*, trajectories: int = 256, turns: int = 30) -> None:
    """Print both times, after a comparison of the results."""
    arrays = batch(trajectories, turns)
    here = functools.partial(adca, *arrays, alpha=0.1, norm="reference")
    loop = functools.partial(naive, *arrays, alpha=0.1)
    np.testing.assert_allclose(here(), loop(), atol=1e-5)
    print(f"{trajectories} trajectories x {turns} turns, milliseconds, median of 9")
    print(f"here {median_ms(here):.2f}, Python loop {median_ms(loop):.2f}")


if __name__ == "__main__":
    commands.program(main)
