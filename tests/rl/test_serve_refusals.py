"""What the server refuses over real HTTP, with the reason: requests that it could not answer as they
are meant."""

import threading

import httpx
import openai
import pytest

from models.tokenizer import Tokenizer
from rl.engines.serve.requests import NEUTRAL
from rl.engines.serve.server import Service
from tests.models.helpers import user
from tests.rl.served import HELLO, RIGHT, form_of, serving

pytest_plugins = "tests.rl.serve_fixtures"
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def refuses(answer, words, status=400):
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def changed(path, sound, *cases):
    """Return (path, body, words of the refusal) of a sound body with each of some changes."""
    return [(path, sound | change, words) for change, words in cases]


def asking(content):
    return {"messages": [user(content)]}


def calling(arguments):
    call = {"function": {"name": "flights", "arguments": arguments}}
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}


BODIES = [
    (b"{", "the body is not JSON"),
    (b"", "the body is not JSON"),
    (b"[" * 10**5, "nested deeper than 100 levels"),
    (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100 levels"),
    (b'{"prompt": [5], "\\ud800": 1}', "not valid Unicode"),
    (b'{"prompt": [5], "model": "\\udc00"}', "not valid Unicode"),
    (b'{"prompt": "a\\ud83d"}', "not valid Unicode"),
    (b'{"prompt": "\xed\xa0\x80"}', "not valid Unicode"),
    (b'{"prompt": "\xff"}', "not valid Unicode"),
    (b'{"prompt": [5], "temperature": NaN}', "the body.temperature is nan"),
    (b'{"prompt": [5], "temperature": 1e999}', "the body.temperature is inf"),
    (b'{"prompt": [5], "seed": ' + b"9" * 400 + b"}", "more than 300 digits"),
    (b'{"prompt": [5], "seed": ' + b"9" * 5000 + b"}", "more than 300 digits"),
    (b'{"prompt": [5], "n": 1, "n": 2}', 'the key "n" twice'),
    (b'{"prompt": [5], "%s": 1}' % (b"x" * 10**6), "is unknown to this server"),
    (b'{"prompt": [5], "stop": [%s5]}' % (b"5," * 10**5), "stop must be a text"),
    (b'{"prompt": [%s5]}' % (b'"a",' * 5000), "a list of such lists, at most 128"),
]
REFUSED = [
    *changed(
        COMPLETION,
        {"prompt": [5]},
        ({"prompt": []}, "prompt must be a text"),
        ({"prompt": None}, "prompt must be a text"),
        ({"prompt": [1.5]}, "prompt must be a text"),
        ({"prompt": ["a", [5]]}, "prompt must be a text"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [10_000]}, "vocabulary"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"max_tokens": 256}, "maximum context length is 256"),
        ({"max_tokens": 0}, "leaves nothing to answer"),
        ({"max_tokens": "9"}, 'max_tokens: Input should be a valid integer (given: "9")'),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": True}, "n: Input should be a valid integer"),
        ({"prompt": ["a", "b"], "n": 65}, "2 prompts with n=65 are more than 128 choices"),
        ({"stop": [""]}, "stop must be"),
        ({"logprobs": 21}, "logprobs must be a number between 0 and 20"),
        ({"logprobs": {"k": 1}}, "logprobs must be a number between 0 and 20"),
        ({"logprobs": 5, "stream": True}, "logprobs) are not supported while streaming"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt are not supported while streaming"),
        ({"prompt_logprobs": 1}, "only log-probabilities of the prompt tokens are available"),
        ({"max_tokenz": 5}, "max_tokenz is unknown to this server (did you mean max_tokens?)"),
        ({"messages": HELLO}, "messages is unknown"),
        ({"stream_options": {"usage": True}}, "usage is unknown"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(50))}, "stop tokens"),
        ({"stop_token_ids": [10**12]}, "a stop token is outside of the vocabulary"),
        ({"stop_token_ids": [10**12], "stream": True}, "a stop token is outside of the vocab"),
        ({"temperature": 1e-30}, "temperature is 1e-30"),
        ({"stream": "yes"}, "stream: Input should be a valid boolean"),
        ({"response_format": {"type": "xml"}}, "'text', 'json_object' or 'json_schema'"),
    ),
    *changed(
        CHAT,
        {"messages": HELLO, "max_tokens": 2},
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": ["hi"]}, "messages.0: Input should be a valid dictionary"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
        (asking([{"type": "image_url"}]), "parts of type text"),
        (asking([{"type": "image_url", "text": "x"}]), "parts of type text"),
        (asking(0), "messages.0.content: Input should be"),
        (asking({}), "messages.0.content: Input should be"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function: Field required",
        ),
        ({"tools": [{}]}, "tools.0: a tool must be"),
        ({"tool_choice": "required"}, "cannot force a tool call"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs=true"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs: Input should be less than or equal to 20",
        ),
        ({"logprobs": 3}, "logprobs: Input should be a valid boolean"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "has no thinking switch"),
        ({"echo": True}, "echo is not supported"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "json_schema.schema: Field required",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema is unknown"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "not supported together with",
        ),
        ({"prompt": "x"}, "prompt is unknown"),
        (calling("[" * 10**5), "nested deeper than 100 levels"),
        (calling("{"), "is not JSON"),
        (calling('{"a": NaN}'), "is nan"),
        (calling("[]"), "valid dictionary"),
    ),
    (COMPLETION, [], "not a JSON object"),
    ("/tokenize", {"prompt": ["a", "b"]}, "2 prompts; one at a time"),
    ("/tokenize", {"prompt": "a", "add": 1}, "add is unknown to this server"),
    ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens is unknown to this server"),
    ("/detokenize", {"tokens": [5], "skip": 1}, "skip is unknown to this server"),
    ("/detokenize", {"tokens": [10_000]}, "token ids below"),
    *((COMPLETION, body, words) for body, words in BODIES),
]


