"""What the tests of the server ask, and the server in a thread."""

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


@contextlib.contextmanager
def serving(service):
    """Run the service in a thread, on a free port; yield its URL."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(service.app, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
