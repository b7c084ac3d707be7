"""The worlds of a run: in this process, in worker processes, or on a service."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envs.mixture import MixedSource, Mixture
from envs.process import Deadlines
from envs.source import Source
from evolver.config.paths import resolve
from evolver.llm.questions import SERVED
from evolver.processes import hosts
from evolver.processes.server import Server, own_code

RESTARTS = 10  # of the service
RETRIES = 9  # for 51 s, in which a service that died has been started again


@contextlib.contextmanager
def open_source(
    config: Any,
    workdir: Path,
    *,
    say: Callable[[str], None] = print,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[Source]:
    """Open the source of the config's worlds while the context lasts, and the service that they are
    on if the run has to serve them itself. check, and what is raised: as for `Server.running`.
    progress: as for `Server`."""
    env = config.env
    if env.url != SERVED:
        with make_source(config) as source:
            yield source
        return
    server = Server(
        f"the world {env.name}",
        lambda port: service_command(env, port),
        workdir / hosts.own_name("env_server.log"),
        say,
        health="/healthz",
        start_timeout=env.timeout,
        restarts=RESTARTS,
        progress=progress,
        environment=own_code(),
    )
    with server.running(check) as url:
        # Here a call also waits for others of its worker.
        waiting = {"url": url, "timeout": 2 * env.timeout}
        with source_of(ConfigDict(env.to_dict() | waiting), retries=RETRIES) as source:
            yield source


def service_command(env: Any, port: int) -> list[str]:
    """Return the command line of the service. env: `config.env`."""
    words = [sys.executable, "-m", "envs.service", "--env", env.name, "--port", port]
    words += ["--kwargs", json.dumps(env.args.to_dict()), "--workers", env.workers]
    words += ["--recycle", env.recycle]
    if env.python:
        words += ["--python", resolve(env.python)]
    if env.memory_mb:
        words += ["--memory_mb", env.memory_mb]
    for call in ("start", "reset", "step"):
        words += [f"--{call}_s", env.timeout]
    return [*map(str, words)]


def make_source(config: Any) -> Source:
    """Return the source of the config's worlds: this process, worker processes, or a service. In
    workers, each world of a mixture has some of its own."""
    env = config.env
    if env.name != Mixture.name or env.mode != "worker":
        return source_of(env)
    worlds = env.args.worlds.to_dict()

    def of_world(name: str) -> Source:
        return source_of(ConfigDict(env.to_dict() | {"name": name, "args": {}} | worlds[name]))

    return MixedSource(worlds, of_world)


def source_of(env: Any, **options: Any) -> Source:
    """Return the source of one world. env: `config.env`. options: further ones of `Source`."""
    return Source(
        env.name,
        env.args.to_dict(),
        mode=env.mode,
        url=env.url,
        deadlines=Deadlines(start=env.timeout, reset=env.timeout, step=env.timeout),
        workers=env.workers,
        python=str(resolve(env.python)) if env.python else None,
        recycle=env.recycle,
        memory_mb=env.memory_mb or None,
        **options,
    )
