"""The server over real HTTP: clients get the engine's samples in OpenAI's format with vLLM's
fields."""

import asyncio
import concurrent.futures
import functools
import itertools
import json
from collections import Counter

import httpx
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from envs import toolcalls
from models import chat, hf
from models.tokenizer import Tokenizer
from rl.engines.jax.engine import JaxEngine
from rl.engines.serve.answers import Answers
from rl.engines.serve.requests import ChatRequest
from rl.engines.serve.server import Service, main, metrics_text, warm_up
from rl.engines.vllm.engine import VllmEngine
from rl.engines.vllm.servers import Servers
from rl.trajectory import Completion, Sampling
from tests.rl.served import HELLO, RIGHT, TOOL, form_of, serving

pytest_plugins = "tests.rl.serve_fixtures"

GRADES = {
    "type": "object", "additionalProperties": False, "required": ["step", "label"],
    "properties": {"step": {"type": "integer", "minimum": 0, "maximum": 99}, "label": {"enum": ["GOOD", "BAD"]}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "flights", "arguments": {"to": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def speak(client):
    """(fields) -> answer of a chat completion."""
    asked = {"model": "policy", "messages": HELLO}
    return lambda **options: client.chat.completions.create(**asked | options)


@pytest.fixture(scope="module")
def direct(parts):
    """(prompt, sampling) -> Completion of the same engine settings, without a server."""
    engine = JaxEngine(parts[0].shape, parts[1], slots=8, context=256)
    return lambda prompt, sampling: asyncio.run(engine.generate(prompt, sampling, session="s"))


def ends(tokenizer: Tokenizer) -> tuple[int, int]:
    return tokenizer.im_end, tokenizer.endoftext


# --- completions ----------------------------------------------------------------------------------


def test_token_ids_in_and_out_are_the_engines(post, direct):
    prompt = [5, 9, 300, 17]
    body = {"model": "policy", "prompt": prompt, "max_tokens": 12, "temperature": 0.7, "seed": 2**40 + 3,
            "stop_token_ids": [7], "ignore_eos": True, "logprobs": 0, "return_token_ids": True}  # fmt: skip
    answer = post("/v1/completions", body).json()
    sampling = Sampling(12, temperature=0.7, seed=2**40 + 3, stop_tokens=(7,))
    expected, (choice,) = direct(prompt, sampling), answer["choices"]
    count = len(expected.tokens)
    assert choice["token_ids"] == expected.tokens and choice["prompt_token_ids"] == prompt
    logprobs = choice["logprobs"]
    assert_allclose(logprobs["token_logprobs"], expected.logprobs, atol=1e-5)
    assert choice["finish_reason"] == expected.stop and choice["weights_version"] == 0
    usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
    assert answer["usage"] == usage
    assert len(logprobs["tokens"]) == count and "".join(logprobs["tokens"])


def test_greedy_text(complete, direct, parts):
    tokenizer = parts[2]
    (choice,) = complete(prompt="Book a", max_tokens=8, temperature=0)
    sampling = Sampling(8, temperature=0.0, stop_tokens=ends(tokenizer))
    tokens = direct(tokenizer.encode("Book a"), sampling).tokens
    assert choice["text"] == tokenizer.decode([t for t in tokens if t not in ends(tokenizer)])


def test_several_prompts_and_samples(complete):
    body = {"max_tokens": 5, "seed": 1, "return_token_ids": True}
    ask = lambda: complete(prompt=[[5, 6], [7, 8]], n=3, **body)
    choices = ask()
    assert [c["index"] for c in choices] == list(range(6))
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6]] * 3 + [[7, 8]] * 3
    ids = [c["token_ids"] for c in choices]
    assert len(set(map(tuple, ids))) > 3
    assert [c["token_ids"] for c in ask()] == ids
    assert complete(prompt=[5, 6], **body)[0]["token_ids"] == ids[0]


@pytest.mark.parametrize("seed", [{"seed": 1}, {}])
def test_equal_prompts_get_samples_of_their_own(complete, seed):
    body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True} | seed
    choices = complete(prompt=[[5, 9]] * 3, **body)
    if not seed:  # nor do two requests without a seed get the same
        choices = choices[:2] + complete(prompt=[5, 9], **body)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def test_a_prompt_is_scored_as_its_tokens_were_sampled(complete):
    asked = {"max_tokens": 10, "seed": 4, "logprobs": 0, "return_token_ids": True}
    (choice,) = complete(prompt=[5, 9, 300], ignore_eos=True, **asked)
    whole = [5, 9, 300, *choice["token_ids"]]
    (scored,) = complete(prompt=whole, max_tokens=1, temperature=0, prompt_logprobs=0)
    rows = scored["prompt_logprobs"]
    scores = [row[str(token)]["logprob"] for token, row in zip(whole[1:], rows[1:])]
    assert_allclose(scores[2:], choice["logprobs"]["token_logprobs"], atol=1e-4)
    (echo,) = complete(prompt=whole, max_tokens=0, echo=True, logprobs=0)
    assert_allclose(echo["logprobs"]["token_logprobs"][1:], scores, atol=1e-6)


