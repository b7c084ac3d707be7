"""Which rollouts of a group are guided by experience."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.seeds import seed_of


def plan(task_ids: Sequence[str], G: int, eta: float, seed: int) -> np.ndarray:
    """bool [tasks, G]: exactly `round(eta * G)` guided rollouts per task, at places drawn from `seed` and its id.

    Which rollouts of a task are drawn does not depend on what else is in the batch. Raises ValueError for an `eta`
    outside [0, 1] (the N_e of AgentEvolver eq. 15).
    """
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta is a share of the rollouts, between 0 and 1; got {eta}")
    guided_NG = np.zeros((len(task_ids), G), bool)
    for row_G, id in zip(guided_NG, task_ids, strict=True):
        rng = np.random.default_rng(seed_of(seed, "guided", id))
        row_G[rng.permutation(G)[: round(eta * G)]] = True
    return guided_NG
