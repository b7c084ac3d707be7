"""The JAX engine as an OpenAI-compatible server: `python -m rl.engines.serve --model=DIR`.

DIR is a Hugging Face checkpoint, such as the `policy/` of a run, whose `system_message.txt` is then
the default system message. Routes: /v1/chat/completions (tools, streaming), /v1/completions (text
or token ids in, token ids and log-probabilities out), /v1/models, /health, /metrics (Prometheus),
/tokenize, /detokenize, /openapi.json. Request fields for token ids are vLLM's: `prompt` as ids,
`return_token_ids`, `stop_token_ids`, `ignore_eos`, `prompt_logprobs`. Log-probabilities of sampled
tokens are computed at the sampling temperature, those of prompts at temperature 1.
`response_format` holds an answer to a JSON schema, token by token (llguidance), and its
log-probabilities are renormalised to the tokens that may follow. A request with an unsupported
option, such as penalties, or with an unknown one is refused; the error names the option. So is one
that is certainly longer than the context, before it is encoded.

With tools, an answer is read as the worlds read it (envs/toolcalls.py): its thought is
`reasoning_content`, and a stream holds its text back until it is complete. An answer that cannot be
read stays a text. Without `--key` only requests to this machine's local names are answered.

Needs `pip install -r requirements/service.txt`. Listens on 127.0.0.1 by default.
"""

import argparse
import asyncio
import functools
import json
import os
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from envs import http
from envs.packages import how_to_install
from models import chat, hf, qwen
from models.logp import chunked_logp, logits
from models.tokenizer import Tokenizer
from rl.calls import format_of
from rl.engines import EngineFault
from rl.engines.grammar import GrammarError, Grammars
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Sampling

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from envs.service import server_config
    from rl.engines.serve.answers import Answers, Generated, error
    from rl.engines.serve.requests import (
        MAX_BODY,
        MAX_TOP,
        ChatPrompt,
        ChatRequest,
        Generation,
        Json,
        Message,
        Refused,
        TextPrompt,
        TextRequest,
        TokenIds,
        fields_of,
        parse,
        prompts_of,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"serving needs {missing.name}: {how_to_install('service')}", name=missing.name
    ) from None

