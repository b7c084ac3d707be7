"""The vLLM servers of a run: external servers at given URLs, or servers that the run starts and
stops."""

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

from rl.engines.vllm.wire import Server

SIDE = Path(__file__).parent / "side"  # code that runs under vLLM's interpreter
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # values that --max-lora-rank accepts
BACKEND = "evolver_shm"  # weight-transfer backend, registered by side/evolver_vllm.py


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

    @property
    def restartable(self) -> bool:
        """True if a dead server can be started again."""
        return False

    def ended(self, number: int) -> bool:
        """Return True if the server's process is known to have ended."""
        return False

    async def restart(self, number: int) -> None:
        """Stop the server and start it again at its URL. Raises ServerStartError."""
        raise ServerStartError("this server was not started by this run, so it cannot be restarted")

    async def stop(self) -> None:
        """Stop the servers that were started here."""


class OwnServers(Servers):
    """Servers started by this run on this machine, one process tree each.

    python: interpreter of a virtual environment with vLLM. checkpoint: directory of the initial
    weights. logs: directory for `vllm-0.log`, ... replicas: number of servers if `devices` is
    empty. devices: CUDA_VISIBLE_DEVICES of each server ("0,1" = two devices, tensor parallel).
    context: most tokens of a sequence. slots: most sequences at a
    time. backend: of the weight transfer; "" = none. lora_rank: of the adapters that will be sent;
    0 = none. flags: more arguments of `vllm serve`. start_timeout: seconds. restarts: of servers
    that died, in all.
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
        flags: str = "",
        start_timeout: float = 900.0,
        restarts: int = 2,
        say: Callable[[str], None] = lambda text: None,
    ):
        super().__init__([], model="policy")
        self._python, self._checkpoint, self._logs = python, Path(checkpoint), Path(logs)
        self._devices = list(devices) or [""] * replicas
        self._flags = _flags(
            context=context, dtype=dtype, slots=slots, backend=backend, lora_rank=lora_rank
        )
        self._flags += shlex.split(flags)
        self._start_timeout, self._restarts, self._say = start_timeout, restarts, say
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(self._devices)
        self._log_starts = [0] * len(
            self._devices
        )  # size of each log when its server was last started

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
            process.stdin.close()  # launch.py then stops the server
        for process in running:
            try:
                await asyncio.to_thread(process.wait, 20.0)
            except subprocess.TimeoutExpired:
                process.kill()

    def pids(self) -> list[int]:
        """Return the process ids of the launchers; each server is its launcher's only child."""
        return [process.pid for process in self._processes if process is not None]

    def _log(self, number: int) -> Path:
        return self._logs / f"vllm-{number}.log"

    def _spawn(self, number: int) -> None:
        port, devices = self._urls[number].rpartition(":")[2], self._devices[number]
        command = [
            self._python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(self._checkpoint),
            "--port",
            port,
        ]
        command += self._flags
        parallel = len([d for d in devices.split(",") if d])
        if parallel > 1:
            command += ["--tensor-parallel-size", str(parallel)]
        with open(self._log(number), "ab") as log:
            self._log_starts[number] = log.tell()
            self._processes[number] = subprocess.Popen(
                [sys.executable, str(SIDE / "launch.py"), *command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=_environment(devices),
            )  # fmt: skip

    async def _until_up(self, number: int) -> None:
        client, ends = self.client(self._urls[number]), time.monotonic() + self._start_timeout
        try:
            while not await client.healthy(2.0):
                process = self._processes[number]
                if process is None or process.poll() is not None:
                    raise ServerStartError(self._reason(number, "vLLM ended while starting"))
                if time.monotonic() > ends:
                    raise ServerStartError(
                        self._reason(number, f"vLLM was not ready after {self._start_timeout:g} s")
                    )
                await asyncio.sleep(0.5)
        finally:
            await client.close()

    def _reason(self, number: int, what: str) -> str:
        text = (
            self._log(number)
            .read_bytes()[self._log_starts[number] :][-200_000:]
            .decode(errors="replace")
        )
        return f"{what}: {first_error(text)}\n  log: {self._log(number)}"


def first_error(log: str) -> str:
    """Return the likely fault in a server's log: the last line of the first traceback, else the
    first error line."""
    lines = [
        re.sub(r"^(\([^)]*\) )?(ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?", "", line)
        for line in log.splitlines()
    ]
    exceptions = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*: ?\S", line)
    ]
    errors = [line for line in lines if re.search(r"\berror\b", line, flags=re.IGNORECASE)]
    if (
        exceptions and "validation error" in exceptions[0]
    ):  # pydantic gives the details on the next lines
        index = lines.index(exceptions[0])
        return " ".join(" ".join(lines[index : index + 3]).split())[:400]
    line = (
        exceptions
        or errors
        or [line for line in lines if line.strip()][-1:]
        or ["its log is empty"]
    )[0]
    return line.strip()[:400]


def _flags(*, context: int, dtype: str, slots: int, backend: str, lora_rank: int) -> list[str]:
    flags = [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "policy",
        "--max-model-len",
        str(context),
        "--dtype",
        dtype,
    ]
    flags += [
        "--max-num-seqs",
        str(slots),
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",
    ]
    flags += ["--enable-prompt-tokens-details"]
    if backend:
        flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if lora_rank:
        flags += [
            "--enable-lora",
            "--max-lora-rank",
            str(next(r for r in LORA_RANKS if r >= lora_rank)),
        ]
    if backend == BACKEND:
        flags += ["--worker-extension-cls", "evolver_vllm.Worker"]
    return flags


def _environment(devices: str) -> dict[str, Any]:
    environment = dict(os.environ)
    # These variables point at our interpreter and would break vLLM's.
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        environment.pop(name, None)
    environment |= {
        "PYTHONPATH": str(SIDE),
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


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
