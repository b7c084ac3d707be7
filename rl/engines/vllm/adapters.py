"""LoRA adapters sent to vLLM servers as files: a few megabytes per update instead of the whole
model.

vLLM loads each version in place under one adapter name, which requests then use as the model name.
The servers need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models import lora, qwen
from rl.engines.vllm.transfer import Receiver

LOAD = "/v1/load_lora_adapter"


class AdapterFiles:
    """A `Transfer` (rl/engines/vllm/transfer.py) of adapters to servers that already hold the
    frozen weights.

    Every version gets its own directory: vLLM's prefix cache identifies adapters by path and would
    otherwise answer from the keys and values of the previous version. `source` returns the
    learner's adapters; while it is None the adapters are still at their initial values, which have
    no effect, and nothing is sent.
    """

    replays, whole = True, False
    needs = (LOAD, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")

    def __init__(
        self, config: lora.LoRA, *, folder: str | Path | None = None, name: str = "policy-adapter"
    ):
        self.config, self.name = config, name
        self.source: Callable[[], qwen.Params] | None = None
        self._folder, self._count = (
            Path(tempfile.mkdtemp(prefix="evolver-adapters-", dir=folder)),
            0,
        )

    def stage(self, params: Any) -> int:
        if self.source is None:
            return 0
        previous = self._path
        self._count += 1
        lora.save(self._path, self.source(), self.config)
        shutil.rmtree(previous, ignore_errors=True)
        return (self._path / "adapter_model.safetensors").stat().st_size

    async def connect(self, servers: Sequence[Receiver]) -> None:
        pass

    async def send(self, servers: Sequence[Receiver]) -> list[BaseException | None]:
        body = {"lora_name": self.name, "lora_path": str(self._path), "load_inplace": True}

        async def load(server: Receiver) -> None:
            if self._count:
                await server.post(LOAD, body)
                server.model = self.name

        return await asyncio.gather(*(load(server) for server in servers), return_exceptions=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._count:06}"
