"""A tiny policy, served over real HTTP: the fixtures of the tests of the server."""

import contextlib
import threading

import httpx
import openai
import pytest
import uvicorn

from envs.http import listen
from envs.service import server_config
from rl.engines.serve.server import Service, load
from tests.tiny import tiny_policy

user = lambda content: {"messages": [{"role": "user", "content": content}]}
HELLO = user("Book a flight.")["messages"]
TOOL = {
    "type": "function",
    "function": {"name": "flights", "description": "", "parameters": {"type": "object"}},
}
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


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(engine, parameters, tokenizer) of a tiny policy."""
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    return load(folder, slots=8, context=256, dtype="float32")


@pytest.fixture(scope="module")
def url(parts):
    with serving(Service(*parts, name="policy", key="sk-right")) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="sk-right", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def post(url):
    """(path, body) -> answer. A body of bytes is sent as it is, others as JSON."""
    with httpx.Client(headers=RIGHT, timeout=120, base_url=url.removesuffix("/v1")) as client:
        yield lambda path, body: client.post(
            path, **{"content" if isinstance(body, bytes) else "json": body}
        )


@pytest.fixture(scope="module")
def get(url):
    return lambda path, headers=RIGHT: httpx.get(url.removesuffix("/v1") + path, headers=headers)


@pytest.fixture(scope="module")
def complete(post):
    """(fields) -> choices of a completion."""
    return lambda **body: post("/v1/completions", body).json()["choices"]
