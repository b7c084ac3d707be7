"""The JAX engine as an OpenAI-compatible server: `python -m rl.engines.serve --model=DIR`.

DIR is a Hugging Face checkpoint, such as the `policy/` of a run. Routes: /v1/chat/completions
(tools, streaming), /v1/completions (text or token ids in, token ids and log-probabilities out),
/v1/models, /health, /metrics (Prometheus), /tokenize, /detokenize, /openapi.json. Request fields
for token ids are vLLM's: `prompt` as ids, `return_token_ids`, `stop_token_ids`, `ignore_eos`,
`prompt_logprobs`. Log-probabilities of sampled tokens are computed at the sampling temperature,
those of prompts at temperature 1. `response_format` holds an answer to a JSON schema, token by
token (llguidance), and its log-probabilities are renormalised to the tokens that may follow. A
request with an unsupported option, such as penalties, or with an unknown one is refused; the error
names the option.

Needs `pip install -r requirements/service.txt`. Listens on 127.0.0.1 by default.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import http, toolcalls
from envs.packages import how_to_install
from models import hf, qwen
from models.tokenizer import Tokenizer, TokenizerError
from rl.engines import ContextFull, EngineFault
from rl.engines.grammar import GrammarError, Grammars
from rl.engines.jax.engine import JaxEngine
from rl.engines.serve.openai_api import (
    MAX_TOP,
    Answers,
    Generated,
    Refused,
    Request,
    error,
    read,
    refuse_unknown,
)
from rl.seeds import seed_of
from rl.trajectory import Sampling

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"serving needs {missing.name}: {how_to_install('service')}", name=missing.name
    ) from None

MAX_BODY = 32 << 20


class Service:
    """The routes over an engine. `app` is an ASGI application; stop it before you close the engine.

    params: the engine's weights, for scoring prompts. key: the bearer token that every request must
    carry; "" = none.
    """

    def __init__(
        self, engine: JaxEngine, params: Any, tokenizer: Tokenizer, *, name: str, key: str = ""
    ):
        self.engine, self.tokenizer, self.name, self._key = engine, tokenizer, name, key
        self._params, self._grammars = params, Grammars(tokenizer, engine.shape.vocab)
        handlers = {
            "/v1/chat/completions": self._complete, "/v1/completions": self._complete,
            "/tokenize": self._tokenize, "/detokenize": self._detokenize,
        }  # fmt: skip
        self.answered: Counter[tuple[str, int]] = Counter()  # requests by route and status
        self.paths = [*handlers, "/v1/models", "/health", "/metrics", "/openapi.json"]
        routes = [
            Route(path, self._endpoint(handler), methods=["POST"])
            for path, handler in handlers.items()
        ]
        routes += [Route("/v1/models", self._endpoint(self._models)), Route("/health", _health)]
        routes += [Route("/metrics", self._endpoint(self._metrics))]
        routes += [Route("/openapi.json", self._endpoint(self._openapi))]
        self.app = Starlette(routes=routes)

    def _endpoint(self, handler: Any) -> Any:
        async def endpoint(request: HttpRequest) -> Response:
            answer = await answered(request)
            self.answered[request.url.path, answer.status_code] += 1
            return answer

        async def answered(request: HttpRequest) -> Response:
            if not http.authorized(request.headers.get("authorization", ""), self._key):
                return JSONResponse(
                    error("the API key is missing or wrong", "invalid_api_key"), 401
                )
            try:
                return await handler(request)
            except Refused as why:
                return JSONResponse(error(str(why), why.code), why.status)
            except ContextFull as why:
                return JSONResponse(
                    error(f"maximum context length: {why}", "context_length_exceeded"), 400
                )
            except EngineFault as why:
                return JSONResponse(error(str(why), "engine_error"), 500)
            except ValueError as why:
                return JSONResponse(error(str(why)), 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return endpoint

    # --- routes -----------------------------------------------------------------------------------

    async def _complete(self, incoming: HttpRequest) -> Response:
        path, body = incoming.url.path, await _json(incoming)
        vocab, context = self.engine.shape.vocab, self.engine.context
        request = read(body, path, self.name, self.tokenizer, vocab, context)
        answers = Answers(request, path, self.name, self.tokenizer)
        if request.schema is not None:
            try:
                await asyncio.to_thread(self._grammars.guide, request.schema)
            except GrammarError as why:
                raise Refused(f"response_format: {why}") from None
        if request.stream:
            for prompt, sampling in _choices(request):
                self.engine.check(prompt, sampling)  # before the status of the answer is sent
            return StreamingResponse(self._events(request, answers), media_type="text/event-stream")
        choices = [self._finished(request, *choice) for choice in _choices(request)]
        work = asyncio.ensure_future(_together(choices))
        try:
            while not (await asyncio.wait([work], timeout=1.0))[0]:
                if await incoming.is_disconnected():
                    raise ClientDisconnect
        finally:
            work.cancel()
        return JSONResponse(answers.whole(await work))

    async def _models(self, incoming: HttpRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "evolver"}
        model |= {"max_model_len": self.engine.context, "root": self.name}
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, incoming: HttpRequest) -> Response:
        return Response(
            metrics_text(self.engine.stats(), self.answered), media_type="text/plain; version=0.0.4"
        )

    async def _openapi(self, incoming: HttpRequest) -> Response:
        paths = {path: {} for path in self.paths}
        return JSONResponse(
            {"openapi": "3.1.0", "info": {"title": "Evolver", "version": "1"}, "paths": paths}
        )

    async def _tokenize(self, incoming: HttpRequest) -> Response:
        prompt = await _json(incoming)
        if not isinstance(prompt, dict):
            raise Refused("the body is not a JSON object")
        refuse_unknown(prompt, {"model", "prompt", "messages", "tools"})
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        request = read(
            {**prompt, "max_tokens": 1},
            path,
            self.name,
            self.tokenizer,
            self.engine.shape.vocab,
            2**31,
        )
        ids = request.prompts[0]
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self.engine.context}
        )

    async def _detokenize(self, incoming: HttpRequest) -> Response:
        body = await _json(incoming)
        ids = body.get("tokens") if isinstance(body, dict) else None
        refuse_unknown(body if isinstance(body, dict) else {}, {"model", "tokens"})
        vocab = self.engine.shape.vocab
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < vocab for i in ids):
            raise Refused(f"tokens must be a list of token ids below {vocab}")
        return JSONResponse({"prompt": self.tokenizer.decode(ids)})

    # --- generating -------------------------------------------------------------------------------

    async def _events(self, request: Request, answers: Answers) -> AsyncIterator[str]:
        """Yield server-sent events: the pieces of all choices as they are generated, then the
        usage."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def choice(index: int, prompt: list[int], sampling: Sampling) -> None:
            try:
                generated = await self._stream(request, prompt, sampling, index, answers, queue)
                await queue.put(generated)
            except Exception as why:
                await queue.put(why)

        choices = _choices(request)
        tasks = [asyncio.ensure_future(choice(i, *chosen)) for i, chosen in enumerate(choices)]
        generated: list[Generated] = []
        try:
            while len(generated) < len(choices):
                item = await queue.get()
                if isinstance(item, Exception):
                    yield f"data: {json.dumps(error(str(item), 'engine_error'))}\n\n"
                    return
                if isinstance(item, Generated):
                    generated.append(item)
                else:
                    yield f"data: {json.dumps(item)}\n\n"
            if request.usage:
                yield f"data: {json.dumps(answers.usage_event(generated))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(
        self,
        request: Request,
        prompt: list[int],
        sampling: Sampling,
        index: int,
        answers: Answers,
        queue: asyncio.Queue[Any],
    ) -> Generated:
        """Generate one choice and put its pieces into the queue.

        Text from the possible start of a tool call or of a stop text on is held back until the
        generation ends.
        """
        sent, tokens_sent, first = 0, 0, True
        generated = None
        async for generated, done in self._generate(request, prompt, sampling):
            text, calls = generated.text, []
            if not done and request.stops:
                text = text[: max(len(text) - max(map(len, request.stops)) + 1, sent)]
            if request.tools:
                turn = toolcalls.parse(text) if done else None
                if turn is not None and turn.calls and not turn.errors:
                    calls = turn.calls
                if calls or not done:
                    text = text[: _begins(text, toolcalls.OPEN)]
            piece, ids = text[sent:], generated.tokens[tokens_sent:]
            if piece or ids or first:
                logprobs = generated.logprobs[tokens_sent:]
                queue.put_nowait(answers.event(index, piece, ids, logprobs, first=first))
                sent, tokens_sent, first = max(sent, len(text)), len(generated.tokens), False
            if done:
                queue.put_nowait(
                    answers.last_event(index, generated.finish, calls, generated.version)
                )
        return generated

    async def _finished(self, request: Request, prompt: list[int], sampling: Sampling) -> Generated:
        """Generate one whole choice, with the scores of its prompt if requested."""
        scores: list[float | None] = []
        if request.score:
            scores = [None, *(await asyncio.to_thread(self._score, prompt))]
        if sampling.max_tokens == 0:
            return Generated(prompt, [], [], "", "length", self.engine.version, scores)
        async for generated, _ in self._generate(request, prompt, sampling):  # noqa: B007 (the last one is the result)
            pass
        generated.scores = scores
        if request.top:
            temperature = sampling.temperature or 1.0
            generated.top = await asyncio.to_thread(
                self._top, prompt, generated.tokens, request.top, temperature
            )
        return generated

    async def _generate(
        self, request: Request, prompt: list[int], sampling: Sampling
    ) -> AsyncIterator[tuple[Generated, bool]]:
        """Yield (everything generated so far, finished?) after each block. A stop text ends the
        generation early."""
        blocks: asyncio.Queue[Any] = asyncio.Queue()
        session = uuid.uuid4().hex
        options: dict[str, Any] = {
            "stream": lambda tokens, logprobs: blocks.put_nowait((tokens, logprobs))
        }
        if request.schema is not None:
            options["guide"] = self._grammars.guide(request.schema)
        task = asyncio.ensure_future(
            self.engine.generate(prompt, sampling, session=session, **options)
        )
        task.add_done_callback(blocks.put_nowait)
        generated = Generated(prompt, [], [], "", "length", self.engine.version)
        try:
            while (block := await blocks.get()) is not task:
                generated.tokens += block[0]
                generated.logprobs += block[1]
                stopped = generated.tokens[-1] in sampling.stop_tokens
                generated.text = self.tokenizer.decode(generated.tokens[: -1 if stopped else None])
                found = [
                    (at, at + len(s)) for s in request.stops if (at := generated.text.find(s)) >= 0
                ]
                if found:
                    self._cut(generated, *min(found))
                    yield generated, True
                    return
                generated.text = generated.text.rstrip(
                    "\ufffd"
                )  # the last character may be incomplete
                yield generated, False
            completion = task.result()
            stopped = completion.stop == "stop"
            generated.text = self.tokenizer.decode(completion.tokens[: -1 if stopped else None])
            generated.finish, generated.version = completion.stop, completion.version
            yield generated, True
        finally:
            task.cancel()
            await self.engine.release(session)

    def _cut(self, generated: Generated, at: int, end: int) -> None:
        """Cut at a stop text, text[at:end]: keep the text before it, and the tokens up to the one
        that completes it."""
        text = generated.text
        count = len(generated.tokens)
        while self.tokenizer.decode(generated.tokens[: count - 1]).startswith(text[:end]):
            count -= 1
        generated.tokens, generated.logprobs = generated.tokens[:count], generated.logprobs[:count]
        generated.text, generated.finish = text[:at], "stop"

    def _score(self, ids: list[int]) -> list[float]:
        """Return log p(ids[i] | ids[:i]) for i >= 1, at temperature 1 like vLLM, computed in
        float32."""
        tokens_RT, segments_RT = _row(ids)
        logp_T = _scores(self.engine.shape, self._params, tokens_RT, segments_RT)
        return [float(x) for x in np.asarray(logp_T)[: len(ids) - 1]]

    def _top(
        self, prompt: list[int], tokens: list[int], count: int, temperature: float
    ) -> list[dict[int, float]]:
        """Return {token: log p} of the `count` most probable tokens at the place of each of
        `tokens`, best first."""
        tokens_RT, segments_RT = _row(prompt + tokens)
        logp_TC, id_TC = map(
            np.asarray, _best(self.engine.shape, self._params, tokens_RT, segments_RT, temperature)
        )
        places = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        return [
            {int(i): float(x) for i, x in zip(id_TC[t, :count], logp_TC[t, :count])} for t in places
        ]


