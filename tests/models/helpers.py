"""What several test files of `models` and `rl` share."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.logp import chunked_logp
from rl.trajectory import Completion

ROOT = Path(__file__).parents[2]


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def assert_close(a, b, atol=1e-4, rtol=0.0):
    """Assert that the arrays of two trees are equal within an absolute and a relative
    tolerance."""
    jax.tree.map_with_path(
        lambda path, *xy: np.testing.assert_allclose(*xy, rtol, atol, err_msg=str(path)), a, b
    )


def assert_equal(a, b):
    """Assert that the arrays of two trees are equal, in their types too."""
    assert jax.tree.map(jnp.result_type, a) == jax.tree.map(jnp.result_type, b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def noise(shapes, scale=1.0, dtype=jnp.float32, seed=0):
    """Return random arrays for a tree of shapes, such as `qwen.shapes` returns."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(scale * rng.normal(size=s.shape), dtype), shapes)


def token_logp(h_ND, w_DV, targets_N, *, temperature=1.0, chunk, unused=0):
    """Return (logp_N, entropy_N), computed `chunk` tokens at a time."""
    n, count = len(targets_N), -(-len(targets_N) // chunk)
    pad = (0, count * chunk - n)
    h_CSD = jnp.pad(h_ND, (pad, (0, 0))).reshape(count, chunk, -1)
    targets_CS = jnp.pad(targets_N, pad).reshape(count, chunk)
    found = chunked_logp(h_CSD, w_DV, targets_CS, temperature, count, unused)
    return tuple(y.reshape(-1)[:n] for y in found)


def edit(file: Path, change: dict) -> None:
    """Change some keys of a file that holds a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def printed(code: str, *words: str, **environment: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def with_devices(code: str, *words: str) -> str:
    """Return what a program prints that runs with eight simulated devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    return printed(code, *words, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def extend(context, tokens: list[int], answers, tools=None) -> None:
    """Add a generation and what answers it to a context."""
    said = Completion(tokens, [0.0] * len(tokens), "stop", 0)
    asyncio.run(context.extend(said, answers, tools))
