"""An HTTP service with an OpenAPI description as a server of tools (MCP), for envs/mcp.py.

    python -m envs.openapi "uvicorn my_api:app --port {port}"
    python -m envs.openapi "node server.js {port}" --spec spec.json

Needs `pip install -r requirements/openapi.txt`. Each operation is a tool. Each world starts a
service of its own, because episodes that are played at once would share the state of one that runs
already. It is brought back to its initial state for each episode: by an operation `reset` without
parameters, or else by starting it again (RESTART), which takes longer, for a service in Python a
tenth of a second (envs/forked.py).
"""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urljoin

from envs import commands, forked, packages
from envs.mcp import RESTART
from envs.process import end, end_with_parent
from envs.values import Json

METHODS = ("get", "put", "post", "delete", "patch")
READY_S = 30.0  # until a service that was started must answer
PORT = "{port}"


class Unusable(Exception):
    """A description or a service that cannot be a world; the message is for the user."""


def names_of(spec: Json) -> dict[str, str]:
    """Return {operationId: name of its tool}.

    FastAPI appends path and method to the name of a function, as in close_tickets__id__post; that
    says nothing that a policy could use, so it is left out where the names stay different.
    """
    names = {}
    for path, operations in spec.get("paths", {}).items():
        for method in METHODS:
            if id := operations.get(method, {}).get("operationId", ""):
                suffix = re.sub(r"\W", "_", path) + f"_{method}"
                names[id] = id.removesuffix(suffix) or id
    taken = list(names.values())
    return {id: name if taken.count(name) == 1 else id for id, name in names.items()}


def read_spec(where: str) -> Json:
    """Return the description in a file or at an address. Raises Unusable."""
    httpx = packages.load("httpx2", "openapi")
    try:
        if re.match("https?://", where):
            text = httpx.get(where, timeout=READY_S).raise_for_status().text
        else:
            text = Path(where).read_text("utf-8")
        spec = json.loads(text)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise Unusable(f"{where} is no OpenAPI description in JSON: {error}") from None
    if not isinstance(spec, dict) or not names_of(spec):
        raise Unusable(f"{where} describes no operation with an operationId")
    return spec


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


@contextlib.contextmanager
def serving(command: str) -> Iterator[str]:
    """Start a service and return its address; end it afterwards. Raises Unusable."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace(PORT, str(port)) for word in shlex.split(command)]
    words = forked.copying(words, dict(os.environ), here=False)
    try:
        # MCP speaks over standard output, which the service must not share.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )  # fmt: skip
    except OSError as error:
        raise Unusable(f"{command!r} cannot be started: {error}") from None
    try:
        until = time.monotonic() + READY_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                code = process.poll()
                raise Unusable(
                    f"{command!r} does not listen on port {port} (its exit code: {code})"
                )
            time.sleep(0.005)  # each episode may wait for this
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process, 5)


def serve(spec: Json, url: str, start: Callable[[], str]) -> None:
    """Offer the operations of a service at an address as tools, on standard input and output.
    start: starts the service again and returns its address."""
    fastmcp, httpx = packages.load("fastmcp", "openapi"), packages.load("httpx2", "openapi")
    name = str(spec.get("info", {}).get("title") or "service")
    client = httpx.AsyncClient(base_url=url)
    server = fastmcp.FastMCP.from_openapi(
        spec, client, name=name, mcp_names=names_of(spec), validate_output=False
    )

    async def restart() -> str:  # in this thread, with whose end the service would end
        client.base_url = start()
        return "started"

    server.tool(restart, name=RESTART)
    server.run(transport="stdio", show_banner=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until standard input closes. Return 2, with a message, for what cannot be served."""
    try:
        commands.called(tools, argv)
    except (Unusable, ModuleNotFoundError) as error:
        print(f"envs.openapi: {error}", file=sys.stderr)
        return 2
    return 0


def tools(command: str, *, spec: str = "/openapi.json") -> None:
    """Start a service and serve its tools. Raises Unusable and ModuleNotFoundError.

    command: starts the service, with {port} for its port
    spec: its description: one of its paths, or a file
    """
    if PORT not in command:
        raise Unusable(
            f"{command!r} is no command with {PORT} in it. Each world starts a service of"
            f' its own, because episodes would share the state of one: "uvicorn my_api:app'
            f' --port {PORT}", with --spec FILE if it does not serve its own description'
        )
    with contextlib.ExitStack() as running:

        def start() -> str:
            running.close()
            return running.enter_context(serving(command))

        url, own = start(), not Path(spec).is_file()
        serve(read_spec(urljoin(url, spec) if own else spec), url, start)


if __name__ == "__main__":
    # The service ends with this process, however its client ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
