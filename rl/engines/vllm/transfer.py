"""Weight transfer from this process to vLLM servers, over vLLM's weight-transfer endpoints.

A transfer converts parameters to the tensors of a Hugging Face checkpoint (`models.hf.to_hf`),
sends them in buckets rather than one by one, and describes each bucket to vLLM. The engine
(rl/engines/vllm/engine.py) pauses the servers before and resumes them afterwards.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from envs.values import Json
from models import hf, lora, qwen
from rl.engines.vllm.client import Server

PREFIX = "evolver-weights-"
MIB = 1 << 20
LOAD = "/v1/load_lora_adapter"
SLEEP, WAKE = "/sleep", "/wake_up"
CONTROL = ("/pause", "/resume", "/reset_prefix_cache")
UPDATE = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    *CONTROL,
)


class TransferError(RuntimeError):
    """Weights could not be transferred; the message gives the cause."""


class Transfer:
    """A way to send weights to servers.

    replays: True if staged weights can be sent again, to a server that recovers later. level: that
    of vLLM's sleep: 2 drops the weights, all of which the next update brings, and 1 keeps them in
    the host's memory. needs: the paths that a server must have.
    """

    replays = True
    level = 2
    needs: tuple[str, ...]

    def stage(self, params: qwen.Params) -> int:
        """Prepare weights for sending; return their size in bytes. Blocking: call it in a
        thread."""
        raise NotImplementedError

    async def connect(self, servers: Sequence[Server]) -> None:
        """Set up the transfer: once, and again when the set of servers has changed."""

    async def begin(self, server: Server) -> None:
        """Announce the weights to a paused server."""
        await server.post("/start_weight_update")

    async def send(self, servers: Sequence[Server]) -> list[BaseException | None]:
        """Send the staged weights to all servers in parallel; return one exception or None for
        each."""
        sent = (self.send_to(server) for server in servers)
        return await asyncio.gather(*sent, return_exceptions=True)

    async def send_to(self, server: Server) -> None:
        """Send the staged weights to one server."""
        raise NotImplementedError

    async def finish(self, server: Server, version: int) -> None:
        """Let the server use the weights that it got, under this version."""
        await server.post("/finish_weight_update", {"weight_version": str(version)})

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError


class Tensors(Transfer):
    """A transfer of all tensors in buckets of `bucket` MiB. size: the bytes of all buckets."""

    needs: tuple[str, ...] = UPDATE

    def __init__(self, shape: qwen.Config, dtype: str, bucket: float):
        self.shape, self.dtype = shape, dtype
        self.buckets = hf.buckets_of(shape, dtype, int(bucket * MIB))
        self.size = sum(bucket.size for bucket in self.buckets)


class SharedMemory(Tensors):
    """Sends weights through files in shared memory, to any number of servers on this machine, on
    any device.

    The whole model stays in `folder`, once for all servers, so that a server that recovers can be
    updated without the learner. bucket: MiB per file. Each `stage` overwrites the files, because
    their memory is allocated already.
    """

    def __init__(self, shape: qwen.Config, *, dtype: str, folder: str | Path, bucket: float = 1024):
        """Create the directory. Raises TransferError if `folder` does not have enough free
        space."""
        super().__init__(shape, dtype, bucket)
        try:
            _clear(Path(folder))
            free = shutil.disk_usage(folder).free
            if free < self.size:
                raise TransferError(
                    f"{folder} has {free:,} bytes free; the weights need {self.size:,}"
                )
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            self._owned = open(self.folder / "owner", "w")  # noqa: SIM115  (locked until close)
            fcntl.flock(self._owned, fcntl.LOCK_EX)
        except OSError as error:
            raise TransferError(f"{folder} cannot hold the weights: {error}") from None
        self._maps: list[np.memmap] = []

    def stage(self, params: qwen.Params) -> int:
        if not self._maps:
            try:
                self._maps = [self._allocated(*numbered) for numbered in enumerate(self.buckets)]
            except OSError as error:
                raise TransferError(f"{self.folder} cannot hold the weights: {error}") from None
        weights = hf.outgoing(self.shape, params, self.dtype)
        with ThreadPoolExecutor() as pool:
            for held, bucket in zip(self._maps, self.buckets):
                for expected, offset in zip(bucket.names, bucket.offsets):
                    tensor, weight = next(weights)
                    assert tensor.name == expected, f"expected {expected}, got {tensor.name}"
                    # In our own layout: to transpose here would be ten times slower, and a server
                    # transposes while it copies.
                    out = np.ndarray(weight.shape, self.dtype, held.data, offset)
                    copy_into(out, weight, pool)
        return self.size

    def _allocated(self, number: int, bucket: hf.Bucket) -> np.memmap:
        """Return the memory of a bucket. Raises OSError if there is too little."""
        path = self.folder / f"bucket_{number:03}.bin"
        with open(path, "wb") as file:
            # Allocate now: running out of memory later would kill the process.
            os.posix_fallocate(file.fileno(), 0, bucket.size)
        return np.memmap(path, np.uint8, mode="r+", shape=(bucket.size,))

    def updates(self) -> Iterator[Json]:
        """Yield the bodies of the /update_weights requests, in order."""
        for held, bucket in zip(self._maps, self.buckets):
            yield {
                "update_info": {
                    "path": str(held.filename),
                    "size": bucket.size,
                    "names": bucket.names,
                    "dtypes": [self.dtype] * len(bucket.names),
                    "shapes": bucket.shapes,
                    "offsets": bucket.offsets,
                    "transposed": bucket.transposed,
                }
            }

    async def connect(self, servers: Sequence[Server]) -> None:
        body: Json = {"init_info": {}}
        requests = (server.post("/init_weight_transfer_engine", body) for server in servers)
        await asyncio.gather(*requests)

    async def send_to(self, server: Server) -> None:
        for body in self.updates():
            await server.post("/update_weights", body)

    def close(self) -> None:
        self._maps = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owned.close()


class AdapterFiles(Transfer):
    """Sends LoRA adapters as files, a few megabytes per update, to servers that already hold the
    frozen weights.

    vLLM loads each version in place under one adapter name, which requests then use as the model
    name; the servers need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Every version
    gets its own directory: vLLM's prefix cache identifies adapters by path and would otherwise
    answer from the keys and values of the previous version. `source` returns the learner's
    adapters; while it is None the adapters are still at their initial values, which have no effect,
    and nothing is sent.
    """

    needs = (LOAD, "/update_weight_version", *CONTROL)
    level = 1
    name = "policy-adapter"

    def __init__(self, config: lora.LoRA, *, folder: str | Path):
        self.config = config
        self.source: Callable[[], qwen.Params] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="evolver-adapters-", dir=folder))
        self._count = 0

    def stage(self, params: qwen.Params) -> int:
        if self.source is None:
            return 0
        previous = self._path
        self._count += 1
        lora.save(self._path, self.source(), self.config)
        shutil.rmtree(previous, ignore_errors=True)
        return (self._path / "adapter_model.safetensors").stat().st_size

    async def begin(self, server: Server) -> None:
        pass

    async def send_to(self, server: Server) -> None:
        if self._count:
            path = str(self._path)
            body = {"lora_name": self.name, "lora_path": path, "load_inplace": True}
            await server.post(LOAD, body)
            server.model = self.name

    async def finish(self, server: Server, version: int) -> None:
        await server.post("/update_weight_version", {"new_version": str(version)})

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._count:06}"


def copy_into(out: np.ndarray, weight: jax.Array | np.ndarray, pool: Executor) -> None:
    """Copy a weight to memory on the host, casting it; its shards are copied in parallel."""
    if isinstance(weight, np.ndarray):
        out[...] = weight
        return
    once = [shard for shard in weight.addressable_shards if shard.replica_id == 0]
    list(pool.map(lambda shard: out.__setitem__(shard.index, np.asarray(shard.data)), once))


def _clear(folder: Path) -> None:
    """Delete the directories of killed runs: those whose owner file is not locked."""
    for owner in folder.glob(f"{PREFIX}*/owner"):
        with contextlib.suppress(OSError), open(owner) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
