"""Sources of worlds: this process, worker processes or a service, behind one method `world()`."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args

from envs import make
from envs.pool import Pool
from envs.process import DEADLINES, Deadlines, Piped, child_environment, end
from envs.remote import RETRIES, Connections, RemoteWorld
from envs.values import Json
from envs.world import World, WorldError

Mode = Literal["inprocess", "worker", "http"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Source(contextlib.AbstractContextManager["Source"]):
    """A factory of worlds of one environment. `close`, or leaving its `with` block, ends its
    processes.

    mode: "inprocess" (fastest, but a world that hangs or crashes takes this process down), "worker"
    (a pool of `workers` processes under the interpreter `python`, with a deadline on every call) or
    "http" (the service at `url`, which was started with the environment and its arguments; `kwargs`
    is ignored).
    """

    def __init__(
        self,
        env: str,
        kwargs: Json | None = None,
        *,
        mode: str = "inprocess",
        url: str = "",
        deadlines: Deadlines = DEADLINES,
        retries: int = RETRIES,
        **pool: Any,
    ):
        """retries: of requests that the service does not answer. `pool` holds further arguments of
        `Pool`: workers, python, per_worker, memory_mb, lease_s, recycle."""
        if mode not in MODES:
            raise ValueError(
                f"the mode of an environment is one of {', '.join(MODES)}, not '{mode}'"
            )
        if mode == "http" and not url:
            raise ValueError("mode 'http' needs the url of a service")
        if mode != "http" and url:
            raise ValueError(f"mode '{mode}' takes no url")
        self._env, self._kwargs = env, kwargs or {}
        self._patience: Json = {"deadlines": deadlines, "retries": retries}
        self._pool = Pool(env, kwargs, deadlines=deadlines, **pool) if mode == "worker" else None
        self._connections = Connections(url) if url else None

    def world(self) -> World:
        """Return a world, which plays one episode at a time. Close it after use."""
        if self._pool:
            return self._pool.world()
        if self._connections:
            return RemoteWorld(self._connections, env=self._env, **self._patience)
        return make(self._env, **self._kwargs)

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextlib.contextmanager
def serving(env: str, kwargs: str = "{}", *options: str) -> Iterator[str]:
    """Run a service in a separate process during the block and yield its URL. `options` are
    command-line options."""
    command = [sys.executable, "-m", "envs.service", "--env", env, "--kwargs", kwargs]
    process = Piped(
        [*command, "--port", "0", *options], stdout=subprocess.PIPE, env=child_environment()
    )
    try:
        line = process.stdout.readline().decode()
        if "running on" not in line:
            raise WorldError(f"the service of {env} did not start (exit code {process.wait(10)})")
        yield line.split()[-1]
    finally:
        end(process, 10)
        process.stdout.close()
