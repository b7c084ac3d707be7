"""A checkpoint is whole or it does not exist; what is damaged afterwards is set aside for the one before."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl.checkpoint import CheckpointError, Checkpoints, checksums

ROOT = Path(__file__).parents[2]


def make_state(value: float) -> dict:
    value = float(value)
    params = {"w": jnp.full((64, 32), value), "layers": {"b": jnp.full((3,), value, jnp.bfloat16)}}
    return {"params": params, "opt": optax.adamw(1e-3).init(params), "step": jnp.int32(int(value))}


def test_state_and_manifest_come_back_bit_for_bit(tmp_path):
    state = make_state(1 / 3)
    manifest = {"pool": [{"content": "Search before booking. é"}], "count": 3, "ratio": 0.1 + 0.2, "10": None}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state, manifest)
    step, restored, found = Checkpoints(tmp_path).restore(make_state(0.0))
    assert step == 4 and found == manifest
    assert checksums(restored) == checksums(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_an_empty_directory_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path).restore(make_state(0.0)) is None


def test_the_last_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, metric in enumerate([0.1, 0.9, None, 0.3, None, None]):
        checkpoints.save(step, make_state(step), {}, metric=metric)
    assert checkpoints.steps() == [1, 4, 5]


def test_a_step_is_not_saved_twice(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1.0), {"first": True})
    checkpoints.save(1, make_state(2.0), {"first": False})
    assert checkpoints.restore(make_state(0.0))[2] == {"first": True}


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:10])


def flip_bytes(path: Path):
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 2, min(len(content) // 2 + 8, len(content))):
        content[i] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("what", ["state", "manifest"])
@pytest.mark.parametrize("damage", [truncate, flip_bytes, Path.unlink])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage, what):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"step": step})
    checkpoints.close()
    for path in (tmp_path / "2" / what).rglob("*"):
        if path.is_file() and path.name != "commit_success.txt" and path.stat().st_size:
            damage(path)
    reopened = Checkpoints(tmp_path, keep=3)
    with caplog.at_level(logging.WARNING):
        step, state, manifest = reopened.restore(make_state(0.0))
    assert (step, manifest) == (1, {"step": 1})
    assert np.array_equal(state["params"]["w"], make_state(1.0)["params"]["w"])
    assert "checkpoint 2 is damaged" in caplog.text
    reopened.save(2, make_state(2.0), {"step": 2})
    assert reopened.restore(make_state(0.0))[0] == 2


def test_unreadable_checkpoints_are_an_error_and_stay_where_they_are(tmp_path):
    Checkpoints(tmp_path).save(3, make_state(3.0), {})
    with pytest.raises(CheckpointError, match="step 3: "):
        Checkpoints(tmp_path).restore({"other": jnp.zeros(2)})
    assert Checkpoints(tmp_path).steps() == [3]


WRITER = """
import sys, jax.numpy as jnp
from rl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=3)
for step in range(1, 1000):
    checkpoints.save(step, {"w": jnp.full((256, 4096), float(step))}, {"step": step})
    print(step, flush=True)
"""


def test_a_save_that_was_killed_is_never_seen(tmp_path):
    """kill -9 at moments spread over the save; whatever is restored is whole."""
    for i, delay in enumerate((0.0, 0.013, 0.031)):
        directory = tmp_path / str(i)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        saved = [int(writer.stdout.readline()) for _ in range(3)][-1]
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        saved = max([saved, *[int(line) for line in writer.stdout.read().split()]])
        writer.wait()
        step, state, manifest = Checkpoints(directory).restore({"w": jnp.zeros((256, 4096))})
        assert manifest == {"step": step} and step in (saved, saved + 1)
        assert np.array_equal(state["w"], np.full((256, 4096), step, np.float32))
