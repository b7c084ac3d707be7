"""Tiny checkpoints and engines for the tests that start real vLLM servers."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.imitation.bpe import train_bpe
from models import hf, qwen
from models.logp import logits
from rl.engines.vllm.engine import Patience, VllmEngine
from rl.engines.vllm.servers import OwnServers
from rl.engines.vllm.transfer import SharedMemory

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("EVOLVER_VLLM_PYTHON", ROOT / ".bench/vllm/bin/python"))
# On a CPU vLLM 0.32 dies ("CPU Generator does not use offset") where the prompt of a request with a
# seed is cut in two, because those of one pass have more tokens than this.
FLAGS = "--enforce-eager --block-size 32 --max-num-batched-tokens 32768"
CONTEXT = 256
# vLLM's CPU attention takes heads of 32 and more.
SHAPE = qwen.Config(400, 64, 2, 2, 1, 32, 128)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Frequent health checks notice a death within a second.
QUICK = Patience(check_every=0.5, failed_checks=3, no_replica=1800.0)


def random_params(shape: qwen.Config, seed: int = 0) -> qwen.Params:
    """Return weights of twice the usual size, so that answers depend on them and rounding stays
    small."""
    drawn = qwen.init(shape, seed)
    return jax.tree.map(lambda x, weight: x * (2 if weight.std else 1), drawn, qwen.weights(shape))


def assert_holds(found: dict, shape: qwen.Config, params: qwen.Params, dtype: str) -> None:
    """Assert that these are the tensors of the checkpoint, in its order and in this dtype."""
    expected = {name: np.asarray(array) for name, array in hf.to_hf(shape, params)}
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array.astype(DTYPES[dtype]), name, strict=True)


def checkpoint(folder: Path, *, tied: bool) -> tuple[qwen.Config, qwen.Params]:
    """Write a checkpoint with a tokenizer; return its shape and parameters."""
    tokenizer = train_bpe([f"word {i} {i * i}" for i in range(400)], 400)
    shape = dataclasses.replace(SHAPE, tied=tied, vocab=tokenizer.vocab_size)
    params = random_params(shape)
    hf.save(folder, shape, params, tokenizer=tokenizer)
    return shape, params


@functools.partial(jax.jit, static_argnums=0)
def _logp(shape: qwen.Config, params, tokens_RT, temperature):
    positions_RT = np.arange(CONTEXT)[None]
    h_RTD = qwen.merge(shape, params).hidden(tokens_RT, positions_RT, np.ones_like(positions_RT))
    head = qwen.unembed(shape, params)
    logp_TV = jax.nn.log_softmax(logits(h_RTD[0, :-1], head, temperature))
    return jnp.take_along_axis(logp_TV, tokens_RT[0, 1:, None], axis=1)[:, 0]


def learner_score(shape: qwen.Config, params, ids: list[int], temperature=1.0) -> np.ndarray:
    """Return log p(ids[i] | ids[:i]) for i >= 1, as the learner computes it."""
    padded = np.pad(np.array(ids, np.int32), (0, CONTEXT - len(ids)))[None]
    return np.asarray(_logp(shape, params, padded, temperature))[: len(ids) - 1]


def make_engine(folder: Path, shape: qwen.Config, *, replicas=1, **options: Any) -> VllmEngine:
    """Return an engine whose servers start from the checkpoint in `folder`."""
    lines: list[str] = []
    servers = OwnServers(
        python=str(PYTHON), checkpoint=folder, logs=folder / "logs", replicas=replicas, context=CONTEXT,
        dtype="float32", slots=64, flags=FLAGS, start_timeout=1800.0, say=lines.append,
    )  # fmt: skip
    engine = VllmEngine(
        servers, vocab=shape.vocab, context=CONTEXT,
        transfer=SharedMemory(shape, dtype="float32", folder="/dev/shm", bucket=1 / 16),
        score=lambda params, ids: learner_score(shape, params, ids), patience=QUICK, say=lines.append, **options,
    )  # fmt: skip
    engine.lines = lines
    return engine
