"""One client for every language-model role: explorer, writer, judges, summariser, re-ranker and
embedder.

Works with any OpenAI-compatible server. Answers are cached on disk by content. Calls are limited in
number, rate and time, retried by one policy, priced and recorded in a ledger. The run ends, with
everything complete saved, when its budget is spent or a server stays down. Keys are read from the
environment for each call and written nowhere.

Roles with `url="policy"` are answered by the run's own engines, with the same cache and ledger.

The client has an event loop on its own thread, so synchronous mechanisms (`ask`) and coroutines of
any event loop (`await chat(...)`) can share it. If the policy answers for a role, that loop is the
engines' own. Creating a Chat needs httpx (requirements/llm.txt); importing this module does not.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from envs.packages import load
from evolver.llm.answers import Unreadable
from evolver.llm.questions import (
    CURRENT_POLICY,
    Call,
    ChatError,
    Json,
    Question,
    Record,
    Reply,
    Role,
    Said,
    ServerDown,
)
from evolver.llm.spread import Spread
from evolver.llm.store import Budget, Cache, Ledger, Rate
from evolver.processes.interrupt import Interrupted

if TYPE_CHECKING:
    from evolver.llm.policy import PolicyResponder

LONGEST_RETRY_AFTER = 600.0  # seconds; longer Retry-After values are cut to this


@dataclass(frozen=True)
class Limits:
    """Limits of each server, and the budget of the run. Times are in seconds; 0 = no limit for
    rates and budgets."""

    concurrency: int = 32
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    deadline: float = 120.0  # of one request
    attempts: int = 6
    # doubles with each retry; the actual wait is uniform between half of it and all of it
    first_wait: float = 1.0
    longest_wait: float = 60.0
    failures: int = 20  # consecutive unanswered questions after which the server counts as down
    budget_money: float = 0.0
    budget_tokens: int = 0
    grace: float = 15.0  # for calls in flight when the client is closed


class _Queue:
    """The state that all questions to one url share."""

    def __init__(self, limits: Limits, is_policy: bool):
        rates = Limits() if is_policy else limits  # an engine of this run has no limits per minute
        self.slots = asyncio.Semaphore(limits.concurrency)
        self.requests = Rate(rates.requests_per_minute)
        self.tokens = Rate(rates.tokens_per_minute)
        self.paused_until = 0.0  # set by Retry-After, on the monotonic clock
        self.failed = 0  # consecutive unanswered questions
        self.inside = 0  # questions that are asked or wait for it

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one of the places, and hold it during the block."""
        self.inside += 1
        try:
            async with self.slots:
                yield
        finally:
            self.inside -= 1


