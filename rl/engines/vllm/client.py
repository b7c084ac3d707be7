"""HTTP client of one server: token ids in, token ids and log-probabilities out.

It uses one of two endpoints, depending on the server's /openapi.json: vLLM's
`/inference/v1/generate`, which reports the weight version behind every token, or `/v1/completions`
of an OpenAI-compatible server that returns token ids.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import httpx

from envs.http import bearer, retry_after
from envs.values import Json
from rl.engines import ContextFull, EngineFault, RequestFault
from rl.trajectory import Sampling

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
# timeout of a weight-update request, which may wait for requests in flight
CONTROL_SECONDS = 1800.0


class Schemas:
    """Stands for `rl.engines.grammar.Grammars` where servers hold answers to schemas: a guide is
    the schema itself."""

    def guide(self, schema: Json) -> Json:
        return schema


class ServerGone(Exception):
    """The server does not answer: it is dead, hangs or is unreachable."""

    after = 0.0  # as of ServerBusy


class ServerBusy(Exception):
    """The server refused for now (429, 5xx). after: seconds to wait, from Retry-After; 0 if it sent
    none."""

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


@dataclass
class Part:
    """The result of one request. stop: "stop", "length" or "abort" (cut by a weight update)."""

    tokens: list[int]
    logprobs: list[float]
    stop: str
    # of the oldest weights that sampled these tokens; -1 = unknown weights, None = not reported
    version: int | None
    cached: int  # prompt tokens found in the server's prefix cache


class Server:
    """Client of one server.

    url: with or without a trailing /v1. model: the policy's name on the server. key: sent as a
    bearer token.
    """

    def __init__(self, url: str, model: str, key: str = ""):
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        # Drop idle connections before the server does (after 5 s): otherwise a request may hit a
        # closing connection.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0
        )
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=bearer(key), limits=limits, timeout=None
        )
        self.paths: set[str] = {COMPLETIONS}
        self.never = range(0)  # tokens that no answer may have

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, method: str, path: str, *, timeout: float | None, **content: Any) -> Any:
        """Send a request; return the JSON of the answer. Raises ServerGone, ServerBusy, ValueError
        (4xx answers)."""
        try:
            limit = httpx.Timeout(timeout, connect=10.0)
            response = await self.http.request(method, path, timeout=limit, **content)
        except (httpx.HTTPError, OSError) as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None
        status = response.status_code
        if status >= 400:
            message = message_of(response)
            reason = f"{self.url}{path}: {status} {message}"
            if status < 500 and status != 429:
                raise ValueError(reason)
            if re.search("EngineDead|EngineCore encountered", message):
                raise ServerGone(f"{self.url}: its engine died: {message}")
            raise ServerBusy(reason, retry_after(response.headers.get("retry-after")) or 0.0)
        try:
            return response.json() if response.content else {}
        except (ValueError, RecursionError):
            raise ServerBusy(
                f"{self.url}{path}: the answer is not JSON: {response.text[:80]!r}"
            ) from None

    async def post(self, path: str, body: Json | None = None, **content: Any) -> Any:
        """Send a request of a weight update."""
        return await self.ask("POST", path, timeout=CONTROL_SECONDS, json=body or {}, **content)

    async def healthy(self, timeout: float) -> bool:
        """Return True if /health answers within `timeout` seconds."""
        try:
            await self.ask("GET", "/health", timeout=timeout)
        except (ServerGone, ServerBusy, ValueError):
            return False
        return True

    @property
    def sampling_path(self) -> str:
        """The endpoint that samples: vLLM's own if the server has it."""
        return GENERATE if GENERATE in self.paths else COMPLETIONS

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        schema: Json | None = None,
        timeout: float | None = None,
    ) -> Part:
        """Sample once. Raises ServerGone, ServerBusy, ContextFull, EngineFault (unusable answer),
        and RequestFault if the server refuses a request with a schema."""
        path = self.sampling_path
        options = {}
        if self.never:
            bias = dict.fromkeys(map(str, self.never), -100.0)  # the lowest that vLLM accepts
            options["logit_bias"] = bias
        body = request_of(path, self.model, prompt, sampling, schema, **options)
        try:
            answer = await self.ask("POST", path, timeout=timeout, json=body)
        except ValueError as error:
            message = str(error)
            if re.search("context|max_model_len|maximum model length", message):
                raise ContextFull(message) from None
            if schema is not None:
                raise RequestFault(message) from None
            raise EngineFault(message) from None
        try:
            return part_of(path, answer, sampling)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineFault(
                f"{self.url}{path}: an answer without token ids or log-probabilities"
                f" ({type(error).__name__}: {error})"
            ) from None

    async def score(self, ids: list[int]) -> list[float]:
        """Return log p(ids[i] | ids[:i]) for i >= 1 at temperature 1. Raises the same errors as
        `generate`."""
        path = self.sampling_path
        greedy = Sampling(max_tokens=1, temperature=0.0)
        body = request_of(path, self.model, ids, greedy, prompt_logprobs=0)
        try:
            answer = await self.ask("POST", path, timeout=60.0, json=body)
            scored = answer if path == GENERATE else answer["choices"][0]
            rows = zip(ids, scored["prompt_logprobs"], strict=True)
            return [float(row[str(token)]["logprob"]) for token, row in list(rows)[1:]]
        except ValueError as error:
            raise EngineFault(str(error)) from None
        except (LookupError, TypeError) as error:
            raise EngineFault(
                f"{self.url}{path} does not score prompts ({type(error).__name__}: {error})"
            ) from None


