"""The JAX engine as an OpenAI-compatible server: `python -m rl.engines.serve --model=DIR`.

DIR is a Hugging Face checkpoint, such as the `policy/` of a run. Routes: /v1/chat/completions (tools, streaming),
/v1/completions (text or token ids in, token ids and log-probabilities out), /v1/models, /health, /tokenize,
/detokenize, /openapi.json. Request fields for token ids are vLLM's: `prompt` as ids, `return_token_ids`,
`stop_token_ids`, `ignore_eos`, `prompt_logprobs`. Log-probabilities of what is sampled are those at the sampling
temperature, those of prompts at temperature 1. What is not supported, structured output and penalties for example, is
refused by name.

Needs `pip install -r requirements/service.txt`. Listens on 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hmac
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import toolcalls
from models import hf, qwen
from models.tokenizer import Tokenizer, TokenizerError
from rl.engines import ContextFull, EngineFault
from rl.engines.jax_engine import JaxEngine
from rl.engines.openai_api import Answers, Generated, Refused, Request, error, read
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
        f"serving needs {missing.name}: pip install -r requirements/service.txt", name=missing.name
    ) from None

MAX_BODY = 32 << 20


class Service:
    """The routes over an engine. `app` is an ASGI application; close the engine after it.

    params: the engine's weights, for scoring prompts; key: a bearer token that every request must carry, "" = none.
    """

    def __init__(self, engine: JaxEngine, params: Any, tokenizer: Tokenizer, *, name: str, key: str = ""):
        self.engine, self.tokenizer, self.name, self._key = engine, tokenizer, name, key
        self._params = params
        handlers = {
            "/v1/chat/completions": self._complete, "/v1/completions": self._complete,
            "/tokenize": self._tokenize, "/detokenize": self._detokenize,
        }  # fmt: skip
        self.paths = [*handlers, "/v1/models", "/health", "/openapi.json"]
        routes = [Route(path, self._endpoint(handler), methods=["POST"]) for path, handler in handlers.items()]
        routes += [Route("/v1/models", self._endpoint(self._models)), Route("/health", _health)]
        routes += [Route("/openapi.json", self._endpoint(self._openapi))]
        self.app = Starlette(routes=routes)

    def _endpoint(self, handler: Any) -> Any:
        async def endpoint(http: HttpRequest) -> Response:
            given = http.headers.get("authorization", "")
            if self._key and not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                return JSONResponse(error("the API key is missing or wrong", "invalid_api_key"), 401)
            try:
                return await handler(http)
            except Refused as why:
                return JSONResponse(error(str(why), why.code), why.status)
            except ContextFull as why:
                return JSONResponse(error(f"maximum context length: {why}", "context_length_exceeded"), 400)
            except EngineFault as why:
                return JSONResponse(error(str(why), "engine_error"), 500)
            except ValueError as why:
                return JSONResponse(error(str(why)), 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return endpoint

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _complete(self, http: HttpRequest) -> Response:
        path, body = http.url.path, await _json(http)
        vocab, length = self.engine.config.vocab, self.engine.length
        request = read(body, path, self.name, self.tokenizer, vocab, length)
        answers = Answers(request, path, self.name, self.tokenizer)
        if request.stream:
            return StreamingResponse(self._events(request, answers), media_type="text/event-stream")
        choices = [self._finished(request, prompt, n) for prompt in request.prompts for n in range(request.n)]
        work = asyncio.ensure_future(_together(choices))
        try:
            while not (await asyncio.wait([work], timeout=1.0))[0]:
                if await http.is_disconnected():
                    raise ClientDisconnect
        finally:
            work.cancel()
        return JSONResponse(answers.whole(await work))

    async def _models(self, http: HttpRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "evolver"}
        model |= {"max_model_len": self.engine.length, "root": self.name}
        return JSONResponse({"object": "list", "data": [model]})

    async def _openapi(self, http: HttpRequest) -> Response:
        paths = {path: {} for path in self.paths}
        return JSONResponse({"openapi": "3.1.0", "info": {"title": "Evolver", "version": "1"}, "paths": paths})

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = await _json(http)
        wanted = (
            {k: v for k, v in body.items() if k in ("prompt", "messages", "tools")} if isinstance(body, dict) else {}
        )
        path = "/v1/chat/completions" if "messages" in wanted else "/v1/completions"
        request = read({**wanted, "max_tokens": 1}, path, self.name, self.tokenizer, self.engine.config.vocab, 2**31)
        ids = request.prompts[0]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.engine.length})

    async def _detokenize(self, http: HttpRequest) -> Response:
        body = await _json(http)
        ids = body.get("tokens") if isinstance(body, dict) else None
        vocab = self.engine.config.vocab
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < vocab for i in ids):
            raise Refused(f"tokens is a list of token ids below {vocab}")
        return JSONResponse({"prompt": self.tokenizer.decode(ids)})

    # --- generating ---------------------------------------------------------------------------------------------------

    async def _events(self, request: Request, answers: Answers) -> AsyncIterator[str]:
        """Server-sent events: pieces of all choices as they come, then their ends."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def choice(index: int, prompt: list[int], n: int) -> None:
            try:
                generated = await self._stream(request, prompt, n, index, answers, queue)
                await queue.put(generated)
            except Exception as why:
                await queue.put(why)

        pairs = [(prompt, n) for prompt in request.prompts for n in range(request.n)]
        tasks = [asyncio.ensure_future(choice(i, *pair)) for i, pair in enumerate(pairs)]
        generated: list[Generated] = []
        try:
            while len(generated) < len(pairs):
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
        self, request: Request, prompt: list[int], n: int, index: int, answers: Answers, queue: asyncio.Queue[Any]
    ) -> Generated:
        """One choice, its pieces put into the queue. Text from where a tool call may begin waits for the end."""
        sent, tokens_sent, first = 0, 0, True
        generated = None
        async for generated, done in self._generate(request, prompt, n):
            text, calls = generated.text, []
            if request.tools:
                turn = toolcalls.parse(text) if done else None
                if turn is not None and turn.calls and not turn.errors:
                    calls = turn.calls
                if calls or not done:
                    text = text[: _begins(text, toolcalls.OPEN)]
            elif not done and request.stops:
                text = text[: max(len(text) - max(map(len, request.stops)) + 1, sent)]
            piece, ids = text[sent:], generated.tokens[tokens_sent:]
            if piece or ids or first:
                logprobs = generated.logprobs[tokens_sent:]
                queue.put_nowait(answers.event(index, piece, ids, logprobs, first=first))
                sent, tokens_sent, first = max(sent, len(text)), len(generated.tokens), False
            if done:
                queue.put_nowait(answers.last_event(index, generated.finish, calls, generated.version))
        return generated

    async def _finished(self, request: Request, prompt: list[int], n: int) -> Generated:
        """One whole choice."""
        scores: list[float | None] = []
        if request.score:
            scores = [None, *(await asyncio.to_thread(self._score, prompt))]
        if request.sampling.max_tokens == 0:
            return Generated(prompt, [], [], "", "length", self.engine.version, scores)
        async for generated, _ in self._generate(request, prompt, n):  # noqa: B007 the last one counts
            pass
        generated.scores = scores
        return generated

    async def _generate(self, request: Request, prompt: list[int], n: int) -> AsyncIterator[tuple[Generated, bool]]:
        """What is generated so far, after each block, and whether that is all. A stop text ends it early."""
        blocks: asyncio.Queue[Any] = asyncio.Queue()
        sampling, session = request.sampling, uuid.uuid4().hex
        if n or len(request.prompts) > 1:
            sampling = Sampling(**{**vars(sampling), "seed": seed_of(sampling.seed, n)})
        push = lambda tokens, logprobs: blocks.put_nowait((tokens, logprobs))  # noqa: E731
        task = asyncio.ensure_future(self.engine.generate(prompt, sampling, session=session, stream=push))
        task.add_done_callback(blocks.put_nowait)
        generated = Generated(prompt, [], [], "", "length", self.engine.version)
        try:
            while (block := await blocks.get()) is not task:
                generated.tokens += block[0]
                generated.logprobs += block[1]
                stopped = generated.tokens[-1] in sampling.stop_tokens
                generated.text = self.tokenizer.decode(generated.tokens[: -1 if stopped else None])
                at = min((p for s in request.stops if (p := generated.text.find(s)) >= 0), default=-1)
                if at >= 0:
                    self._cut(generated, at)
                    yield generated, True
                    return
                generated.text = generated.text.rstrip("\ufffd")  # a character may be half there
                yield generated, False
            completion = task.result()
            stopped = completion.stop == "stop"
            generated.text = self.tokenizer.decode(completion.tokens[: -1 if stopped else None])
            generated.finish, generated.version = completion.stop, completion.version
            yield generated, True
        finally:
            task.cancel()
            await self.engine.release(session)

    def _cut(self, generated: Generated, at: int) -> None:
        """End at a stop text: the text before it, the tokens up to the one that completes it."""
        whole = generated.text
        count = len(generated.tokens)
        while (
            count > 1
            and len(self.tokenizer.decode(generated.tokens[: count - 1])) > at
            and whole.startswith(self.tokenizer.decode(generated.tokens[: count - 1]))
        ):
            count -= 1
        generated.tokens, generated.logprobs = generated.tokens[:count], generated.logprobs[:count]
        generated.text, generated.finish = whole[:at], "stop"

    def _score(self, ids: list[int]) -> list[float]:
        """log p(ids[i] | ids[:i]) for i >= 1, at temperature 1 as vLLM's are, in the precision of the weights."""
        size = max(16, 1 << (len(ids) - 1).bit_length())  # few shapes, because each is a compile
        tokens_RT = np.zeros((1, size), np.int32)
        tokens_RT[0, : len(ids)] = ids
        segments_RT = (np.arange(size) < len(ids)).astype(np.int32)[None]
        logp_T = _scores(self.engine.config, self._params, tokens_RT, segments_RT)
        return [float(x) for x in np.asarray(logp_T)[: len(ids) - 1]]


