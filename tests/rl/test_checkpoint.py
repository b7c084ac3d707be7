"""A checkpoint is complete or does not exist; a damaged one is moved aside and the one before it is
used."""

import itertools
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models import mesh as meshes
from rl import checkpoint
from rl.checkpoint import CheckpointError, Checkpoints, _weighted_sum, checksums
from tests.models.helpers import ROOT, with_devices


def make_state(value: float) -> dict:
    value = float(value)
    params = {"w": jnp.full((64, 32), value), "layers": {"b": jnp.full((3,), value, jnp.bfloat16)}}
    return {"params": params, "opt": optax.adamw(1e-3).init(params), "step": jnp.int32(int(value))}


def newest(folder, like=None, keep=3):
    """Return (step, state, manifest) of the newest readable checkpoint of a directory."""
    return Checkpoints(folder, keep=keep).restore(make_state(0.0) if like is None else like)


def written(folder, *steps, metrics=(), keep=3):
    """Write the checkpoints of these steps, whose states and manifests name them."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step, metric in itertools.zip_longest(steps, metrics):
        checkpoints.save(step, make_state(step), {"step": step}, metric=metric)
    checkpoints.close()
    return checkpoints


def started(code: str, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines_of(process: subprocess.Popen) -> list[str]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    return out.splitlines()


def test_state_and_manifest_come_back_bit_for_bit(tmp_path):
    state, manifest = make_state(1 / 3), {"pool": [{"content": "Search. é"}], "count": 3}
    manifest |= {"ratio": 0.1 + 0.2, "10": None}
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(4, state, manifest)
    checkpoints.close()
    assert checkpoints.seconds > 0
    step, restored, restored_manifest = newest(tmp_path)
    assert step == 4 and restored_manifest == manifest
    assert checksums(restored) == checksums(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_an_empty_directory_restores_nothing(tmp_path):
    assert newest(tmp_path) is None


@pytest.mark.parametrize(
    "options, metrics, kept",
    [
        ({"keep": 2}, [0.1, 0.9, None, 0.3, None, None], [1, 4, 5]),
        ({"keep": 1, "milestones": 3}, [None] * 8, [0, 3, 6, 7]),
    ],
)
def test_the_last_the_best_and_the_milestones_are_kept(tmp_path, options, metrics, kept):
    checkpoints = Checkpoints(tmp_path, **options)
    for step, metric in enumerate(metrics):
        checkpoints.save(step, {"w": jnp.full((4,), step)}, {}, metric=metric)
    checkpoints.close()
    assert checkpoints.steps() == kept


def test_a_checkpoint_is_replaced_by_one_that_brings_a_metric(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(10, make_state(1.0), {"unbooked": True})
    checkpoints.save(10, make_state(1.0), {"unbooked": False}, metric=0.9, replace=True)
    checkpoints.save(20, make_state(2.0), {}, metric=0.1)
    checkpoints.close()
    assert checkpoints.steps() == [10, 20] and not list((tmp_path / "replaced").iterdir())
    shutil.rmtree(tmp_path / "20")
    assert newest(tmp_path, keep=1)[2] == {"unbooked": False}


def test_a_checkpoint_whose_successor_is_not_written_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(10, make_state(1.0), {"n": 1})
    checkpoints.wait()
    checkpoints.save(10, make_state(1.0), {"n": object()}, replace=True)  # no JSON
    assert checkpoints.failed == 1
    with pytest.raises(CheckpointError):
        checkpoints.wait()
    assert checkpoints.steps() == [10] and checkpoints.restore(make_state(0.0))[2] == {"n": 1}
    checkpoints.close()
    (tmp_path / "replaced").mkdir(exist_ok=True)
    # as a process leaves it that dies in between
    (tmp_path / "10").rename(tmp_path / "replaced" / "10")
    assert newest(tmp_path, keep=1)[0] == 10


def test_a_save_holds_the_state_at_the_time_of_the_call(tmp_path):
    """The next update consumes the state while it is being written."""
    checkpoints, state = Checkpoints(tmp_path, keep=4), {"w": jnp.zeros((512, 1024))}
    step = jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    for i in range(4):
        checkpoints.save(i, state, {})
        state = step(state)
    checkpoints.wait()
    for i in range(4):
        loaded, *_ = checkpoints._load(i, {"w": jnp.zeros((512, 1024))})
        np.testing.assert_array_equal(loaded["w"], np.full((512, 1024), i))
    checkpoints.close()


FULL = """
import resource, signal, sys, jax.numpy as jnp
from rl.checkpoint import CheckpointError, Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
checkpoints.save(1, state, {"step": 1})
checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpoints.save(2, state, {"step": 2})
try:
    checkpoints.wait()
    print("no error")
except CheckpointError as error:
    print(error)
