"""FLOPs, bytes and memory of the programs, from shapes: pure arithmetic, no devices.

FLOPs count a multiply and an add as two, matrix products only. Bytes are those that have to move between memory and
compute units at least once. Sizes are per device unless said otherwise; s is the length of a packed segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models import qwen

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Split:
    """Into how many parts things are cut: rows over `rows` devices, weights over `weights`, heads and hidden units over
    `tensor`, tokens of a row over `sequence`."""

    rows: int = 1
    weights: int = 1
    tensor: int = 1
    sequence: int = 1


def layer_parameters(shape: qwen.Config) -> int:
    """Entries of one layer's matrices."""
    attention = shape.d_model * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return attention + 3 * shape.d_model * shape.d_ff


def forward_flops(shape: qwen.Config, tokens: float, segment: float, predicted: float) -> float:
    """A forward pass over `tokens` tokens in segments of mean length `segment`, `predicted` of them unembedded.

    A token attends to segment / 2 others on average: 4 L H h of FLOPs for each.
    """
    matrices = 2 * shape.layers * layer_parameters(shape)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * segment / 2
    return tokens * (matrices + attention) + 2 * predicted * shape.d_model * shape.vocab


def update_flops(shape: qwen.Config, tokens: float, segment: float, predicted: float, *, remat: bool) -> float:
    """Forward, and backward at twice that; with `remat` what the hardware does beyond it: the forward pass again."""
    return (4 if remat else 3) * forward_flops(shape, tokens, segment, predicted)


def decode_flops(shape: qwen.Config, batch: float, context: float) -> float:
    """One token for each of `batch` sequences with `context` tokens in the cache."""
    return forward_flops(shape, batch, 2 * context, batch)


def kv_bytes(shape: qwen.Config, dtype: str) -> int:
    """Keys and values of one token, all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def decode_bytes(shape: qwen.Config, batch: float, context: float, *, dtype: str, cache_dtype: str) -> float:
    """One step reads every weight but the embedding table once, and the cache of every sequence."""
    weights = shape.layers * layer_parameters(shape) + shape.d_model * shape.vocab
    return weights * BYTES[dtype] + batch * context * kv_bytes(shape, cache_dtype)


def layer_activations(shape: qwen.Config, tokens: float, *, dtype: str, tensor: int = 1) -> float:
    """Bytes that one layer's backward pass wants: inputs of norms and products, heads before and after rotation."""
    width = 4 * shape.d_model
    heads = (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim
    return tokens * (width + (heads + 3 * shape.d_ff) / tensor) * BYTES[dtype]


def update_bytes(shape: qwen.Config, tokens: float, micro_batches: float, split: Split, *, dtype: str) -> float:
    """Of one update on one device: gathered weights three times for each micro-batch, activations written and read
    in both passes, and the optimizer's 28 bytes for each of its parameters."""
    weights = qwen.parameter_count(shape)
    gathered = 3 * micro_batches * weights * BYTES[dtype] / split.tensor
    activations = 6 * shape.layers * layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    return gathered + activations + 28 * weights / split.weights


def logp_bytes(shape: qwen.Config, tokens: float, micro_batches: float, split: Split, *, dtype: str) -> float:
    """Of one scoring pass on one device."""
    weights = micro_batches * qwen.parameter_count(shape) * BYTES[dtype] / split.tensor
    return weights + 2 * shape.layers * layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)


def update_temporaries(
    shape: qwen.Config, rows: int, row: int, split: Split, *, dtype: str, remat: str, chunk: int
) -> float:
    """Activations and buffers of a micro-batch of `rows` rows of `row` tokens on one device.

    Kept for the backward pass: every layer's input ("full" remat), with the attention's output, with the outputs of
    the products ("dots"), or everything. On top, one layer's working set forward and backward, its gathered weights
    and their gradient, a chunk of logits three times, and the gathered unembedding with its gradient. Attention is
    taken to be linear in the row.
    """
    tokens, size = rows / split.rows * row / split.sequence, BYTES[dtype]
    working = layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    stream = tokens * shape.d_model * size
    heads = tokens * shape.heads * shape.head_dim * size / split.tensor
    kept = {"full": stream, "attention": stream + heads, "dots": stream + 0.7 * working, "none": working}[remat]
    layer = layer_parameters(shape) * (2 * size + 4) / split.tensor
    unembedding = shape.d_model * shape.vocab * (size + 4) / split.tensor
    logits = 3 * 4 * min(chunk, tokens) * shape.vocab / split.tensor
    return shape.layers * kept + 2 * working + layer + unembedding + logits


def logp_temporaries(shape: qwen.Config, rows: int, row: int, split: Split, *, dtype: str, chunk: int) -> float:
    """The same of a scoring pass: nothing is kept."""
    tokens, size = rows / split.rows * row / split.sequence, BYTES[dtype]
    working = layer_activations(shape, tokens, dtype=dtype, tensor=split.tensor)
    weights = (2 * layer_parameters(shape) + shape.d_model * shape.vocab) * size / split.tensor
    return 2 * working + weights + 2 * 4 * min(chunk, tokens) * shape.vocab / split.tensor


def sequences_that_fit(room: float, shape: qwen.Config, context: int, cache_dtype: str) -> int:
    """Whole contexts of keys and values that `room` bytes hold."""
    return max(0, math.floor(room / (context * kv_bytes(shape, cache_dtype))))
