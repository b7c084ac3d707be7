"""The vLLM servers of a run: external servers at given URLs, or servers that the run starts and
stops."""

import asyncio
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.engines.child import PLUGIN, Child, free_ports
from rl.engines.vllm.client import Server

LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # values that --max-lora-rank accepts
GPUS = Path("/dev/nvidiactl")  # exists where there are NVIDIA GPUs
BACKEND = "evolver_shm"  # weight-transfer backend, registered by vllm_plugin/evolver_vllm.py


class ServerStartError(RuntimeError):
    """A server did not start; the message contains its first error and the path of its log."""


class Servers:
    """Servers that are already running at `urls`. key: sent as a bearer token."""

    def __init__(self, urls: Sequence[str], *, model: str, key: str = ""):
        self._urls, self._model, self._key = list(urls), model, key

    async def start(self) -> list[str]:
        """Start the servers, if they are ours, and return their URLs. Raises ServerStartError."""
        return self._urls

    def client(self, url: str) -> Server:
        """Return a client of the server at `url`."""
        return Server(url, self._model, self._key)

    def restartable(self, number: int) -> bool:
        """Return True if the server can be started again when it is dead."""
        return False

    def renew(self, number: int) -> None:
        """Note that the server has made progress: it may be started again as often as at first."""

    def ended(self, number: int) -> bool:
        """Return True if the server's process is known to have ended."""
        return False

    async def restart(self, number: int) -> None:
        """Stop the server and start it again at its URL. Raises ServerStartError."""
        raise ServerStartError("this server was not started by this run, so it cannot be restarted")

    async def end(self, number: int) -> None:
        """End the server, if it was started here: `restart` starts it again."""

    async def stop(self) -> None:
        """Stop the servers that were started here."""


class OwnServers(Servers):
    """Servers started by this run on this machine, one process tree each.

    python: interpreter of a virtual environment with vLLM. checkpoint: directory of the initial
    weights. logs: directory for `vllm-0.log`, ... replicas: number of servers if `devices` is
    empty. devices: CUDA_VISIBLE_DEVICES of each server ("0,1" = two devices, tensor parallel).
    context: most tokens of a sequence. slots: most sequences at a time. backend: of the weight
    transfer; "" = none. lora_rank: of the adapters that will be sent; 0 = none. sleeps: True if
    they will be told to sleep. flags: more arguments of `vllm serve`. start_timeout: seconds.
    restarts: of a server that dies without taking an update in between.
    """

    def __init__(
        self,
        *,
        python: str,
        checkpoint: str | Path,
        logs: str | Path,
        replicas: int = 1,
        devices: Sequence[str] = (),
        context: int,
        dtype: str,
        slots: int,
        backend: str = BACKEND,
        lora_rank: int = 0,
        sleeps: bool = False,
        flags: str = "",
        start_timeout: float = 900.0,
        restarts: int = 2,
        say: Callable[[str], None] = lambda text: None,
    ):
        super().__init__([], model="policy")
        self._python, self._checkpoint, self._logs = python, Path(checkpoint), Path(logs)
        self._devices = list(devices) or [""] * replicas
        self._flags = shlex.split(
            f"--host 127.0.0.1 --served-model-name policy --max-model-len {context} --dtype {dtype}"
            f" --max-num-seqs {slots} --logprobs-mode processed_logprobs --enable-scale-out"
            " --enable-prompt-tokens-details"
        )
        if backend:
            self._flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
        if lora_rank:
            most = next(rank for rank in LORA_RANKS if rank >= lora_rank)
            self._flags += ["--enable-lora", "--max-lora-rank", str(most)]
        if backend == BACKEND:
            self._flags += ["--worker-extension-cls", "evolver_vllm.Worker"]
        if sleeps and GPUS.exists():  # on a CPU vLLM knows /sleep but refuses the flag
            self._flags += ["--enable-sleep-mode"]
        self._flags += shlex.split(flags)
        self._start_timeout, self._restarts, self._say = start_timeout, restarts, say
        self._left = [restarts] * len(self._devices)
        self._children: list[Child | None] = [None] * len(self._devices)

    async def start(self) -> list[str]:
        self._urls = [f"http://127.0.0.1:{port}" for port in free_ports(len(self._devices))]
        self._say(f"starting {len(self._urls)} vLLM server(s); log: {self._log(0)}")
        try:
            await asyncio.gather(*(self._spawn(number) for number in range(len(self._urls))))
        except BaseException:
            await self.stop()
            raise
        return self._urls

    def restartable(self, number: int) -> bool:
        return self._left[number] > 0

    def renew(self, number: int) -> None:
        self._left[number] = self._restarts

    def ended(self, number: int) -> bool:
        child = self._children[number]
        return child is None or child.ended

    async def restart(self, number: int) -> None:
        self._left[number] -= 1
        await self.end(number)
        self._say(f"engine: starting replica {number} again; log: {self._log(number)}")
        await self._spawn(number)

    async def end(self, number: int) -> None:
        await _end([self._children[number]])

    async def stop(self) -> None:
        await _end(self._children)
        self._children = [None] * len(self._children)

    def _log(self, number: int) -> Path:
        return self._logs / f"vllm-{number}.log"

    async def _spawn(self, number: int) -> None:
        """Start a server and wait until it answers."""
        url, devices = self._urls[number], self._devices[number]
        command = [self._python, "-m", "vllm.entrypoints.cli.main", "serve", str(self._checkpoint)]
        command += ["--port", url.rpartition(":")[2], *self._flags]
        parallel = len([device for device in devices.split(",") if device])
        if parallel > 1:
            command += ["--tensor-parallel-size", str(parallel)]
        child = self._children[number] = Child(command, self._log(number), _environment(devices))
        client, ends = self.client(url), time.monotonic() + self._start_timeout
        try:
            while not await client.healthy(2.0):
                if child.ended:
                    raise ServerStartError(child.fault("vLLM ended while starting"))
                if time.monotonic() > ends:
                    late = f"vLLM was not ready after {self._start_timeout:g} s"
                    raise ServerStartError(child.fault(late))
                await asyncio.sleep(0.5)
        finally:
            await client.close()


async def _end(children: Sequence[Child | None]) -> None:
    running = [child for child in children if child is not None]
    await asyncio.gather(*(asyncio.to_thread(child.end) for child in running))


def _environment(devices: str) -> dict[str, Any]:
    environment = dict(os.environ)
    # These variables point at our interpreter and would break vLLM's.
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        environment.pop(name, None)
    environment |= {
        "PYTHONPATH": str(PLUGIN),
        # enables the weight-transfer endpoints; the server only listens on the loopback
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
    }
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return environment