assert checkpoints.failed == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, state, {"step": 3})
checkpoints.wait()
print(checkpoints.steps())
checkpoints.close()
"""


def test_a_full_disk_costs_one_save_and_no_checkpoint(tmp_path):
    error, steps = lines_of(started(FULL, str(tmp_path)))[-2:]
    assert error.startswith("the checkpoint of step 2 was not written: ")
    assert error.endswith("the last checkpoint is of step 1") and steps == "[3]"


NO_DESCRIPTORS = """
import os, resource, sys, threading, jax.numpy as jnp
from rl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
state = {"w": jnp.ones((100, 100)), "b": jnp.ones(100)}
checkpoints.save(1, state, {})
checkpoints.wait()
before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for left in range(12):
    few = len(os.listdir("/proc/self/fd")) - 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    checkpoints.save(2 + left, state, {})
    checkpoints._settle()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
checkpoints.close()
print(checkpoints.failed)
for thread in threading.enumerate():
    if not thread.daemon and thread is not threading.main_thread():
        thread.join(20)
        print(thread.is_alive())
"""


def test_no_thread_of_a_save_that_failed_keeps_the_process_alive(tmp_path):
    process = started(NO_DESCRIPTORS, str(tmp_path))
    try:
        failed, *threads_left = lines_of(process)
    finally:
        process.kill()
    assert int(failed) >= 1 and "True" not in threads_left


def test_too_little_disk_space_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    checkpoints.save(1, make_state(1.0), {})
    words = r"it needs .* GB and .* has 1e-06 GB left; the last checkpoint .* none"
    with pytest.raises(CheckpointError, match=words):
        checkpoints.wait()
    assert not list(tmp_path.iterdir())


def test_a_step_is_not_saved_twice(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, make_state(1.0), {"first": True})
    checkpoints.save(1, make_state(2.0), {"first": False})
    checkpoints.wait()
    assert checkpoints.restore(make_state(0.0))[2] == {"first": True}


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:10])


def flip_bytes(path: Path):
    content = np.fromfile(path, np.uint8)
    content[len(content) // 2 :][:8] ^= 0xFF
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize("what", ["state", "manifest"])
@pytest.mark.parametrize("damage", [truncate, flip_bytes, Path.unlink])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage, what):
    written(tmp_path, 1, 2)
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
    reopened.close()


@pytest.mark.parametrize("file", ["manifest/metadata", "metrics/metrics"])
def test_any_flipped_bit_is_noticed_or_changes_nothing(tmp_path, caplog, file):
    """Each bit alone: the newest checkpoint comes back as it was written, or the sound one before
    it does."""
    manifest = {"step": 2, "alarm": [0.25, 1.0], "questioning": {"texts": ["bé"]}}
    checkpoints = Checkpoints(tmp_path / "sound", keep=3)
    checkpoints.save(1, {"w": jnp.ones(4)}, manifest | {"step": 1}, metric=0.1)
    checkpoints.save(2, {"w": jnp.ones(4)}, manifest, metric=0.25)
    checkpoints.close()
    content = (tmp_path / "sound/2" / file).read_bytes()
    for bit in np.random.default_rng(0).permutation(8 * len(content))[:40]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << (bit % 8)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        folder = shutil.copytree(tmp_path / "sound", tmp_path / "copy")
        (folder / "2" / file).write_bytes(bytes(damaged))
        caplog.clear()
        reopened = Checkpoints(folder, keep=3)
        step, _, found = reopened.restore({"w": jnp.zeros(4)})
        assert found == manifest | {"step": step}
        unharmed = step == 2 and file.startswith("metrics")
        assert unharmed or "checkpoint 2 is damaged" in caplog.text
        reopened.save(3, {"w": jnp.ones(4)}, {}, metric=0.0)
        reopened.close()
        assert reopened.steps() == [1, *([2] if step == 2 else []), 3]


@pytest.mark.parametrize(
    "damage", [truncate, flip_bytes, lambda path: path.write_text('{"best": 9.0}')]
)
def test_a_damaged_metric_does_not_block_a_resume(tmp_path, caplog, damage):
    written(tmp_path, 1, 2, metrics=(0.1, 0.2), keep=1)
    damage(tmp_path / "2/metrics/metrics")
    reopened = Checkpoints(tmp_path, keep=1)
    assert reopened.restore(make_state(0.0))[0] == 2
    assert "the metric of checkpoint 2 is damaged" in caplog.text
    reopened.save(3, make_state(3.0), {}, metric=0.05)
    reopened.close()
    assert reopened.steps() == [3]


@pytest.mark.parametrize("name", [2, 9, 0])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path, name):
    """A copy of step 1 is in the place of step 2, or behind it; or all that is left is renamed."""
    written(tmp_path, *([1] if name == 2 else [1, 2]))
    shutil.copytree(tmp_path / "1", tmp_path / str(name))
    for step in (1, 2) if name == 0 else ():
        shutil.rmtree(tmp_path / str(step))
    with pytest.raises(CheckpointError, match=f"{name} holds the checkpoint of step 1: give it"):
        newest(tmp_path)
    assert (tmp_path / str(name)).is_dir(), "it stays where its owner finds it"


def test_unreadable_checkpoints_are_an_error_and_are_not_moved(tmp_path):
    written(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step 3: "):
        newest(tmp_path, {"other": jnp.zeros(2)})
    assert Checkpoints(tmp_path, keep=2).steps() == [3]


WRITER = """
import sys, jax.numpy as jnp
from rl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=3)
for step in range(1, 1000):
    checkpoints.save(step, {"w": jnp.full((256, 4096), float(step))}, {"step": step})
    print(step, flush=True)
