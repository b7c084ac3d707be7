"""Client of the environment service (envs/service.py): a World over HTTP. Standard library only."""

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.parse
from typing import Any

from envs.hosted import HostedWorld
from envs.http import TOKEN_VARIABLE, bearer
from envs.process import DEADLINES, MAX_MESSAGE, Deadlines
from envs.values import Json
from envs.world import WorldError, WorldTimeout

RETRIES = 4  # of a request
FIRST_WAIT_S = 0.1  # before the first retry; doubles with each further one


class Connections:
    """Keep-alive connections to one service, shared by the threads of this process."""

    def __init__(self, url: str):
        """Parse the URL without connecting. Raises ValueError unless it is an http(s) URL with a
        host."""
        parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL of a service looks like http://host:port, not {url!r}")
        # Extra methods of the service's worlds; None = not requested yet.
        self.methods: list[str] | None = None
        self.url = f"{parts.scheme}://{parts.netloc}"
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        self._class = kinds[parts.scheme]
        self._address = (parts.hostname, parts.port)
        self._path = parts.path.rstrip("/")
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def post(
        self, route: str, body: bytes, headers: dict[str, str], timeout: float
    ) -> tuple[int, bytes]:
        """Send one request and return (status, body). Raises OSError or HTTPException if the
        connection fails."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._class(*self._address)
        try:
            connection.timeout = timeout
            if connection.sock:
                connection.sock.settimeout(timeout)
            connection.request("POST", f"{self._path}/{route}", body, headers)
            response = connection.getresponse()
            # A length that is declared is checked first: a peer may reset the connection while it
            # sends too much.
            declared = response.length or 0
            data = b"" if declared > MAX_MESSAGE else response.read(MAX_MESSAGE + 1)
            if max(declared, len(data)) > MAX_MESSAGE:
                raise http.client.HTTPException(f"an answer of more than {MAX_MESSAGE >> 20} MB")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return response.status, data


class Client:
    """The methods of `envs.pool.Pool` that worlds use, over HTTP. Each raises WorldError or
    WorldTimeout if the service fails.

    Every call has one deadline that includes its retries. If the connection breaks or the service
    is full, a request is sent again after 0.1 s, 0.2 s, 0.4 s and so on. Steps are numbered, so the
    service executes a repeated step once.
    """

    def __init__(self, connections: Connections, env: str, deadlines: Deadlines, retries: int):
        self.connections, self._env = connections, env
        self._deadlines, self._retries = deadlines, retries
        token = bearer(os.environ.get(TOKEN_VARIABLE, ""))
        self._headers = {"Content-Type": "application/json"} | token

    @property
    def methods(self) -> list[str]:
        if self.connections.methods is None:
            self.connections.methods = self._post("get_info", "profile", params={"methods": True})
        return self.connections.methods

    def tasks(self, split: str) -> list[Json]:
        params = {"split": split, "raw": True}
        return self._post("get_env_profile", "tasks", env_type=self._env, params=params)

    def profile(self) -> Json:
        return self._post("get_info", "profile", params={"profile": True})

    def create(self, task: Json, seed: int, id: str) -> tuple[str, Json]:
        params = {"task": task, "seed": seed, "raw": True}
        about = {"env_type": self._env, "task_id": task["id"], "instance_id": id}
        data = self._post("create", "reset", **about, params=params)
        return id, {"messages": data["state"], "tools": data["info"]["tools"]}

    def restore(self, snapshot: Any, id: str) -> None:
        self._post("restore", "restore", instance_id=id, params={"snapshot": snapshot})

    def step(self, id: str, action: str, number: int) -> Json:
        message = {"role": "assistant", "content": action}
        params = {"step": number, "raw": True}
        data = self._post("step", "step", instance_id=id, messages=message, params=params)
        names = ("reward", "terminated", "truncated", "tools", "info")
        return {"messages": data["state"]} | {name: data[name] for name in names}

    def ask(self, id: str, op: str, *args: Any) -> Any:
        if op == "query":
            params = dict(zip(("query", "args", "kwargs"), args))
            return self._post("get_info", op, instance_id=id, params=params)
        return self._post(op, op, instance_id=id, params={"raw": True})

    def release(self, id: str) -> None:
        """Release the instance. Failures are ignored: the service also releases instances that are
        idle."""
        with contextlib.suppress(WorldError, ValueError):
            self._post("release", "close", instance_id=id)

    def _post(self, route: str, op: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        deadline = self._deadlines.of(op)
        until = time.monotonic() + deadline
        problem = ""
        for attempt in range(self._retries + 1):
            left = until - time.monotonic()
            if attempt:
                pause = FIRST_WAIT_S * 2 ** (attempt - 1)
                if pause >= left:
                    break
                time.sleep(pause)
            try:
                status, answer = self.connections.post(route, data, self._headers, max(left, 0.001))
            except TimeoutError:
                who = self._env or self.connections.url
                raise WorldTimeout(f"{who} did not answer {op} within {deadline:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status != 503:
                return self._read(op, status, answer)
            problem = answer[:200].decode(errors="replace")
        raise WorldError(f"{self.connections.url} did not answer {op}: {problem}")

    def _read(self, op: str, status: int, answer: bytes) -> Any:
        """Return the data of an answer, or raise the error that it reports."""
        try:
            reply = json.loads(answer)
            data, detail = reply.get("data"), "" if status == 200 else reply["detail"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            start = answer[:200].decode(errors="replace")
            said = f"{self.connections.url} answered {op} with {status} {start}"
            raise WorldError(said) from None
        if status == 200:
            return data
        if reply.get("reason") == "env_timeout":
            raise WorldTimeout(detail)
        if reply.get("reason") == "not_implemented":
            raise NotImplementedError(detail)
        if status == 400 and op not in ("step", "evaluate"):
            raise ValueError(detail)
        raise WorldError(f"{self.connections.url}: {detail}" if status == 401 else detail)


class RemoteWorld(HostedWorld):
    """A World whose episode is an instance of a service. Raises what `Client` does. The bearer
    token comes from the environment variable EVOLVER_ENV_TOKEN."""

    def __init__(
        self,
        url: str | Connections,
        *,
        env: str = "",
        deadlines: Deadlines = DEADLINES,
        retries: int = RETRIES,
    ):
        """Worlds that are given the same `Connections` share its sockets."""
        connections = url if isinstance(url, Connections) else Connections(url)
        client = Client(connections, env, deadlines, retries)
        super().__init__(env or connections.url, client)