def request_of(
    path: str,
    model: str,
    prompt: list[int],
    sampling: Sampling,
    schema: Json | None = None,
    **more: Any,
) -> Json:
    """Return the body of a request for one sample, which follows a JSON schema, in the format of
    the endpoint `path`. more: options of the sampling."""
    options: Json = more | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,  # only our stop tokens count, not those of generation_config.json
        "logprobs": 0,  # of the sampled token only
        # A server takes what is not given from generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if schema is not None:
        options["ignore_eos"] = False  # the end of the text is the only token that may follow it
        if path == GENERATE:
            options["structured_outputs"] = {"json": schema}
        else:
            named = {"name": "answer", "schema": schema}
            options["response_format"] = {"type": "json_schema", "json_schema": named}
    if path == COMPLETIONS:
        return options | {"model": model, "prompt": prompt, "return_token_ids": True}
    options["detokenize"] = False
    return {"model": model, "token_ids": prompt, "sampling_params": options}


def part_of(path: str, answer: Json, sampling: Sampling) -> Part:
    """Return the sample in an answer. Raises LookupError, TypeError or ValueError for an unusable
    answer."""
    choice = answer["choices"][0]
    tokens, version = [int(token) for token in choice["token_ids"]], None
    if path == GENERATE:
        rows = choice["logprobs"]["content"]
        logprobs = [float(row["logprob"]) for row in rows]
        if [row["token_id"] for row in rows] != tokens:
            raise ValueError("the log-probabilities belong to other tokens")
        versions = [span["version"] for span in choice.get("weight_versions") or ()]
        if versions:
            # Other names are of weights that this run did not send, such as the initial ones.
            version = min(int(name) if name.isdigit() else -1 for name in versions)
    else:
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(tokens) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        raise ValueError(
            f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, or one that is not finite"
        )
    if len(tokens) > sampling.max_tokens:
        raise ValueError(f"{len(tokens)} tokens, {sampling.max_tokens} requested")
    stop = choice["finish_reason"]
    if stop not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish_reason {stop!r}")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Part(tokens, logprobs, stop, version, int(details.get("cached_tokens") or 0))


def message_of(response: httpx.Response) -> str:
    """Return the message of an error answer, on one line."""
    try:
        body = response.json()
        error = body.get("error", body.get("detail", body))
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:300]
