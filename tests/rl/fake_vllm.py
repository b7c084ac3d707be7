"""A server with vLLM's endpoints and no model: answers depend on the prompt, the seed and one
weight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rl.engines.vllm.client import COMPLETIONS, GENERATE
from rl.engines.vllm.transfer import SLEEP, UPDATE, WAKE
from tests.rl.served import started

VOCAB, CONTEXT = 50, 128


def token_of(seed: int, position: int) -> int:
    """Return the sampled token."""
    return (seed * 7 + position * 11) % VOCAB


def logp_of(token: int, position: int, weight: float) -> float:
    """Return the log-probability of a token under a model with this weight."""
    return -1.0 - ((token * 3 + position) % 7) / 10 - weight


def _error(message: str, status: int = 400, headers: dict | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


@dataclass
class Fake:
    """One server in its own thread; the options simulate faults."""

    paths: tuple[str, ...] = (GENERATE, COMPLETIONS, *UPDATE, SLEEP, WAKE)
    model: str = "policy"
    context: int = CONTEXT
    vocab: int = VOCAB
    secret: str = ""  # the key that it requires
    seconds: float = 0.0  # duration of a request
    refuse: list[int] = field(default_factory=list)  # statuses of the first answers
    deaf: bool = False  # accepts weights and does not use them
    silent: bool = False  # does not answer
    fails: str = ""  # the path that it answers with an error
    strip: tuple[str, ...] = ()  # fields missing in a choice
    raw: bool = False  # log-probabilities before the temperature
    weight: float = 0.0
    version: str = "default"
    asked: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    options: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self._staged, self._paused, self._cut = 0.0, False, asyncio.Event()
        self.asleep: set[str] = set()  # tags of the memory that it has freed
        self.waits = 0  # requests that came while it was paused or asleep
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        options = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 1}
        self.url, self._server, self._thread = started(Starlette(routes=routes), **options)

    def die(self) -> None:
        """Stop listening and drop every connection."""
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> JSONResponse:
        path = "/" + request.path_params["path"]
        self.asked.append(path)
        while self.silent:
            await asyncio.sleep(0.05)
        if self.secret and request.headers.get("authorization") != f"Bearer {self.secret}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if path in (GENERATE, COMPLETIONS) and self.refuse:
            return _error("not now", self.refuse.pop(0), {"retry-after": "0.01"})
        body = await request.json() if request.method == "POST" and await request.body() else {}
        if path == "/openapi.json":
            return JSONResponse({"paths": {path: {} for path in self.paths}})
        if path == "/v1/models":
            return JSONResponse({"data": [{"id": self.model, "max_model_len": self.context}]})
        if path in (GENERATE, COMPLETIONS) and path in self.paths:
            self.options.append(body.get("sampling_params", body))
            return await self._sample(path, body)
        if path == self.fails:
            return _error("it does not work", 500)
        if path in (SLEEP, WAKE):
            self._sleep(path, request.query_params)
        if path in UPDATE:
            if "weights" in self.asleep and path.endswith(("_update", "_weights")):
                return _error("an illegal memory access was encountered", 500)
            self._control(path, body, request.query_params)
        return JSONResponse({})

    def _sleep(self, path: str, query) -> None:
        """As vLLM: it stops until all of its memory is back, and level 2 loses the weights."""
        if path == SLEEP:
            self._paused, self.asleep = True, {"weights", "kv_cache"}
            if query["level"] == "2":
                self.weight = self._staged = float("nan")
        else:
            self.asleep -= set(query.getlist("tags") or self.asleep)
            self._paused = bool(self.asleep)

    def _control(self, path: str, body: dict, query) -> None:
        if path == "/pause":
            self._paused = True
            if query["mode"] == "abort":
                self._cut.set()
        elif path == "/resume":
            assert not self.asleep, "it would sample without a cache"
            self._paused = False
            self._cut.clear()
        elif path == "/update_weights":
            info = body["update_info"]
            if "model.norm.weight" in info["names"]:
                offset = info["offsets"][info["names"].index("model.norm.weight")]
                self._staged = float(np.fromfile(info["path"], np.float32, 1, offset=offset)[0])
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
            if not self.deaf:
                self.weight = self._staged

    async def _sample(self, path: str, body: dict) -> JSONResponse:
        prompt, wanted = body["token_ids" if path == GENERATE else "prompt"], self.options[-1]
        if body["model"] != self.model:
            return _error(f"The model `{body['model']}` does not exist.", 404)
        if "robot" in str(wanted.get("structured_outputs") or wanted.get("response_format")):
            return _error("unknown type robot")
        if max(prompt) >= self.vocab:
            return _error(f"Token id {max(prompt)} is out of vocabulary")
        self.prompts.append(prompt)
        self.waits += self._paused
        while self._paused:
            await asyncio.sleep(0.01)
        version, weight = self.version, self.weight  # an update may come while it samples
        count, reason = wanted["max_tokens"], "length"
        try:
            async with asyncio.timeout(self.seconds or 1e-3):
                await self._cut.wait()
            count, reason = count // 2, "abort"
        except TimeoutError:
            pass
        tokens = [token_of(wanted["seed"], len(prompt) + i) for i in range(count)]
        for i, token in enumerate(tokens):
            if token in wanted["stop_token_ids"]:
                tokens, reason = tokens[: i + 1], "stop"
                break
        warm = 0.0 if self.raw or wanted["temperature"] in (0, 1) else 0.5
        logprobs = [logp_of(t, i, weight) - warm for i, t in enumerate(tokens, len(prompt))]
        rows = [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, logprobs)]
        scores = [{str(t): {"logprob": logp_of(t, i, self.weight)}} for i, t in enumerate(prompt)]
        scores[0] = None
        choice = {
            "finish_reason": reason, "token_ids": tokens, "prompt_logprobs": scores,
            "logprobs": {"content": rows} if path == GENERATE else {"token_logprobs": logprobs},
        }  # fmt: skip
        if path == GENERATE:
            choice["weight_versions"] = [{"version": version, "start": 0, "end": len(tokens)}]
        choice = {name: value for name, value in choice.items() if name not in self.strip}
        return JSONResponse({"choices": [choice], "prompt_logprobs": scores, "usage": {}})
