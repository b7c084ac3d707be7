"""Loaded inside vLLM, under vLLM's interpreter: weights out of files in shared memory, over vLLM's own endpoints.

    PYTHONPATH=<this folder> vllm serve ... --worker-extension-cls evolver_vllm.Worker \
        --weight-transfer-config '{"backend": "evolver_shm"}'

The trainer writes buckets (rl/engines/transfer.py, `SharedMemory`) and says in each `/update_weights` which bucket to
read and where in it every tensor lies. Importing this module registers the backend; nothing else is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "evolver_shm"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One bucket: a file of `size` bytes, and for each tensor its name, dtype, shape and first byte."""

    path: str = ""
    size: int = 0
    names: list = field(default_factory=list)
    dtypes: list = field(default_factory=list)
    shapes: list = field(default_factory=list)
    offsets: list = field(default_factory=list)


class SharedMemoryEngine(WeightTransferEngine):
    """Reads checkpoint-format tensors where the trainer left them; vLLM's loader copies, splits and packs them."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # The base class synchronises torch.accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        held = torch.from_file(update_info.path, shared=False, size=update_info.size, dtype=torch.uint8)

        def tensors():
            rows = zip(update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets)
            for name, dtype_name, shape, offset in rows:
                dtype = getattr(torch, dtype_name)
                size = dtype.itemsize * torch.Size(shape).numel()
                yield name, held[offset : offset + size].view(dtype).view(shape)

        self.model.load_weights(tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)

    def shutdown(self) -> None:
        pass


def repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU the head of a tied model keeps a packed copy of the embedding, which no reload touches: make it anew.

    Without this the body is new and the head old, and nothing says so.
    """
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


class Worker:
    """What --worker-extension-cls names; it adds no method."""
