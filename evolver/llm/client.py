"""One client for every language-model role: explorer, writer, judges, summariser, re-ranker and
embedder.

Works with any OpenAI-compatible server. Answers are cached on disk by content. Calls are limited in
number, rate and time, retried by one policy, priced and recorded in a ledger. The run ends, with
everything complete saved, when its budget is spent or a server stays down. Keys are read from the
environment for each call and written nowhere.

Roles that the policy plays (`url="policy"`) are answered by the run's own engines, with the same
cache and ledger.

The client has an event loop on its own thread, so synchronous mechanisms (`ask`) and coroutines of
any event loop (`await chat(...)`) can share it. If the policy plays a role, that loop is the
engines' own. Creating a Chat needs httpx (requirements/llm.txt); importing this module does not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from envs import values
from envs.http import bearer, retry_after
from envs.packages import how_to_install
from evolver.llm.answers import Unreadable, read_json
from evolver.llm.store import Budget, Cache, ChatError, Ledger, Rate, Reply
from evolver.processes.interrupt import Interrupted, RunEnds

if TYPE_CHECKING:
    from evolver.llm.policy import Player

RETRIABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # HTTP statuses
_LARGEST = 1e15  # number in a vector; the norm of larger ones, like that of NaN, is no float32
LONGEST_RETRY_AFTER = 600.0  # seconds; longer Retry-After values are cut to this
PRESENT, INITIAL = PLAYED = (
    "policy",
    "policy:initial",
)  # urls of roles that the run's own engine plays
NO_PROXY = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
Message = dict[str, Any]


class BudgetSpent(RunEnds):
    """The budget of money or tokens is spent."""


class ServerDown(RunEnds):
    """A server refuses the key or the model, or too many questions in a row have failed."""


@dataclass(frozen=True)
class Role:
    """The server, model and sampling of one role.

    key: the environment variable that holds the key; "" = none. extra: more fields of the request,
    as a JSON object.
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

    @property
    def played(self) -> bool:
        """True if an engine of this run plays the role."""
        return self.url in PLAYED

    def sampling(self, seed: int | None) -> dict[str, Any]:
        """Return the sampling fields of a request."""
        body = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        body |= {} if seed is None else {"seed": seed % 2**31}
        return body | (json.loads(self.extra) if self.extra else {})


@dataclass(frozen=True)
class Limits:
    """Limits of each server, and the budget of the run. Times are in seconds; 0 = no limit for
    rates and budgets."""

    concurrency: int = 32
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    deadline: float = 120.0  # of one request
    attempts: int = 6
    first_wait: float = (
        1.0  # doubles with each retry; the actual wait is uniform between half of it and all of it
    )
    longest_wait: float = 60.0
    failures: int = 20  # consecutive unanswered questions after which the server counts as down
    budget_money: float = 0.0
    budget_tokens: int = 0
    grace: float = 15.0  # for calls in flight when the client is closed


@dataclass(frozen=True)
class Question:
    """One call. `version` is that of the prompt; `seed` distinguishes questions with the same
    wording."""

    role: str
    messages: Sequence[Message]
    schema: dict[str, Any] | None = None
    version: str = ""
    seed: int | None = None


class _Server:
    """State shared by all questions to one url."""

    def __init__(self, limits: Limits):
        self.slots = asyncio.Semaphore(limits.concurrency)
        self.requests, self.tokens = (
            Rate(limits.requests_per_minute),
            Rate(limits.tokens_per_minute),
        )
        self.paused_until = 0.0  # set by Retry-After, on the monotonic clock
        self.failed = 0  # consecutive unanswered questions
        self.structured = True  # False once the server refuses a response_format


