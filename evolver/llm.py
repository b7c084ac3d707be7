"""One client for every chat role: explorer, writer, outcome judge, step judge, summariser, re-ranker; and embeddings.

Any OpenAI-compatible server will do. Answers are cached on disk by content, calls limited in number, rate and time,
retried by one policy, priced and booked; a spent budget and a server that stays down end the run with what is complete
saved. Keys are read from the environment when a call is made and reach no log, cache entry or workdir.

The client lives on a thread with an event loop of its own, so that one instance serves synchronous mechanisms (`ask`)
and coroutines of any loop (`await chat(...)`) alike. Needs httpx: requirements/llm.txt.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from evolver.llm_store import Budget, Cache, Ledger, Rate, Reply, read_json
from evolver.stop import RunEnds

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("chat models need httpx: pip install -r requirements/llm.txt", name="httpx") from error

RETRIABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LONGEST_RETRY_AFTER = 600.0  # seconds; a server that wants more is taken at its word once, and no longer
LOCAL = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}  # never through a proxy
Message = dict[str, Any]


class ChatError(RuntimeError):
    """A question that stays unanswered. `kind` is the word it is counted under; whoever asked abstains."""

    def __init__(self, kind: str, message: str, *, retriable: bool = False, after: float | None = None):
        super().__init__(message)
        self.kind, self.retriable, self.after = kind, retriable, after


class BudgetSpent(RunEnds):
    """The budget of money or tokens is used up."""


class ServerDown(RunEnds):
    """A server answers nobody: the key or the model is refused, or one question after the other fails."""


@dataclass(frozen=True)
class Role:
    """Who answers and how. `key` names the environment variable with the key ("" = none); `extra` are more fields of
    the request, as JSON."""

    url: str
    model: str
    key: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    extra: str = ""

    @property
    def server(self) -> str:
        return self.url.rstrip("/")

    def sampling(self, seed: int | None) -> dict[str, Any]:
        body = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        body |= {} if seed is None else {"seed": seed % 2**31}
        return body | (json.loads(self.extra) if self.extra else {})


@dataclass(frozen=True)
class Limits:
    """Bounds, the same for each server. Rates are per minute; 0 means unlimited. Times are in seconds."""

    concurrency: int = 32
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    deadline: float = 120.0  # of one attempt
    attempts: int = 6
    first_wait: float = 1.0  # doubles with each retry; what is waited is drawn from its upper half
    longest_wait: float = 60.0
    failures: int = 20  # questions given up in a row until the server counts as down
    budget_money: float = 0.0
    budget_tokens: int = 0


@dataclass(frozen=True)
class Question:
    """One call. `version` is that of the prompt; `seed` tells questions apart that are worded alike."""

    role: str
    messages: Sequence[Message]
    schema: dict[str, Any] | None = None
    version: str = ""
    seed: int | None = None


class _Server:
    """What is shared by all questions to one url."""

    def __init__(self, limits: Limits):
        self.slots = asyncio.Semaphore(limits.concurrency)
        self.requests, self.tokens = Rate(limits.requests_per_minute), Rate(limits.tokens_per_minute)
        self.quiet_until = 0.0  # it asked to be left alone until then (Retry-After)
        self.failed = 0  # questions given up in a row
        self.structured = True  # until it refuses a response_format


class Chat:
    """Every chat role of a run. `prices` maps a model to money per million (prompt tokens, completion tokens);
    `check` raises when the user wants the run to end; `say` shows a line, once per kind of failure."""

    def __init__(
        self,
        roles: dict[str, Role],
        *,
        limits: Limits = Limits(),
        prices: dict[str, Sequence[float]] | None = None,
        cache: str | os.PathLike | None = None,
        ledger: Ledger | None = None,
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ):
        self.roles, self.limits, self.prices = dict(roles), limits, dict(prices or {})
        self.cache, self.ledger = Cache(cache), ledger or Ledger()
        self.budget = Budget(limits.budget_money, limits.budget_tokens, self.ledger)
        self._check, self.say, self._said = check, say, set()
        self._servers = {role.server: _Server(limits) for role in self.roles.values()}
        self._pending: dict[str, asyncio.Task[Reply]] = {}  # equal questions asked at once cost one call
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=limits.concurrency)
        self._http = httpx.AsyncClient(timeout=None, limits=pool, mounts=LOCAL)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        role: str,
        schema: dict[str, Any] | None = None,
        version: str = "",
        seed: int | None = None,
    ) -> Reply:
        """Ask from any event loop. Raises ChatError, and RunEnds when the run cannot go on."""
        question = Question(role, messages, schema, version, seed)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(question), self._loop))

    def ask(self, questions: Sequence[Question]) -> list[Reply | ChatError]:
        """Ask all at once and wait. What stays unanswered is its ChatError. Raises RunEnds, and what `check` raises."""

        async def together() -> list[Any]:
            return await asyncio.gather(*map(self._answer, questions), return_exceptions=True)

        answers = self._wait(together())
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ChatError):
                raise answer
        return answers

    def embed(self, texts: Sequence[str], *, role: str = "embedder") -> list[list[float]]:
        """A vector per text, as the role's server gives them. Raises ChatError, RunEnds."""

        async def together() -> list[Any]:
            return await asyncio.gather(*(self._vector(role, text) for text in texts), return_exceptions=True)

        vectors = self._wait(together())
        for vector in vectors:
            if isinstance(vector, BaseException):
                raise vector
        return vectors

    def metrics(self) -> dict[str, float]:
        """See `Ledger.metrics`; and what could not be written to disk."""
        found = self.ledger.metrics()
        lost = {"cache": self.cache.unwritten, "ledger": self.ledger.unwritten}
        return found | {f"llm/unwritten/{name}": count for name, count in lost.items() if count}

    def close(self) -> None:
        """Abandon what is on its way and end the thread."""

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.aclose()

        if self._thread.is_alive():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    # --- before the run -----------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Whatever can be known before the run, in words: dead urls, unknown models, wrong keys, small contexts."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for name, role in self.roles.items():
            groups.setdefault((role.server, role.model, role.key), []).append(name)

        async def together() -> list[str]:
            return await asyncio.gather(*(self._problem(*server, names) for server, names in groups.items()))

        return [problem for problem in self._wait(together()) if problem]

    async def _problem(self, url: str, model: str, key: str, names: list[str]) -> str:
        who = f"config.llm: {url} ({', '.join(names)})"
        if key and not os.environ.get(key):
            return f"{who}: the environment variable {key} is not set; export {key}=... with the server's key"
        try:
            async with asyncio.timeout(min(20.0, self.limits.deadline)):
                answer = await self._http.get(f"{url}/models", headers=_headers(key))
            if answer.status_code in (401, 403):
                said = f"the key in {key} is refused" if key else "it wants a key; name its variable in config.llm.key"
                return f"{who}: {said} (HTTP {answer.status_code})"
            if answer.status_code != 200:
                return (
                    f"{who}: GET {url}/models answers HTTP {answer.status_code};"
                    " the url of an OpenAI-compatible server usually ends in /v1"
                )
            served = {entry["id"]: entry for entry in answer.json()["data"]}
        except ChatError as error:
            return f"{who}: {error}"
        except TimeoutError:
            return f"{who}: no answer within {min(20.0, self.limits.deadline):g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return f"{who}: no server can be reached there ({_redacted(f'{type(error).__name__}: {error}', key)})"
        except (ValueError, KeyError, TypeError):
            return f"{who}: what answers there is no OpenAI-compatible server"
        if model not in served:
            return f"{who}: there is no model {model!r}; it serves {', '.join(map(repr, list(served)[:8]))}"
        context, wanted = served[model].get("max_model_len"), max(self.roles[name].max_tokens for name in names)
        if isinstance(context, int) and context <= wanted:
            return f"{who}: its context of {context} tokens leaves no room for a prompt beside max_tokens={wanted}"
        return ""

    # --- one question -------------------------------------------------------------------------------------------------

    async def _answer(self, question: Question) -> Reply:
        spec = self.roles[question.role]
        body = {"model": spec.model, "messages": list(question.messages), **spec.sampling(question.seed)}
        content = {"body": body, "schema": question.schema, "version": question.version}
        record, hit = await self._once(question.role, content, self._chat_reply)
        reply = Reply(**record, cached=hit)
        if question.schema is not None:
            try:
                reply.parsed = read_json(reply.text, question.schema)
            except ValueError as why:
                cut = f", which was cut at max_tokens={spec.max_tokens}" if reply.finish == "length" else ""
                self.ledger.add("failure", question.role, spec.model, kind="unreadable")
                self.ledger.add("unanswered", question.role, spec.model)
                raise self._shown(question.role, ChatError("unreadable", f"{why}{cut}")) from None
        return reply

    async def _vector(self, role: str, text: str) -> list[float]:
        content = {"body": {"model": self.roles[role].model, "input": text}, "schema": None, "version": "embedding"}
        record, _ = await self._once(role, content, self._embedding)
        return record["vector"]

    async def _once(self, role: str, content: dict[str, Any], read: Callable) -> tuple[dict[str, Any], bool]:
        """The record of a question, from the cache, from an equal question on its way, or from the server."""
        record = self.cache.get(content)
        if record is not None and set(record) in ({"vector"}, {"text", "prompt_tokens", "completion_tokens", "finish"}):
            self.ledger.add("hit", role, self.roles[role].model)
            return record, True
        name = json.dumps(content, sort_keys=True)
        pending = self._pending.get(name)
        if pending is None:
            task = self._pending[name] = asyncio.ensure_future(self._ask(role, content, read))
            task.add_done_callback(lambda _: self._pending.pop(name, None))
            return await asyncio.shield(task), False
        record = await asyncio.shield(pending)
        self.ledger.add("hit", role, self.roles[role].model)
        return record, True

    async def _ask(self, role: str, content: dict[str, Any], read: Callable) -> dict[str, Any]:
        """The one retry policy: bounded attempts, doubling waits with jitter, Retry-After honoured by all."""
        spec, limits = self.roles[role], self.limits
        server, wait = self._servers[spec.server], limits.first_wait
        for attempt in range(1, limits.attempts + 1):
            try:
                record = await self._attempt(role, server, content, read)
            except ChatError as error:
                failure = error
            else:
                server.failed = 0
                if not self.cache.put(content, record):
                    self._tell("cache", f"the chat cache {self.cache.folder} cannot be written; going on without it")
                return record
            self.ledger.add("failure", role, spec.model, kind=failure.kind)
            if not failure.retriable or attempt == limits.attempts:
                break
            pause = wait * random.uniform(0.5, 1.0)
            if failure.after is not None:
                pause = min(failure.after, LONGEST_RETRY_AFTER) + wait * random.uniform(0.0, 0.1)
                server.quiet_until = max(server.quiet_until, time.monotonic() + pause)
            await asyncio.sleep(pause)
            wait = min(2 * wait, limits.longest_wait)
        self.ledger.add("unanswered", role, spec.model)
        server.failed += failure.kind != "context"  # that is the question's fault alone
        if failure.kind in ("key", "model") or server.failed >= limits.failures:
            times = f"{server.failed} questions in a row failed, the last with: " if server.failed > 1 else ""
            raise ServerDown(f"{role} at {spec.server}: {times}{failure}") from None
        raise self._shown(role, failure)

    async def _attempt(self, role: str, server: _Server, content: dict[str, Any], read: Callable) -> dict[str, Any]:
        spec, body = self.roles[role], content["body"]
        prompt = len(json.dumps(body)) / 4
        rates = self.prices.get(spec.model, (0.0, 0.0))
        most = body.get("max_tokens", 0)
        async with server.slots:
            while (left := server.quiet_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            await server.requests.take(1)
            await server.tokens.take(prompt + most)
            async with self.budget.reserve((prompt * rates[0] + most * rates[1]) / 1e6, prompt + most, BudgetSpent):
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self.limits.deadline):
                        record, usage = await read(spec, server, body, content["schema"])
                except TimeoutError:
                    what = f"no answer within {self.limits.deadline:g} s (config.llm.deadline)"
                    raise ChatError("timeout", what, retriable=True) from None
                except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                    what = _redacted(f"{type(error).__name__}: {error}", spec.key)
                    raise ChatError("connection", what, retriable=True) from None
                used = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
                server.tokens.give_back(prompt + most - sum(used))
                money = (used[0] * rates[0] + used[1] * rates[1]) / 1e6
                figures = {"money": money, "seconds": time.monotonic() - began}
                self.ledger.add("call", role, spec.model, prompt_tokens=used[0], completion_tokens=used[1], **figures)
        return record

    async def _chat_reply(self, spec: Role, server: _Server, body: dict[str, Any], schema: Any) -> tuple[dict, dict]:
        if schema is not None and server.structured:
            wanted = {"name": "answer", "schema": schema}
            structured = {**body, "response_format": {"type": "json_schema", "json_schema": wanted}}
            try:
                return _completion(await self._post(spec, "chat/completions", structured))
            except ChatError as error:
                if error.kind != "request":
                    raise
                reply = _completion(await self._post(spec, "chat/completions", body))  # it was not the question's fault
                server.structured = False
                return reply
        return _completion(await self._post(spec, "chat/completions", body))

    async def _embedding(self, spec: Role, server: _Server, body: dict[str, Any], schema: Any) -> tuple[dict, dict]:
        record = await self._post(spec, "embeddings", body)
        try:
            vector = [float(x) for x in record["data"][0]["embedding"]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ChatError("bad_json", "what the server answered holds no embedding", retriable=True) from None
        return {"vector": vector}, record.get("usage")

    async def _post(self, spec: Role, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(f"{spec.server}/{route}", json=body, headers=_headers(spec.key))
        if answer.status_code != 200:
            raise _refusal(answer, spec.key)
        try:
            record = answer.json()
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ChatError("bad_json", "what the server answered is no JSON object, or was cut", retriable=True)
        return record

    # --- the thread and the user --------------------------------------------------------------------------------------

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine on the client's loop, looking now and then whether the user wants to end."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=0.2).done:
                self._check()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _shown(self, role: str, error: ChatError) -> ChatError:
        spec = self.roles[role]
        text = f"{role} ({spec.model} at {spec.server}): {error}"
        self._tell(f"{role} {error.kind}", f"{text}. Counted as llm/{role}/unanswered; said once")
        return ChatError(error.kind, text)

    def _tell(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(text)


def _completion(record: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What is kept of a chat completion, and its usage. Raises ChatError for anything else."""
    usage = record.get("usage")
    try:
        choice = record["choices"][0]
        text, finish = choice["message"].get("content") or "", str(choice.get("finish_reason") or "stop")
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ChatError("bad_json", "what the server answered is no chat completion", retriable=True) from None
    used = {name: _count(usage, name) for name in ("prompt_tokens", "completion_tokens")}
    return {"text": text, "finish": finish, **used}, usage


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else 0
    return count if isinstance(count, int) and count >= 0 else 0


def _refusal(answer: httpx.Response, key: str) -> ChatError:
    """What an answer other than 200 means: its kind, whether it is worth another try, and when."""
    status, text = answer.status_code, _redacted(answer.text[:300], key)
    said = f"HTTP {status}: {text}"
    if status in (401, 403):
        return ChatError("key", f"the key{f' in {key}' if key else ''} is refused ({said})")
    if status == 404:
        return ChatError("model", f"the server knows no such model or route ({said})")
    if status in RETRIABLE:
        return ChatError(f"http_{status}", said, retriable=True, after=_seconds(answer.headers.get("retry-after")))
    long = any(words in text.lower() for words in ("context length", "context_length", "maximum context", "too long"))
    return ChatError("context" if long or status == 413 else "request", said)


def _headers(key: str) -> dict[str, str]:
    value = os.environ.get(key, "").strip() if key else ""
    if not (value.isascii() and value.isprintable()):
        raise ChatError("key", f"the environment variable {key} holds characters that no key has")
    return {"Authorization": f"Bearer {value}"} if value else {}


def _redacted(text: str, key: str) -> str:
    """Servers like to quote the key that they refuse."""
    value = os.environ.get(key, "").strip() if key else ""
    return text.replace(value, f"<{key}>") if value else text


def _seconds(text: str | None) -> float | None:
    """A Retry-After header in seconds, also from its form as a date; None where there is none that can be read."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def url_problem(url: str) -> str:
    """What is wrong with a server's url, "" if nothing is."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        return "holds a user or a password; a key belongs into an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is no url such as http://127.0.0.1:8000/v1"
    return ""
