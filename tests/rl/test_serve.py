"""The server over real HTTP: clients get the engine's samples in OpenAI's format with vLLM's
fields."""

import asyncio
import concurrent.futures
import json
from collections import Counter

import httpx
import numpy as np
import openai
import pytest

from evolver.llm.schemas import array, record, string
from models import chat
from models.tokenizer import Tokenizer
from rl.engines.jax.engine import JaxEngine
from rl.engines.serve.openai_api import NEUTRAL, Answers, Request
from rl.engines.serve.server import Service, load, main, metrics_text, serving, warm_up
from rl.trajectory import Completion, Sampling
from tests.tiny import tiny_policy

HELLO = [{"role": "user", "content": "Book a flight."}]
TOOL = {
    "type": "function",
    "function": {"name": "flights", "description": "", "parameters": {"type": "object"}},
}
GRADES = {
    "type": "object", "additionalProperties": False, "required": ["step", "label"],
    "properties": {"step": {"type": "integer", "minimum": 0, "maximum": 99}, "label": {"enum": ["GOOD", "BAD"]}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "flights", "arguments": {"to": "Rome"}}\n</tool_call>'


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
    with httpx.Client(headers={"Authorization": "Bearer sk-right"}, timeout=120) as http:
        yield lambda path, body: http.post(url.removesuffix("/v1") + path, json=body)


@pytest.fixture(scope="module")
def direct(parts):
    """(prompt, sampling) -> Completion of the same engine settings, without a server."""
    engine = JaxEngine(parts[0].shape, parts[1], slots=8, context=256)
    return lambda prompt, sampling: asyncio.run(engine.generate(prompt, sampling, session="s"))


def ends(tokenizer: Tokenizer) -> tuple[int, int]:
    return tokenizer.im_end, tokenizer.endoftext


class TestCompletions:
    def test_token_ids_in_and_out_are_the_engines(self, post, direct, parts):
        prompt, tokenizer = [5, 9, 300, 17], parts[2]
        sampling = Sampling(12, temperature=0.7, seed=2**40 + 3, stop_tokens=(7,))
        body = {"model": "policy", "prompt": prompt, "max_tokens": 12, "temperature": 0.7, "seed": 2**40 + 3,
                "stop_token_ids": [7], "ignore_eos": True, "logprobs": 0, "return_token_ids": True}  # fmt: skip
        answer = post("/v1/completions", body).json()
        expected = direct(prompt, sampling)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected.tokens and choice["prompt_token_ids"] == prompt
        np.testing.assert_allclose(
            choice["logprobs"]["token_logprobs"], expected.logprobs, atol=1e-5
        )
        assert choice["finish_reason"] == expected.stop and choice["weights_version"] == 0
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": len(expected.tokens),
                                   "total_tokens": 4 + len(expected.tokens)}  # fmt: skip
        assert len(choice["logprobs"]["tokens"]) == len(expected.tokens)
        assert "".join(choice["logprobs"]["tokens"]) and tokenizer.decode(expected.tokens)

    def test_greedy_text(self, client, direct, parts):
        tokenizer = parts[2]
        answer = client.completions.create(
            model="policy", prompt="Book a", max_tokens=8, temperature=0
        )
        expected = direct(
            tokenizer.encode("Book a"), Sampling(8, temperature=0.0, stop_tokens=ends(tokenizer))
        )
        assert answer.choices[0].text == tokenizer.decode(
            [t for t in expected.tokens if t not in ends(tokenizer)]
        )

    def test_several_prompts_and_samples(self, post):
        body = {
            "prompt": [[5, 6], [7, 8]],
            "n": 3,
            "max_tokens": 5,
            "seed": 1,
            "return_token_ids": True,
        }
        choices = post("/v1/completions", body).json()["choices"]
        assert [c["index"] for c in choices] == list(range(6))
        assert [c["prompt_token_ids"] for c in choices] == [[5, 6]] * 3 + [[7, 8]] * 3
        assert len({tuple(c["token_ids"]) for c in choices}) > 3
        again = post("/v1/completions", body).json()["choices"]
        assert [c["token_ids"] for c in again] == [c["token_ids"] for c in choices]
        alone = post("/v1/completions", {**body, "prompt": [5, 6], "n": 1}).json()["choices"]
        assert alone[0]["token_ids"] == choices[0]["token_ids"]

    def test_equal_prompts_get_samples_of_their_own(self, post):
        body = {
            "prompt": [[5, 9]] * 3,
            "max_tokens": 12,
            "seed": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = post("/v1/completions", body).json()["choices"]
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 3

    def test_without_a_seed_samples_differ(self, post):
        body = {"prompt": [5, 6], "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}
        assert (
            len(
                {
                    tuple(post("/v1/completions", body).json()["choices"][0]["token_ids"])
                    for _ in range(3)
                }
            )
            > 1
        )

    def test_a_prompt_is_scored_as_its_tokens_were_sampled(self, post):
        asked = {
            "prompt": [5, 9, 300],
            "max_tokens": 10,
            "seed": 4,
            "logprobs": 0,
            "return_token_ids": True,
        }
        (choice,) = post("/v1/completions", {**asked, "ignore_eos": True}).json()["choices"]
        whole = [5, 9, 300, *choice["token_ids"]]
        body = {"prompt": whole, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        rows = post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
        scores = [row[str(token)]["logprob"] for token, row in zip(whole[1:], rows[1:])]
        np.testing.assert_allclose(scores[2:], choice["logprobs"]["token_logprobs"], atol=1e-4)
        echo = post(
            "/v1/completions", {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 0}
        ).json()
        np.testing.assert_allclose(
            echo["choices"][0]["logprobs"]["token_logprobs"][1:], scores, atol=1e-6
        )

    def test_the_most_probable_tokens_of_each_place(self, post):
        asked = {
            "prompt": [5, 9, 300],
            "max_tokens": 6,
            "seed": 4,
            "temperature": 0.7,
            "ignore_eos": True,
        }
        (choice,) = post(
            "/v1/completions", {**asked, "logprobs": 3, "return_tokens_as_token_ids": True}
        ).json()["choices"]
        found = choice["logprobs"]
        assert len(found["top_logprobs"]) == 6
        for name, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"]
        ):
            assert len(top) == 3 + (list(top).index(name) > 2) and top[name] == logprob
            best = list(top.values())[:3]
            assert best == sorted(best, reverse=True) and logprob <= best[0] + 1e-4
        (greedy,) = post("/v1/completions", {**asked, "temperature": 0, "logprobs": 20}).json()[
            "choices"
        ]
        for logprob, top in zip(
            greedy["logprobs"]["token_logprobs"], greedy["logprobs"]["top_logprobs"]
        ):
            assert max(top.values()) == pytest.approx(logprob, abs=1e-4)

    def test_a_stop_text_ends_a_generation_and_is_cut_off(self, post, parts):
        body = {
            "prompt": [5, 9],
            "max_tokens": 40,
            "seed": 3,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (whole,) = post("/v1/completions", body).json()["choices"]
        for mark in (
            whole["text"][6:9],
            whole["text"][6:24],
        ):  # the longer one is of several tokens
            (cut,) = post("/v1/completions", {**body, "stop": [mark]}).json()["choices"]
            assert (
                cut["text"] == whole["text"][: whole["text"].index(mark)]
                and cut["finish_reason"] == "stop"
            )
            assert whole["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]
            assert mark in parts[2].decode(cut["token_ids"]) and mark not in parts[2].decode(
                cut["token_ids"][:-1]
            )

    def test_streamed_pieces_concatenate_to_the_whole(self, client):
        asked = {"model": "policy", "prompt": "Book", "max_tokens": 70, "seed": 8, "logprobs": 0}
        extra = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
        whole = client.completions.create(**asked, **extra)
        events = list(
            client.completions.create(
                **asked, **extra, stream=True, stream_options={"include_usage": True}
            )
        )
        pieces = [e.choices[0] for e in events if e.choices]
        assert len(pieces) > 2
        assert "".join(p.text for p in pieces) == whole.choices[0].text
        assert [t for p in pieces for t in getattr(p, "token_ids", [])] == whole.choices[
            0
        ].token_ids
        assert pieces[-1].finish_reason == "length" and events[-1].usage == whole.usage


class TestChat:
    def test_messages_go_through_the_template(self, client, direct, parts):
        tokenizer = parts[2]
        prompt = chat.opening(tokenizer, HELLO)
        answer = client.chat.completions.create(
            model="policy",
            messages=HELLO,
            max_tokens=9,
            seed=5,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        expected = direct(prompt, Sampling(9, seed=5, stop_tokens=ends(tokenizer)))
        assert answer.prompt_token_ids == prompt and answer.choices[0].token_ids == expected.tokens
        assert answer.choices[0].message.role == "assistant"
        logprobs = [row.logprob for row in answer.choices[0].logprobs.content]
        np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-5)

    def test_the_most_probable_tokens(self, client):
        asked = {
            "model": "policy",
            "messages": HELLO,
            "max_tokens": 4,
            "seed": 5,
            "logprobs": True,
            "top_logprobs": 2,
        }
        rows = client.chat.completions.create(**asked).choices[0].logprobs.content
        assert rows and all(len(row.top_logprobs) == 2 for row in rows)
        assert all(row.logprob <= row.top_logprobs[0].logprob + 1e-4 for row in rows)

    def test_a_conversation_with_tools_is_rendered_like_the_training_prompts(self, post, parts):
        tokenizer = parts[2]
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "flights", "arguments": '{"to": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "none"},
        ]  # fmt: skip
        ids = post("/tokenize", {"messages": messages, "tools": [TOOL]}).json()["tokens"]
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "flights", "arguments": {"to": "Rome"}}],
        }
        ours = [
            {"role": "system", "content": "Be brief."},
            *HELLO,
            turn,
            {"role": "tool", "content": "none"},
        ]
        assert ids == chat.opening(tokenizer, ours, [TOOL])
        assert CALL in post("/detokenize", {"tokens": ids}).json()["prompt"]

    def test_streamed(self, client):
        asked = {"model": "policy", "messages": HELLO, "max_tokens": 70, "seed": 8}
        whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        pieces = list(
            client.chat.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
        )
        assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 2
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == whole.choices[0].message.content

    @pytest.mark.parametrize("stream", [False, True])
    def test_tool_calls_are_extracted_from_the_text(self, parts, stream):
        """A scripted engine, because random weights never call a tool."""
        tokenizer = parts[2]

        class Scripted(JaxEngine):
            async def generate(self, prompt_ids, sampling, *, session, stream=None):
                ids = [*tokenizer.encode("I look. " + CALL), tokenizer.im_end]
                for token in ids:
                    stream([token], [-0.5])
                from rl.trajectory import Completion

                return Completion(ids, [-0.5] * len(ids), "stop", 0)

        engine = Scripted(parts[0].shape, parts[1], slots=4, context=1024)
        with serving(Service(engine, parts[1], tokenizer, name="policy")) as address:
            with openai.OpenAI(base_url=address, api_key="none") as client:
                asked = {"model": "policy", "messages": HELLO, "tools": [TOOL], "max_tokens": 100}
                answer = client.chat.completions.create(**asked, stream=stream)
                if stream:
                    deltas = [event.choices[0] for event in answer]
                    content = "".join(d.delta.content or "" for d in deltas)
                    calls, finish = deltas[-1].delta.tool_calls, deltas[-1].finish_reason
                else:
                    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
                    content, calls = message.content, message.tool_calls
                assert finish == "tool_calls" and content.strip() == "I look."
                assert calls[0].function.name == "flights"
                assert json.loads(calls[0].function.arguments) == {"to": "Rome"}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_random_weights_answer_in_the_form_that_is_asked_for(self, client, temperature):
        """Beside others that may say anything, and that say what they say alone."""
        pytest.importorskip("llguidance", reason="pip install -r requirements/service.txt")
        asked = {"model": "policy", "messages": HELLO, "max_tokens": 60, "temperature": temperature}
        form = {
            "type": "json_schema",
            "json_schema": {"name": "grades", "schema": GRADES, "strict": True},
        }
        ask = lambda seed: client.chat.completions.create(**asked, seed=seed, response_format=form)
        free = lambda seed: (
            client.chat.completions.create(**asked, seed=seed).choices[0].message.content
        )
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            formed, others = threads.map(ask, range(4)), threads.map(free, range(2))
            formed, others = list(formed), list(others)
        assert others == [free(seed) for seed in range(2)]
        for answer in formed:
            assert answer.choices[0].finish_reason == "stop"
            record = json.loads(answer.choices[0].message.content)
            assert (
                record["label"] in ("GOOD", "BAD")
                and type(record["step"]) is int
                and 0 <= record["step"] <= 99
            )
        pieces = client.chat.completions.create(**asked, seed=0, response_format=form, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == formed[0].choices[0].message.content

    def test_an_answer_of_bounded_texts_and_lists_ends(self, client):
        """A policy of random weights would never close a string by itself."""
        schema = record(chosen=array(record(why=string(12), content=string(0)), 2))
        form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
        for seed in range(3):
            answer = client.chat.completions.create(
                model="policy", messages=HELLO, max_tokens=150, seed=seed, response_format=form
            )
            assert answer.choices[0].finish_reason == "stop"
            entries = json.loads(answer.choices[0].message.content)["chosen"]
            assert len(entries) <= 2 and all(
                len(e["why"]) <= 12 and e["content"] == "" for e in entries
            )

    @pytest.mark.parametrize(
        "schema,words",
        [({"type": "robot"}, "response_format:"), ({"$ref": "#/nowhere"}, "response_format:")],
    )
    def test_a_schema_that_cannot_be_followed_is_refused(self, post, schema, words):
        pytest.importorskip("llguidance", reason="pip install -r requirements/service.txt")
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = post(
            "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "response_format": form}
        )
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]

    def test_many_at_once(self, client):
        ask = lambda seed: client.chat.completions.create(
            model="policy",
            messages=HELLO,
            max_tokens=6,
            seed=seed,
            extra_body={"return_token_ids": True},
        )
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            together = [answer.choices[0].token_ids for answer in threads.map(ask, range(12))]
        assert together == [ask(seed).choices[0].token_ids for seed in range(12)]


