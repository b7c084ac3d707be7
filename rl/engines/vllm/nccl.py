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
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from models import hf, qwen
from rl.engines.vllm.transfer import MIB, UPDATE, Bucket, Receiver, TransferError, buckets_of

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # of nccl.h


class Library(Protocol):
    """The part of NCCL that is used. Buffers are JAX arrays on `device`."""

    def unique_id(self) -> bytes:
        """Return the 128 bytes that identify a new communicator."""
        ...

    def join(self, world: int, unique_id: bytes, device: jax.Device) -> None:
        """Join as rank 0 of `world` ranks, wait for all of them, and all-reduce one element."""
        ...

    def broadcast(self, buffer: jax.Array) -> None:
        """Send a uint8 array to all other ranks; return when it is sent."""
        ...

    def leave(self) -> None:
        """Destroy the communicator."""
        ...


class NcclBroadcast:
    """A `Transfer` (rl/engines/vllm/transfer.py) over NVLink or InfiniBand to GPUs other than the
    trainer's.

    bucket: MiB per broadcast. Weights are not kept after sending, so a server that recovers waits
    for the next update.
    """

    replays, whole, needs = (
        False,
        True,
        (*UPDATE, "/get_world_size", "/shutdown_weight_transfer_engine"),
    )

    def __init__(
        self,
        shape: qwen.Config,
        *,
        dtype: str,
        bucket: float = 1024,
        library: Library | None = None,
    ):
        self.shape, self.dtype = shape, jnp.dtype(dtype)
        self.buckets = buckets_of(shape, dtype, int(bucket * MIB), alignment=1)
        self._limit = max(int(bucket * MIB), *(bucket.size for bucket in self.buckets))
        self._library = library or Nccl()
        self._device = jax.local_devices()[0]
        self._params: qwen.Params | None = None
        self._members: tuple[Receiver, ...] = ()

    def stage(self, params: qwen.Params) -> int:
        self._params = params  # sent bucket by bucket before the learner continues
        return sum(bucket.size for bucket in self.buckets)

    async def connect(self, servers: Sequence[Receiver]) -> None:
        sizes = [
            (await server.ask("GET", "/get_world_size", timeout=60.0))["world_size"]
            for server in servers
        ]
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
        if (
            tuple(servers) != self._members
        ):  # the members of a communicator are fixed, so join again
            self._library.leave()
            for server in servers:
                await server.post("/shutdown_weight_transfer_engine")
            await self.connect(servers)
        faults: list[BaseException | None] = [None] * len(servers)
        tensors = hf.to_hf(self.shape, self._params)
        for bucket in self.buckets:
            requests = [
                asyncio.ensure_future(server.post("/update_weights", described(bucket)))
                for server in servers
            ]
            buffer = packed([next(tensors)[1] for _ in bucket.slots], self.dtype, self._device)
            await asyncio.to_thread(self._library.broadcast, buffer)
            answers = await asyncio.gather(*requests, return_exceptions=True)
            faults = [
                a if isinstance(a, BaseException) else fault for fault, a in zip(faults, answers)
            ]
        self._params = None
        return faults

    def close(self) -> None:
        self._params = None
        if self._members:
            self._library.leave()


def described(bucket: Bucket) -> dict[str, Any]:
    """Return the body of the /update_weights request that announces a bucket."""
    return {
        "update_info": {
            "names": [slot.name for slot in bucket.slots],
            "dtype_names": [slot.dtype for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
        }
    }


def packed(arrays: Sequence[Any], dtype: Any, device: jax.Device) -> jax.Array:
    """Return the bytes of the arrays, cast to `dtype` and concatenated, as a uint8 array on
    `device`. Blocks."""
    parts = []
    for array in arrays:
        part = jax.device_put(array, device).astype(dtype).reshape(-1)
        parts.append(jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1))
    return jax.block_until_ready(jnp.concatenate(parts))


class Nccl:
    """libnccl and libcudart by ctypes; both come with JAX's CUDA wheels."""

    def __init__(self):
        self._nccl, self._cuda, self._comm = None, None, ctypes.c_void_p()

    def unique_id(self) -> bytes:
        identifier = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(identifier))
        return bytes(identifier.internal)

    def join(self, world: int, unique_id: bytes, device: jax.Device) -> None:
        self._check(
            self._libraries()[1].cudaSetDevice(device.local_hardware_id or 0), "cudaSetDevice"
        )
        identifier = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), world, identifier, 0)
        one = jax.block_until_ready(jax.device_put(jnp.zeros(1, jnp.float32), device))
        self._collect("ncclAllReduce", one, 1, FLOAT32, SUM)

    def broadcast(self, buffer: jax.Array) -> None:
        self._collect("ncclBroadcast", buffer, buffer.size, UINT8, 0)

    def leave(self) -> None:
        if self._comm:
            self._call("ncclCommDestroy", self._comm)
            self._comm = ctypes.c_void_p()

    def _collect(
        self, name: str, buffer: jax.Array, count: int, kind: int, operation_or_root: int
    ) -> None:
        """Run one collective in place on the default stream and wait for it."""
        pointer = ctypes.c_void_p(buffer.unsafe_buffer_pointer())
        self._call(
            name,
            pointer,
            pointer,
            ctypes.c_size_t(count),
            kind,
            operation_or_root,
            self._comm,
            None,
        )
        self._check(self._libraries()[1].cudaStreamSynchronize(None), "cudaStreamSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._libraries()[0], name)(*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            raise TransferError(f"{name} failed with code {code}")

    def _libraries(self) -> tuple[Any, Any]:
        if self._nccl is None:
            try:
                self._nccl, self._cuda = (
                    ctypes.CDLL("libnccl.so.2"),
                    _first("libcudart.so.13", "libcudart.so.12"),
                )
            except OSError as error:
                raise TransferError(
                    f"engine.vllm.transfer=nccl needs NCCL and CUDA on the trainer: {error}"
                ) from None
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
