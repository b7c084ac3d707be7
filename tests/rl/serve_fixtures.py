"""A tiny policy, served over real HTTP: the fixtures of the tests of the server."""

import httpx
import openai
import pytest

from rl.engines.serve.server import Service, load
from tests.rl.served import RIGHT, serving
from tests.tiny import tiny_policy


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