@dataclass(eq=False)
class Chat:
    """The client of all language-model roles of a run.

    prices: {model: money per million (prompt tokens, completion tokens)}. cache: None = answers are
    not kept. check: called while waiting; raises if the user wants the run to end. say: called with
    a line for the user, once per kind of failure. loop: a running event loop to use, that of the
    engines if the policy answers for a role; None = one of its own.

    `responders` has the PolicyResponder of each url whose answers depend on weights of this run. It
    is filled when the engines are built, before the first question.
    """

    roles: dict[str, Role]
    limits: Limits = Limits()
    prices: dict[str, tuple[float, float]] = field(default_factory=dict)
    cache: Cache | None = None
    ledger: Ledger = field(default_factory=Ledger)
    check: Callable[[], None] = lambda: None
    say: Callable[[str], None] = print
    loop: InitVar[asyncio.AbstractEventLoop | None] = None

    def __post_init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        load("httpx", "llm")  # says how to install it
        from evolver.llm.servers import Servers

        limits = self.limits
        self.budget = Budget(limits.budget_money, limits.budget_tokens, self.ledger)
        self.responders: dict[str, PolicyResponder] = {}
        self._shown = set[str]()
        self.keeps = False  # True: `said` returns what the current policy answers
        # Roles of the policy that answer without being held to a schema. Where such an answer
        # cannot be read, the question is asked again, held to it.
        self.free: Sequence[str] = ()
        self._said: dict[str, Said] = {}  # by the key of the question
        self._servers = Servers(lambda text: self.say(text))
        self.spread: Spread | None = None  # of a run of several processes
        self._queues = {role.server: _Queue(limits, role.is_policy) for role in self.roles.values()}
        # Equal concurrent questions share one call.
        self._pending: dict[str, asyncio.Task[Record]] = {}
        self._in_flight: set[str] = set()  # keys of those that a server is answering
        self._closing = self._closed = False
        self._loop = loop or asyncio.new_event_loop()
        self._owns_loop = loop is None
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        if self._owns_loop:
            self._thread.start()

    def spread_roles(self, roles: Collection[str]) -> None:
        """Let other processes answer for roles whose servers each process has for itself."""
        self.spread = Spread(roles, self._answer_here, self._loop)

    # --- asking -----------------------------------------------------------------------------------

    async def __call__(self, messages: Sequence[Json], *, role: str, **options: Any) -> Reply:
        """Ask one Question, with its further fields as options, from any event loop. Raises
        ChatError and RunEnds."""
        answer = self._answer(Question(role, messages, **options))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def ask(self, questions: Sequence[Question]) -> list[Reply | ChatError]:
        """Ask all questions concurrently. Return their answers, in order: a Reply or a ChatError
        each.

        Raises RunEnds, what `check` raises, and the EngineFault of an engine that answers for a
        role.
        """
        return self._together(self._answer, questions, kept=ChatError)

    def embed(self, texts: Sequence[str], *, role: str = "embedder") -> list[list[float]]:
        """Return one vector per text, as the role's server gives it. Raises ChatError and
        RunEnds."""

        async def vector(text: str) -> list[float]:
            body = {"model": self.roles[role].model, "input": text}
            call = Call(role, self.roles[role], body, version="embedding")
            return (await self._record(call))[0]["vector"]

        return self._together(vector, texts)

    def queues(self) -> list[Json]:
        """Return the questions that each server is answering, and those that wait for it."""
        found = []
        for url, queue in self._queues.items():
            running = min(queue.inside, self.limits.concurrency)
            found.append({"name": url, "running": running, "waiting": queue.inside - running})
        return found

    def said(self) -> list[Said]:
        """Return the current policy's answers since the last call, also those that could not be
        read, one for all equal questions, in an order that does not depend on time."""
        # The client's thread may add more meanwhile.
        return [self._said.pop(key) for key in sorted(self._said)]

    def server_problems(self) -> list[str]:
        """Return what is wrong with the servers: unreachable urls, unknown models, refused keys,
        small contexts."""
        groups: dict[tuple[str, ...], dict[str, Role]] = {}
        for name, role in self.roles.items():
            if not role.is_policy:
                groups.setdefault((role.server, role.model, role.key), {})[name] = role
        problems = self._together(self._servers.problem, [*groups.values()])
        return [problem for problem in problems if problem]

    def close(self) -> None:
        """End all calls.

        Those that a server is answering have `limits.grace` seconds, because they are paid for
        anyway: their answers are recorded and cached. Those that take longer are recorded at the
        most they may cost.
        """
        if self._closed:
            return
        self._closing = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ended.result(self.limits.grace + 10)
        self._closed = True
        if self._owns_loop:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    async def _end(self) -> None:
        self._drop_queued()
        if self._in_flight:
            answering = [self._pending[key] for key in self._in_flight]
            await asyncio.wait(answering, timeout=self.limits.grace)
        tasks: set[asyncio.Task[Any]] = set(self._pending.values())
        if self._owns_loop:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._servers.http.aclose()

    def _drop_queued(self) -> None:
        """Cancel the questions that no server has been asked yet, or that wait for another
        attempt."""
        for key in self._pending.keys() - self._in_flight:
            self._pending[key].cancel()

    # --- one question -----------------------------------------------------------------------------

    async def _answer(self, question: Question) -> Reply:
        if self.spread and (elsewhere := self.spread.elsewhere(question)):
            return await asyncio.wrap_future(elsewhere)
        return await self._answer_here(question)

    async def _answer_here(self, question: Question) -> Reply:
        role = self.roles[question.role]
        body = {"model": role.model, "messages": [*question.messages]}
        body |= role.sampling(question.seed)
        free = question.role in self.free and question.schema is not None
        for held in (False, True) if free else (True,):
            weights = self._weights(role)
            version = question.version
            call = Call(question.role, role, body, question.schema, version, weights, held)
            record, cached = await self._record(call)
            if self.keeps and role.url == CURRENT_POLICY and record.get("tokens"):
                self._keep(question, call, record)
            try:
                return Reply(**record, parsed=call.parse(record), cached=cached)
            except Unreadable as error:
                problem = error
        self._book(call, "failure", kind=problem.kind)
        raise self._unanswered(call, problem.kind, problem) from None

    def _keep(self, question: Question, call: Call, record: Record) -> None:
        """Keep an answer for `said`, once for all questions that share it."""
        key = call.key
        usable = call.is_usable(record)
        about = {question.about, *(self._said[key].about if key in self._said else ())} - {""}
        reply = Reply(**record)
        self._said[key] = Said(question, reply, usable, key, tuple(sorted(about)), call.held)

    async def _record(self, call: Call) -> tuple[Record, bool]:
        """Return the record of an answer, and True if it came from the cache or from an equal
        question in flight.

        Records that are not usable are neither cached nor taken from the cache, because the fault
        may be temporary.
        """
        key = call.key
        record: Any = self.cache and self.cache.get(key)
        task = self._pending.get(key)
        if not call.is_usable(record):
            if task is None:
                task = self._pending[key] = asyncio.ensure_future(self._ask(call))
                task.add_done_callback(lambda _: self._pending.pop(key, None))
                return await asyncio.shield(task), False
            record = await asyncio.shield(task)
        self._book(call, "hit")
        return record, True

    async def _ask(self, call: Call) -> Record:
        """Ask with exponential waits and jitter between attempts, and cache the answer.

        Retry-After pauses all questions to the server.
        """
        queue = self._queues[call.role.server]
        limits = self.limits
        wait = limits.first_wait
        for attempt in range(1, limits.attempts + 1):
            try:
                record = await self._attempt(call, queue)
                break
            except ChatError as error:
                failure = error
            if self._closing or failure.kind == "interrupted":
                raise asyncio.CancelledError
            if not failure.retriable or attempt == limits.attempts:
                raise self._given_up(call, queue, failure)
            pause = wait * random.uniform(0.5, 1.0)
            if failure.after is not None:
                pause = min(failure.after, LONGEST_RETRY_AFTER) + wait * random.uniform(0.0, 0.1)
                queue.paused_until = max(queue.paused_until, time.monotonic() + pause)
            await asyncio.sleep(pause)
            wait = min(2 * wait, limits.longest_wait)
        queue.failed = 0
        same = self._weights(call.role) == call.weights  # else an update came in between
        if self.cache and same and call.is_usable(record) and not self.cache.put(call.key, record):
            self.ledger.unwritten["cache"] += 1
            folder = self.cache.folder
            text = f"answers cannot be written to {folder}; continuing without caching them"
            self._say_once("cache", text)
        return record

    async def _attempt(self, call: Call, queue: _Queue) -> Record:
        """Ask once, within the limits and the budget, and record the cost.

        A failed attempt is recorded at the most that it may have cost.
        """
        usage: Record = {
            "prompt_tokens": math.ceil(len(json.dumps(call.body)) / 4),
            "completion_tokens": call.body.get("max_tokens", 0),
            "estimated": True,
        }
        most = _tokens(usage)
        async with queue.place():
            while (left := queue.paused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            await queue.requests.take(1)
            await queue.tokens.take(most)
            async with self.budget.reserve(self._money(call, usage), most):
                began = time.monotonic()
                try:
                    record = await self._within_deadline(call)
                except ChatError as error:
                    self._book(call, "failure", usage if error.billed else {}, kind=error.kind)
                    raise
                self._book(call, "call", record, seconds=time.monotonic() - began)
                queue.tokens.give_back(most - _tokens(record))
                return record

    async def _within_deadline(self, call: Call) -> Record:
        """Return the answer of an engine or a server. Raises ChatError, also if it is cancelled."""
        deadline = self.limits.deadline
        kind = "timeout"
        billed = not call.role.is_policy
        if billed:  # what the policy answers is not paid for: nothing waits for it at the end
            self._in_flight.add(call.key)
        asked = self._servers if billed else self.responders[call.role.server]
        try:
            async with asyncio.timeout(deadline):
                return await asked.answer(call)
        except TimeoutError:
            text = f"no answer within {deadline:g} s (config.llm.deadline)"
        except asyncio.CancelledError:
            kind = text = "interrupted"
        finally:
            self._in_flight.discard(call.key)
        raise ChatError(kind, text, retriable=True, billed=billed)

    def _weights(self, role: Role) -> str:
        """Return the name of the weights that answer for a role now, "" if they are not of this
        run."""
        responder = self.responders.get(role.server)
        return responder.weights if responder else ""

    def _money(self, call: Call, usage: Record) -> float:
        prompt, completion = self.prices.get(call.role.model, (0.0, 0.0))
        return (usage["prompt_tokens"] * prompt + usage["completion_tokens"] * completion) / 1e6

    # --- the ledger and the user ------------------------------------------------------------------

    def _book(self, call: Call, what: str, usage: Record | None = None, **figures: Any) -> None:
        """Add a line to the ledger, with tokens and money if there is a usage."""
        if usage:
            names = ("prompt_tokens", "completion_tokens", "estimated")
            figures |= {name: usage[name] for name in names if name in usage}
            figures["money"] = self._money(call, usage)
        self.ledger.add(what, call.name, call.role.model, **figures)

    def _given_up(self, call: Call, queue: _Queue, failure: ChatError) -> Exception:
        """Return the error of a question that no attempt has answered: ServerDown where no other
        would be answered, either."""
        queue.failed += failure.kind != "context"  # this says nothing about the server
        if failure.kind not in ("key", "model") and queue.failed < self.limits.failures:
            return self._unanswered(call, failure.kind, failure)
        self._book(call, "unanswered")
        times = f"{queue.failed} questions in a row failed, the last with: "
        text = f"{times if queue.failed > 1 else ''}{failure}"
        return ServerDown(f"{call.name} at {call.role.server}: {text}")

    def _unanswered(self, call: Call, kind: str, why: Exception) -> ChatError:
        """Record a question as unanswered. Return the error with role, model and server in its
        message; show it once per role and kind."""
        self._book(call, "unanswered")
        text = f"{call.name} ({call.role.model} at {call.role.server}): {why}"
        more = f"{text}. Counted as llm/{call.name}/unanswered and shown once"
        self._say_once(f"{call.name} {kind}", more)
        return ChatError(kind, text)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._shown:
            self._shown.add(what)
            self.say(text)

    # --- the thread -------------------------------------------------------------------------------

    def _together(
        self,
        answer: Callable[[Any], Coroutine[Any, Any, Any]],
        asked: Sequence[Any],
        kept: tuple[()] | type[Exception] = (),
    ) -> list[Any]:
        """Return the answers to all that is asked, concurrently on the client's loop, with
        exceptions of type `kept` in their places.

        Raises other exceptions when all have ended, and Interrupted once the client is closed.
        Calls `check` every 0.2 seconds; if that raises, everything that no server is answering is
        cancelled.
        """
        if _runs_here(self._loop):
            hint = "use `await chat(...)` here"
            raise RuntimeError(f"chat.ask would wait for the event loop that it blocks: {hint}")
        if self._closed:
            raise Interrupted

        async def gathered() -> list[Any]:
            return await asyncio.gather(*map(answer, asked), return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(gathered(), self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=0.2).done:
                self.check()
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


def _tokens(usage: Record) -> int:
    return usage["prompt_tokens"] + usage["completion_tokens"]


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if the calling thread is running this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