@functools.partial(jax.jit, static_argnums=0)
def _scores(config: qwen.Config, params: Any, tokens_RT: Any, segments_RT: Any) -> jax.Array:
    positions_RT = jnp.arange(tokens_RT.shape[1])[None]
    h_RTD = qwen.hidden(config, params, tokens_RT, positions_RT, segments_RT)
    return qwen.token_logp(h_RTD[0, :-1], qwen.unembed(config, params), tokens_RT[0, 1:])[0]


async def _together(choices: list[Any]) -> list[Generated]:
    """All of them, or the first error, with nothing left running."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _begins(text: str, mark: str) -> int:
    """Where `mark` begins in a text, or may begin at its end; its length where it does not."""
    at = text.find(mark)
    if at >= 0:
        return at
    tail = next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
    return len(text) - tail


async def _json(http: HttpRequest) -> Any:
    raw = bytearray()
    async for piece in http.stream():
        raw += piece
        if len(raw) > MAX_BODY:
            raise Refused(f"the body is larger than {MAX_BODY >> 20} MB", 413)
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        raise Refused("the body is not JSON") from None


async def _health(http: HttpRequest) -> Response:
    return Response()


# --- starting --------------------------------------------------------------------------------------------------------


def load(model: str | Path, *, slots: int, length: int, dtype: str) -> tuple[JaxEngine, Any, Tokenizer]:
    """(engine, parameters, tokenizer) of a checkpoint. Raises OSError, ValueError."""
    if not Path(model).is_dir():
        raise ValueError(f"--model={model}: there is no such directory")
    tokenizer = Tokenizer.load(model)
    shape, params = hf.load(model)
    engine = JaxEngine(shape, params, slots=slots, length=length, dtype=jnp.dtype(dtype), threaded=True)
    return engine, params, tokenizer


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. OSError names an address that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as why:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} ({why.strerror})") from None
    return listener


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """The service on a free port of 127.0.0.1 in a thread of this process while the block runs; gives its url."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(service.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
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
    parser = argparse.ArgumentParser(prog="python -m rl.engines.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--name", default="policy", help="what clients call the model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reachable from other machines")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it")
    parser.add_argument("--slots", type=int, default=32, help="sequences at a time")
    parser.add_argument("--length", type=int, default=2048, help="tokens of prompt and answer together")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--key", default="", help="environment variable with the key that clients must send")
    args = parser.parse_args(argv)
    key = os.environ.get(args.key, "") if args.key else ""
    try:
        if args.key and not key:
            raise ValueError(f"--key={args.key}: this environment variable is not set")
        listener = listen(args.host, args.port)
        engine, params, tokenizer = load(args.model, slots=args.slots, length=args.length, dtype=args.dtype)
    except (OSError, ValueError, TokenizerError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    if args.host not in ("127.0.0.1", "::1", "localhost") and not key:
        print("warning: anyone who reaches this port can use it; see --key", file=sys.stderr)
    service = Service(engine, params, tokenizer, name=args.name, key=key)
    config = uvicorn.Config(service.app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    print(f"{args.name}: running on http://{args.host}:{listener.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
