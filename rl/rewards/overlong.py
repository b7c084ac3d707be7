"""DAPO (Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv
2503.14476), section 3.4: a soft penalty of long answers.

The paper reports that this part of DAPO raises avg@32 on AIME 2024 from 38 to 41 points; all parts
together raise it from 30 to 50.
"""

import numpy as np

from rl.advantages.batch import Batch
from rl.bounds import Count


def overlong(batch: Batch, *, longest: Count = 20480, soft: Count = 4096) -> np.ndarray:
    """Return the scores plus `length_penalty` of the tokens that each rollout generated, in all its
    turns.

    longest: the most tokens without the whole penalty. soft: the last tokens of these, over which
    it grows from 0 to -1. The defaults are the paper's.
    """
    turns = [[turn for turn in t.turns if turn.trains] for t in batch.trajectories]
    tokens_N = np.array([sum(len(turn.completion.tokens) for turn in own) for own in turns])
    return batch.outcome_N + length_penalty(tokens_N, longest, soft)


def length_penalty(tokens_N: np.ndarray, longest: int, soft: int) -> np.ndarray:
    """Return equation 13: 0 up to longest - soft tokens, -1 beyond `longest`, linear between."""
    return np.clip((longest - soft - tokens_N) / soft, -1.0, 0.0)
