"""The environment service over HTTP: `python -m envs.service --env=bfcl --port=8080`.

Needs `pip install -r requirements/service.txt`. Routes, requests and answers are those of
AgentEvolver's service, so its clients work unchanged. Every POST takes `{"env_type", "task_id",
"instance_id", "messages", "params"}` and answers `{"success", "data"}`; `/create` returns one
system message that includes the tool docs and one user message, and `/step` returns one message.
With `params.raw`, which `envs.remote` sends, messages and tools are passed on as the environment
returned them. `/snapshot`, `/restore` and `/metrics` are additions.

The status is 400 for the client's errors (413 for a body that is too large, 408 for one that is
late), 500 for the environment's (`reason` is `env_error` or `env_timeout`) and 503 if the pool is
full; `detail` is the message. Idle instances are released. A `step` that gives its number in
`params.step` is executed once, however often it arrives.
"""

import asyncio
import bisect
import collections
import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

from envs import commands, http
from envs.packages import how_to_install
from envs.pool import Call, Pool, PoolFull
from envs.process import Deadlines
from envs.toolcalls import CLOSE, OPEN, call_text, tools_text
from envs.values import Json, json_value, without_repeats
from envs.world import Message, Task, WorldError, WorldTimeout, message

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the environment service needs {error.name}: {how_to_install('service')}", name=error.name
    ) from None

