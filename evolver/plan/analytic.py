"""FLOPs, bytes and memory of the programs, computed from shapes alone.

FLOPs are those of matrix products; a multiply and an add count as two. Bytes are those that must
move between memory and compute units at least once. Sizes are per device unless stated otherwise.
tensor: the number of devices that split heads and hidden units.
"""

import math

from models import qwen

BYTES = {"float32": 4, "bfloat16": 2}


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


def kv_bytes(shape: qwen.Config, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def sequences_that_fit(room: float, shape: qwen.Config, context: int, cache_dtype: str) -> int:
    """Return how many contexts of keys and values fit in `room` bytes."""
    return max(0, math.floor(room / (context * kv_bytes(shape, cache_dtype))))


def decode_bytes(
    shape: qwen.Config, batch: float, context: float, *, dtype: str, cache_dtype: str
) -> float:
    """Return the bytes that a decoding step reads: each weight but the embedding table, and every
    sequence's cache."""
    weights = shape.layers * layer_parameters(shape) + shape.d_model * shape.vocab
    return weights * BYTES[dtype] + batch * context * kv_bytes(shape, cache_dtype)


def layer_activations(shape: qwen.Config, tokens: float, dtype: str, tensor: int) -> float:
    """Return the bytes that a layer saves for its backward pass: inputs of norms and products,
    heads before and after rotation."""
    heads = (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim
    return tokens * (4 * shape.d_model + (heads + 3 * shape.d_ff) / tensor) * BYTES[dtype]


def logp_bytes(
    shape: qwen.Config, tokens: float, micro_batches: float, *, dtype: str, tensor: int
) -> float:
    """Return the bytes that one pass of log-probabilities moves on a device: the weights, gathered
    for each micro-batch, and the activations, written and read."""
    weights = micro_batches * qwen.parameter_count(shape) * BYTES[dtype] / tensor
    return weights + 2 * shape.layers * layer_activations(shape, tokens, dtype, tensor)


def update_bytes(
    shape: qwen.Config,
    tokens: float,
    micro_batches: float,
    *,
    dtype: str,
    tensor: int,
    shards: int,
) -> float:
    """Return the bytes that one update moves on a device: those of three passes, and 28 bytes of
    the optimizer per parameter. shards: the number of devices that split the parameters."""
    passes = 3 * logp_bytes(shape, tokens, micro_batches, dtype=dtype, tensor=tensor)
    return passes + 28 * qwen.parameter_count(shape) / shards