def test_the_most_probable_tokens_of_each_place(complete):
    asked = {"prompt": [5, 9, 300], "max_tokens": 6, "seed": 4, "ignore_eos": True}
    (choice,) = complete(**asked, temperature=0.7, logprobs=3, return_tokens_as_token_ids=True)
    found = choice["logprobs"]
    assert len(found["top_logprobs"]) == 6
    for name, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert len(top) == 3 + (list(top).index(name) > 2) and top[name] == logprob
        best = list(top.values())[:3]
        assert best == sorted(best, reverse=True) and logprob <= best[0] + 1e-4
    greedy = complete(**asked, temperature=0, logprobs=20)[0]["logprobs"]
    for logprob, top in zip(greedy["token_logprobs"], greedy["top_logprobs"]):
        assert max(top.values()) == pytest.approx(logprob, abs=1e-4)


def test_a_stop_text_ends_a_generation_and_is_cut_off(complete, parts):
    body = {"prompt": [5, 9], "max_tokens": 40, "seed": 3, "ignore_eos": True}
    (whole,) = complete(**body, return_token_ids=True)
    text, decode = whole["text"], parts[2].decode
    for mark in (text[6:9], text[6:24]):  # the longer one is of several tokens
        (cut,) = complete(**body, return_token_ids=True, stop=[mark])
        ids = cut["token_ids"]
        assert cut["text"] == text[: text.index(mark)] and cut["finish_reason"] == "stop"
        assert whole["token_ids"][: len(ids)] == ids
        assert mark in decode(ids) and mark not in decode(ids[:-1])


