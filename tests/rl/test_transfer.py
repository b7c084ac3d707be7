"""Weight transfers: broadcasts match their announcements, and adapters are written as PEFT writes
them."""

import asyncio
import base64
import ctypes
import errno
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from models import lora, qwen
from rl.engines.vllm.nccl import NcclBroadcast
from rl.engines.vllm.transfer import MIB, AdapterFiles, SharedMemory, TransferError
from tests.envs.test_process import wait_until
from tests.rl.vllm_setup import DTYPES, assert_holds, random_params

SHAPE = qwen.Config(50, 8, 2, 2, 1, 4, 16)


class Library:
    """A simulated NCCL: a barrier that opens when all ranks have joined, and a record of the
    broadcasts."""

    def __init__(self):
        self.ranks, self.world, self.sent, self.left = set(), 0, [], 0

    def unique_id(self):
        return bytes(range(128))

    def join(self, world, unique_id, device):
        self.world = world
        self.enter([0])
        self.wait()

    def enter(self, ranks):
        assert not self.ranks & set(ranks)
        self.ranks |= set(ranks)

    def wait(self):
        came = wait_until(lambda: len(self.ranks) == self.world)
        assert came, f"{self.ranks} came, {self.world} were expected"

    def broadcast(self, buffer):
        assert buffer.dtype == np.uint8
        self.sent.append(np.asarray(buffer))

    def leave(self):
        self.ranks, self.left = set(), self.left + 1


class Worker:
    """A server of `size` ranks that behaves like vLLM's workers."""

    def __init__(self, library, size):
        self.library, self.size, self.weights, self.asked = library, size, {}, []

    async def ask(self, method, path, *, timeout):
        assert (method, path) == ("GET", "/get_world_size")
        return {"world_size": self.size}

    async def post(self, path, body=None):
        self.asked.append(path)
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            assert base64.b64decode(info["nccl_unique_id_b64"], validate=True) == bytes(range(128))
            assert info["packed"] is True and not {"master_address", "master_port"} & set(info)
            self.limit = info["packed_buffer_size_bytes"]
            self.library.enter(range(info["rank_offset"], info["rank_offset"] + self.size))
            await asyncio.to_thread(self.library.wait)
        elif path == "/update_weights":
            await self.receive(body["update_info"])

    async def receive(self, info):
        """Read a packed broadcast like vLLM: tensors without gaps, in one buffer of limited
        size."""
        number = len([path for path in self.asked if path == "/update_weights"])
        while len(self.library.sent) < number:
            await asyncio.sleep(0.01)
        raw, at = self.library.sent[number - 1].tobytes(), 0
        tensors = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        for name, kind, shape in tensors:
            assert at <= self.limit
            self.weights[name] = np.ndarray(shape, DTYPES[kind], raw, at)
            at += self.weights[name].nbytes
        assert at == len(raw)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket", [1, 700, 10**6])
def test_every_worker_receives_the_checkpoint(dtype, bucket):
    library, params = Library(), random_params(SHAPE)
    workers = [Worker(library, 2), Worker(library, 1)]
    transfer = NcclBroadcast(SHAPE, dtype=dtype, bucket=bucket / MIB, library=library)

    async def play():
        await transfer.connect(workers)
        assert library.world == 4 and library.ranks == {0, 1, 2, 3}
        size = transfer.stage(params)
        assert await transfer.send(workers) == [None, None]
        return size

    size = asyncio.run(play())
    for worker in workers:
        assert_holds(worker.weights, SHAPE, params, dtype)
        assert size == sum(array.nbytes for array in worker.weights.values())
    transfer.close()
    assert library.left == 1


def test_changed_servers_join_a_new_communicator():
    library, params = Library(), random_params(SHAPE)
    first, second = Worker(library, 1), Worker(library, 1)
    transfer = NcclBroadcast(SHAPE, dtype="float32", library=library)

    async def play():
        await transfer.connect([first, second])
        transfer.stage(params)
        assert await transfer.send([second]) == [None]

    asyncio.run(play())
    assert library.left == 1 and library.world == 2
    assert second.asked.count("/init_weight_transfer_engine") == 2
    assert "/update_weights" not in first.asked


def test_directories_of_killed_runs_are_deleted_and_those_of_running_ones_are_kept(tmp_path):
    alive, killed = (SharedMemory(SHAPE, dtype="float32", folder=tmp_path) for _ in range(2))
    killed._owned.close()  # as the kernel does when a process ends
    late = SharedMemory(SHAPE, dtype="float32", folder=tmp_path)
    assert {path for path in tmp_path.iterdir()} == {alive.folder, late.folder}
    alive.close()
    late.close()


def test_memory_that_fills_up_leaves_no_half_of_the_weights(tmp_path, monkeypatch):
    params, allocate, sizes = random_params(SHAPE, 0), os.posix_fallocate, []

    def limited(file, offset, size):
        sizes.append(size)
        if len(sizes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    transfer = SharedMemory(SHAPE, dtype="float32", folder=tmp_path, bucket=1 / 1024)
    assert len(transfer.buckets) > 2
    with pytest.raises(TransferError, match=r"cannot hold the weights: .*No space left"):
        transfer.stage(params)
    assert transfer.stage(params) == transfer.size
    assert len(list(transfer.updates())) == len(transfer.buckets)
    transfer.close()


def test_without_nccl_the_message_says_so():
    transfer = NcclBroadcast(SHAPE, dtype="float32")

    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError:
        with pytest.raises(TransferError, match="needs NCCL and CUDA on the trainer"):
            asyncio.run(transfer.connect([Worker(Library(), 1)]))


def test_every_version_of_an_adapter_has_its_own_path(tmp_path):
    config = lora.LoRA(3, targets=("q", "down"))
    loaded = []

    class Server:
        model = "policy"

        async def post(self, path, body):
            assert path == "/v1/load_lora_adapter" and body["load_inplace"]
            folder = body["lora_path"]
            loaded.append((folder, load_file(f"{folder}/adapter_model.safetensors")))

    transfer, server = AdapterFiles(config, folder=tmp_path), Server()
    assert transfer.stage(None) == 0 and asyncio.run(transfer.send([server])) == [None]
    assert server.model == "policy" and not loaded  # the initial adapters have no effect
    for version in (1, 2):
        transfer.source = lambda version=version: qwen.init(SHAPE, version, lora=config)
        assert transfer.stage(None) > 0
        assert asyncio.run(transfer.send([server])) == [None]
    (first, one), (second, two) = loaded
    assert server.model == transfer.name and first != second and set(one) == set(two)
    assert any((one[name] != two[name]).any() for name in one)
    transfer.close()
    assert not list(tmp_path.iterdir())