MAX_BODY = 4 << 20  # bytes
# Searched for a task id.
SPLITS = ("train", "dev", "val", "test", "all", "test_normal", "test_challenge")
BUCKETS = (  # seconds
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
# The status for an error of a request. The first kind that fits counts.
STATUSES = (
    (PermissionError, 401), (http.BodyTooLarge, 413), (http.BodyTooLate, 408), (ValueError, 400),
    (NotImplementedError, 400), (PoolFull, 503),
)  # fmt: skip
FIELDS = {"env_type": str, "task_id": str, "instance_id": str, "messages": dict, "params": dict}
KINDS = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
# seconds in which the head of a request has to arrive; envs/http.py has those for the body
HEAD_S = 20.0
log = logging.getLogger("envs.service")


class Service:
    """The routes over a pool. `app` is the ASGI application, which closes the pool at shutdown.

    local: answer only to names of this machine, for a service that nobody else can reach: a page
    elsewhere may make its own name resolve to it.
    """

    def __init__(self, pool: Pool, *, token: str = "", local: bool = False):
        self.pool, self._token, self._local = pool, token, local
        self._tasks: dict[str, dict[str, Json]] = {}  # by split and id
        # By route: the requests per bucket, then the sum of seconds.
        self._seconds: dict[str, list[float]] = {}
        self._statuses: collections.Counter[tuple[str, int]] = collections.Counter()
        handlers = (
            self.get_env_profile, self.create, self.step, self.evaluate, self.get_info,
            self.release, self.snapshot, self.restore,
        )  # fmt: skip
        routes = [Route(f"/{h.__name__}", self._endpoint(h), methods=["POST"]) for h in handlers]
        routes.append(Route("/healthz", _healthz))
        routes.append(Route("/metrics", self._metrics))
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    # One method per route. Each takes the request's body and returns the answer's `data`.

    async def get_env_profile(self, body: Json) -> Any:
        """Return the task ids of `params.split`, or with `params.raw` the tasks."""
        self._check_env(body)
        tasks = await self._split(_typed(body["params"], "split", str) or "train")
        return list(tasks.values() if body["params"].get("raw") else tasks)

    async def create(self, body: Json) -> Json:
        self._check_env(body)
        params = body["params"]
        if "task" in params:
            task = _task(params["task"])
        else:
            task = await self._task(body["task_id"], _typed(params, "split", str))
        if params.get("is_open_query"):
            task = {**task, "meta": {**task.get("meta", {}), "open_query": True}}
        seed = _typed(params, "seed", int) or 0
        id, first = await self._wait(self.pool.create(task, seed, body["instance_id"]))
        info = {"instance_id": id, "task_id": task.get("id", "")}
        if params.get("raw"):
            return {"state": first["messages"], "info": info | {"tools": first["tools"]}}
        return {"state": opening(first["messages"], first["tools"]), "info": info}

    async def step(self, body: Json) -> Json:
        params = body["params"]
        number = _typed(params, "step", int)
        result = await self._wait(
            self.pool.step(_instance(body), action_of(body["messages"]), number)
        )
        over = result["terminated"] or result["truncated"]
        data = {"reward": result["reward"], "is_terminated": over}
        if params.get("raw"):
            more = {key: result[key] for key in ("terminated", "truncated", "tools", "info")}
            return {"state": result["messages"], **data, **more}
        return {"state": [one_message(result)], **data, "info": result["info"]}

    async def evaluate(self, body: Json) -> Any:
        """Return the score; with `params.sparse` 1.0 for success and else 0.0; with `params.raw`
        the Evaluation."""
        evaluation = await self._wait(self.pool.ask(_instance(body), "evaluate"))
        if body["params"].get("raw"):
            return evaluation
        return float(evaluation["success"]) if body["params"].get("sparse") else evaluation["score"]

    async def get_info(self, body: Json) -> Any:
        """Describe an instance. With `params.methods` return the names of the environment's extra
        methods, with `params.profile` its profile, and with `params.query` the result of the method
        of that name: an extra one, `functions` or `call_text`."""
        params = body["params"]
        if params.get("methods"):
            return self.pool.methods
        if params.get("profile"):
            return await self._wait(self.pool.profile())
        if method := _typed(params, "query", str):
            args, kwargs = _typed(params, "args", list) or [], _typed(params, "kwargs", dict) or {}
            asked = self.pool.ask(_instance(body), "query", method, args, kwargs)
            return await self._wait(asked)
        return self.pool.info(_instance(body))

    async def snapshot(self, body: Json) -> Any:
        return await self._wait(self.pool.ask(_instance(body), "snapshot"))

    async def restore(self, body: Json) -> Json:
        restored = self.pool.restore(body["params"].get("snapshot"), body["instance_id"])
        id, _ = await self._wait(restored)
        return {"info": {"instance_id": id}}

    async def release(self, body: Json) -> bool:
        return self.pool.release(_instance(body))

    # Helpers of the routes.

    def _endpoint(
        self, handler: Callable[[Json], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        name = handler.__name__

        async def endpoint(request: Request) -> Response:
            started = time.perf_counter()
            try:
                self._authorise(request)
                data = await handler(await self._body(request))
                done = data if name == "release" else True
                status, answer = 200, {"success": done, "data": None if name == "release" else data}
            except Exception as error:
                status, answer = _failure(name, error)
                if status == 413:  # else the client's own sending fails before it reads the answer
                    await http.drain(request.stream())
            self._observe(name, status, time.perf_counter() - started)
            # The rest of the body may still come.
            headers = {"Connection": "close"} if status in (408, 413) else None
            return Response(json.dumps(answer), status, headers, "application/json")

        return endpoint

    def _authorise(self, request: Request) -> None:
        if self._local and not http.is_local(request.headers.get("host", "")):
            raise PermissionError(
                "without a bearer token this service answers to the names of this machine only; set"
                f" {http.TOKEN_VARIABLE} to use others"
            )
        if not http.authorized(request.headers.get("authorization", ""), self._token):
            raise PermissionError(
                f"wrong or missing bearer token; clients read it from {http.TOKEN_VARIABLE}"
            )

    async def _body(self, request: Request) -> Json:
        body = await http.read_json(request.stream(), MAX_BODY)
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        checked = {}
        for key, kind in FIELDS.items():
            value = _checked(body.get(key), key, kind)
            checked[key] = {} if value is None and kind is dict else value
        return checked

    async def _wait(self, call: Call) -> Any:
        """Return the result of a call, as `PoolWorld` does: the calls before it have deadlines of
        their own."""
        waiting, answered = asyncio.wrap_future(call.future), -1
        while not waiting.done() and call.slot.answered != answered:
            answered = call.slot.answered
            await asyncio.wait({waiting}, timeout=self.pool.patience)
        if not waiting.done():
            raise WorldTimeout(f"{self.pool.env} did not answer within {self.pool.patience:g} s")
        return waiting.result()

    def _check_env(self, body: Json) -> None:
        requested = body["env_type"]
        if requested and requested != self.pool.env and ":" not in self.pool.env:
            raise ValueError(f"this service runs '{self.pool.env}', not '{requested}'")

    async def _split(self, split: str) -> dict[str, Json]:
        """Return the tasks of a split by their ids. Raises WorldError if two share one."""
        if split not in self._tasks:
            tasks = await self._wait(self.pool.tasks(split))
            by_id = {task["id"]: task for task in tasks}
            if len(by_id) < len(tasks):
                raise WorldError(f"tasks of {self.pool.env} in the split {split} share an id")
            self._tasks[split] = by_id
        return self._tasks[split]

    async def _task(self, id: str | None, split: str | None) -> Json:
        if not id:
            raise ValueError("'task_id' is missing")
        for name in [split] if split else SPLITS:
            try:
                tasks = await self._split(name)
            except ValueError:
                if split:
                    raise
                continue
            if id in tasks:
                return tasks[id]
        raise ValueError(f"{self.pool.env} has no task '{id}'")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        yield
        sweeper.cancel()
        self.pool.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(300.0, self.pool.lease_s / 4))
            self.pool.release_idle()

    def _observe(self, route: str, status: int, seconds: float) -> None:
        counts = self._seconds.setdefault(route, [0.0] * (len(BUCKETS) + 2))
        counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        counts[-1] += seconds
        self._statuses[route, status] += 1

    async def _metrics(self, request: Request) -> Response:
        try:
            self._authorise(request)
        except PermissionError as error:
            return PlainTextResponse(str(error), 401)
        lines = [
            "# TYPE env_instances gauge",
            f"env_instances {self.pool.alive()}",
            "# TYPE env_events_total counter",
        ]
        lines += [
            f'env_events_total{{event="{name}"}} {n}'
            for name, n in sorted(self.pool.counts.items())
        ]
        lines.append("# TYPE env_requests_total counter")
        for (route, status), n in sorted(self._statuses.items()):
            lines.append(f'env_requests_total{{route="{route}",status="{status}"}} {n}')
        lines.append("# TYPE env_request_seconds histogram")
        for route, counts in sorted(self._seconds.items()):
            total = 0
            for edge, requests in zip([*BUCKETS, "+Inf"], counts):
                total += int(requests)
                lines.append(f'env_request_seconds_bucket{{route="{route}",le="{edge}"}} {total}')
            lines.append(f'env_request_seconds_count{{route="{route}"}} {total}')
            lines.append(f'env_request_seconds_sum{{route="{route}"}} {counts[-1]:.6f}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


Protocol: Any = AutoHTTPProtocol  # which of its two protocols, Uvicorn decides when it runs


class Impatient(Protocol):
    """Uvicorn's protocol, which on its own waits for the rest of a request's head for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        super().connection_lost(error)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a head has arrived
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def server_config(app: Starlette, **options: Any) -> uvicorn.Config:
    """Return the settings of the HTTP server of an application."""
    settings: Json = {
        "log_level": "warning", "access_log": False, "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": 5,
    }  # fmt: skip
    return uvicorn.Config(app, http=Impatient, **settings | options)


def _failure(route: str, error: Exception) -> tuple[int, Json]:
    """Return the status and the answer for a request that raised an error, and log what the client
    cannot mend."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    if status != 500:
        answer = {"detail": str(error)}
        if isinstance(error, NotImplementedError):
            answer["reason"] = "not_implemented"
        return status, answer
    if not isinstance(error, WorldError):
        log.exception("%s failed", route)
        return 500, {"detail": "the service failed; see its log", "reason": "env_error"}
    log.warning("%s: %s", route, error)
    reason = "env_timeout" if isinstance(error, WorldTimeout) else "env_error"
    return 500, {"detail": str(error).split("\n")[0], "reason": reason}


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("OK")


def _instance(body: Json) -> str:
    if not body["instance_id"]:
        raise ValueError("'instance_id' is missing")
    return body["instance_id"]


def _task(record: Any) -> Json:
    try:
        return Task.from_dict(record).to_dict()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'params.task' is not a task: {error}") from None


def _typed(params: Json, name: str, kind: type) -> Any:
    return _checked(params.get(name), f"params.{name}", kind)


def _checked(value: Any, name: str, kind: type) -> Any:
    """Return a field of a request, repaired (envs/values.py). Raises ValueError, with its name, for
    a wrong type."""
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"'{name}' must be {KINDS[kind]}, not {type(value).__name__}")
    return json_value(value, f"'{name}'")


# ------------------------------------------ messages in the form that AgentEvolver's clients expect


def opening(messages: list[Message], tools: list[Json]) -> list[Message]:
    """Merge an observation into one system message, which includes the tool docs, and one user
    message."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    user = [m["content"] for m in messages if m["role"] != "system"]
    if tools:
        system.append(tools_text(tools))
    return [message("system", "\n\n".join(system)), message("user", "\n\n".join(user))]


def one_message(result: Json) -> Message:
    """Merge a step's messages into one user message, with tool results in Qwen's tags and changed
    tools listed."""
    parts = [] if result["tools"] is None else [tools_text(result["tools"])]
    for said in result["messages"]:
        text = said["content"]
        is_result = said["role"] == "tool"
        parts.append(f"<tool_response>\n{text}\n</tool_response>" if is_result else text)
    return message("user", "\n".join(parts))


def action_of(turn: Message) -> str:
    """Return the text of an assistant message; structured `tool_calls` are rendered after its
    content.

    Arguments that are no JSON object are passed on as they are. They are the model's mistake, so
    the environment has to see it and answer it. Raises ValueError, with the name of the field, for
    a message of the wrong form.
    """
    content = _checked(turn.get("content"), "messages.content", str)
    parts = [content] if content else []
    calls = _checked(turn.get("tool_calls"), "messages.tool_calls", list) or []
    for number, call in enumerate(calls):
        where = f"messages.tool_calls[{number}]"
        kind = _checked(_checked(call, where, dict).get("type"), f"{where}.type", str)
        key = "function" if "function" in call else kind or "function"
        function = _checked(call.get(key), f"{where}.{key}", dict) or {}
        name = _checked(function.get("name"), f"{where}.{key}.name", str)
        if not name:
            raise ValueError(f"'{where}.{key}.name' is missing")
        parts.append(_call_text(name, function.get("arguments", {})))
    return "\n".join(parts)


def _call_text(name: str, arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json_value(json.loads(arguments, object_pairs_hook=without_repeats))
        except (ValueError, RecursionError):
            quoted, unread = json.dumps(name, ensure_ascii=False), arguments.replace(CLOSE, "")
            body = f'{{"name": {quoted}, "arguments": {unread}}}'
            return f"{OPEN}\n{body}\n{CLOSE}"
    return call_text(name, arguments)


# ------------------------------------------------------------------------------------- command line


def serve(
    *,
    env: str,
    kwargs: Json | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    backend: Literal["local", "ray"] = "local",
    address: str | None = None,
    workers: int = os.cpu_count() or 1,
    per_worker: int = 1000,
    python: str | None = None,
    memory_mb: int | None = None,
    lease_s: float = 3600.0,
    recycle: int = 0,
    start_s: float = Deadlines.start,
    reset_s: float = Deadlines.reset,
    step_s: float = Deadlines.step,
) -> int:
    """Serve until interrupted.

    env: a registered name or my_module:MyEnv
    kwargs: JSON arguments of the environment
    host: 0.0.0.0 to be reachable from other machines
    port: 0 takes a free port and prints it
    address: address of the Ray cluster; without it one is started on this machine
    workers: number of worker processes
    per_worker: maximum number of instances in one process
    python: interpreter of the workers
    memory_mb: address space of one worker
    lease_s: release instances that are idle for so long
    recycle: replace a worker after this many episodes; 0 = never
    start_s: deadline for setting up a worker
    reset_s: deadline for starting an episode
    step_s: deadline for any other call
    """
    token = os.environ.get(http.TOKEN_VARIABLE, "")
    common: Json = {"deadlines": Deadlines(start_s, reset_s, step_s), "lease_s": lease_s}
    try:
        listener = http.listen(host, port)
        if backend == "ray":
            from envs.ray_pool import RayPool

            pool: Pool = RayPool(env, kwargs, address=address, **common)
        else:
            pool = Pool(
                env, kwargs, workers=workers, per_worker=per_worker, python=python,
                memory_mb=memory_mb, recycle=recycle, **common,
            )  # fmt: skip
    except (OSError, ValueError, WorldError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if host not in http.LOOPBACK and not token:
        print(
            f"warning: anyone who can reach this port can use it; set {http.TOKEN_VARIABLE}",
            file=sys.stderr,
        )
    # With the default of 5 ms, threads that talk to workers wait long for the loop.
    sys.setswitchinterval(0.0005)
    print(f"{env}: Uvicorn running on http://{host}:{listener.getsockname()[1]}", flush=True)
    service = Service(pool, token=token, local=not token and host in http.LOOPBACK)
    uvicorn.Server(server_config(service.app)).run(sockets=[listener])
    return 0


main = functools.partial(commands.called, serve, joint="_")  # returns the exit code


if __name__ == "__main__":
    sys.exit(main())
