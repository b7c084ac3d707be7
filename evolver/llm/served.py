"""A language model that the run serves itself on this machine (config.llm.serve)."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evolver.config.paths import model_folder
from evolver.processes import hosts
from evolver.processes.server import Server, own_code


@contextlib.contextmanager
def serving(
    config: Any,
    workdir: Path,
    *,
    say: Callable[[str], None],
    check: Callable[[], None],
    progress: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Serve config.llm.serve.path while the context lasts, and yield the url. check, and what is
    raised: as for `Server.running`. progress: as for `Server`."""
    s = config.llm.serve
    # vLLM imports nothing of ours.
    environment = {"PYTHONPATH": ""} if s.python else own_code()
    if s.devices:
        environment["CUDA_VISIBLE_DEVICES"] = s.devices
    server = Server(
        s.path,
        lambda port: command_of(config, port),
        workdir / hosts.own_name("llm_server.log"),
        say,
        health="/health",
        start_timeout=s.start_timeout,
        restarts=s.restarts,
        progress=progress,
        environment=environment,
    )
    with server.running(check) as address:
        yield f"{address}/v1"


def command_of(config: Any, port: int) -> list[str]:
    """Return the command line of the server: vLLM's under an interpreter with vLLM, else that of
    this project."""
    c = config.llm
    s = config.llm.serve
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
