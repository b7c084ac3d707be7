"""The servers of a run: found at their addresses, or started here, watched, and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.engines.vllm_wire import Server

SIDE = Path(__file__).parent / "vllm_side"  # what runs under vLLM's interpreter
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # that vLLM reserves room for
BACKEND = "evolver_shm"  # as vllm_side/evolver_vllm.py registers it


class ServerStartError(RuntimeError):
    """A server did not come up; the message holds its first error and the place of its log."""


class Servers:
    """Servers that run already, at `urls`. key: for their Authorization header."""

    def __init__(self, urls: Sequence[str], *, model: str, key: str = ""):
        self._urls, self._model, self._key = list(urls), model, key

    async def start(self) -> list[str]:
        """Addresses, once every server answers or cannot be waited for. Raises ServerStartError."""
        return self._urls

    def client(self, url: str) -> Server:
        """For requests to one of them."""
        return Server(url, self._model, self._key)

    @property
    def restartable(self) -> bool:
        """Whether one that is dead may be started again."""
        return False

    def ended(self, number: int) -> bool:
        """Whether its process is known to be gone."""
        return False

    async def restart(self, number: int) -> None:
        """End what is left of it and start it again at its address."""
        raise ServerStartError("this server was started by somebody else")

    async def stop(self) -> None:
        """End what was started."""


class OwnServers(Servers):
    """Servers started by this run, on this machine, one process tree each.

    python: the interpreter of a virtual environment that has vLLM. checkpoint: directory they start from. logs: where
    `vllm-0.log`, ... go. devices: for each server its CUDA_VISIBLE_DEVICES ("0,1": two, tensor parallel); () = one
    server on what vLLM finds. backend: of the weight transfer, "" = none. lora_rank: of adapters that it will be
    given, 0 = none. flags: more words for `vllm serve`.
    """

    def __init__(
        self,
        *,
        python: str,
        checkpoint: str | Path,
        logs: str | Path,
        replicas: int = 1,
        devices: Sequence[str] = (),
        length: int,
        dtype: str,
        sequences: int,
        backend: str = BACKEND,
        lora_rank: int = 0,
        flags: str = "",
        timeout: float = 600.0,
        restarts: int = 2,
        say: Callable[[str], None] = lambda text: None,
    ):
        super().__init__([], model="policy")
        self._python, self._checkpoint, self._logs = python, Path(checkpoint), Path(logs)
        self._devices = list(devices) or [""] * replicas
        self._words = _words(length=length, dtype=dtype, sequences=sequences, backend=backend, lora_rank=lora_rank)
        self._words += shlex.split(flags)
        self._timeout, self._restarts, self._say = timeout, restarts, say
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(self._devices)
        self._log_starts = [0] * len(self._devices)  # bytes in each log before its server was last started

    async def start(self) -> list[str]:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._urls = [f"http://127.0.0.1:{port}" for port in _free_ports(len(self._devices))]
        self._say(f"starting {len(self._urls)} vLLM server(s); log: {self._log(0)}")
        for number in range(len(self._urls)):
            self._spawn(number)
        try:
            await asyncio.gather(*(self._until_up(number) for number in range(len(self._urls))))
        except BaseException:
            await self.stop()
            raise
        return self._urls

    @property
    def restartable(self) -> bool:
        return self._restarts > 0

    def ended(self, number: int) -> bool:
        process = self._processes[number]
        return process is None or process.poll() is not None

    async def restart(self, number: int) -> None:
        self._restarts -= 1
        await self._end([self._processes[number]])
        self._say(f"engine: starting replica {number} again; log: {self._log(number)}")
        self._spawn(number)
        await self._until_up(number)

    async def stop(self) -> None:
        await self._end(self._processes)
        self._processes = [None] * len(self._processes)

    async def _end(self, processes: Sequence[subprocess.Popen[bytes] | None]) -> None:
        running = [process for process in processes if process is not None]
        for process in running:
            process.stdin.close()  # launch.py ends the server
        for process in running:
            try:
                await asyncio.to_thread(process.wait, 20.0)
            except subprocess.TimeoutExpired:
                process.kill()

    def pids(self) -> list[int]:
        """Of the launchers; each server is its launcher's only child."""
        return [process.pid for process in self._processes if process is not None]

    def _log(self, number: int) -> Path:
        return self._logs / f"vllm-{number}.log"

    def _spawn(self, number: int) -> None:
        port, devices = self._urls[number].rpartition(":")[2], self._devices[number]
        words = [self._python, "-m", "vllm.entrypoints.cli.main", "serve", str(self._checkpoint), "--port", port]
        words += self._words
        parallel = len([d for d in devices.split(",") if d])
        if parallel > 1:
            words += ["--tensor-parallel-size", str(parallel)]
        with open(self._log(number), "ab") as log:
            self._log_starts[number] = log.tell()
            self._processes[number] = subprocess.Popen(
                [sys.executable, str(SIDE / "launch.py"), *words],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=_environment(devices),
            )  # fmt: skip

    async def _until_up(self, number: int) -> None:
        client, ends = self.client(self._urls[number]), time.monotonic() + self._timeout
        try:
            while not await client.healthy(2.0):
                process = self._processes[number]
                if process is None or process.poll() is not None:
                    raise ServerStartError(self._reason(number, "vLLM ended while starting"))
                if time.monotonic() > ends:
                    raise ServerStartError(self._reason(number, f"vLLM was not ready after {self._timeout:g} s"))
                await asyncio.sleep(0.5)
        finally:
            await client.close()

    def _reason(self, number: int, what: str) -> str:
        text = self._log(number).read_bytes()[self._log_starts[number] :][-200_000:].decode(errors="replace")
        return f"{what}: {first_error(text)}\n  log: {self._log(number)}"


def first_error(log: str) -> str:
    """The line of a server's log that says why it died: of the first traceback its end, else the first error line."""
    lines = [re.sub(r"^(\([^)]*\) )?(ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?", "", line) for line in log.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*: ?\S", line)]
    said = [line for line in lines if re.search(r"\berror\b", line, flags=re.IGNORECASE)]
    if raised and "validation error" in raised[0]:  # pydantic says what is wrong further down
        at = lines.index(raised[0])
        return " ".join(" ".join(lines[at : at + 3]).split())[:400]
    found = (raised or said or [line for line in lines if line.strip()][-1:] or ["its log is empty"])[0]
    return found.strip()[:400]


def _words(*, length: int, dtype: str, sequences: int, backend: str, lora_rank: int) -> list[str]:
    words = ["--host", "127.0.0.1", "--served-model-name", "policy", "--max-model-len", str(length), "--dtype", dtype]
    words += ["--max-num-seqs", str(sequences), "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    words += ["--enable-prompt-tokens-details"]
    if backend:
        words += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(next(r for r in LORA_RANKS if r >= lora_rank))]
    if backend == BACKEND:
        words += ["--worker-extension-cls", "evolver_vllm.Worker"]
    return words


def _environment(devices: str) -> dict[str, Any]:
    environment = dict(os.environ)
    # Ours that would confuse theirs: jax's flags are harmless, an interpreter's home is not.
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        environment.pop(name, None)
    environment |= {
        "PYTHONPATH": str(SIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-transfer endpoints; the server listens on the loopback only
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
    }
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return environment


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
