"""Host time of advantages: from outcomes and labels to one number per token, for a full-size step.

    python -m experiments.bench.advantages [--trajectories=256] [--steps=30] [--tokens=25000]

Prints the time of `adca` and of `spread` beside the same work with a Python loop over steps and a table look-up per
token, on the same arrays in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import numpy as np

from rl import advantages


def batch(n: int, k: int, t: int, seed: int = 0):
    """Random outcomes, groups of 8, ragged labels, and for each trajectory `k` runs of trained tokens among `t`."""
    rng = np.random.default_rng(seed)
    steps_N = rng.integers(k // 2, k + 1, n)
    label_NK = rng.choice(np.array([-1, 1], np.int8), (n, k)) * (np.arange(k) < steps_N[:, None])
    step_ids_NT = np.full((n, t), -1, np.int32)
    for row, steps in zip(step_ids_NT, steps_N):
        edges = np.sort(rng.choice(t, 2 * steps, replace=False))
        for step in range(steps):
            row[edges[2 * step] : edges[2 * step + 1]] = step
    outcome_N = rng.integers(0, 2, n).astype(np.float64)
    return outcome_N, np.arange(n) // 8, label_NK, steps_N, step_ids_NT


def naive(outcome_N, group_N, label_NK, steps_N, alpha: float):
    """`adca(norm="reference")` one group, one trajectory and one step at a time."""
    result = np.zeros(label_NK.shape)
    for g in set(group_N.tolist()):
        members = [i for i in range(len(outcome_N)) if group_N[i] == g]
        value = {i: [0.2 * label_NK[i, j] for j in range(steps_N[i])] for i in members}
        mean = math.fsum(math.fsum(v) / len(v) for v in value.values()) / len(members)
        var = math.fsum(math.fsum((x - mean) ** 2 for x in v) / len(v) for v in value.values()) / len(members)
        outcome_mean = math.fsum(outcome_N[i] for i in members) / len(members)
        outcome_std = math.sqrt(math.fsum((outcome_N[i] - outcome_mean) ** 2 for i in members) / len(members))
        for i in members:
            total = (outcome_N[i] - outcome_mean) / (outcome_std + 1e-12) if outcome_std > 1e-8 else 0.0
            for j in reversed(range(steps_N[i])):
                total += alpha * (value[i][j] - mean) / math.sqrt(var + 1e-8)
                result[i, j] = total
    return result


def look_up(advantage_NK, step_ids_NT):
    """`spread`, token by token in NumPy."""
    return np.where(step_ids_NT >= 0, np.take_along_axis(advantage_NK, np.maximum(step_ids_NT, 0), axis=1), 0.0).astype(
        np.float32
    )


def clock(function, *arguments, repeats: int = 9, **options):
    """Median time in milliseconds, and what the function returned."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*arguments, **options)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=25_000)
    flags = parser.parse_args()
    *arrays, step_ids_NT = batch(flags.trajectories, flags.steps, flags.tokens)

    ours, advantage_NK = clock(advantages.adca, *arrays, alpha=0.1, norm="reference")
    theirs, expected_NK = clock(naive, *arrays, alpha=0.1)
    np.testing.assert_allclose(advantage_NK, expected_NK, atol=1e-5)
    spread, token_NT = clock(advantages.spread, advantage_NK, step_ids_NT)
    looked_up, expected_NT = clock(look_up, advantage_NK, step_ids_NT)
    np.testing.assert_array_equal(token_NT, expected_NT)

    print(f"{flags.trajectories} trajectories x {flags.steps} steps x {flags.tokens} tokens, median of 9, milliseconds")
    print(f"{'':24}{'here':>10}{'loop or look-up':>18}")
    print(f"{'advantages of steps':24}{ours:10.2f}{theirs:18.2f}")
    print(f"{'spread over tokens':24}{spread:10.2f}{looked_up:18.2f}")
    print(f"{'together':24}{ours + spread:10.2f}{theirs + looked_up:18.2f}")


if __name__ == "__main__":
    main()