def _row(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens_RT, segments_RT) of one row, padded to one of few widths, because each one is
    compiled."""
    size = max(16, 1 << (len(ids) - 1).bit_length())
    tokens_RT = np.zeros((1, size), np.int32)
    tokens_RT[0, : len(ids)] = ids
    return tokens_RT, (np.arange(size) < len(ids)).astype(np.int32)[None]


@functools.partial(jax.jit, static_argnums=0)
def _best(
    shape: qwen.Config, params: Any, tokens_RT: Any, segments_RT: Any, temperature: Any
) -> tuple[Any, Any]:
    """Return (logp_TC, id_TC) of the most probable next tokens at each place, a few places at a
    time."""
    positions_RT = jnp.arange(tokens_RT.shape[1])[None]
    h_TD = qwen.hidden(shape, params, tokens_RT, positions_RT, segments_RT)[0]
    head = qwen.unembed(shape, params)

    def best(h_CD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_CV = (h_CD @ head).astype(jnp.float32) / temperature
        return jax.lax.top_k(jax.nn.log_softmax(logits_CV), min(MAX_TOP, shape.vocab))

    logp_PCK, id_PCK = jax.lax.map(best, h_TD.reshape(-1, 16, h_TD.shape[1]))
    return logp_PCK.reshape(len(h_TD), -1), id_PCK.reshape(len(h_TD), -1)


@functools.partial(jax.jit, static_argnums=0)
def _scores(shape: qwen.Config, params: Any, tokens_RT: Any, segments_RT: Any) -> jax.Array:
    positions_RT = jnp.arange(tokens_RT.shape[1])[None]
    h_RTD = qwen.hidden(shape, params, tokens_RT, positions_RT, segments_RT)
    return qwen.token_logp(h_RTD[0, :-1], qwen.unembed(shape, params), tokens_RT[0, 1:])[0]


def _choices(request: Request) -> list[tuple[list[int], Sampling]]:
    """Return (prompt, sampling) of each choice. The first has the request's seed, the others have
    random numbers of their own, also for equal prompts."""
    seed, choices = request.sampling.seed, []
    for index, prompt in enumerate(request.prompts):
        for n in range(request.n):
            own = seed_of(seed, index, n) if index or n else seed
            choices.append((prompt, dataclasses.replace(request.sampling, seed=own)))
    return choices


async def _together(choices: list[Any]) -> list[Generated]:
    """Return all results, or raise the first error after cancelling the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _begins(text: str, mark: str) -> int:
    """Return the index at which `mark` begins, or may begin at the end of the text; the text's
    length if neither."""
    at = text.find(mark)
    if at >= 0:
        return at
    tail = next(
        (k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0
    )
    return len(text) - tail


async def _json(incoming: HttpRequest) -> Any:
    try:
        return await http.read_json(incoming.stream(), MAX_BODY)
    except ValueError as error:
        raise Refused(str(error), 413 if isinstance(error, http.BodyTooLarge) else 400) from None


async def _health(incoming: HttpRequest) -> Response:
    return Response()


def metrics_text(stats: dict[str, float], answered: Counter[tuple[str, int]]) -> str:
    """Return counters in Prometheus's text format. stats: of the engine. answered: requests by
    route and status."""
    lines = []
    for name, value in sorted(stats.items()):
        kind = "gauge" if name in ("occupancy", "sessions", "version") else "counter"
        lines += [f"# TYPE evolver_engine_{name} {kind}", f"evolver_engine_{name} {value!r}"]
    lines += ["# TYPE evolver_requests counter"]
    lines += [
        f'evolver_requests{{route="{route}",status="{status}"}} {n}'
        for (route, status), n in answered.items()
    ]
    return "\n".join(lines) + "\n"


# --- starting -------------------------------------------------------------------------------------


def load(
    model: str | Path, *, slots: int, context: int, dtype: str
) -> tuple[JaxEngine, Any, Tokenizer]:
    """Return (engine, parameters, tokenizer) of a checkpoint. Raises OSError, ValueError,
    TokenizerError."""
    if not Path(model).is_dir():
        raise ValueError(f"--model={model} is not a directory")
    tokenizer = Tokenizer.load(model)
    shape, params = hf.load(model)
    if context > shape.max_positions:
        raise ValueError(f"--context={context}: the model knows {shape.max_positions} positions")
    engine = JaxEngine(
        shape, params, slots=slots, context=context, dtype=jnp.dtype(dtype), threaded=True
    )
    return engine, params, tokenizer


def warm_up(engine: JaxEngine, say: Callable[[str], None] = lambda line: None) -> int:
    """Compile the programs that requests need: for prompts of each length class, one alone and as
    many as there are slots. Say how far it is, and return the number of compiled shapes."""
    lengths = [n for n in (1, *(128 * 2**k for k in range(20))) if n < engine.context]
    began = time.monotonic()

    async def generate() -> None:
        for done, length in enumerate(lengths):
            past = f"{engine.stats()['compiles']:.0f} programs, {time.monotonic() - began:.0f} s"
            say(
                f"compiling for prompts of {length} tokens, {done + 1} of {len(lengths)} lengths ({past} so far)"
            )
            for count in (1, engine.slots):
                prompts = [
                    [(7 * i + 31 * j + length) % engine.shape.vocab for j in range(length)]
                    for i in range(count)
                ]
                tokens = Sampling(min(40, engine.context - length), temperature=1.0)
                asked = [
                    engine.generate(prompt, tokens, session=f"warm {i}")
                    for i, prompt in enumerate(prompts)
                ]
                await asyncio.gather(*asked)
                for i in range(count):
                    await engine.release(f"warm {i}")

    asyncio.run(generate())
    engine.clear_cache()
    return int(engine.stats()["compiles"])


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """Run the service in a thread, on a free port of 127.0.0.1, for the duration of the block;
    yield its URL."""
    listener = http.listen("127.0.0.1", 0)
    config = uvicorn.Config(
        service.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.engines.serve", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--model", required=True, help="directory of a Hugging Face checkpoint with its tokenizer"
    )
    parser.add_argument("--name", default="policy", help="the model's name in requests")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 to be reachable from other machines"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port and prints it")
    parser.add_argument("--slots", type=int, default=32, help="sequences generated at a time")
    parser.add_argument(
        "--context", type=int, default=2048, help="most tokens of prompt and answer together"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the computation",
    )
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile before the first request comes",
    )
    parser.add_argument(
        "--key", default="", help="environment variable that holds the key clients must send"
    )
    args = parser.parse_args(argv)
    key = os.environ.get(args.key, "") if args.key else ""
    try:
        if args.key and not key:
            raise ValueError(f"--key={args.key}: this environment variable is not set")
        listener = http.listen(args.host, args.port)
        engine, params, tokenizer = load(
            args.model, slots=args.slots, context=args.context, dtype=args.dtype
        )
    except (OSError, ValueError, TokenizerError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    if args.host not in http.LOOPBACK and not key:
        print("warning: anyone who can reach this port can use it; see --key", file=sys.stderr)
    service = Service(engine, params, tokenizer, name=args.name, key=key)
    if args.warm_up:
        compiled = warm_up(engine, lambda line: print(f"{args.name}: {line}", flush=True))
        print(f"{args.name}: compiled {compiled} programs", flush=True)
    config = uvicorn.Config(
        service.app, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    print(f"{args.name}: running on http://{args.host}:{listener.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0
