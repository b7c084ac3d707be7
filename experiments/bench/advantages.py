"""Host time of advantages, from outcomes and labels to one number per token, for a full-size
training step.

    python -m experiments.bench.advantages [--trajectories=256] [--turns=30] [--tokens=25000]

Prints the times of `adca` and `spread`, and of a Python loop over turns and a look-up per token on
the same arrays.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import numpy as np

from rl import advantages


def batch(n: int, k: int, t: int, seed: int = 0):
    """Return random outcomes, groups of 8, ragged labels, turns, and the turn of each of `t` tokens
    per trajectory."""
    rng = np.random.default_rng(seed)
    turns_N = rng.integers(k // 2, k + 1, n)
    label_NK = rng.choice(np.array([-1, 1], np.int8), (n, k)) * (np.arange(k) < turns_N[:, None])
    turn_ids_NT = np.full((n, t), -1, np.int32)
    for row, turns in zip(turn_ids_NT, turns_N):
        edges = np.sort(rng.choice(t, 2 * turns, replace=False))
        for turn in range(turns):
            row[edges[2 * turn] : edges[2 * turn + 1]] = turn
    outcome_N = rng.integers(0, 2, n).astype(np.float64)
    return outcome_N, np.arange(n) // 8, label_NK, turns_N, turn_ids_NT


def naive(outcome_N, group_N, label_NK, turns_N, alpha: float):
    """Compute `adca(norm="reference")` for one group, one trajectory and one turn at a time."""
    result = np.zeros(label_NK.shape)
    for g in set(group_N.tolist()):
        members = [i for i in range(len(outcome_N)) if group_N[i] == g]
        value = {i: [0.2 * label_NK[i, j] for j in range(turns_N[i])] for i in members}
        mean = math.fsum(math.fsum(v) / len(v) for v in value.values()) / len(members)
        var = math.fsum(
            math.fsum((x - mean) ** 2 for x in v) / len(v) for v in value.values()
        ) / len(members)
        outcome_mean = math.fsum(outcome_N[i] for i in members) / len(members)
        outcome_std = math.sqrt(
            math.fsum((outcome_N[i] - outcome_mean) ** 2 for i in members) / len(members)
        )
        for i in members:
            total = (
                (outcome_N[i] - outcome_mean) / (outcome_std + 1e-12) if outcome_std > 1e-8 else 0.0
            )
            for j in reversed(range(turns_N[i])):
                total += alpha * (value[i][j] - mean) / math.sqrt(var + 1e-8)
                result[i, j] = total
    return result


def look_up(advantage_NK, turn_ids_NT):
    """Compute `spread` with one NumPy look-up per token."""
    value_NT = np.take_along_axis(advantage_NK, np.maximum(turn_ids_NT, 0), axis=1)
    return np.where(turn_ids_NT >= 0, value_NT, 0.0).astype(np.float32)


def clock(function, *arguments, repeats: int = 9, **options):
    """Return the median time in milliseconds, and the result of the function."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*arguments, **options)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=25_000)
    flags = parser.parse_args()
    *arrays, turn_ids_NT = batch(flags.trajectories, flags.turns, flags.tokens)

    adca_ms, advantage_NK = clock(advantages.adca, *arrays, alpha=0.1, norm="reference")
    naive_ms, expected_NK = clock(naive, *arrays, alpha=0.1)
    np.testing.assert_allclose(advantage_NK, expected_NK, atol=1e-5)
    spread_ms, token_NT = clock(advantages.spread, advantage_NK, turn_ids_NT)
    look_up_ms, expected_NT = clock(look_up, advantage_NK, turn_ids_NT)
    np.testing.assert_array_equal(token_NT, expected_NT)

    print(
        f"{flags.trajectories} trajectories x {flags.turns} turns x {flags.tokens} tokens, median of 9, milliseconds"
    )
    print(f"{'':24}{'here':>10}{'loop or look-up':>18}")
    print(f"{'advantages of turns':24}{adca_ms:10.2f}{naive_ms:18.2f}")
    print(f"{'spread over tokens':24}{spread_ms:10.2f}{look_up_ms:18.2f}")
    print(f"{'together':24}{adca_ms + spread_ms:10.2f}{naive_ms + look_up_ms:18.2f}")


if __name__ == "__main__":
    main()