class Chat:
    """The client of all language-model roles of a run.

    prices: {model: money per million (prompt tokens, completion tokens)}. check: called while
    waiting; raises if the
    user wants the run to end. say: called with a line for the user, once per kind of failure. loop:
    a running event loop to use, that of the engines if the policy plays a role; None = one of its
    own.

    `players` has the Player of each url whose answers depend on weights of this run. It is filled
    when the engines are built, before the first question.
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
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        try:
            import httpx
        except ModuleNotFoundError as error:
            words = f"language models need httpx: {how_to_install('llm')}"
            raise ModuleNotFoundError(words, name="httpx") from error
        self.roles, self.limits, self.prices = dict(roles), limits, dict(prices or {})
        self.cache, self.ledger = Cache(cache), ledger or Ledger()
        self.budget = Budget(limits.budget_money, limits.budget_tokens, self.ledger)
        self._check, self.say, self._said = check, say, set()
        unmetered = dataclasses.replace(limits, requests_per_minute=0, tokens_per_minute=0)
        self._servers = {
            r.server: _Server(unmetered if r.played else limits) for r in self.roles.values()
        }
        self._pending: dict[
            str, asyncio.Task[dict[str, Any]]
        ] = {}  # equal concurrent questions share one call
        self._in_flight: set[asyncio.Task] = set()  # those of `_pending` that a server is answering
        self.players: dict[str, Player] = {}
        self._closing = self._closed = False
        self._loop, self._thread = loop or asyncio.new_event_loop(), None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
            self._thread.start()
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=limits.concurrency)
        self._http = httpx.AsyncClient(timeout=None, limits=pool, mounts=NO_PROXY)
        self._connection_errors = (httpx.HTTPError, httpx.InvalidURL, OSError)

    # --- asking -----------------------------------------------------------------------------------

    async def __call__(self, messages: Sequence[Message], *, role: str, **options: Any) -> Reply:
        """Ask one Question, with its further fields as options, from any event loop. Raises
        ChatError and RunEnds."""
        answer = self._answer(Question(role, messages, **options))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def ask(self, questions: Sequence[Question]) -> list[Reply | ChatError]:
        """Ask all questions concurrently. Return their answers, in order: a Reply or a ChatError
        each.

        Raises RunEnds, what `check` raises, and the EngineFault of an engine that plays a role.
        """
        return self._together([self._answer(question) for question in questions], kept=ChatError)

    def embed(self, texts: Sequence[str], *, role: str = "embedder") -> list[list[float]]:
        """Return one vector per text, as the role's server gives it. Raises ChatError and
        RunEnds."""
        return self._together([self._vector(role, text) for text in texts])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the ledger (see `Ledger.metrics`) and counts of failed writes."""
        unwritten = {"cache": self.cache.unwritten, "ledger": self.ledger.unwritten}
        return self.ledger.metrics() | {
            f"llm/unwritten/{name}": count for name, count in unwritten.items() if count
        }

    def close(self) -> None:
        """End all calls. Those that a server is answering have `limits.grace` seconds, because they
        are paid for
        anyway: their answers are booked and cached. Those that take longer are booked at the most
        they may cost."""

        async def end() -> None:
            self._drop_queued()
            if self._in_flight:
                await asyncio.wait(self._in_flight, timeout=self.limits.grace)
            tasks = (
                asyncio.all_tasks() - {asyncio.current_task()}
                if self._thread
                else set(self._pending.values())
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.aclose()

        if self._closed:
            return
        self._closing = True
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(self.limits.grace + 10)
        self._closed = True
        if self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _drop_queued(self) -> None:
        """Cancel the questions that no server has been asked yet, or that wait for another
        attempt."""
        for task in set(self._pending.values()) - self._in_flight:
            task.cancel()

    # --- before the run ---------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return what is wrong with the servers: unreachable urls, unknown models, refused keys,
        small contexts."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for name, role in self.roles.items():
            if not role.played:
                groups.setdefault((role.server, role.model, role.key), []).append(name)
        return [
            problem
            for problem in self._together([self._problem(names) for names in groups.values()])
            if problem
        ]

    async def _problem(self, names: list[str]) -> str:
        """Return what is wrong with the server of these roles, which share url, model and key; ""
        if nothing is."""
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
            return (
                f"{who}: {f'the key in {role.key} is refused' if role.key else required} {status}"
            )
        try:
            served = (
                {entry["id"]: entry for entry in answer.json()["data"]}
                if answer.status_code == 200
                else {}
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            served = {}
        if not served:
            return await self._problem_of_route(
                names, f"{who}: GET {url}/models {status} lists no models"
            )
        if role.model not in served:
            return f"{who}: there is no model {role.model!r}; it serves {', '.join(map(repr, list(served)[:8]))}"
        context, needed = (
            served[role.model].get("max_model_len"),
            max(self.roles[name].max_tokens for name in names),
        )
        if isinstance(context, int) and context <= needed:
            return f"{who}: the context of {context} tokens leaves no room for a prompt with max_tokens={needed}"
        return ""

    async def _problem_of_route(self, names: list[str], unlisted: str) -> str:
        """Return what is wrong with a server that lists no models, "" if it has the route that
        these roles use.

        The request is empty, so every server refuses it or answers without generating.
        """
        role = self.roles[names[0]]
        route, content = (
            ("embeddings", "input") if names == ["embedder"] else ("chat/completions", "messages")
        )
        try:
            answer = await self._request(
                "POST", role, route, {"model": role.model, content: []}, most=20.0
            )
        except ChatError as error:
            return f"{unlisted}, and POST {role.server}/{route} fails: {error}"
        if answer.status_code in (401, 403, 404, 405):
            problem = _redacted(f"HTTP {answer.status_code}: {answer.text[:200]}", role.key)
            hint = "the url of an OpenAI-compatible server usually ends in /v1"
            return f"{unlisted}, and POST {role.server}/{route} is refused ({problem}); {hint}"
        self.say(f"{unlisted}; continuing without checking that it serves {role.model!r}")
        return ""

    # --- one question -----------------------------------------------------------------------------

    async def _answer(self, question: Question) -> Reply:
        role = self.roles[question.role]
        body = {
            "model": role.model,
            "messages": list(question.messages),
            **role.sampling(question.seed),
        }
        content = {"body": body, "schema": question.schema, "version": question.version}
        if player := self.players.get(role.server):
            content["weights"] = player.weights
        shown = "\n".join(
            str(m.get("content")) for m in question.messages if m.get("role") == "user"
        )

        def parsed(record: dict[str, Any]) -> Any:
            if record["finish"] == "length":
                raise Unreadable("cut", f"the answer was cut at max_tokens={role.max_tokens}")
            if question.schema is not None:
                return read_json(record["text"], question.schema, shown=shown)
            if not record["text"].strip():
                raise Unreadable("empty", "the answer is empty")
            return None

        def usable(record: dict[str, Any]) -> bool:
            with contextlib.suppress(Unreadable):
                parsed(record)
                return True
            return False

        read = self._played if role.played else self._completion
        record, hit = await self._once(question.role, content, read, usable)
        try:
            return Reply(**record, parsed=parsed(record), cached=hit)
        except Unreadable as problem:
            self.ledger.add("failure", question.role, role.model, kind=problem.kind)
            self.ledger.add("unanswered", question.role, role.model)
            raise self._reported(question.role, ChatError(problem.kind, str(problem))) from None

    async def _vector(self, role: str, text: str) -> list[float]:
        content = {
            "body": {"model": self.roles[role].model, "input": text},
            "schema": None,
            "version": "embedding",
        }
        record, _ = await self._once(role, content, self._embedding, lambda record: True)
        return record["vector"]

    async def _once(
        self,
        role: str,
        content: dict[str, Any],
        read: Callable,
        usable: Callable[[dict[str, Any]], bool],
    ) -> tuple[dict[str, Any], bool]:
        """Return the record of a question, and True if it came from the cache or from an equal
        question in flight.

        Records that are not `usable` are neither cached nor taken from the cache, because the fault
        may be temporary.
        """
        record = self.cache.get(content)
        known = record and set(record) in (
            {"vector"},
            {"text", "prompt_tokens", "completion_tokens", "finish"},
        )
        if known and usable(record):
            self.ledger.add("hit", role, self.roles[role].model)
            return record, True
        name = json.dumps(content, sort_keys=True)
        pending = self._pending.get(name)
        if pending is None:
            task = self._pending[name] = asyncio.ensure_future(
                self._ask(role, content, read, usable)
            )
            task.add_done_callback(lambda _: self._pending.pop(name, None))
            return await asyncio.shield(task), False
        record = await asyncio.shield(pending)
        self.ledger.add("hit", role, self.roles[role].model)
        return record, True

    async def _ask(
        self, name: str, content: dict[str, Any], read: Callable, usable: Callable
    ) -> dict[str, Any]:
        """Ask the server, with exponential waits and jitter between attempts. Retry-After pauses
        all its questions."""
        role, limits = self.roles[name], self.limits
        server, wait = self._servers[role.server], limits.first_wait
        for attempt in range(1, limits.attempts + 1):
            try:
                record = await self._attempt(name, server, content, read)
            except ChatError as error:
                failure = error
            else:
                server.failed = 0
                player = self.players.get(role.server)
                same = (
                    player is None or player.weights == content["weights"]
                )  # else an update came in between
                if same and usable(record) and not self.cache.put(content, record):
                    self._say_once(
                        "cache",
                        f"answers cannot be written to {self.cache.folder}; continuing without caching them",
                    )
                return record
            self.ledger.add("failure", name, role.model, kind=failure.kind, **failure.cost)
            if self._closing:
                raise asyncio.CancelledError
            if not failure.retriable or attempt == limits.attempts:
                break
            pause = wait * random.uniform(0.5, 1.0)
            if failure.after is not None:
                pause = min(failure.after, LONGEST_RETRY_AFTER) + wait * random.uniform(0.0, 0.1)
                server.paused_until = max(server.paused_until, time.monotonic() + pause)
            await asyncio.sleep(pause)
            wait = min(2 * wait, limits.longest_wait)
        self.ledger.add("unanswered", name, role.model)
        server.failed += (
            failure.kind != "context"
        )  # an overlong question says nothing about the server
        if failure.kind in ("key", "model") or server.failed >= limits.failures:
            times = (
                f"{server.failed} questions in a row failed, the last with: "
                if server.failed > 1
                else ""
            )
            raise ServerDown(f"{name} at {role.server}: {times}{failure}") from None
        raise self._reported(name, failure)

    async def _attempt(
        self, name: str, server: _Server, content: dict[str, Any], read: Callable
    ) -> dict[str, Any]:
        """Ask once, within the limits and the budget, and record the cost.

        A failed attempt may have to be paid for too: its ChatError holds the estimate as `cost`.
        """
        role, body = self.roles[name], content["body"]
        prompt, most = (
            math.ceil(len(json.dumps(body)) / 4),
            body.get("max_tokens", 0),
        )  # tokens, estimated
        rates = self.prices.get(role.model, (0.0, 0.0))

        def cost(prompt_tokens: int, completion_tokens: int, **more: Any) -> dict[str, Any]:
            money = (prompt_tokens * rates[0] + completion_tokens * rates[1]) / 1e6
            return {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "money": money,
                **more,
            }

        async with server.slots:
            while (left := server.paused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            await server.requests.take(1)
            await server.tokens.take(prompt + most)
            async with self.budget.reserve(cost(prompt, most)["money"], prompt + most, BudgetSpent):
                began, task = time.monotonic(), asyncio.current_task()
                if (
                    not role.played
                ):  # an engine's answer is not paid for, so nothing waits for it at the end
                    self._in_flight.add(task)
                try:
                    record, usage = await read(role, server, body, content["schema"])
                except ChatError as error:
                    if error.served is not None:
                        error.cost = cost(
                            prompt, math.ceil(min(error.served, most)), estimated=True
                        )
                    raise
                except asyncio.CancelledError:
                    lost = {} if role.played else cost(prompt, most, estimated=True)
                    self.ledger.add("failure", name, role.model, kind="interrupted", **lost)
                    raise
                finally:
                    self._in_flight.discard(task)
                server.tokens.give_back(
                    prompt + most - usage["prompt_tokens"] - usage["completion_tokens"]
                )
                self.ledger.add(
                    "call", name, role.model, **cost(**usage), seconds=time.monotonic() - began
                )
        return record

    async def _completion(
        self, role: Role, server: _Server, body: dict[str, Any], schema: Any
    ) -> tuple[dict, dict]:
        """Return (record, usage) of a chat completion. A server that refuses a response_format is
        asked without it."""
        route = "chat/completions"
        if schema is not None and server.structured:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            try:
                return _read_completion(
                    body, await self._post(role, route, {**body, "response_format": form})
                )
            except ChatError as error:
                if error.kind != "request":
                    raise
        reply = _read_completion(body, await self._post(role, route, body))
        if schema is not None:
            server.structured = False  # it answered once response_format was left out
        return reply

    async def _played(
        self, role: Role, server: _Server, body: dict[str, Any], schema: Any
    ) -> tuple[dict, dict]:
        """Return (record, usage) of an answer by an engine of this run."""
        try:
            async with asyncio.timeout(self.limits.deadline):
                record = await self.players[role.server].answer(body, schema)
        except TimeoutError:
            text = f"no answer within {self.limits.deadline:g} s (config.llm.deadline)"
            raise ChatError("timeout", text, retriable=True) from None
        return record, {name: record[name] for name in ("prompt_tokens", "completion_tokens")}

    async def _embedding(
        self, role: Role, server: _Server, body: dict[str, Any], schema: Any
    ) -> tuple[dict, dict]:
        """Return (record, usage) of an embedding."""
        record = await self._post(role, "embeddings", body)
        try:
            vector = [float(x) for x in record["data"][0]["embedding"]]
            if not vector or not all(abs(x) < _LARGEST for x in vector):
                raise ValueError
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise ChatError(
                "bad_json", "the server's answer holds no embedding", retriable=True, served=0
            ) from None
        return {"vector": vector}, _usage(record, body, "")

    async def _post(self, role: Role, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._request("POST", role, route, body)
        if answer.status_code != 200:
            raise _refusal(answer, role.key)
        try:
            record = answer.json()
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            problem, served = (
                "the server's answer is not a JSON object, or was cut",
                len(answer.content) / 4,
            )
            raise ChatError("bad_json", problem, retriable=True, served=served)
        return record

    async def _request(
        self, method: str, role: Role, route: str, body: Any = None, most: float = math.inf
    ) -> Any:
        """Return the httpx.Response, whatever its status. Raises ChatError for a timeout or a
        broken connection.

        most: bound on the deadline, in seconds.
        """
        deadline, events = min(most, self.limits.deadline), []

        async def trace(event: str, _: Any) -> None:
            events.append(event)

        def served(
            event: str,
        ) -> float | None:  # tokens the server may have generated, if this event happened
            return math.inf if any(name.endswith(event) for name in events) else None

        content = (
            None if body is None else json.dumps(body)
        )  # ASCII: httpx cannot encode lone surrogates
        try:
            async with asyncio.timeout(deadline):
                url, more = (
                    f"{role.server}/{route}",
                    {"headers": _headers(role.key), "extensions": {"trace": trace}},
                )
                return await self._http.request(method, url, content=content, **more)
        except TimeoutError:
            hint = " (config.llm.deadline)" if deadline < most else ""
            text, sent = (
                f"no answer within {deadline:g} s{hint}",
                served("send_request_body.complete"),
            )
            raise ChatError("timeout", text, retriable=True, served=sent) from None
        except self._connection_errors as error:
            text = _redacted(f"{type(error).__name__}: {error}", role.key)
            answered = served("receive_response_headers.complete")
            raise ChatError("connection", text, retriable=True, served=answered) from None

    # --- the thread and the user ------------------------------------------------------------------

    def _together(
        self, coroutines: Sequence[Coroutine[Any, Any, Any]], kept: tuple | type = ()
    ) -> list[Any]:
        """Run coroutines on the client's loop. Return their results, with exceptions of type `kept`
        in their places.

        Raises other exceptions when all coroutines have ended, and Interrupted once the client is
        closed. Calls `check` every 0.2 seconds; if that raises, the coroutines and all questions
        that no server is answering are cancelled.
        """
        if self._closed or _runs_here(self._loop):
            for coroutine in coroutines:
                coroutine.close()
            if self._closed:
                raise Interrupted
            raise RuntimeError(
                "chat.ask would wait for the event loop that it blocks: use `await chat(...)` here"
            )

        async def gathered() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(gathered(), self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=0.2).done:
                self._check()
                if self._closed:
                    raise Interrupted
        except BaseException:
            future.cancel()
            self._loop.call_soon_threadsafe(self._drop_queued)
            raise
        for result in future.result():
            if isinstance(result, asyncio.CancelledError):  # another thread was interrupted
                raise Interrupted
            if isinstance(result, BaseException) and not isinstance(result, kept):
                raise result
        return future.result()

    def _reported(self, name: str, error: ChatError) -> ChatError:
        """Return the error with role, model and server in its message; show it once per role and
        kind."""
        text = f"{name} ({self.roles[name].model} at {self.roles[name].server}): {error}"
        self._say_once(
            f"{name} {error.kind}", f"{text}. Counted as llm/{name}/unanswered and shown once"
        )
        return ChatError(error.kind, text)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(text)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if the calling thread is running this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _read_completion(
    body: dict[str, Any], record: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (record, usage) of a chat completion. Raises ChatError if the answer is none."""
    try:
        choice = record["choices"][0]
        text, finish = (
            choice["message"].get("content") or "",
            str(choice.get("finish_reason") or "stop"),
        )
        text = values.text(text)
    except (KeyError, IndexError, TypeError, AttributeError):
        problem, served = (
            "the server's answer is not a chat completion",
            len(json.dumps(record)) / 4,
        )
        raise ChatError("bad_json", problem, retriable=True, served=served) from None
    usage = _usage(record, body, text)
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {"text": text, "finish": finish, **counts}, usage


def _usage(record: dict[str, Any], body: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the token counts of a server's answer. Missing counts are estimated, so that they
    count towards the budget; the result then has `estimated`."""
    given = record.get("usage") if isinstance(record.get("usage"), dict) else {}
    sizes = {
        "prompt_tokens": len(json.dumps(body)),
        "completion_tokens": len(text.encode("utf-8", "replace")),
    }
    usage: dict[str, Any] = {}
    for name, size in sizes.items():
        count = given.get(name)
        right = (
            isinstance(count, int)
            and not isinstance(count, bool)
            and (count > 0 or count == size == 0)
        )
        usage |= (
            {name: count}
            if right
            else {name: math.ceil(size / 4)} | ({"estimated": True} if size else {})
        )
    return usage


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
    long = any(
        words in text.lower()
        for words in ("context length", "context_length", "maximum context", "too long")
    )
    return ChatError("context" if long or status == 413 else "request", message)


def _headers(key: str) -> dict[str, str]:
    value = os.environ.get(key, "").strip() if key else ""
    if not (value.isascii() and value.isprintable()):
        raise ChatError(
            "key", f"the environment variable {key} holds characters that are invalid in a key"
        )
    return {"Content-Type": "application/json"} | bearer(value)


def _redacted(text: str, key: str) -> str:
    """Return the text without the key: servers tend to quote a key that they refuse."""
    value = os.environ.get(key, "").strip() if key else ""
    return text.replace(value, f"<{key}>") if value else text


def url_problem(url: str, example: str = "http://127.0.0.1:8000/v1") -> str:
    """Return what is wrong with a server's URL, "" if nothing is."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError if it is none)
    except ValueError as error:
        return f"is not a URL such as {example} ({error})"
    if parts.username or parts.password:
        return "contains a user name or a password; put the key into an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"is not a URL such as {example}"
    return ""
