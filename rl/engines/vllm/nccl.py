"""Weights sent to vLLM servers by NCCL broadcast, without torch in the trainer: vLLM's "nccl"
backend.

The trainer is rank 0 of one communicator; the workers of all servers are the other ranks. All ranks
must join at the same time, so the HTTP requests are in flight while this process waits in
`ncclCommInitRank`. Each rank then all-reduces one element, as vLLM's workers do. After that, each
`/update_weights` names the tensors of one bucket, and one broadcast sends their concatenated bytes.

Not tested on GPUs yet; the tests run the protocol against a simulated NCCL library.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models import hf, qwen
from rl.engines.vllm.client import Server
from rl.engines.vllm.transfer import MIB, UPDATE, Tensors, TransferError

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # of nccl.h


class NcclBroadcast(Tensors):
    """Sends weights over NVLink or InfiniBand to GPUs other than the trainer's.

    bucket: MiB per broadcast. Weights are not kept after sending, so a server that recovers waits
    for the next update.
    """

    replays = False
    needs = (*UPDATE, "/get_world_size", "/shutdown_weight_transfer_engine")

    def __init__(
        self,
        shape: qwen.Config,
        *,
        dtype: str,
        bucket: float = 1024,
        library: Nccl | None = None,
    ):
        super().__init__(shape, dtype, bucket)
        self._limit = max(int(bucket * MIB), *(bucket.size for bucket in self.buckets))
        self._library = library or Nccl()
        self._device = jax.local_devices()[0]
        self._params: qwen.Params = {}
        self._members: Sequence[Server] = ()

    def stage(self, params: qwen.Params) -> int:
        self._params = params  # sent bucket by bucket before the learner continues
        return self.size

    async def connect(self, servers: Sequence[Server]) -> None:
        ranks = []
        for server in servers:
            answer = await server.ask("GET", "/get_world_size", timeout=60.0)
            ranks.append(answer["world_size"])
        world, unique_id = 1 + sum(ranks), self._library.unique_id()
        requests = []
        for number, server in enumerate(servers):
            info = {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "rank_offset": 1 + sum(ranks[:number]),
                "world_size": world,
                "packed": True,
                "packed_buffer_size_bytes": self._limit,
                "packed_num_buffers": 2,
            }
            requests.append(server.post("/init_weight_transfer_engine", {"init_info": info}))
        join = asyncio.to_thread(self._library.join, world, unique_id, self._device)
        await asyncio.gather(join, *requests)
        self._members = list(servers)

    async def send(self, servers: Sequence[Server]) -> list[BaseException | None]:
        if servers != self._members:  # the members of a communicator are fixed, so join again
            self._library.leave()
            for server in servers:
                await server.post("/shutdown_weight_transfer_engine")
            await self.connect(servers)
        faults: list[BaseException | None] = [None] * len(servers)
        tensors = hf.to_hf(self.shape, self._params)
        for bucket in self.buckets:
            info = {
                "names": bucket.names,
                "dtype_names": [self.dtype] * len(bucket.names),
                "shapes": bucket.shapes,
            }
            posts = (server.post("/update_weights", {"update_info": info}) for server in servers)
            answers = asyncio.gather(*posts, return_exceptions=True)
            buffer = packed([next(tensors)[1] for _ in bucket.names], self.dtype, self._device)
            await asyncio.to_thread(self._library.broadcast, buffer)
            for number, answer in enumerate(await answers):
                if isinstance(answer, BaseException):
                    faults[number] = answer
        self._params = {}
        return faults

    def close(self) -> None:
        self._params = {}
        if self._members:
            self._library.leave()


def packed(arrays: Sequence[Any], dtype: str, device: jax.Device) -> jax.Array:
    """Return the bytes of the arrays, cast to `dtype` and concatenated, as a uint8 array on
    `device`. Blocks."""
    parts = []
    for array in arrays:
        part = jax.device_put(array, device).astype(dtype).reshape(-1)
        parts.append(jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1))
    return jax.block_until_ready(jnp.concatenate(parts))


class Nccl:
    """The part of NCCL that is used, by ctypes; libnccl and libcudart come with JAX's CUDA
    wheels."""

    def __init__(self) -> None:
        self._nccl: Any = None
        self._cuda: Any = None
        self._communicator = ctypes.c_void_p()

    def unique_id(self) -> bytes:
        """Load the libraries; return the 128 bytes that identify a new communicator."""
        try:
            self._nccl = ctypes.CDLL("libnccl.so.2")
            self._cuda = _cuda_runtime()
        except OSError as error:
            raise TransferError(
                f"engine.vllm.transfer=nccl needs NCCL and CUDA on the trainer: {error}"
            ) from None
        identifier = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(identifier))
        return bytes(identifier.internal)

    def join(self, world: int, unique_id: bytes, device: jax.Device) -> None:
        """Join as rank 0 of `world` ranks, wait for all of them, and all-reduce one element."""
        _check(self._cuda.cudaSetDevice(device.local_hardware_id or 0), "cudaSetDevice")
        identifier = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._communicator), world, identifier, 0)
        one = jax.block_until_ready(jax.device_put(jnp.zeros(1, jnp.float32), device))
        self._collect("ncclAllReduce", one, FLOAT32, SUM)

    def broadcast(self, buffer: jax.Array) -> None:
        """Send a uint8 array to all other ranks; return when it is sent."""
        self._collect("ncclBroadcast", buffer, UINT8, 0)

    def leave(self) -> None:
        """Destroy the communicator."""
        if self._communicator:
            self._call("ncclCommDestroy", self._communicator)
            self._communicator = ctypes.c_void_p()

    def _collect(self, name: str, buffer: jax.Array, kind: int, operation_or_root: int) -> None:
        """Run one collective in place on the default stream and wait for it."""
        pointer = ctypes.c_void_p(buffer.unsafe_buffer_pointer())
        count = ctypes.c_size_t(buffer.size)
        self._call(name, pointer, pointer, count, kind, operation_or_root, self._communicator, None)
        _check(self._cuda.cudaStreamSynchronize(None), "cudaStreamSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        _check(getattr(self._nccl, name)(*arguments), name)


def _check(code: int, name: str) -> None:
    if code:
        raise TransferError(f"{name} failed with code {code}")


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


def _cuda_runtime() -> Any:
    try:
        return ctypes.CDLL("libcudart.so.13")
    except OSError:
        return ctypes.CDLL("libcudart.so.12")
