"""Weights from this process to vLLM servers: what goes into each request of vLLM's weight-transfer endpoints.

A backend turns parameters into the tensors of a Hugging Face checkpoint (`models.hf.to_hf`, the one table of names
and layouts), gathers them in buckets, never sends one by one, and says what vLLM has to know to read them. The order
of requests (pause, start, update, finish, resume) is `rl/engines/vllm.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from models import hf, qwen

PREFIX = "evolver-weights-"
ALIGNMENT = 64  # bytes; more than any dtype asks for
CONTROL = ("/pause", "/resume", "/reset_prefix_cache")
UPDATE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", *CONTROL)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class TransferError(RuntimeError):
    """Weights could not be handed over; the message says why."""


class Receiver(Protocol):
    """A server, as far as weights are concerned (`rl/engines/vllm_wire.py`, `Server`)."""

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the answer."""
        ...

    async def ask(self, method: str, path: str, *, timeout: float | None) -> Any:
        """The same for other methods."""
        ...


@dataclass
class Slot:
    """One tensor within a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass
class Bucket:
    """Tensors that travel in one request."""

    slots: list[Slot] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], alignment: int = ALIGNMENT) -> None:
        slot = Slot(name, dtype, shape, -(-self.size // alignment) * alignment)
        self.slots.append(slot)
        self.size = slot.offset + slot.size


def buckets_of(config: qwen.Config, dtype: str, bucket_bytes: int, alignment: int = ALIGNMENT) -> list[Bucket]:
    """A model's tensors, in checkpoint order, in buckets of at most `bucket_bytes`; a larger tensor gets its own."""
    buckets = [Bucket()]
    for name, shape in hf.shapes(config):
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if buckets[-1].slots and buckets[-1].size + size > bucket_bytes:
            buckets.append(Bucket())
        buckets[-1].add(name, dtype, shape, alignment)
    return buckets


class Transfer(Protocol):
    """A way for weights to travel."""

    replays: bool  # whether a server that joins later can be given what was staged
    whole: bool  # whether all weights are replaced, over start and finish; else an adapter is
    needs: tuple[str, ...]  # paths that a server must have

    def stage(self, params: qwen.Params) -> int:
        """Make weights ready to be sent; returns their bytes. Blocks, so it is called in a thread."""
        ...

    async def connect(self, servers: Sequence[Receiver]) -> None:
        """Once, and again whenever the set of servers has changed."""
        ...

    async def send(self, servers: Sequence[Receiver]) -> list[BaseException | None]:
        """Between start and finish of an update, to all servers at once; for each what went wrong, or None."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class SharedMemory:
    """Buckets as files in memory that server and trainer share; any device, any number of servers on this machine.

    The whole model stays staged (its size in `folder`, once for all servers), so that a server which comes back can
    be brought up to date without the learner. The files are written over at each `stage`: the pages exist already.
    """

    replays, whole, needs = True, True, UPDATE

    def __init__(self, config: qwen.Config, *, dtype: str, folder: str | Path, bucket_bytes: int = 1 << 30):
        """Raises TransferError where `folder` has no room for the model."""
        self.config, self.buckets = config, buckets_of(config, dtype, bucket_bytes)
        needed = sum(bucket.size for bucket in self.buckets)
        try:
            _clear(Path(folder))
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise TransferError(f"{folder} has {free:,} bytes free; staging the weights needs {needed:,}")
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            self._owned = open(self.folder / "owner", "w")  # noqa: SIM115  (held for as long as this lives)
            fcntl.flock(self._owned, fcntl.LOCK_EX)
        except OSError as error:
            raise TransferError(f"{folder} cannot hold the weights: {error}") from None
        self._maps: list[np.memmap] = []

    def stage(self, params: qwen.Params) -> int:
        if not self._maps:
            for number, bucket in enumerate(self.buckets):
                path = self.folder / f"bucket_{number:03}.bin"
                with open(path, "wb") as file:  # all of it now: memory that runs out later would kill the process
                    os.posix_fallocate(file.fileno(), 0, bucket.size)
                self._maps.append(np.memmap(path, np.uint8, mode="r+", shape=(bucket.size,)))
        tensors = hf.to_hf(self.config, params)
        for held, bucket in zip(self._maps, self.buckets):
            for slot in bucket.slots:
                name, array = next(tensors)
                assert name == slot.name, f"{name} where {slot.name} belongs"
                place = held[slot.offset : slot.offset + slot.size].view(DTYPES[slot.dtype]).reshape(slot.shape)
                np.copyto(place, np.asarray(array), casting="unsafe")
        return sum(bucket.size for bucket in self.buckets)

    def updates(self) -> Iterator[dict[str, Any]]:
        """The bodies of /update_weights, in order."""
        for held, bucket in zip(self._maps, self.buckets):
            yield {
                "update_info": {
                    "path": str(held.filename),
                    "size": bucket.size,
                    "names": [slot.name for slot in bucket.slots],
                    "dtypes": [slot.dtype for slot in bucket.slots],
                    "shapes": [list(slot.shape) for slot in bucket.slots],
                    "offsets": [slot.offset for slot in bucket.slots],
                }
            }

    async def connect(self, servers: Sequence[Receiver]) -> None:
        await asyncio.gather(*(server.post("/init_weight_transfer_engine", {"init_info": {}}) for server in servers))

    async def send(self, servers: Sequence[Receiver]) -> list[BaseException | None]:
        if not self._maps:
            raise TransferError("no weights are staged")

        async def one(server: Receiver) -> None:
            for body in self.updates():
                await server.post("/update_weights", body)

        return await asyncio.gather(*(one(server) for server in servers), return_exceptions=True)

    def close(self) -> None:
        self._maps = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owned.close()


def _clear(folder: Path) -> None:
    """Give back the memory of runs that were killed: their directories are there and nobody holds them."""
    for owner in folder.glob(f"{PREFIX}*/owner"):
        with contextlib.suppress(OSError), open(owner) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