class TestServer:
    def test_models_and_health(self, client, url):
        (model,) = client.models.list().data
        assert model.id == "policy" and model.max_model_len == 256
        root = url.removesuffix("/v1")
        right = {"Authorization": "Bearer sk-right"}
        assert httpx.get(f"{root}/health").status_code == 200
        assert "/v1/completions" in httpx.get(f"{root}/openapi.json", headers=right).json()["paths"]

    @pytest.mark.parametrize("key", ["", "Bearer sk-wrong", "sk-right"])
    def test_a_wrong_key(self, url, key):
        answer = httpx.post(
            f"{url}/completions",
            json={"prompt": [5]},
            headers={"Authorization": key} if key else {},
        )
        assert answer.status_code == 401 and "key" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "body,words",
        [
            ({"prompt": []}, "prompt must be a text"),
            ({"prompt": [1.5]}, "prompt must be a text"),
            ({"prompt": [[]]}, "the prompt is empty"),
            ({"prompt": [10_000]}, "vocabulary"),
            ({"prompt": [-1]}, "vocabulary"),
            ({"prompt": [5], "max_tokens": 256}, "maximum context length is 256"),
            ({"prompt": [5], "max_tokens": 0}, "leaves nothing to answer"),
            ({"prompt": [5], "max_tokens": "9"}, "max_tokens must be a number"),
            ({"prompt": [5], "temperature": -1}, "temperature"),
            ({"prompt": [5], "top_p": 2}, "top_p"),
            ({"prompt": [5], "n": 0}, "n must be"),
            ({"prompt": [5], "stop": [""]}, "stop must be"),
            ({"prompt": [5], "logprobs": 21}, "logprobs must be a number between 0 and 20"),
            ({"prompt": [5], "logprobs": {"k": 1}}, "logprobs must be a number between 0 and 20"),
            (
                {"prompt": [5], "logprobs": 5, "stream": True},
                "logprobs is not supported while streaming",
            ),
            (
                {"prompt": [5], "max_tokenz": 5},
                "max_tokenz is unknown to this server (did you mean max_tokens?)",
            ),
            ({"prompt": [5], "messages": HELLO}, "messages is unknown"),
            (
                {"prompt": [5], "truncate_prompt_tokens": 3},
                "truncate_prompt_tokens is not supported",
            ),
            (
                {"prompt": [5], "include_stop_str_in_output": True},
                "include_stop_str_in_output is not supported",
            ),
            ({"prompt": [5], "logits_processors": ["a"]}, "logits_processors is not supported"),
            (
                {"prompt": [5], "stream": True, "stream_options": {"usage": True}},
                "stream_options.usage is unknown",
            ),
            ({"prompt": [5], "stop_token_ids": ["a"]}, "stop_token_ids"),
            ({"prompt": [5], "stop_token_ids": list(range(50))}, "stop tokens"),
            (
                {"prompt": [5], "stop_token_ids": [10**12]},
                "a stop token is outside of the vocabulary",
            ),
            ({"prompt": [5], "temperature": 1e-30}, "temperature is 1e-30"),
            (
                {"prompt": [5], "stop_token_ids": [10**12], "stream": True},
                "a stop token is outside of the vocabulary",
            ),
            ({"prompt": [5], "temperature": 1e-30, "stream": True}, "temperature is 1e-30"),
            ({"prompt": [5], "stream": "yes"}, "stream must be"),
            (
                {"prompt": [5], "response_format": {"type": "xml"}},
                "response_format.type must be text",
            ),
            ({"prompt": [5], "logit_bias": {"5": 1}}, "logit_bias.5 is not supported"),
            ([], "not a JSON object"),
        ],
    )
    def test_unsupported_requests_are_rejected_with_a_reason(self, post, body, words):
        answer = post("/v1/completions", body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "change,words",
        [
            ({"messages": []}, "at least one message"),
            ({"messages": ["hi"]}, "must be an object with a role"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "parts of type text",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a tool call must be"),
            ({"tools": [{}]}, "tools must be a list"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls is not supported"),
            ({"tool_choice": "required"}, "cannot force a tool call"),
            ({"top_logprobs": 3}, "top_logprobs needs logprobs=true"),
            (
                {"logprobs": True, "top_logprobs": 21},
                "top_logprobs must be a number between 0 and 20",
            ),
            ({"logprobs": 3}, "logprobs must be of type bool"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "has no thinking switch"),
            ({"chat_template": "{{ x }}"}, "chat_template is not supported"),
            ({"continue_final_message": True}, "continue_final_message is not supported"),
            ({"add_generation_prompt": False}, "add_generation_prompt is not supported"),
            (
                {"response_format": {"type": "xml"}},
                "response_format.type must be text, json_object or json_schema",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {}}},
                "json_schema.schema must be",
            ),
            (
                {"response_format": {"type": "json_object", "schema": {}}},
                "response_format.schema is unknown",
            ),
            (
                {"response_format": {"type": "json_object"}, "ignore_eos": True},
                "not supported together with",
            ),
            ({"prompt": "x"}, "prompt is unknown"),
        ],
    )
    def test_invalid_conversations_are_rejected_with_a_reason(self, post, change, words):
        answer = post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, **change})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]

    def test_neutral_values_of_unsupported_options_are_accepted(self, post):
        neutral = {name: values[-1] for name, values in NEUTRAL.items()}
        neutral |= {"user": "me", "metadata": {"a": "b"}, "unheard_of": None}
        assert (
            post("/v1/completions", {"prompt": [5], "max_tokens": 2, **neutral}).status_code == 200
        )

    def test_the_other_routes_refuse_unknown_fields_too(self, post):
        for path, body in (
            ("/tokenize", {"prompt": "a", "add": 1}),
            ("/detokenize", {"tokens": [5], "skip": 1}),
        ):
            answer = post(path, body)
            assert (
                answer.status_code == 400
                and "is unknown to this server" in answer.json()["error"]["message"]
            )

    def test_metrics(self, post, url):
        post("/v1/completions", {"prompt": [5], "max_tokens": 3, "ignore_eos": True})
        post("/v1/completions", {"prompt": [5], "max_tokenz": 3})
        root, headers = url.removesuffix("/v1"), {"Authorization": "Bearer sk-right"}
        text = httpx.get(f"{root}/metrics", headers=headers).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert (
            float(values["evolver_engine_generated_tokens"]) >= 3
            and "# TYPE evolver_engine_generated_tokens counter" in text
        )
        assert int(values['evolver_requests{route="/v1/completions",status="400"}']) >= 1
        assert httpx.get(f"{root}/metrics").status_code == 401

    def test_a_wrong_model_name(self, client):
        with pytest.raises(openai.NotFoundError, match="this server has `policy`"):
            client.completions.create(model="gpt", prompt="x")

    def test_a_body_that_is_not_json(self, url):
        answer = httpx.post(
            f"{url}/completions", content=b"{", headers={"Authorization": "Bearer sk-right"}
        )
        assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]

    def test_a_disconnected_client_frees_its_slot(self, url, parts, post):
        body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer sk-right"}
        with httpx.Client() as http:
            for _ in range(10):
                with http.stream(
                    "POST", f"{url}/completions", json=body, headers=headers, timeout=60
                ) as answer:
                    next(answer.iter_lines())
        assert post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status_code == 200
        assert parts[0].stats()["sessions"] <= 1