def test_streamed_pieces_concatenate_to_the_whole(client):
    create = functools.partial(
        client.completions.create, model="policy", prompt="Book", max_tokens=70, seed=8, logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    answer = create()
    *pieces, last, usage = create(stream=True, stream_options={"include_usage": True})
    whole, pieces = answer.choices[0], [event.choices[0] for event in pieces]
    assert len(pieces) > 1
    assert "".join(p.text for p in pieces) == whole.text
    joined = itertools.chain.from_iterable
    assert [*joined(p.token_ids for p in pieces)] == whole.token_ids
    logprobs = joined(p.logprobs.token_logprobs for p in pieces)
    assert [*logprobs] == whole.logprobs.token_logprobs
    assert last.choices[0].finish_reason == "length" and usage.usage == answer.usage


# --- conversations --------------------------------------------------------------------------------


def test_messages_go_through_the_template(speak, direct, parts):
    tokenizer = parts[2]
    prompt = chat.opening(tokenizer, HELLO)
    extra = {"return_token_ids": True}
    answer = speak(max_tokens=9, seed=5, logprobs=True, top_logprobs=2, extra_body=extra)
    expected = direct(prompt, Sampling(9, seed=5, stop_tokens=ends(tokenizer)))
    assert answer.prompt_token_ids == prompt and answer.choices[0].token_ids == expected.tokens
    assert answer.choices[0].message.role == "assistant"
    rows = answer.choices[0].logprobs.content
    assert_allclose([row.logprob for row in rows], expected.logprobs, atol=1e-5)
    assert all(len(row.top_logprobs) == 2 for row in rows)
    assert all(row.logprob <= row.top_logprobs[0].logprob + 1e-4 for row in rows)


def test_a_conversation_with_tools_is_rendered_like_the_training_prompts(post, parts):
    tokenizer = parts[2]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "flights", "arguments": '{"to": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "none"},
    ]  # fmt: skip
    ids = post("/tokenize", {"messages": messages, "tools": [TOOL]}).json()["tokens"]
    calls = [{"name": "flights", "arguments": {"to": "Rome"}}]
    ours = [
        {"role": "system", "content": "Be brief."}, *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "none"},
    ]  # fmt: skip
    assert ids == chat.opening(tokenizer, ours, [TOOL])
    assert CALL in post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_the_system_message_of_training_is_the_default(parts, tmp_path):
    hf.save(tmp_path, parts[0].shape, parts[1], tokenizer=parts[2], system="Be a clerk.")
    system = chat.system_message(tmp_path)
    clerk, own = ([{"role": "system", "content": text}] for text in (system, "Be brief."))
    service = Service(*parts, name="policy", system=system)
    prompt = lambda messages: service._prompt({"messages": messages})
    assert prompt(HELLO) == chat.opening(parts[2], clerk + HELLO)
    assert prompt(own + HELLO) == chat.opening(parts[2], own + HELLO)
    hf.save(tmp_path / "none", parts[0].shape, parts[1], tokenizer=parts[2])
    assert system == "Be a clerk." and chat.system_message(tmp_path / "none") == ""


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_extracted_from_the_text(parts, stream):
    """A scripted engine, because random weights never call a tool."""
    tokenizer = parts[2]
    ids = [*tokenizer.encode("I look. " + CALL), tokenizer.im_end]
    with serving(scripted(parts, ids, "stop")) as address:
        client = openai.OpenAI(base_url=address, api_key="none")
        answer = client.chat.completions.create(
            model="policy", messages=HELLO, tools=[TOOL], max_tokens=100, stream=stream
        )
        choices = [event.choices[0] for event in (answer if stream else [answer])]
    messages = [choice.delta if stream else choice.message for choice in choices]
    assert messages[0].role == "assistant" and choices[-1].finish_reason == "tool_calls"
    assert "".join(message.content or "" for message in messages).strip() == "I look."
    (call,) = messages[-1].tool_calls
    assert call.function.name == "flights"
    assert json.loads(call.function.arguments) == {"to": "Rome"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_answer_in_the_form_that_is_asked_for(speak, temperature):
    """Beside others that may say anything, and that say what they say alone."""
    asked = {"max_tokens": 60, "temperature": temperature}
    ask = lambda seed: speak(**asked, seed=seed, response_format=form_of(GRADES)).choices[0]
    free = lambda seed: speak(**asked, seed=seed).choices[0].message.content
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        formed, others = threads.map(ask, range(4)), threads.map(free, range(2))
        formed, others = list(formed), list(others)
    assert others == [free(seed) for seed in range(2)]
    for choice in formed:
        assert choice.finish_reason == "stop"
        grade = json.loads(choice.message.content)
        assert grade["label"] in ("GOOD", "BAD")
        assert type(grade["step"]) is int and 0 <= grade["step"] <= 99
    pieces = speak(**asked, seed=0, response_format=form_of(GRADES), stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == formed[0].message.content


def test_a_schema_that_turns_out_too_complex_fails_alone(speak):
    """Its first token may follow; the properties that may come after it are too many."""
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}
    ask = lambda seed: speak(max_tokens=60, seed=seed).choices[0].message.content

    def refused():
        with pytest.raises(openai.BadRequestError, match="the JSON schema"):
            speak(max_tokens=60, seed=1, response_format=form_of(schema))

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        faulty, others = threads.submit(refused), threads.map(ask, range(11))
        faulty.result()
        others = list(others)
    assert others == [ask(seed) for seed in range(11)]


# --- the server -----------------------------------------------------------------------------------


def test_models_and_health(client, get):
    (model,) = client.models.list().data
    assert model.id == "policy" and model.max_model_len == 256
    assert get("/health", headers={}).status_code == 200
    assert "/v1/completions" in get("/openapi.json").json()["paths"]


def test_tools_that_may_not_be_used_are_not_shown(post):
    body = {"messages": HELLO, "max_tokens": 2}
    bodies = body, body | {"tools": [TOOL], "tool_choice": "none"}
    usages = [post("/v1/chat/completions", body).json()["usage"] for body in bodies]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]


def test_metrics(post, get):
    post("/v1/completions", {"prompt": [5], "max_tokens": 3, "ignore_eos": True})
    post("/v1/completions", {"prompt": [5], "max_tokenz": 3})
    text = get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["evolver_engine_generated_tokens"]) >= 3
    assert "# TYPE evolver_engine_generated_tokens counter" in text
    assert int(values['evolver_requests{route="/v1/completions",status="400"}']) >= 1
    assert get("/metrics", headers={}).status_code == 401


def test_a_disconnected_client_frees_its_slot(url, parts, complete):
    body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.Client(headers=RIGHT, timeout=60) as client:
        for _ in range(10):
            with client.stream("POST", f"{url}/completions", json=body) as answer:
                next(answer.iter_lines())
    assert complete(prompt=[5], max_tokens=2)
    assert parts[0].stats()["sessions"] <= 1


