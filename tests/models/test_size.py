"""Tests with checkpoints of real sizes, read and written in little memory. The files are sparse and
use no disk."""

import itertools
import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from models import hf, hf_config, mesh, qwen
from tests.models.helpers import with_devices


def sparse_checkpoint(folder: Path, config: qwen.Config) -> int:
    """Write a checkpoint in bfloat16 whose values are holes of sparse files, so zeros, but ones for
    the last norm, of which zeros are refused; return its size in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config.record_of(config, "bfloat16")))
    buckets, weight_map = hf.buckets_of(config, "bfloat16", hf.SHARD_BYTES), {}
    for number, bucket in enumerate(buckets):
        spans = itertools.pairwise([*bucket.offsets, bucket.size])
        header = {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": span}
            for name, shape, span in zip(bucket.names, bucket.shapes, spans)
        }
        text, name = json.dumps(header).encode(), f"model-{number}.safetensors"
        weight_map |= dict.fromkeys(bucket.names, name)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + bucket.size)
            for norm in filter(header.get, [hf.HF_NAMES["norm"]]):
                start, stop = header[norm]["data_offsets"]
                file.seek(8 + len(text) + start)
                file.write(np.full((stop - start) // 2, 0x3F80, np.uint16).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(bucket.size for bucket in buckets)


@pytest.mark.parametrize("name", ["14b", "qwen3-14b"])
def test_fourteen_billion_parameters_are_checked_and_sharded_before_any_is_read(tmp_path, name):
    """All names and shapes match, and each of eight devices reads an eighth, in pieces smaller than
    a shard."""
    config = qwen.PRESETS[name]
    assert sparse_checkpoint(tmp_path / "m", config) == 2 * qwen.parameter_count(config)
    assert sum(f.stat().st_blocks for f in (tmp_path / "m").iterdir()) * 512 < 10_000_000
    assert hf.config_of(tmp_path / "m") == config
    with hf.ExitStack() as stack:
        tensors = hf.checked(tmp_path / "m", config, stack)
        declared, eight = qwen.weights(config), AbstractMesh((1, 8, 1, 1), mesh.AXES)
        flat, places = map(qwen.by_name, (declared, mesh.places(declared, eight)))
        parts = (places[own].shard_shape(weight.shape) for own, weight in flat.items())
        assert sum(map(math.prod, parts)) < 1.001 * qwen.parameter_count(config) / 8
        read = hf._reader(tmp_path, "layers.down", flat["layers.down"], tensors, hf.DTYPES["BF16"])
        _, hidden, width = flat["layers.down"].shape
        block = read((slice(7, 9), slice(0, hidden), slice(width // 8, width // 4)))
        assert block.shape == (2, hidden, width // 8) and not block.any()


class PeakMemory:
    """Measures the peak anonymous memory of this process in the block, in bytes.

    Pages of mapped files do not count: the kernel can drop them.
    """

    def __enter__(self):
        self.peak, self._stop = self.now(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def loads_and_saves(folder: str) -> None:
    """Load and save with 8 simulated devices, whose memory belongs to this process too."""
    import jax

    places = mesh.make_mesh({"fsdp": 4, "tensor": 2})
    before = PeakMemory.now()
    with PeakMemory() as reading:
        config, params = hf.load(f"{folder}/in", mesh=places, dtype=hf.DTYPES["BF16"])
        jax.block_until_ready(params)
    arrays = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    with PeakMemory() as writing:
        hf.save(f"{folder}/out", config, params)
    figures = {"arrays": arrays, "largest": largest, "reading": reading.peak - before}
    print(json.dumps(figures | {"writing": writing.peak - before - arrays}))


@pytest.mark.slow
def test_more_than_a_billion_parameters_are_loaded_and_saved_in_little_more_than_their_size(
    tmp_path,
):
    config = qwen.PRESETS["1.5b"]
    sparse_checkpoint(tmp_path / "in", config)
    code = f"from tests.models import test_size as t; t.loads_and_saves({str(tmp_path)!r})"
    figures = json.loads(with_devices(code).splitlines()[-1])
    assert figures["arrays"] == 2 * qwen.parameter_count(config)
    assert figures["reading"] < figures["arrays"] + 1.2 * figures["largest"], figures
    # a copy or two of the largest tensor
    assert figures["writing"] < 2 * 151936 * 1536 * 2 + 100_000_000
    with hf.ExitStack() as stack:
        written = hf.checked(tmp_path / "out", config, stack)
        norm = written["model.norm.weight"][:]
    assert np.all(np.asarray(norm, np.float32) == 1)
