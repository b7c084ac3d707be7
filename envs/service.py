"""Environments over HTTP: `python -m envs.service --env=bfcl --port=8080`.

Needs `pip install -r requirements/service.txt`. Routes, requests and answers are those of the reference's
service, so its clients work unchanged: every POST takes `{"env_type", "task_id", "instance_id", "messages",
"params"}` and answers `{"success", "data"}`; `/create` gives exactly a system and a user message, with the tool
docs written into the first, and `/step` gives one message. With `params.raw` (what `envs.remote` sends)
messages and tools come as the environment gave them. `/snapshot`, `/restore` and `/metrics` are additions.

Errors are 400 for what the client got wrong, 500 for what the environment got wrong (`reason` is `env_error` or
`env_timeout`), 503 when every place is taken; `detail` says what happened. Idle instances are released. A `step`
with `params.step`, its number, is played once however often it arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from envs.pool import Pool, PoolFull
from envs.process import Deadlines
from envs.toolcalls import call_text, tools_text
from envs.world import Task, WorldError, WorldTimeout

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the environment service needs {error.name}: pip install -r requirements/service.txt", name=error.name
    ) from None

TOKEN_VARIABLE = "EVOLVER_ENV_TOKEN"
MAX_BODY = 4 << 20
SPLITS = ("train", "dev", "val", "test", "all", "test_normal", "test_challenge")  # where a task id is looked for
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
FIELDS = {"env_type": str, "task_id": str, "instance_id": str, "messages": dict, "params": dict}
log = logging.getLogger("envs.service")
Json = dict[str, Any]


class Service:
    """The routes over a pool. `app` is an ASGI application; it closes the pool when it shuts down."""

    def __init__(self, pool: Pool, *, token: str = "", max_body: int = MAX_BODY):
        self.pool, self._token, self._max_body = pool, token, max_body
        self._tasks: dict[str, list[Json]] = {}  # by split
        self._by_id: dict[str, Json] = {}
        self._seconds: dict[str, list[float]] = {}  # route -> counts per bucket, then the sum
        self._statuses: dict[tuple[str, int], int] = {}
        handlers = (self.get_env_profile, self.create, self.step, self.evaluate, self.get_info, self.release)
        handlers += (self.snapshot, self.restore)
        routes = [Route(f"/{h.__name__}", self._endpoint(h), methods=["POST"]) for h in handlers]
        routes.append(Route("/healthz", _healthz))
        routes.append(Route("/metrics", self._metrics))
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    # One method per route: the body in, `data` out.

    async def get_env_profile(self, body: Json) -> Any:
        """The task ids of `params.split`; with `params.raw` the tasks."""
        self._check_env(body)
        tasks = await self._split(body["params"].get("split", "train"))
        return tasks if body["params"].get("raw") else [task["id"] for task in tasks]

    async def create(self, body: Json) -> Json:
        self._check_env(body)
        params = body["params"]
        task = _task(params["task"]) if "task" in params else await self._task(body["task_id"], params.get("split"))
        if params.get("is_open_query"):
            task = {**task, "meta": {**task.get("meta", {}), "open_query": True}}
        id, observation = await self._wait(self.pool.create(task, _integer(params, "seed") or 0, body["instance_id"]))
        info = {"instance_id": id, "task_id": task.get("id", "")}
        if params.get("raw"):
            return {"state": observation["messages"], "info": {**info, "tools": observation["tools"]}}
        return {"state": opening(observation["messages"], observation["tools"]), "info": info}

    async def step(self, body: Json) -> Json:
        params = body["params"]
        number = _integer(params, "step")
        result = await self._wait(self.pool.step(_instance(body), action_of(body["messages"]), number))
        data = {"reward": result["reward"], "is_terminated": result["terminated"] or result["truncated"]}
        if params.get("raw"):
            more = {key: result[key] for key in ("terminated", "truncated", "tools", "info")}
            return {"state": result["messages"], **data, **more}
        return {"state": [one_message(result)], **data, "info": result["info"]}

    async def evaluate(self, body: Json) -> Any:
        """The score; with `params.sparse` 1.0 or 0.0 for success; with `params.raw` everything."""
        evaluation = await self._wait(self.pool.evaluate(_instance(body)))
        if body["params"].get("raw"):
            return evaluation
        return float(evaluation["success"]) if body["params"].get("sparse") else evaluation["score"]

    async def get_info(self, body: Json) -> Any:
        """What is known of an instance; with `params.profile`, `.methods` or `.query` the profile, the names of the
        methods that can be asked, or the answer of one."""
        params = body["params"]
        if params.get("methods"):
            return self.pool.methods
        if params.get("profile"):
            return await self._wait(self.pool.profile())
        if method := params.get("query"):
            call = self.pool.query(_instance(body), method, params.get("args", []), params.get("kwargs", {}))
            return await self._wait(call)
        return self.pool.info(_instance(body))

    async def snapshot(self, body: Json) -> Any:
        return await self._wait(self.pool.snapshot(_instance(body)))

    async def restore(self, body: Json) -> Json:
        id, _ = await self._wait(self.pool.restore(body["params"].get("snapshot"), body["instance_id"]))
        return {"info": {"instance_id": id}}

    async def release(self, body: Json) -> bool:
        return self.pool.release(_instance(body))

    # What the routes share.

    def _endpoint(self, handler: Callable[[Json], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        name = handler.__name__

        async def endpoint(request: Request) -> Response:
            started = time.perf_counter()
            try:
                self._authorise(request)
                data = await handler(await self._body(request))
                done = data if name == "release" else True
                status, answer = 200, {"success": done, "data": None if name == "release" else data}
            except PermissionError as error:
                status, answer = 401, {"detail": str(error)}
            except ValueError as error:
                status, answer = 400, {"detail": str(error)}
            except NotImplementedError as error:
                status, answer = 400, {"detail": str(error), "reason": "not_implemented"}
            except PoolFull as error:
                status, answer = 503, {"detail": str(error)}
            except WorldError as error:
                log.warning("%s: %s", name, error)
                reason = "env_timeout" if isinstance(error, WorldTimeout) else "env_error"
                status, answer = 500, {"detail": str(error).split("\n")[0], "reason": reason}
            except Exception:
                log.exception("%s failed", name)
                status, answer = 500, {"detail": "the service failed; its log says how", "reason": "env_error"}
            self._observe(name, status, time.perf_counter() - started)
            return Response(json.dumps(answer), status, media_type="application/json")

        return endpoint

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise PermissionError(f"wrong or missing bearer token; clients take it from {TOKEN_VARIABLE}")

    async def _body(self, request: Request) -> Json:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body:
                raise ValueError(f"a request may have {self._max_body} bytes")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError("the body is not JSON") from None
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        checked = {}
        for key, kind in FIELDS.items():
            value = body.get(key)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"'{key}' must be {'a string' if kind is str else 'an object'}")
            checked[key] = {} if value is None and kind is dict else value
        return checked

    async def _wait(self, future: Future) -> Any:
        waiting = asyncio.wrap_future(future)
        await asyncio.wait({waiting}, timeout=self.pool.patience)
        if not waiting.done():
            raise WorldTimeout(f"{self.pool.env} did not answer within {self.pool.patience:g} s")
        return waiting.result()

    def _check_env(self, body: Json) -> None:
        wanted = body["env_type"]
        if wanted and wanted != self.pool.env and ":" not in self.pool.env:
            raise ValueError(f"this service runs '{self.pool.env}', not '{wanted}'")

    async def _split(self, split: str) -> list[Json]:
        if split not in self._tasks:
            self._tasks[split] = await self._wait(self.pool.tasks(split))
            self._by_id |= {task["id"]: task for task in self._tasks[split]}
        return self._tasks[split]

    async def _task(self, id: str | None, split: str | None) -> Json:
        if not id:
            raise ValueError("'task_id' is missing")
        for name in [split] if split else SPLITS:
            if id in self._by_id:
                break
            with contextlib.suppress(ValueError if not split else ()):
                await self._split(name)
        if id not in self._by_id:
            raise ValueError(f"{self.pool.env} has no task '{id}'")
        return self._by_id[id]

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette):
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
        counts[next((i for i, edge in enumerate(BUCKETS) if seconds <= edge), len(BUCKETS))] += 1
        counts[-1] += seconds
        self._statuses[route, status] = self._statuses.get((route, status), 0) + 1

    async def _metrics(self, request: Request) -> Response:
        try:
            self._authorise(request)
        except PermissionError as error:
            return PlainTextResponse(str(error), 401)
        lines = ["# TYPE env_instances gauge", f"env_instances {self.pool.alive()}", "# TYPE env_events_total counter"]
        lines += [f'env_events_total{{event="{name}"}} {n}' for name, n in sorted(self.pool.counts.items())]
        lines.append("# TYPE env_requests_total counter")
        for (route, status), n in sorted(self._statuses.items()):
            lines.append(f'env_requests_total{{route="{route}",status="{status}"}} {n}')
        lines.append("# TYPE env_request_seconds histogram")
        for route, counts in sorted(self._seconds.items()):
            total = 0
            for edge, n in zip([*BUCKETS, "+Inf"], counts):
                total += int(n)
                lines.append(f'env_request_seconds_bucket{{route="{route}",le="{edge}"}} {total}')
            lines.append(f'env_request_seconds_count{{route="{route}"}} {total}')
            lines.append(f'env_request_seconds_sum{{route="{route}"}} {counts[-1]:.6f}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


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


def _integer(params: Json, name: str) -> int | None:
    value = params.get(name)
    if value is not None and type(value) is not int:
        raise ValueError(f"'params.{name}' must be an integer")
    return value


# ------------------------------------------------------- messages as the reference's clients expect them


def opening(messages: list[Json], tools: list[Json]) -> list[Json]:
    """Exactly a system and a user message, the tool docs in the first."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    user = [m["content"] for m in messages if m["role"] != "system"]
    text = "\n\n".join([*system, *([tools_text(tools)] if tools else [])])
    return [{"role": "system", "content": text}, {"role": "user", "content": "\n\n".join(user)}]