@pytest.mark.parametrize("path, body, words", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_would_be_answered_wrongly_is_refused_with_the_reason(
    post, path, body, words
):
    refuses(post(path, body), words)


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"type": "robot"}, "cannot be followed"),
        ({"$ref": "#/nowhere"}, "cannot be followed"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "cannot be followed"),
        ({"not": {}}, "cannot be followed"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be followed"),
        ({"type": "string", "pattern": "("}, "cannot be followed"),
        ({"const": "x" * 10**6}, "1,000,013 characters; at most 32,768"),
        ({"enum": [f"v{i}" for i in range(10**4)]}, "characters; at most 32,768"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(post, schema, words):
    body = {"messages": HELLO, "max_tokens": 2, "response_format": form_of(schema)}
    for stream in (False, True):
        answer = post(CHAT, body | {"stream": stream})
        refuses(answer, "response_format: ")
        refuses(answer, words)


@pytest.mark.parametrize("key", ["", "Bearer sk-wrong", "sk-right"])
def test_a_wrong_key(url, key):
    headers = {"Authorization": key} if key else {}
    answer = httpx.post(f"{url}/completions", json={"prompt": [5]}, headers=headers)
    refuses(answer, "key", 401)


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_that_would_change_the_sample_is_refused(post, name):
    for path, body in (COMPLETION, {"prompt": [5]}), (CHAT, {"messages": HELLO}):
        refuses(post(path, body | {name: {"5": 1}}), f"{name}.5 is not supported")


def test_neutral_values_of_unsupported_options_are_accepted(complete):
    neutral = NEUTRAL | {"user": "me", "metadata": {"a": "b"}, "unheard_of": None}
    assert complete(prompt=[5], max_tokens=2, **neutral)


def test_a_wrong_model_name(client):
    with pytest.raises(openai.NotFoundError, match="this server has `policy`"):
        client.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize("body", [b" " * (33 << 20), b"[%s0]" % (b"0," * 2**19)])
def test_a_body_that_is_too_large_is_not_read(post, body):
    answer = post(COMPLETION, body)
    refuses(answer, "the body", 413)


def test_no_event_loop_encodes_and_nothing_that_cannot_fit_is_encoded(post, monkeypatch):
    encode, seen = Tokenizer._encode, []

    def noted(self, text):
        seen.append((threading.current_thread().name.partition("_")[0], len(text)))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    long = "Book a flight to Rome, please. " * 10**5
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    call = {"function": {"name": "flights", "arguments": {"to": long}}}
    for path, body in [
        (COMPLETION, {"prompt": [long, "a"]}),
        ("/tokenize", {"prompt": long}),
        (CHAT, asking(long)),
        (CHAT, asking("é" + long)),
        (CHAT, {"messages": HELLO, "tools": [tool]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        (CHAT, {"messages": [user("")] * 300}),
    ]:
        refuses(post(path, body), "maximum context length is 256 tokens")
    assert post("/tokenize", {"messages": [user("not asked before")]}).status_code == 200
    assert {name for name, _ in seen} == {"serve"}
    assert max(length for _, length in seen) < 1000


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example"]
)
def test_without_a_key_other_host_names_are_refused(parts, host):
    with serving(Service(*parts, name="policy")) as address:
        for path in ("/health", "/v1/models", "/v1/completions"):
            url = address.removesuffix("/v1") + path
            answer = httpx.get(url, headers={"Host": host})
            assert answer.status_code in (403, 405) and "error" in answer.json()
        local = address.replace("127.0.0.1", "localhost")
        assert httpx.get(f"{local}/models").status_code == 200


def test_with_a_key_any_host_name_is_answered(get):
    assert get("/v1/models", headers=RIGHT | {"Host": "policy.example"}).status_code == 200


@pytest.mark.parametrize(
    "method, path, status", [("GET", "/nowhere", 404), ("PUT", "/tokenize", 405)]
)
def test_an_unknown_route_is_an_error_of_the_api(url, method, path, status):
    answer = httpx.request(method, url.removesuffix("/v1") + path, headers=RIGHT)
    refuses(answer, path, status)