def test_after_a_warm_up_requests_compile_little(parts):
    engine = JaxEngine(parts[0].shape, parts[1], slots=2, context=256)
    said = []
    compiled = warm_up(engine, said.append)
    assert len(said) > 1 and f"{len(said)} of {len(said)} lengths" in said[-1]
    assert compiled > 2 and engine.stats()["sessions"] == 0
    asyncio.run(engine.generate([5, 9, 300], Sampling(20, seed=1), session="a"))
    assert engine.stats()["compiles"] == compiled


def test_start_up_errors_are_reported(tmp_path, capsys, monkeypatch):
    for words, said in [
        ([f"--model={tmp_path}/none"], "/none is not a directory"),
        (
            [f"--model={tmp_path}", "--key=NO_SUCH_KEY"],
            "NO_SUCH_KEY: this environment variable is not set",
        ),
        ([f"--model={tmp_path}"], "tokenizer.json"),
    ]:
        assert main([*words, "--port=0"]) == 1
        assert said in capsys.readouterr().err


class Says:
    """An engine that says a text, a token at a time."""

    version = 0

    def __init__(self, parts, text):
        self.shape, self.tokens = parts[0].shape, parts[2].encode(text)

    async def generate(self, prompt, sampling, *, session, stream, **options):
        for token in self.tokens:
            stream([token], [0.0])
            await asyncio.sleep(0)
        return Completion(self.tokens, [0.0] * len(self.tokens), "length", 0)

    async def release(self, session):
        pass


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    "text, left", [("I look STOP more", "I look "), ("I look ST", "I look ST")]
)
def test_no_part_of_a_stop_text_is_streamed(parts, tools, text, left):
    service = Service(Says(parts, text), parts[1], parts[2], name="policy")
    request = Request([[5]], Sampling(40), stops=["STOP"], stream=True, tools=tools)
    answers = Answers(request, "/v1/chat/completions", "policy", parts[2])

    async def streamed():
        return [event async for event in service._events(request, answers)]

    events = [
        json.loads(event.removeprefix("data: "))
        for event in asyncio.run(streamed())
        if "[DONE]" not in event
    ]
    pieces = [
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    ]
    assert "".join(pieces) == left


def test_metrics_count_every_token():
    assert "generated_tokens 12345678.0\n" in metrics_text(
        {"generated_tokens": 12345678.0}, Counter()
    )


class TestVllmEngine:
    """The vLLM engine works with this server too, because it supports the same request fields."""

    def test_it_returns_the_samples_of_the_engine(self, url, parts, direct):
        from rl.engines.vllm.engine import VllmEngine
        from rl.engines.vllm.servers import Servers

        service = Service(*parts, name="policy")
        engine = VllmEngine(
            Servers([url], model="policy", key="sk-right"), vocab=parts[0].shape.vocab, context=256, transfer=None,
            score=lambda params, ids: np.array(service._score(ids)), temperature=0.7,
        )  # fmt: skip
        sampling = Sampling(9, temperature=0.7, seed=11, stop_tokens=(7,))

        async def scenario():
            await engine.start()
            await engine.load(parts[1], 0)  # verifies that the server answers with these weights
            completion = await engine.generate([5, 9, 300], sampling, session="s")
            await engine.close()
            return completion

        completion, expected = asyncio.run(scenario()), direct([5, 9, 300], sampling)
        assert (completion.tokens, completion.stop) == (expected.tokens, expected.stop)
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