"""


def test_a_save_that_was_killed_is_never_seen(tmp_path):
    """kill -9 at several moments of the save; the restored checkpoint is complete."""
    for i, delay in enumerate((0.0, 0.013, 0.031)):
        directory = tmp_path / str(i)
        writer = started(WRITER, str(directory))
        saved = [int(writer.stdout.readline()) for _ in range(3)][-1]
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        saved = max([saved, *[int(line) for line in writer.stdout.read().split()]])
        writer.wait()
        step, state, manifest = newest(directory, {"w": jnp.zeros((256, 4096))}, keep=2)
        assert manifest == {"step": step} and step in (saved - 1, saved, saved + 1)
        assert np.array_equal(state["w"], np.full((256, 4096), step, np.float32))


def test_weighted_sums_detect_every_change():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 10, 8)), jnp.float32)
    weights = 2 * np.arange(480, dtype=np.uint32) + 1
    expected = np.sum(np.asarray(x).view(np.uint32).ravel() * weights, dtype=np.uint32)
    assert _weighted_sum(x) == int(expected)
    swapped = x.at[0, 0, jnp.array([0, 1])].set(x[0, 0, jnp.array([1, 0])])
    for other in (x.at[3, 1, 1].mul(-1), swapped):
        assert _weighted_sum(x) != _weighted_sum(other)
    assert _weighted_sum(x.astype(jnp.bfloat16)) != _weighted_sum((x * 1.01).astype(jnp.bfloat16))


def moves_between_meshes(folder):
    """Run with 8 simulated devices: save on one mesh, with moments on the host, and restore on
    others."""
    values = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)

    def state(shape, memory="device"):
        mesh = meshes.make_mesh(shape)
        where = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
        return {
            "w": jax.device_put(values, where),
            "m": jax.device_put(values + 1, where.with_memory_kind(memory)),
        }

    for limit in (1 << 30, 0):  # checksums on the host, then on the devices
        checkpoint.CHECKSUM_LIMIT = limit
        checkpoints = Checkpoints(f"{folder}/{limit}", keep=2)
        checkpoints.save(1, state({"fsdp": 8}, "pinned_host"), {})
        offloaded = state({"fsdp": 2, "tensor": 4}, "pinned_host")
        for target in (offloaded, state({"data": 2, "fsdp": 4}), state({})):
            _, found, _ = checkpoints.restore(target)
            for name, array in found.items():
                np.testing.assert_array_equal(array, target[name])
                assert array.sharding == target[name].sharding
                assert array.sharding.memory_kind == target[name].sharding.memory_kind
        checkpoints.close()
    print("equal")


def test_a_run_can_continue_on_another_mesh(tmp_path):
    call = f"from tests.rl import test_checkpoint as t; t.moves_between_meshes({str(tmp_path)!r})"
    assert with_devices(call).endswith("equal\n")


SUMS = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rl import checkpoint
if len(sys.argv) > 1:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
values = np.arange(24, dtype=np.float32).reshape(4, 6)
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
state = {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}
print(len(jax.devices()), checkpoint.checksums(state))
"""


def test_checksums_do_not_depend_on_the_number_of_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    processes = [started(SUMS), started(SUMS, address, "0"), started(SUMS, address, "1")]
    alone, *two = (lines_of(process)[-1] for process in processes)
    assert alone.startswith("1 {") and two == [alone.replace("1", "2", 1)] * 2


def test_what_tensorstore_reports_to_a_failed_save_is_dropped_and_nothing_else(monkeypatch):
    """It reports as C code does that has nobody to raise to, without an object."""
    shown = []
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    late, lost = RuntimeError("Event loop is closed"), RuntimeError("lost")
    reports = [
        types.SimpleNamespace(exc_value=error, object=at)
        for error, at in itertools.product((late, lost), (None, print))
    ]
    for report in reports:
        checkpoint.unraisablehook(report)
    assert shown == reports[1:]


def test_what_a_task_of_a_failed_save_raises_is_dropped_and_nothing_else(monkeypatch, caplog):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    checkpoint.report_once()
    said = "Task exception was never retrieved\nfuture: <Task coro=<write() done, defined at {}>>"
    for path in ("/site-packages/orbax/checkpoint/serialization.py:126", "/rl/jax/engine.py:9"):
        logging.getLogger("asyncio").error(said.format(path))
    assert "engine.py" in caplog.text and "orbax" not in caplog.text