def test_after_a_warm_up_requests_compile_little(parts):
    engine = JaxEngine(parts[0].shape, parts[1], slots=2, context=256)
    said = []
    compiled = warm_up(engine, said.append)
    assert len(said) > 1 and f"{len(said)} of {len(said)} lengths" in said[-1]
    assert compiled > 2 and engine.stats()["sessions"] == 0
    asyncio.run(engine.generate([5, 9, 300], Sampling(20, seed=1), session="a"))
    assert engine.stats()["compiles"] == compiled


@pytest.mark.parametrize(
    "words, said",
    [
        (["--model={}/none"], "/none is not a directory"),
        (["--model={}", "--key=NO_SUCH_KEY"], "NO_SUCH_KEY: this environment variable is not set"),
        (["--model={}"], "tokenizer.json"),
    ],
)
def test_start_up_errors_are_reported(tmp_path, capsys, words, said):
    assert main([*(word.format(tmp_path) for word in words), "--port=0"]) == 1
    assert said in capsys.readouterr().err


class Says:
    """An engine that says a text in blocks that end at the given tokens, or after each."""

    version, context = 0, 1024

    def __init__(self, parts, tokens, stop="length", ends=None):
        self.shape, self.tokens, self.stop = parts[0].shape, tokens, stop
        self.ends = range(1, len(tokens) + 1) if ends is None else ends

    def check(self, prompt, sampling):
        pass

    async def generate(self, prompt, sampling, *, session, stream, **options):
        for start, end in itertools.pairwise([0, *self.ends]):
            stream(self.tokens[start:end], [0.0] * (end - start))
            await asyncio.sleep(0)
        return Completion(self.tokens, [0.0] * len(self.tokens), self.stop, 0)

    async def release(self, session):
        pass


def scripted(parts, *says):
    return Service(Says(parts, *says), parts[1], parts[2], name="policy")


PIECES = [
    "I look. ", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL.replace("Rome", "</think>"),
    '{"name": "flights"', ', "arguments": {}}', '"', "\n", "\\", "é", "<", "STOP", "ST",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.randoms(use_true_random=False))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.parametrize("tools, stop", [([TOOL], []), ([TOOL], ["STOP"]), ([], ["STOP"])])
def test_a_streamed_answer_is_the_whole_one_and_what_a_world_reads(parts, tools, stop, texts, rng):
    tokenizer, text = parts[2], "".join(texts) or "I"
    tokens = tokenizer.encode(text)
    ends = [n for n in range(1, len(tokens)) if rng.random() < 0.3] + [len(tokens)]
    service = scripted(parts, tokens, "length", ends)
    answers = Answers(ChatRequest(messages=HELLO, tools=tools, stop=stop), "policy", tokenizer)
    choice = [5], Sampling(1000)

    async def both():
        events = [event async for event in service._events(answers, [choice])]
        return events[:-1], answers.whole([await service._finished(answers, choice)])

    events, whole = asyncio.run(both())
    ((choice,), choices) = whole["choices"], [json.loads(e[6:])["choices"][0] for e in events]
    message, deltas = choice["message"], [streamed["delta"] for streamed in choices]
    assert deltas[0]["role"] == "assistant"
    for name in ("content", "reasoning_content"):
        assert "".join(d.get(name) or "" for d in deltas) == (message.get(name) or "")
    functions = lambda said: [call["function"] for call in said.get("tool_calls", ())]
    assert [*itertools.chain(*map(functions, deltas))] == functions(message)
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    said = text.partition("STOP")[0] if stop else text
    turn = toolcalls.parse(said)
    if not tools:
        assert message["content"] == said
    elif not turn.errors:
        calls = [(c["name"], json.loads(c["arguments"])) for c in functions(message)]
        assert calls == [(call.name, call.arguments) for call in turn.calls]
        assert (message["content"] or "").strip() == turn.content
        assert (choice["finish_reason"] == "tool_calls") == bool(turn.calls)


def test_metrics_count_every_token():
    text = metrics_text({"generated_tokens": 12345678.0}, Counter())
    assert "generated_tokens 12345678.0\n" in text


# --- the vLLM engine ------------------------------------------------------------------------------


def test_the_vllm_engine_returns_the_samples_of_this_one(url, parts, direct):
    """The vLLM engine works with this server too, because it supports the same request fields."""
    service = Service(*parts, name="policy")
    engine = VllmEngine(
        Servers([url], model="policy", key="sk-right"), vocab=parts[0].shape.vocab, context=256, transfer=None,
        score=lambda params, ids: np.array(service.score(ids)[0]), temperature=0.7,
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
    assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
