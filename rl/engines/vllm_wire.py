"""One server over HTTP: token ids in, token ids and log-probabilities out, and what can go wrong on the way.

Two ways of asking, whichever the server's /openapi.json has: vLLM's `/inference/v1/generate`, whose answers name the
version of the weights behind every token, and `/v1/completions` of any OpenAI-compatible server that returns token ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rl.engines import ContextFull, EngineFault
from rl.trajectory import Sampling

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
CONTROL_SECONDS = 1800.0


class ServerGone(Exception):
    """No answer, or none to be expected: the server is dead, or hangs."""


class ServerBusy(Exception):
    """It answered that it could not (429, 5xx); `after` seconds are what it asks for."""

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


@dataclass
class Part:
    """What one request brought: `stop` is "stop", "length" or "abort" (cut by a weight update)."""

    tokens: list[int]
    logprobs: list[float]
    stop: str
    version: int | None  # of the oldest weights behind these tokens; None = the server does not say
    cached: int = 0  # prompt tokens that were in its prefix cache


class Server:
    """Requests to one server.

    url: with or without a trailing /v1. model: the name it serves the policy under. key: sent as a bearer token.
    """

    def __init__(self, url: str, model: str, key: str = ""):
        import httpx

        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # An idle connection is given up before the server does that (after 5 s), or a request may meet its end.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=None)
        self.paths: set[str] = {COMPLETIONS}

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, method: str, path: str, *, timeout: float | None, **content: Any) -> Any:
        """The JSON of an answer. Raises ServerGone, ServerBusy, and ValueError for what the server refuses."""
        import httpx

        try:
            limit = httpx.Timeout(timeout, connect=10.0)
            response = await self.http.request(method, path, timeout=limit, **content)
        except (httpx.HTTPError, OSError) as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None
        if response.status_code == 429 or response.status_code >= 500:
            words = message_of(response)
            if "EngineDead" in words or "EngineCore encountered" in words:
                raise ServerGone(f"{self.url}: its engine died: {words}")
            raise ServerBusy(f"{self.url}{path}: {response.status_code} {words}", retry_after(response))
        if response.status_code >= 400:
            raise ValueError(f"{self.url}{path}: {response.status_code} {message_of(response)}")
        try:
            return response.json() if response.content else {}
        except ValueError:
            raise ServerBusy(f"{self.url}{path}: the answer is not JSON: {response.text[:80]!r}") from None

    async def post(self, path: str, body: dict[str, Any] | None = None, **content: Any) -> Any:
        """A request to the server itself, of a weight update: it may wait for what is in flight."""
        return await self.ask("POST", path, timeout=CONTROL_SECONDS, json=body or {}, **content)

    async def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it says so within `timeout` seconds."""
        try:
            await self.ask("GET", "/health", timeout=timeout)
        except (ServerGone, ServerBusy, ValueError):
            return False
        return True

    async def generate(self, prompt: list[int], sampling: Sampling, *, timeout: float | None = None) -> Part:
        """Sample once. Raises ServerGone, ServerBusy, ContextFull, EngineFault (an answer that cannot be used)."""
        ways = GENERATE if GENERATE in self.paths else COMPLETIONS
        try:
            answer = await self.ask("POST", ways, timeout=timeout, json=request_of(ways, self.model, prompt, sampling))
        except ValueError as error:
            words = str(error)
            if "context" in words or "max_model_len" in words or "maximum model length" in words:
                raise ContextFull(words) from None
            raise EngineFault(words) from None
        try:
            return part_of(ways, answer, sampling)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise EngineFault(
                f"{self.url}{ways}: an answer without token ids or log-probabilities ({reason})"
            ) from None

    async def score(self, ids: list[int], *, timeout: float | None = 60.0) -> list[float]:
        """log p(ids[i] | ids[:i]) for i >= 1, at temperature 1. Raises as `generate`."""
        ways = GENERATE if GENERATE in self.paths else COMPLETIONS
        body = request_of(ways, self.model, ids, Sampling(max_tokens=1, temperature=0.0))
        place = body["sampling_params"] if ways == GENERATE else body
        place["prompt_logprobs"] = 0
        try:
            answer = await self.ask("POST", ways, timeout=timeout, json=body)
            rows = answer["prompt_logprobs"] if ways == GENERATE else answer["choices"][0]["prompt_logprobs"]
            return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]
        except ValueError as error:
            raise EngineFault(str(error)) from None
        except (KeyError, IndexError, TypeError) as error:
            raise EngineFault(f"{self.url}{ways} does not score prompts ({type(error).__name__}: {error})") from None


def request_of(path: str, model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """The body that asks for one sample, of either endpoint."""
    wanted: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,  # the stop tokens are ours to choose, not those of a generation_config.json
        "logprobs": 0,  # that of the sampled token alone
    }
    if path == GENERATE:
        return {"model": model, "token_ids": prompt, "sampling_params": wanted | {"detokenize": False}}
    return {"model": model, "prompt": prompt, "return_token_ids": True} | wanted


def part_of(path: str, answer: dict[str, Any], sampling: Sampling) -> Part:
    """The sample in an answer. KeyError, IndexError, TypeError or ValueError for one that cannot be used."""
    choice = answer["choices"][0]
    tokens, version = [int(token) for token in choice["token_ids"]], None
    if path == GENERATE:
        rows = choice["logprobs"]["content"]
        logprobs = [float(row["logprob"]) for row in rows]
        if [row["token_id"] for row in rows] != tokens:
            raise ValueError("the log-probabilities are not those of the tokens")
        spans = [span["version"] for span in choice.get("weight_versions") or ()]
        if spans and all(name.isdigit() for name in spans):
            version = min(int(name) for name in spans)
        elif spans:
            version = -1  # weights that nobody gave it: those it was started with
    else:
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(tokens) != len(logprobs) or not all(math.isfinite(value) for value in logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, or one that is not finite")
    if len(tokens) > sampling.max_tokens:
        raise ValueError(f"{len(tokens)} tokens, asked for at most {sampling.max_tokens}")
    stop = choice["finish_reason"]
    if stop not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {stop!r}")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Part(tokens, logprobs, stop, version, int(details.get("cached_tokens") or 0))


def message_of(response: Any) -> str:
    """What an error answer says, in a line."""
    try:
        found = response.json()
        found = found.get("error", found.get("detail", found))
        text = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]


def retry_after(response: Any) -> float:
    """Seconds that the server asks to wait; 0 where it does not say."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