def one_message(result: Json) -> Json:
    """The messages of a step as one user message: tool results in Qwen's tags, tools that are new spelled out."""
    parts = [
        f"<tool_response>\n{m['content']}\n</tool_response>" if m["role"] == "tool" else m["content"]
        for m in result["messages"]
    ]
    if result["tools"] is not None:
        parts.insert(0, tools_text(result["tools"]))
    return {"role": "user", "content": "\n".join(parts)}


def action_of(message: Json) -> str:
    """The text of an assistant message; structured `tool_calls`, if any, are written after its content."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise ValueError("'messages.content' must be a string")
    parts = [content] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call.get(call.get("type", "")) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs 'function': {'name', 'arguments'}")
        arguments = function.get("arguments", {})
        parts.append(call_text(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------ command line


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    return listener


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m envs.service", description=__doc__.split("\n")[0])
    parser.add_argument("--env", required=True, help="a name of the registry, or my_module:MyEnv")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON arguments of the environment")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reachable from other machines")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one and prints it")
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--address", help="of the Ray cluster; without it one is started on this machine")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--per_worker", type=int, default=1000, help="instances in one process at most")
    parser.add_argument("--python", help="interpreter of the workers")
    parser.add_argument("--memory_mb", type=int, help="address space of one worker")
    parser.add_argument("--lease_s", type=float, default=3600.0, help="idle instances are released after this")
    parser.add_argument("--recycle", type=int, default=0, help="replace a worker after this many episodes")
    parser.add_argument("--start_s", type=float, default=Deadlines.start, help="deadline of setting a worker up")
    parser.add_argument("--reset_s", type=float, default=Deadlines.reset, help="deadline of starting an episode")
    parser.add_argument("--step_s", type=float, default=Deadlines.step, help="deadline of any other call")
    args = parser.parse_args(argv)
    deadlines = Deadlines(args.start_s, args.reset_s, args.step_s)
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        listener = listen(args.host, args.port)
        pool = make_pool(args, deadlines)
    except (OSError, ValueError, WorldError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.host not in ("127.0.0.1", "::1", "localhost") and not token:
        print(f"warning: anyone who reaches this port can use it; set {TOKEN_VARIABLE}", file=sys.stderr)
    config = uvicorn.Config(
        Service(pool, token=token).app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    sys.setswitchinterval(0.0005)  # threads that talk to workers wait for the loop; the default makes that 5 ms
    print(f"{args.env}: Uvicorn running on http://{args.host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def make_pool(args: argparse.Namespace, deadlines: Deadlines) -> Pool:
    """The pool that the command line asks for."""
    if args.backend == "ray":
        from envs.ray_pool import RayPool

        return RayPool(args.env, args.kwargs, address=args.address, deadlines=deadlines, lease_s=args.lease_s)
    return Pool(
        args.env,
        args.kwargs,
        workers=args.workers,
        per_worker=args.per_worker,
        python=args.python,
        memory_mb=args.memory_mb,
        deadlines=deadlines,
        lease_s=args.lease_s,
        recycle=args.recycle,
    )


if __name__ == "__main__":
    sys.exit(main())
