"""What the tests of the server ask, and servers in threads."""

import contextlib
import threading

import uvicorn

from envs.http import listen
from envs.service import server_config
from envs.world import tool_of
from tests.models.helpers import user

HELLO = [user("Book a flight.")]
TOOL = tool_of("flights", "", {}, [])
form_of = lambda schema: {
    "type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True},
}  # fmt: skip
RIGHT = {"Authorization": "Bearer sk-right"}


def started(app, **options):
    """Serve an application in a thread, on a free port; return the URL, the server, the thread."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread


@contextlib.contextmanager
def serving(service):
    """Serve while the block runs; yield the URL."""
    url, server, thread = started(service.app, timeout_graceful_shutdown=2)
    try:
        yield f"{url}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
