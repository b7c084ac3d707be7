"""Weight-transfer backend that vLLM loads under its own interpreter: it reads weights from shared
memory.

    PYTHONPATH=<this folder> vllm serve ... --worker-extension-cls evolver_vllm.Worker \
        --weight-transfer-config '{"backend": "evolver_shm"}'

The trainer writes buckets (`SharedMemory` in rl/engines/vllm/transfer.py). Each `/update_weights`
names a bucket and the position of every tensor in it. Importing this module registers the backend
and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "evolver_shm"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Initialisation request; the backend needs no settings."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One bucket: a file of `size` bytes, with the name, dtype, shape and byte offset of each
    tensor, and whether it lies there transposed."""

    path: str = ""
    size: int = 0
    names: list = field(default_factory=list)
    dtypes: list = field(default_factory=list)
    shapes: list = field(default_factory=list)
    offsets: list = field(default_factory=list)
    transposed: list = field(default_factory=list)


class SharedMemoryEngine(WeightTransferEngine):
    """Reads tensors in checkpoint format from shared memory; vLLM's loader copies, splits and packs
    them."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # The base class synchronises torch.accelerator, which does not exist on a CPU.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        held = torch.from_file(
            update_info.path, shared=False, size=update_info.size, dtype=torch.uint8
        )

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            rows = zip(
                update_info.names,
                update_info.dtypes,
                update_info.shapes,
                update_info.offsets,
                update_info.transposed,
            )
            for name, dtype_name, shape, offset, transposed in rows:
                dtype = getattr(torch, dtype_name)
                size = dtype.itemsize * torch.Size(shape).numel()
                flat = held[offset : offset + size].view(dtype)
                yield name, flat.view(shape[::-1]).t() if transposed else flat.view(shape)

        self.model.load_weights(tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)

    def shutdown(self) -> None:
        pass


def repack_tied_head(model: torch.nn.Module) -> None:
    """Repack the output head of a tied model on a CPU: its packed copy of the embedding survives a
    reload.

    Without this, the model would silently combine new layers with the old head.
    """
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


class Worker:
    """The class that --worker-extension-cls names; it adds no methods."""
