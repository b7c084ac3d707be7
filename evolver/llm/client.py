"""One client for every language-model role: explorer, writer, judges, summariser, re-ranker and embedder.

Works with any OpenAI-compatible server. Answers are cached on disk by content. Calls are limited in number, rate and
time, retried by one policy, priced and recorded in a ledger. The run ends, with everything complete saved, when its
budget is spent or a server stays down. Keys are read from the environment for each call and written nowhere.

The client has an event loop on its own thread, so synchronous mechanisms (`ask`) and coroutines of any event loop
(`await chat(...)`) can share it. Only creating a Chat needs httpx (requirements/llm.txt), not importing this module.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from envs.http import bearer, retry_after
from evolver.llm.answers import read_json
from evolver.llm.store import Budget, Cache, Ledger, Rate, Reply
from evolver.stop import RunEnds

RETRIABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # HTTP statuses
LONGEST_RETRY_AFTER = 600.0  # seconds; longer Retry-After values are cut to this
NO_PROXY = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
Message = dict[str, Any]


class ChatError(RuntimeError):
    """A question without an answer, counted under `kind`. `after` holds the seconds of a Retry-After header."""

    def __init__(self, kind: str, message: str, *, retriable: bool = False, after: float | None = None):
        super().__init__(message)
        self.kind, self.retriable, self.after = kind, retriable, after


class BudgetSpent(RunEnds):
    """The budget of money or tokens is used up."""


class ServerDown(RunEnds):
    """A server refuses the key or the model, or too many questions in a row have failed."""


@dataclass(frozen=True)
class Role:
    """The server, model and sampling of one role.

    key: the environment variable that holds the key; "" = none. extra: more fields of the request, as a JSON object.
    """

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
        """Return the sampling fields of a request."""
        body = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        body |= {} if seed is None else {"seed": seed % 2**31}
        return body | (json.loads(self.extra) if self.extra else {})


@dataclass(frozen=True)
class Limits:
    """Limits of each server, and the budget of the run. Times are in seconds; 0 = no limit for rates and budgets."""

    concurrency: int = 32
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    deadline: float = 120.0  # of one request
    attempts: int = 6
    first_wait: float = 1.0  # doubles with each retry; the actual wait is uniform between half of it and all of it
    longest_wait: float = 60.0
    failures: int = 20  # consecutive unanswered questions after which the server counts as down
    budget_money: float = 0.0
    budget_tokens: int = 0


@dataclass(frozen=True)
class Question:
    """One call. `version` is that of the prompt; `seed` distinguishes questions with the same wording."""

    role: str
    messages: Sequence[Message]
    schema: dict[str, Any] | None = None
    version: str = ""
    seed: int | None = None


class _Server:
    """State shared by all questions to one url."""

    def __init__(self, limits: Limits):
        self.slots = asyncio.Semaphore(limits.concurrency)
        self.requests, self.tokens = Rate(limits.requests_per_minute), Rate(limits.tokens_per_minute)
        self.paused_until = 0.0  # set by Retry-After, on the monotonic clock
        self.failed = 0  # consecutive unanswered questions
        self.structured = True  # until it refuses a response_format


class Chat:
    """The client of all language-model roles of a run.

    prices: {model: money per million (prompt tokens, completion tokens)}. check: called while waiting; raises if the
    user wants the run to end. say: shows one line to the user, once per kind of failure.
    """

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
        try:
            import httpx
        except ModuleNotFoundError as error:
            words = "language models need httpx: pip install -r requirements/llm.txt"
            raise ModuleNotFoundError(words, name="httpx") from error
        self.roles, self.limits, self.prices = dict(roles), limits, dict(prices or {})
        self.cache, self.ledger = Cache(cache), ledger or Ledger()
        self.budget = Budget(limits.budget_money, limits.budget_tokens, self.ledger)
        self._check, self.say, self._said = check, say, set()
        self._servers = {role.server: _Server(limits) for role in self.roles.values()}
        self._pending: dict[str, asyncio.Task[dict[str, Any]]] = {}  # equal concurrent questions share one call
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=limits.concurrency)
        self._http = httpx.AsyncClient(timeout=None, limits=pool, mounts=NO_PROXY)
        self._connection_errors = (httpx.HTTPError, httpx.InvalidURL, OSError)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def __call__(self, messages: Sequence[Message], *, role: str, **options: Any) -> Reply:
        """Ask one Question, with its further fields as options, from any event loop. Raises ChatError and RunEnds."""
        answer = self._answer(Question(role, messages, **options))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def ask(self, questions: Sequence[Question]) -> list[Reply | ChatError]:
        """Ask all questions concurrently. Return their answers, in order: a Reply or a ChatError each.

        Raises RunEnds, and what `check` raises.
        """
        return self._together([self._answer(question) for question in questions], kept=ChatError)

    def embed(self, texts: Sequence[str], *, role: str = "embedder") -> list[list[float]]:
        """Return one vector per text, as the role's server gives it. Raises ChatError and RunEnds."""
        return self._together([self._vector(role, text) for text in texts])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the ledger (see `Ledger.metrics`) and counts of failed writes."""
        unwritten = {"cache": self.cache.unwritten, "ledger": self.ledger.unwritten}
        return self.ledger.metrics() | {f"llm/unwritten/{name}": count for name, count in unwritten.items() if count}

    def close(self) -> None:
        """Cancel the calls in flight and end the thread."""

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
        """Return what is wrong with the servers: unreachable urls, unknown models, refused keys, small contexts."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for name, role in self.roles.items():
            groups.setdefault((role.server, role.model, role.key), []).append(name)
        return [problem for problem in self._together([self._problem(names) for names in groups.values()]) if problem]

    async def _problem(self, names: list[str]) -> str:
        """Return what is wrong with the server of these roles, which share url, model and key; "" if nothing is."""
        role, url = self.roles[names[0]], self.roles[names[0]].server
        who = f"config.llm: {url} ({', '.join(names)})"
        if role.key and not os.environ.get(role.key):
            return f"{who}: the environment variable {role.key} is not set; export {role.key}=... with the server's key"
        try:
            answer = await self._request("GET", role, "models", most=20.0)
        except ChatError as error:
            return f"{who}: {'the server cannot be reached: ' if error.kind == 'connection' else ''}{error}"
        status = f"(HTTP {answer.status_code})"
        if answer.status_code in (401, 403):
            required = "the server requires a key; name its environment variable in config.llm.key"
            return f"{who}: {f'the key in {role.key} is refused' if role.key else required} {status}"
        if answer.status_code != 200:
            hint = "the url of an OpenAI-compatible server usually ends in /v1"
            return f"{who}: GET {url}/models answers HTTP {answer.status_code}; {hint}"
        try:
            served = {entry["id"]: entry for entry in answer.json()["data"]}
        except (ValueError, KeyError, TypeError):
            return f"{who}: the server is not OpenAI-compatible: its answer to GET {url}/models lists no models"
        if role.model not in served:
            return f"{who}: there is no model {role.model!r}; it serves {', '.join(map(repr, list(served)[:8]))}"
        context, needed = served[role.model].get("max_model_len"), max(self.roles[name].max_tokens for name in names)
        if isinstance(context, int) and context <= needed:
            return f"{who}: the context of {context} tokens leaves no room for a prompt with max_tokens={needed}"
        return ""

    # --- one question -------------------------------------------------------------------------------------------------

    async def _answer(self, question: Question) -> Reply:
        role = self.roles[question.role]
        body = {"model": role.model, "messages": list(question.messages), **role.sampling(question.seed)}
        content = {"body": body, "schema": question.schema, "version": question.version}
        record, hit = await self._once(question.role, content, self._completion)
        reply = Reply(**record, cached=hit)
        if question.schema is not None:
            try:
                reply.parsed = read_json(reply.text, question.schema)
            except ValueError as problem:
                cut = f"; the answer was cut at max_tokens={role.max_tokens}" if reply.finish == "length" else ""
                self.ledger.add("failure", question.role, role.model, kind="unreadable")
                self.ledger.add("unanswered", question.role, role.model)
                raise self._reported(question.role, ChatError("unreadable", f"{problem}{cut}")) from None
        return reply

    async def _vector(self, role: str, text: str) -> list[float]:
        content = {"body": {"model": self.roles[role].model, "input": text}, "schema": None, "version": "embedding"}
        record, _ = await self._once(role, content, self._embedding)
        return record["vector"]

    async def _once(self, role: str, content: dict[str, Any], read: Callable) -> tuple[dict[str, Any], bool]:
        """Return the record of a question, and True if it came from the cache or from an equal question in flight."""
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

    async def _ask(self, name: str, content: dict[str, Any], read: Callable) -> dict[str, Any]:
        """Ask the server: bounded attempts, exponential waits with jitter; Retry-After pauses all its questions."""
        role, limits = self.roles[name], self.limits
        server, wait = self._servers[role.server], limits.first_wait
        for attempt in range(1, limits.attempts + 1):
            try:
                record = await self._attempt(name, server, content, read)
            except ChatError as error:
                failure = error
            else:
                server.failed = 0
                if not self.cache.put(content, record):
                    self._say_once("cache", f"answers cannot be written to {self.cache.folder}; continuing without it")
                return record
            self.ledger.add("failure", name, role.model, kind=failure.kind)
            if not failure.retriable or attempt == limits.attempts:
                break
            pause = wait * random.uniform(0.5, 1.0)
            if failure.after is not None:
                pause = min(failure.after, LONGEST_RETRY_AFTER) + wait * random.uniform(0.0, 0.1)
                server.paused_until = max(server.paused_until, time.monotonic() + pause)
            await asyncio.sleep(pause)
            wait = min(2 * wait, limits.longest_wait)
        self.ledger.add("unanswered", name, role.model)
        server.failed += failure.kind != "context"  # an overlong question says nothing about the server
        if failure.kind in ("key", "model") or server.failed >= limits.failures:
            times = f"{server.failed} questions in a row failed, the last with: " if server.failed > 1 else ""
            raise ServerDown(f"{name} at {role.server}: {times}{failure}") from None
        raise self._reported(name, failure)

    async def _attempt(self, name: str, server: _Server, content: dict[str, Any], read: Callable) -> dict[str, Any]:
        """Ask once, within the limits and the budget, and record the cost."""
        role, body = self.roles[name], content["body"]
        prompt, most = len(json.dumps(body)) / 4, body.get("max_tokens", 0)  # tokens, estimated
        rates = self.prices.get(role.model, (0.0, 0.0))
        async with server.slots:
            while (left := server.paused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            await server.requests.take(1)
            await server.tokens.take(prompt + most)
            async with self.budget.reserve((prompt * rates[0] + most * rates[1]) / 1e6, prompt + most, BudgetSpent):
                began = time.monotonic()
                record, usage = await read(role, server, body, content["schema"])
                server.tokens.give_back(prompt + most - sum(usage.values()))
                money = (usage["prompt_tokens"] * rates[0] + usage["completion_tokens"] * rates[1]) / 1e6
                self.ledger.add("call", name, role.model, **usage, money=money, seconds=time.monotonic() - began)
        return record

    async def _completion(self, role: Role, server: _Server, body: dict[str, Any], schema: Any) -> tuple[dict, dict]:
        """Return (record, usage) of a chat completion. A server that refuses a response_format is asked without it."""
        if schema is not None and server.structured:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            try:
                return _read_completion(await self._post(role, "chat/completions", {**body, "response_format": form}))
            except ChatError as error:
                if error.kind != "request":
                    raise
        reply = _read_completion(await self._post(role, "chat/completions", body))
        server.structured = server.structured and schema is None  # the question itself was not at fault
        return reply

    async def _embedding(self, role: Role, server: _Server, body: dict[str, Any], schema: Any) -> tuple[dict, dict]:
        """Return (record, usage) of an embedding."""
        record = await self._post(role, "embeddings", body)
        try:
            vector = [float(x) for x in record["data"][0]["embedding"]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ChatError("bad_json", "the server's answer holds no embedding", retriable=True) from None
        return {"vector": vector}, _usage(record)

    async def _post(self, role: Role, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._request("POST", role, route, body)
        if answer.status_code != 200:
            raise _refusal(answer, role.key)
        try:
            record = answer.json()
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ChatError("bad_json", "the server's answer is not a JSON object, or was cut", retriable=True)
        return record

    async def _request(self, method: str, role: Role, route: str, body: Any = None, most: float = math.inf) -> Any:
        """Return the httpx.Response, whatever its status. Raises ChatError for a timeout or a broken connection.

        most: bound on the deadline, in seconds.
        """
        deadline = min(most, self.limits.deadline)
        content = None if body is None else json.dumps(body)  # ASCII: httpx cannot encode lone surrogates
        try:
            async with asyncio.timeout(deadline):
                url, headers = f"{role.server}/{route}", _headers(role.key)
                return await self._http.request(method, url, content=content, headers=headers)
        except TimeoutError:
            hint = " (config.llm.deadline)" if deadline < most else ""
            raise ChatError("timeout", f"no answer within {deadline:g} s{hint}", retriable=True) from None
        except self._connection_errors as error:
            text = _redacted(f"{type(error).__name__}: {error}", role.key)
            raise ChatError("connection", text, retriable=True) from None

    # --- the thread and the user --------------------------------------------------------------------------------------

    def _together(self, coroutines: Sequence[Coroutine[Any, Any, Any]], kept: tuple | type = ()) -> list[Any]:
        """Run coroutines on the client's loop. Return their results, with exceptions of type `kept` in their places.

        Raises other exceptions when all coroutines have ended. Calls `check` every 0.2 seconds; if it raises, the
        coroutines are cancelled.
        """

        async def gathered() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(gathered(), self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=0.2).done:
                self._check()
        except BaseException:
            future.cancel()
            raise
        for result in future.result():
            if isinstance(result, BaseException) and not isinstance(result, kept):
                raise result
        return future.result()

    def _reported(self, name: str, error: ChatError) -> ChatError:
        """Return the error with role, model and server in its message; show it once per role and kind."""
        text = f"{name} ({self.roles[name].model} at {self.roles[name].server}): {error}"
        self._say_once(f"{name} {error.kind}", f"{text}. Counted as llm/{name}/unanswered and shown once")
        return ChatError(error.kind, text)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(text)


def _read_completion(record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what is kept of a chat completion, and its usage. Raises ChatError for anything else."""
    usage = _usage(record)
    try:
        choice = record["choices"][0]
        text, finish = choice["message"].get("content") or "", str(choice.get("finish_reason") or "stop")
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ChatError("bad_json", "the server's answer is not a chat completion", retriable=True) from None
    return {"text": text, "finish": finish, **usage}, usage


def _usage(record: dict[str, Any]) -> dict[str, int]:
    """Return the token counts of a server's answer, 0 where it gives none."""
    usage = record.get("usage") if isinstance(record.get("usage"), dict) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {name: count if isinstance(count, int) and count >= 0 else 0 for name, count in counts.items()}


def _refusal(answer: Any, key: str) -> ChatError:
    """Return the error that an httpx.Response other than 200 means."""
    status, text = answer.status_code, _redacted(answer.text[:300], key)
    message = f"HTTP {status}: {text}"
    if status in (401, 403):
        return ChatError("key", f"the key{f' in {key}' if key else ''} is refused ({message})")
    if status == 404:
        return ChatError("model", f"the server has no such model or route ({message})")
    if status in RETRIABLE:
        after = retry_after(answer.headers.get("retry-after"))
        return ChatError(f"http_{status}", message, retriable=True, after=after)
    long = any(words in text.lower() for words in ("context length", "context_length", "maximum context", "too long"))
    return ChatError("context" if long or status == 413 else "request", message)


def _headers(key: str) -> dict[str, str]:
    value = os.environ.get(key, "").strip() if key else ""
    if not (value.isascii() and value.isprintable()):
        raise ChatError("key", f"the environment variable {key} holds characters that are invalid in a key")
    return {"Content-Type": "application/json"} | bearer(value)


def _redacted(text: str, key: str) -> str:
    """Return the text without the key: servers tend to quote a key that they refuse."""
    value = os.environ.get(key, "").strip() if key else ""
    return text.replace(value, f"<{key}>") if value else text


def url_problem(url: str) -> str:
    """Return what is wrong with a server's url, "" if nothing is."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        return "contains a user name or a password; put the key into an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is not a url such as http://127.0.0.1:8000/v1"
    return ""
