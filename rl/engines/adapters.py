"""LoRA adapters to vLLM servers, as files: when only those train, megabytes travel instead of the model.

vLLM loads them in place under one name, and requests ask for that name instead of the model's. The servers need
`--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models import lora, qwen
from rl.engines.transfer import Receiver

LOAD = "/v1/load_lora_adapter"


class AdapterFiles:
    """A `Transfer` (rl/engines/transfer.py) of adapters, to servers that hold the frozen weights already.

    Every version gets a directory of its own: vLLM's prefix cache tells adapters apart by path, and would go on
    answering from the keys and values of the old one. `source` gives the adapters as the learner holds them; while it
    is None they are as they began, without effect, and nothing is sent.
    """

    replays, whole = True, False
    needs = (LOAD, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")

    def __init__(self, config: lora.LoRA, *, folder: str | Path | None = None, name: str = "policy-adapter"):
        self.config, self.name = config, name
        self.source: Callable[[], qwen.Params] | None = None
        self._folder, self._count = Path(tempfile.mkdtemp(prefix="evolver-adapters-", dir=folder)), 0

    def stage(self, params: Any) -> int:
        if self.source is None:
            return 0
        before = self._path
        self._count += 1
        lora.save(self._path, self.source(), self.config)
        shutil.rmtree(before, ignore_errors=True)
        return (self._path / "adapter_model.safetensors").stat().st_size

    async def connect(self, servers: Sequence[Receiver]) -> None:
        pass

    async def send(self, servers: Sequence[Receiver]) -> list[BaseException | None]:
        body = {"lora_name": self.name, "lora_path": str(self._path), "load_inplace": True}

        async def one(server: Receiver) -> None:
            if self._count:
                await server.post(LOAD, body)
                server.model = self.name

        return await asyncio.gather(*(one(server) for server in servers), return_exceptions=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._count:06}"
