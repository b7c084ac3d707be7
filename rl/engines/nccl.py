"""Weights to vLLM servers by NCCL broadcast, from a trainer without torch: vLLM's "nccl" backend with a unique id.

The trainer is rank 0 of one communicator, the workers of all servers follow. Joining has no barrier, so every rank
must enter at once: the requests are on their way while this process waits in `ncclCommInitRank`, and each rank
all-reduces one element before anything else, as vLLM's workers do. Then every `/update_weights` names the tensors of
one bucket, and one broadcast of their bytes, one after the other without gaps, answers it.

Not run on GPUs yet; the tests play the protocol against a library of their own.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from models import hf, qwen
from rl.engines.transfer import UPDATE, Bucket, Receiver, TransferError, buckets_of

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # of nccl.h


class Library(Protocol):
    """What is needed of NCCL. Buffers are jax arrays on `device`."""

    def unique_id(self) -> bytes:
        """128 bytes that name a communicator to be."""
        ...

    def join(self, world: int, unique_id: bytes, device: jax.Device) -> None:
        """Become rank 0 of `world` ranks; waits for all of them, and all-reduces one element."""
        ...

    def broadcast(self, buffer: jax.Array) -> None:
        """Send the bytes of a uint8 array to every other rank; returns when they are sent."""
        ...

    def leave(self) -> None:
        """Give the communicator up."""
        ...


class NcclBroadcast:
    """A `Transfer` (rl/engines/transfer.py) over NVLink or InfiniBand, to GPUs that are not the trainer's.

    Nothing is kept once it is sent, so a server that comes back waits for the next update.
    """

    replays, whole, needs = False, True, (*UPDATE, "/get_world_size", "/shutdown_weight_transfer_engine")

    def __init__(self, config: qwen.Config, *, dtype: str, bucket_bytes: int = 1 << 30, library: Library | None = None):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.buckets = buckets_of(config, dtype, bucket_bytes, alignment=1)
        self._limit = max(bucket_bytes, *(bucket.size for bucket in self.buckets))
        self._library = library or Nccl()
        self._device = jax.local_devices()[0]
        self._params: qwen.Params | None = None
        self._members: tuple[Receiver, ...] = ()

    def stage(self, params: qwen.Params) -> int:
        self._params = params  # sent bucket by bucket, before the learner goes on
        return sum(bucket.size for bucket in self.buckets)

    async def connect(self, servers: Sequence[Receiver]) -> None:
        sizes = [(await server.ask("GET", "/get_world_size", timeout=60.0))["world_size"] for server in servers]
        world, unique_id = 1 + sum(sizes), self._library.unique_id()
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise TransferError(f"NCCL gave a unique id of {len(unique_id)} bytes")
        requests = []
        for number, server in enumerate(servers):
            info = {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "rank_offset": 1 + sum(sizes[:number]),
                "world_size": world,
                "packed": True,
                "packed_buffer_size_bytes": self._limit,
                "packed_num_buffers": 2,
            }
            requests.append(server.post("/init_weight_transfer_engine", {"init_info": info}))
        join = asyncio.to_thread(self._library.join, world, unique_id, self._device)
        await asyncio.gather(join, *requests)
        self._members = tuple(servers)

    async def send(self, servers: Sequence[Receiver]) -> list[BaseException | None]:
        if tuple(servers) != self._members:  # somebody died, or is back: a communicator has fixed members
            self._library.leave()
            for server in servers:
                await server.post("/shutdown_weight_transfer_engine")
            await self.connect(servers)
        faults: list[BaseException | None] = [None] * len(servers)
        tensors = hf.to_hf(self.config, self._params)
        for bucket in self.buckets:
            requests = [asyncio.ensure_future(server.post("/update_weights", described(bucket))) for server in servers]
            buffer = packed([next(tensors)[1] for _ in bucket.slots], self.dtype, self._device)
            await asyncio.to_thread(self._library.broadcast, buffer)
            answers = await asyncio.gather(*requests, return_exceptions=True)
            faults = [a if isinstance(a, BaseException) else before for before, a in zip(faults, answers)]
        self._params = None
        return faults

    def close(self) -> None:
        self._params = None
        if self._members:
            self._library.leave()


def described(bucket: Bucket) -> dict[str, Any]:
    """The body of the /update_weights that a bucket answers."""
    return {
        "update_info": {
            "names": [slot.name for slot in bucket.slots],
            "dtype_names": [slot.dtype for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
        }
    }


def packed(arrays: Sequence[Any], dtype: Any, device: jax.Device) -> jax.Array:
    """The bytes of the arrays in `dtype`, one after the other: a uint8 array on `device`, ready to be read."""
    parts = []
    for array in arrays:
        part = jax.device_put(array, device).astype(dtype).reshape(-1)
        parts.append(jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1))
    return jax.block_until_ready(jnp.concatenate(parts))


class Nccl:
    """libnccl and libcudart by ctypes, as they come with jax's CUDA wheels."""

    def __init__(self):
        self._nccl, self._cuda, self._comm = None, None, ctypes.c_void_p()

    def unique_id(self) -> bytes:
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found.internal)

    def join(self, world: int, unique_id: bytes, device: jax.Device) -> None:
        self._check(self._libraries()[1].cudaSetDevice(device.local_hardware_id or 0), "cudaSetDevice")
        name = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), world, name, 0)
        one = jax.block_until_ready(jax.device_put(jnp.zeros(1, jnp.float32), device))
        self._collect("ncclAllReduce", one, 1, FLOAT32, SUM)

    def broadcast(self, buffer: jax.Array) -> None:
        self._collect("ncclBroadcast", buffer, buffer.size, UINT8, 0)

    def leave(self) -> None:
        if self._comm:
            self._call("ncclCommDestroy", self._comm)
            self._comm = ctypes.c_void_p()

    def _collect(self, name: str, buffer: jax.Array, count: int, kind: int, operation_or_root: int) -> None:
        """One collective in place, on the default stream, finished when this returns."""
        pointer = ctypes.c_void_p(buffer.unsafe_buffer_pointer())
        self._call(name, pointer, pointer, ctypes.c_size_t(count), kind, operation_or_root, self._comm, None)
        self._check(self._libraries()[1].cudaStreamSynchronize(None), "cudaStreamSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._libraries()[0], name)(*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            raise TransferError(f"{name} failed with code {code}")

    def _libraries(self) -> tuple[Any, Any]:
        if self._nccl is None:
            try:
                self._nccl, self._cuda = ctypes.CDLL("libnccl.so.2"), _first("libcudart.so.13", "libcudart.so.12")
            except OSError as error:
                raise TransferError(f"engine.vllm.transfer=nccl needs NCCL and CUDA on the trainer: {error}") from None
        return self._nccl, self._cuda


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


def _first(*names: str) -> Any:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])
