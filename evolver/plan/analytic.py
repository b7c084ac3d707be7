"""FLOPs, bytes and memory of the programs, computed from shapes alone.

FLOPs are those of matrix products; a multiply and an add count as two. Bytes are those that must
move between memory and compute units at least once. Sizes are per device unless stated otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models import qwen

EPISODE = 1 / 3  # assumed mean length of an episode, as a share of rollout.context
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Split:
    """Numbers of devices that split rows, weights, heads and hidden units (tensor), and tokens of a
    row (sequence)."""

    rows: int = 1
    weights: int = 1
    tensor: int = 1
    sequence: int = 1


def layer_parameters(shape: qwen.Config) -> int:
    """Return the number of entries of one layer's matrices."""
    attention = shape.d_model * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return attention + 3 * shape.d_model * shape.d_ff


def forward_flops(shape: qwen.Config, tokens: float, segment: float, predicted: float) -> float:
    """Return the FLOPs of a forward pass over `tokens` tokens in segments of mean length `segment`.

    predicted: the number of tokens that get logits. A token attends to segment / 2 others on
    average, at 4 L H h FLOPs each.
    """
    matrices = 2 * shape.layers * layer_parameters(shape)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * segment / 2
    return tokens * (matrices + attention) + 2 * predicted * shape.d_model * shape.vocab


def update_flops(
    shape: qwen.Config, tokens: float, segment: float, predicted: float, *, remat: bool
) -> float:
    """Return the FLOPs of an update: the backward pass takes twice those of the forward pass,
    `remat` another one."""
    return (4 if remat else 3) * forward_flops(shape, tokens, segment, predicted)


def decode_flops(shape: qwen.Config, batch: float, context: float) -> float:
    """Return the FLOPs of decoding one token for each of `batch` sequences with `context` tokens in
    the cache."""
    return forward_flops(shape, batch, 2 * context, batch)


def kv_bytes(shape: qwen.Config, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def decode_bytes(
    shape: qwen.Config, batch: float, context: float, *, dtype: str, cache_dtype: str
) -> float:
    """Return the bytes that a decoding step reads: each weight but the embedding table, and every
    sequence's cache."""
    weights = shape.layers * layer_parameters(shape) + shape.d_model * shape.vocab
    return weights * BYTES[dtype] + batch * context * kv_bytes(shape, cache_dtype)


def layer_activations(shape: qwen.Config, tokens: float, *, dtype: str, tensor: int = 1) -> float:
    """Return the bytes that a layer saves for its backward pass: inputs of norms and products,
    heads before and after rotation."""
    width = 4 * shape.d_model
    heads = (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim
    return tokens * (width + (heads + 3 * shape.d_ff) / tensor) * BYTES[dtype]


def update_bytes(
    shape: qwen.Config, tokens: float, micro_batches: float, split: Split, *, dtype: str
) -> float:
    """Return the bytes that one update moves on a device.

    They are the gathered weights, three times per micro-batch; the activations, written and read in
    both passes; and 28 bytes of the optimizer per parameter.
    """
    weights = qwen.parameter_count(shape)
    gathered = 3 * micro_batches * weights * BYTES[dtype] / split.tensor
    activations = (
        6 * shape.layers * layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    )
    return gathered + activations + 28 * weights / split.weights


def logp_bytes(
    shape: qwen.Config, tokens: float, micro_batches: float, split: Split, *, dtype: str
) -> float:
    """Return the bytes that one pass of log-probabilities moves on a device."""
    weights = micro_batches * qwen.parameter_count(shape) * BYTES[dtype] / split.tensor
    return weights + 2 * shape.layers * layer_activations(
        shape, tokens, dtype=dtype, tensor=split.tensor
    )


def update_temporaries(
    shape: qwen.Config, rows: int, row: int, split: Split, *, dtype: str, remat: str, chunk: int
) -> float:
    """Return the bytes of activations and buffers for a micro-batch of `rows` rows of `row` tokens
    on one device.

    `remat` decides what each layer saves for the backward pass (see `qwen.REMAT`). Added to that
    are one layer's working set forward and backward, its gathered weights and their gradient, three
    times a chunk of logits, and the gathered unembedding with its gradient. The memory of attention
    is assumed to be linear in the length of a row.
    """
    tokens, size = rows / split.rows * row / split.sequence, BYTES[dtype]
    working = layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    stream = tokens * shape.d_model * size
    heads = tokens * shape.heads * shape.head_dim * size / split.tensor
    saved = {
        "full": stream,
        "attention": stream + heads,
        "dots": stream + 0.7 * working,
        "none": working,
    }[remat]
    layer = layer_parameters(shape) * (2 * size + 4) / split.tensor
    unembedding = shape.d_model * shape.vocab * (size + 4) / split.tensor
    logits = 3 * 4 * min(chunk, tokens) * shape.vocab / split.tensor
    return shape.layers * saved + 2 * working + layer + unembedding + logits


def logp_temporaries(
    shape: qwen.Config, rows: int, row: int, split: Split, *, dtype: str, chunk: int
) -> float:
    """Return the same for a pass of log-probabilities, which saves nothing."""
    tokens, size = rows / split.rows * row / split.sequence, BYTES[dtype]
    working = layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    weights = (2 * layer_parameters(shape) + shape.d_model * shape.vocab) * size / split.tensor
    return 2 * working + weights + 2 * 4 * min(chunk, tokens) * shape.vocab / split.tensor


def sequences_that_fit(room: float, shape: qwen.Config, context: int, cache_dtype: str) -> int:
    """Return how many contexts of keys and values fit in `room` bytes."""
    return max(0, math.floor(room / (context * kv_bytes(shape, cache_dtype))))


def held_out_episodes(config: Any, tasks: int) -> int:
    """Return the number of episodes of all evaluations on `tasks` held-out tasks; step 0 sweeps
    `eval.temperatures`."""
    c, rounds = config.eval, evaluations(config)
    others = [t for t in c.temperatures if t != c.temperature] if rounds else []
    return tasks * (rounds * (c.rollouts + c.greedy) + len(others) * c.rollouts)


def checkpoints(config: Any) -> int:
    """Return the number of checkpoints that are written, with that of step 0."""
    return 1 + math.ceil(config.steps / config.checkpoint.every)


def evaluations(config: Any) -> int:
    """Return how often the held-out tasks are evaluated."""
    every = config.eval.every
    return 1 + config.steps // every + bool(config.steps % every) if every else 0
