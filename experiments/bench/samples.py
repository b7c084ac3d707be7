"""The batch of a benchmark as samples of our learner.

NumPy and the standard library only, because a peer packs its rows in the same way.
"""

import numpy as np

from experiments.bench.workload import Batch
from rl.samples import Sample


def samples_of(batch: Batch) -> list[Sample]:
    """Return a sample for each row."""
    samples = []
    for row in batch.rows:
        mask = np.array([0] * len(row.prompt) + row.mask, bool)
        advantage = np.where(mask, np.float32(row.advantage), 0)
        samples.append(Sample(np.array(row.prompt + row.completion), mask, advantage=advantage))
    return samples