THREADS = 2
CHUNK = 1024  # tokens of a prompt whose logits exist at once
NOT_LOCAL = "without a key this server answers to the names of this machine only; see --key"
Choice = tuple[list[int], Sampling]  # (prompt, sampling)
Result = TypeVar("Result")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class Service:
    """The routes over an engine. `app` is an ASGI application; stop it before you close the engine.

    params: the engine's weights, for scoring prompts. key: the bearer token that every request must
    carry; "" = none. system: the system message of conversations that bring none, "" = that of the
    chat template.
    """

    def __init__(
        self,
        engine: JaxEngine,
        params: Any,
        tokenizer: Tokenizer,
        *,
        name: str,
        key: str = "",
        system: str = "",
    ):
        self.system = Message(role="system", content=system) if system else None
        self.engine, self.tokenizer, self.name, self._key = engine, tokenizer, name, key
        self._params, self._grammars = params, Grammars(tokenizer, engine.shape.vocab)
        # The event loop does no work of a request's size. Few threads, because each may hold a body
        # of MAX_BODY bytes several times over.
        self._threads = ThreadPoolExecutor(THREADS, "serve")
        self.answered: Counter[tuple[str, int]] = Counter()  # requests by route and status
        endpoints = [
            ("GET", "/health", _health),
            ("POST", "/v1/chat/completions", self._complete),
            ("POST", "/v1/completions", self._complete),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/v1/models", self._models),
            ("GET", "/metrics", self._metrics),
            ("GET", "/openapi.json", self._openapi),
        ]
        routes = [
            Route(path, functools.partial(self._counted, handler), methods=[method])
            for method, path, handler in endpoints
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    async def _counted(self, handler: Handler, request: HttpRequest) -> Response:
        answer = await self._answer(handler, request)
        self.answered[request.url.path, answer.status_code] += 1
        return answer

    async def _answer(self, handler: Handler, request: HttpRequest) -> Response:
        """Return the handler's answer, or that of its fault."""
        try:
            # A page elsewhere may make its own name resolve to this machine.
            if not self._key and not http.is_local(request.headers.get("host", "")):
                raise Refused(NOT_LOCAL, 403, "invalid_host")
            authorization = request.headers.get("authorization", "")
            if handler is not _health and not http.authorized(authorization, self._key):
                raise Refused("the API key is missing or wrong", 401, "invalid_api_key")
            return await handler(request)
        except Refused as why:
            return JSONResponse(error(str(why), why.code), why.status)
        except http.BodyTooLate as why:
            return JSONResponse(error(str(why)), 408, {"Connection": "close"})
        except ValueError as why:
            return JSONResponse(error(str(why)), 400)
        except EngineFault as why:
            return JSONResponse(error(str(why), "engine_error"), 500)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as why:
            traceback.print_exc()
            return JSONResponse(error(f"the server failed: {why}", "server_error"), 500)

    # --- routes -----------------------------------------------------------------------------------

    async def _complete(self, incoming: HttpRequest) -> Response:
        kind = ChatRequest if incoming.url.path == "/v1/chat/completions" else TextRequest
        request, choices = await self._read(incoming, functools.partial(self._choices, kind))
        answers = Answers(request, self.name, self.tokenizer)
        schema = request.response_format.wanted
        if schema is not None:
            try:
                await asyncio.to_thread(self._grammars.guide, schema)
            except GrammarError as why:
                raise Refused(f"response_format: {why}") from None
        if request.stream:
            for choice in choices:
                self.engine.check(*choice)  # before the status of the answer is sent
            events = self._events(answers, choices)
            return StreamingResponse(events, media_type="text/event-stream")
        tasks = [asyncio.create_task(self._finished(answers, choice)) for choice in choices]
        try:
            together = asyncio.gather(*tasks)
            while not together.done():
                await asyncio.wait([together], timeout=1.0)
                if not together.done() and await incoming.is_disconnected():
                    raise ClientDisconnect
            generated = together.result()  # raises the first fault of a choice
            return await self._aside(lambda: JSONResponse(answers.whole(generated)))
        finally:
            for task in tasks:
                task.cancel()

    async def _models(self, incoming: HttpRequest) -> Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "evolver",
            "max_model_len": self.engine.context,
            "root": self.name,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, incoming: HttpRequest) -> Response:
        text = metrics_text(self.engine.stats(), self.answered)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _openapi(self, incoming: HttpRequest) -> Response:
        info = {"title": "Evolver", "version": "1"}
        paths: Json = {route.path: {} for route in self.app.routes if isinstance(route, Route)}
        return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})

    async def _tokenize(self, incoming: HttpRequest) -> Response:
        ids = await self._read(incoming, self._prompt)
        limit = self.engine.context
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def _detokenize(self, incoming: HttpRequest) -> Response:
        return JSONResponse({"prompt": await self._read(incoming, self._text_of)})

    # --- reading, in a thread ---------------------------------------------------------------------

    async def _read(self, incoming: HttpRequest, read: Callable[[Json], Result]) -> Result:
        """Return what `read` makes of the fields of the body."""
        try:
            body = await http.read_body(incoming.stream(), MAX_BODY)
        except http.BodyTooLarge as why:
            await http.drain(incoming.stream())  # else the client fails before it reads the answer
            raise Refused(str(why), 413) from None
        return await self._aside(lambda: read(fields_of(body, self.name)))

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _choices(
        self, kind: type[ChatRequest] | type[TextRequest], fields: Json
    ) -> tuple[Generation, list[Choice]]:
        request = parse(kind, fields)
        prompts = self._prompts(request)
        return request, request.choices(prompts, self.tokenizer, self.engine.context)

    def _prompt(self, fields: Json) -> list[int]:
        kind: type[ChatPrompt] | type[TextPrompt] = TextPrompt
        if "messages" in fields:
            kind = ChatPrompt
        request = parse(kind, fields)
        if isinstance(request, TextPrompt) and len(request.prompt) > 1:
            raise Refused(f"{len(request.prompt)} prompts; one at a time is encoded")
        return next(self._prompts(request))

    def _text_of(self, fields: Json) -> str:
        ids = parse(TokenIds, fields).tokens
        vocab = self.engine.shape.vocab
        if any(not 0 <= token < vocab for token in ids):
            raise Refused(f"tokens must be a list of token ids below {vocab}")
        return self.tokenizer.decode(ids)

    def _prompts(self, request: TextPrompt | ChatPrompt) -> Iterator[list[int]]:
        if self.system and isinstance(request, ChatPrompt) and request.messages[0].role != "system":
            request.messages.insert(0, self.system)
        vocab, context = self.engine.shape.vocab, self.engine.context
        return prompts_of(request, self.tokenizer, vocab=vocab, context=context)

    # --- generating -------------------------------------------------------------------------------

    async def _events(self, answers: Answers, choices: list[Choice]) -> AsyncIterator[str]:
        """Yield server-sent events: the pieces of all choices as they are generated, then the
        usage."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tasks = []
        for index, choice in enumerate(choices):
            task = asyncio.create_task(self._stream(answers, index, queue.put_nowait, choice))
            task.add_done_callback(queue.put_nowait)
            tasks.append(task)
        generated: list[Generated] = []
        try:
            while len(generated) < len(choices):
                item = await queue.get()
                if not isinstance(item, asyncio.Task):
                    yield _event(item)
                elif why := item.exception():
                    yield _event(error(str(why), "engine_error"))
                    return
                else:
                    generated.append(item.result())
            if answers.request.stream_options.include_usage:
                yield _event(answers.usage_event(generated))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(
        self, answers: Answers, index: int, put: Callable[[Json], None], choice: Choice
    ) -> Generated:
        """Put the events of one choice, and return the choice.

        Text from the possible start of a stop text on is held back until the generation ends, and
        all of it if the request has tools: what comes later may make it a thought or a tool call.
        """
        request = answers.request
        sent, tokens_sent, first = 0, 0, True
        async for generated in self._generate(request, choice):
            turn = answers.read(generated.text if generated.finish else "")
            text = turn.content
            if not generated.finish and not request.parses_tools:
                held = max(map(len, request.stop), default=1) - 1
                text = generated.text[: max(len(generated.text) - held, sent)]
            if text[sent:] or generated.tokens[tokens_sent:] or first:
                put(answers.event(index, generated, text[sent:], tokens_sent, first=first))
                sent, tokens_sent, first = max(sent, len(text)), len(generated.tokens), False
        put(answers.last_event(index, generated, turn))
        return generated

    async def _finished(self, answers: Answers, choice: Choice) -> Generated:
        """Generate one whole choice, with the scores of its prompt if requested."""
        request, (prompt, sampling) = answers.request, choice
        generated = Generated(prompt, self.engine.version, finish="length")
        if sampling.max_tokens:
            async for partial in self._generate(request, choice):
                generated = partial
        if request.scores_prompt:
            scores, _ = await asyncio.to_thread(self.score, prompt)  # at temperature 1, like vLLM
            generated.scores = [None, *scores]
        if request.top and generated.tokens:
            ids, temperature = prompt + generated.tokens, sampling.temperature or 1.0
            _, best = await asyncio.to_thread(self.score, ids, temperature, request.top)
            generated.top = best[len(prompt) - 1 : -1]
        return generated

    async def _generate(self, request: Generation, choice: Choice) -> AsyncIterator[Generated]:
        """Yield everything generated so far after each block; at the end it has a `finish`. A stop
        text ends the generation early."""
        prompt, sampling = choice
        blocks: asyncio.Queue[Any] = asyncio.Queue()
        session, schema = uuid.uuid4().hex, request.response_format.wanted
        guide = None if schema is None else await asyncio.to_thread(self._grammars.guide, schema)
        task = asyncio.ensure_future(
            self.engine.generate(
                prompt, sampling, session=session, guide=guide,
                stream=lambda *block: blocks.put_nowait(block),
            )
        )  # fmt: skip
        task.add_done_callback(blocks.put_nowait)
        generated = Generated(prompt, self.engine.version)
        try:
            while (block := await blocks.get()) is not task:
                generated.tokens += block[0]
                generated.logprobs += block[1]
                generated.text = self._text(generated.tokens, sampling)
                if self._cut(generated, request.stop):
                    yield generated
                    return
                # the last character may be incomplete
                generated.text = generated.text.rstrip("\ufffd")
                yield generated
            completion = task.result()
            generated.text = self._text(completion.tokens, sampling)
            generated.finish, generated.version = completion.stop, completion.version
            yield generated
        finally:
            task.cancel()
            await self.engine.release(session)

    def _text(self, tokens: list[int], sampling: Sampling) -> str:
        """Return the text of a generation without its stop token."""
        return self.tokenizer.decode(tokens[:-1] if tokens[-1] in sampling.stop_tokens else tokens)

    def _cut(self, generated: Generated, stops: list[str]) -> bool:
        """Cut at the first stop text: keep the text before it, and the tokens up to the one that
        completes it. Return True if there is a stop text."""
        text, count = generated.text, len(generated.tokens)
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if not found:
            return False
        at, stop = min(found)
        while self.tokenizer.decode(generated.tokens[: count - 1]).startswith(text[:at] + stop):
            count -= 1
        generated.tokens, generated.logprobs = generated.tokens[:count], generated.logprobs[:count]
        generated.text, generated.finish = text[:at], "stop"
        return True

    def score(
        self, ids: list[int], temperature: float = 1.0, top: int = 0
    ) -> tuple[list[float], list[dict[int, float]]]:
        """Return (log p(ids[i] | ids[:i]) for i >= 1, {token: log p} of the `top` most probable
        tokens after each of `ids`, best first), computed in float32."""
        # Padded to one of few widths, because each one is compiled.
        padding = (0, max(16, 1 << (len(ids) - 1).bit_length()) - len(ids))
        segments_T = np.pad(np.ones(len(ids), np.int32), padding)
        logp_T, best = _scored(
            self.engine.shape, self._params, np.pad(ids, padding)[None], segments_T[None],
            temperature, MAX_TOP if top else 0,
        )  # fmt: skip
        places = zip(*(np.asarray(array)[: len(ids), :top].tolist() for array in best))
        return np.asarray(logp_T)[: len(ids) - 1].tolist(), [dict(zip(*place)) for place in places]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _scored(
    shape: qwen.Config, params: Any, tokens_RT: Any, segments_RT: Any, temperature: Any, count: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return logp_T of each next token, and (id_TC, logp_TC) of the `count` most probable tokens at
    each place, () if count is 0. T is a power of two."""
    positions_RT = jnp.arange(tokens_RT.shape[1])[None]
    h_TD = qwen.merge(shape, params).hidden(tokens_RT, positions_RT, segments_RT)[0]
    head = qwen.unembed(shape, params)
    chunk = min(len(h_TD), CHUNK)
    h_CSD, next_T = h_TD.reshape(-1, chunk, shape.d_model), jnp.roll(tokens_RT[0], -1)
    logp_CS, _ = chunked_logp(
        h_CSD, head, next_T.reshape(-1, chunk), temperature, len(h_CSD), shape.unused
    )
    logp_T = logp_CS.reshape(-1)
    if not count:
        return logp_T, ()

    def best(h_D: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp_V = jax.nn.log_softmax(logits(h_D, head, temperature, shape.unused))
        logp_C, id_C = jax.lax.top_k(logp_V, min(count, shape.vocab - shape.unused))
        return id_C, logp_C

    return logp_T, jax.lax.map(best, h_TD, batch_size=16)  # never holds the logits of all places


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _health(incoming: HttpRequest) -> Response:
    return Response()


async def _no_route(incoming: HttpRequest, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    message = f"{incoming.method} {incoming.url.path}: {why.detail}"
    return JSONResponse(error(message), why.status_code, why.headers)


def metrics_text(stats: dict[str, float], answered: Counter[tuple[str, int]]) -> str:
    """Return counters in Prometheus's text format. stats: of the engine. answered: requests by
    route and status."""
    lines = []
    for name, value in sorted(stats.items()):
        kind = "gauge" if name in ("occupancy", "sessions", "version") else "counter"
        lines += [f"# TYPE evolver_engine_{name} {kind}", f"evolver_engine_{name} {value!r}"]
    lines.append("# TYPE evolver_requests counter")
    for (route, status), count in answered.items():
        lines.append(f'evolver_requests{{route="{route}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"


# --- starting -------------------------------------------------------------------------------------


def load(
    model: str | Path, *, slots: int, context: int, dtype: str
) -> tuple[JaxEngine, qwen.Params, Tokenizer]:
    """Return (engine, parameters, tokenizer) of a checkpoint. Raises OSError, ValueError,
    TokenizerError."""
    if not Path(model).is_dir():
        raise ValueError(f"--model={model} is not a directory")
    tokenizer = Tokenizer.load(model)
    format_of(tokenizer)  # raises ValueError for one that is nowhere
    shape, params = hf.load(model)
    shape = hf.for_tokenizer(shape, tokenizer)
    if context > shape.max_positions:
        raise ValueError(f"--context={context}: the model knows {shape.max_positions} positions")
    engine = JaxEngine(
        shape, params, slots=slots, context=context, dtype=jnp.dtype(dtype), threaded=True
    )
    return engine, params, tokenizer


def warm_up(engine: JaxEngine, say: Callable[[str], None]) -> int:
    """Compile the programs that requests need: for prompts of each length class, one alone and as
    many as there are slots. Say how far it is, and return the number of compiled shapes."""
    lengths = [n for n in (1, *(128 * 2**k for k in range(20))) if n < engine.context]
    began = time.monotonic()

    async def generate(session: int, length: int) -> None:
        prompt = [(7 * session + 31 * i + length) % engine.shape.vocab for i in range(length)]
        sampling = Sampling(min(40, engine.context - length))
        await engine.generate(prompt, sampling, session=f"warm {session}")

    async def compile_all() -> None:
        for number, length in enumerate(lengths, 1):
            past = f"{engine.stats()['compiles']:.0f} programs, {time.monotonic() - began:.0f} s"
            say(
                f"compiling for prompts of {length} tokens, {number} of {len(lengths)} lengths"
                f" ({past} so far)"
            )
            for count in (1, engine.slots):
                await asyncio.gather(*(generate(session, length) for session in range(count)))
                for session in range(count):
                    await engine.release(f"warm {session}")

    asyncio.run(compile_all())
    engine.clear_cache()
    return int(engine.stats()["compiles"])


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.engines.serve", description=__doc__.partition("\n\n")[0]
    )
    option = parser.add_argument
    option("--model", required=True, help="directory of a Hugging Face checkpoint with tokenizer")
    option("--name", default="policy", help="the model's name in requests")
    option("--host", default="127.0.0.1", help="0.0.0.0 to be reachable from other machines")
    option("--port", type=int, default=8000, help="0 takes a free port and prints it")
    option("--slots", type=int, default=32, help="sequences generated at a time")
    option("--context", type=int, default=2048, help="most tokens of prompt and answer together")
    option("--dtype", choices=("float32", "bfloat16"), default="float32",
           help="dtype of the computation")  # fmt: skip
    option("--warm-up", action=argparse.BooleanOptionalAction, default=True,
           help="compile before the first request comes")  # fmt: skip
    option("--key", default="", help="environment variable that holds the key clients must send")
    args = parser.parse_args(argv)
    key = os.environ.get(args.key, "")
    try:
        if args.key and not key:
            raise ValueError(f"--key={args.key}: this environment variable is not set")
        listener = http.listen(args.host, args.port)
        engine, params, tokenizer = load(
            args.model, slots=args.slots, context=args.context, dtype=args.dtype
        )
        system = chat.system_message(args.model)
    except (OSError, ValueError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    if args.host not in http.LOOPBACK and not key:
        print(
            "warning: anyone who can reach this port can use it as localhost; other names of this"
            " machine are refused without --key",
            file=sys.stderr,
        )
    service = Service(engine, params, tokenizer, name=args.name, key=key, system=system)
    say = functools.partial(print, f"{args.name}:", flush=True)
    if system:
        say(
            f"conversations without a system message get that of {chat.SYSTEM_FILE}, as in training"
        )
    if args.warm_up:
        say(f"compiled {warm_up(engine, say)} programs")
    say(f"running on http://{args.host}:{listener.getsockname()[1]}/v1")
    uvicorn.Server(server_config(service.app)).run(sockets=[listener])
    return 0
