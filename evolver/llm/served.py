"""A language model that the run serves itself on this machine (config.llm.serve): started before
anything asks it, started again if it dies, and ended with the run, also by kill -9."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

import rl
from evolver.config.paths import model_folder
from evolver.processes import hosts
from rl.engines import EngineFault
from rl.engines.vllm.servers import PLUGIN, first_error, free_ports

CHECKS_S = 0.5  # between two looks at a server
GRACE_S = 20.0  # until a server that was told to end is killed


class NotServed(EngineFault):
    """The server did not start; the message has its first error and the path of its log."""


@contextlib.contextmanager
def serving(
    config: Any, workdir: Path, *, say: Callable[[str], None], check: Callable[[], None]
) -> Iterator[str]:
    """Serve config.llm.serve.path while the context lasts, and yield the url.

    check: called while the server starts; raises what ends the run. Raises NotServed.
    """
    server = _Server(config, workdir / hosts.own_name("llm_server.log"), say)
    try:
        server.start(check)
        server.watcher.start()
        yield f"{server.address}/v1"
    finally:
        server.close()


def command_of(config: Any, port: int) -> list[str]:
    """Return the command line of the server: vLLM's under an interpreter with vLLM, else that of
    this project."""
    c, s = config.llm, config.llm.serve
    folder = model_folder(s.path, weights=True)
    if s.python:
        parallel = len([device for device in s.devices.split(",") if device])
        words = [
            s.python, "-m", "vllm.entrypoints.cli.main", "serve", folder,
            "--served-model-name", s.path, "--host", "127.0.0.1", "--port", port,
            "--max-model-len", s.context, "--max-num-seqs", c.concurrency,
            "--tensor-parallel-size", max(1, parallel),
        ]  # fmt: skip
    else:
        words = [
            sys.executable, "-m", "rl.engines.serve", "--model", folder, "--name", s.path,
            "--port", port, "--context", s.context, "--slots", c.concurrency,
            "--dtype", config.model.dtype,
        ]  # fmt: skip
    return [*map(str, words), *shlex.split(s.flags)]


class _Server:
    """The process of a server. log: its output is appended."""

    def __init__(self, config: Any, log: Path, say: Callable[[str], None]):
        self.serve, self._log, self._say = config.llm.serve, log, say
        (port,) = free_ports(1)
        self._command, self.address = command_of(config, port), f"http://127.0.0.1:{port}"
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0  # of the log of the present process

    def start(self, check: Callable[[], None]) -> None:
        """Start the process and wait until it answers. Raises NotServed and what `check` raises."""
        serve, environment = self.serve, dict(os.environ)
        self._say(f"serving {serve.path}; log: {self._log}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if serve.python:  # vLLM imports nothing of ours
            environment["PYTHONPATH"] = ""
        else:
            paths = (str(Path(rl.__file__).parents[1]), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if serve.devices:
            environment["CUDA_VISIBLE_DEVICES"] = serve.devices
        with self._log.open("ab") as log:
            self._begins = log.tell()
            process = self._process = subprocess.Popen(
                [sys.executable, str(PLUGIN / "launch.py"), *self._command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        ends = time.monotonic() + serve.start_timeout
        while not self._answers():
            check()
            if process.poll() is not None:
                raise NotServed(self._fault("it ended while starting"))
            if time.monotonic() > ends:
                raise NotServed(self._fault(f"it was not ready after {serve.start_timeout:g} s"))
            time.sleep(CHECKS_S)

    def _watch(self) -> None:
        """Start the process again whenever it ends by itself, as often as the config allows. Say
        so, also when it is gone for good."""
        for left in range(self.serve.restarts, -1, -1):
            while self._process is not None and self._process.poll() is None:
                if self._closed.wait(CHECKS_S):
                    return
            then = "and is started again" if left else "and is not started again"
            self._say(self._fault(f"it ended, {then}"))
            try:
                if left:
                    self.start(self._unless_closed)
            except NotServed as error:
                self._say(str(error))
            except InterruptedError:
                return

    def close(self) -> None:
        """End the process."""
        self._closed.set()
        if self.watcher.is_alive():  # it may be starting another process
            self.watcher.join()
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()  # launch.py then ends the server
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _unless_closed(self) -> None:
        if self._closed.is_set():
            raise InterruptedError

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/health", timeout=2.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def _fault(self, what: str) -> str:
        log = self._log.read_bytes()[self._begins :][-200_000:].decode(errors="replace")
        path = self.serve.path
        return f"the server of {path}: {what}: {first_error(log)}\n  log: {self._log}"
