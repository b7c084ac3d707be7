"""Storage and limits of the language-model client: cached answers, a ledger of their cost, rate
limits and a budget."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.files import append_line, read_jsonl, write_atomically

log = logging.getLogger(__name__)


class ChatError(RuntimeError):
    """A question without an answer, counted under `kind`.

    after: the seconds of a Retry-After header. served: the tokens that the server may have
    generated although no answer arrived (inf = unknown); None if it generated none.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        retriable: bool = False,
        after: float | None = None,
        served: float | None = None,
    ):
        super().__init__(message)
        self.kind, self.retriable, self.after, self.served = kind, retriable, after, served
        self.cost: dict[str, Any] = {}  # tokens and money that are booked for it


@dataclass
class Reply:
    """An answer. `parsed` is its JSON value if the question had a schema."""

    text: str
    parsed: Any = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "stop"  # "stop" | "length" | any other finish_reason of the server
    cached: bool = False


class Cache:
    """Answers on disk, one small file each, named by the hash of the whole question. Runs may share
    a folder.

    A damaged file counts as absent. A failed write (a full disk) is only counted: the cache must
    never end a run.
    """

    def __init__(self, folder: str | os.PathLike | None):
        self.folder = Path(folder) if folder else None
        self.unwritten = 0

    def path(self, question: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"

    def get(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record of this question, None if there is no readable one."""
        if self.folder is None:
            return None
        try:
            record = json.loads(self.path(question).read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def put(self, question: dict[str, Any], record: dict[str, Any]) -> bool:
        """Write the record of a question. Return False if the write failed."""
        if self.folder is None:
            return True
        try:
            write_atomically(
                self.path(question), json.dumps(record)
            )  # ASCII, as answers may hold lone surrogates
        except OSError:
            self.unwritten += 1
            return False
        return True


@dataclass
class Account:
    """The usage of one role."""

    calls: int = 0  # answered by a server
    hits: int = 0  # answered by the cache, or by an equal question in flight
    unanswered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0  # sum over calls
    failures: Counter = dataclasses.field(default_factory=Counter)  # failed attempts by kind

    def add(self, line: dict[str, Any]) -> None:
        """Add one line of the ledger."""
        what = line["what"]
        if what == "failure":
            self.failures[line["kind"]] += 1
        self.calls += what == "call"
        self.hits += what == "hit"
        self.unanswered += what == "unanswered"
        for name in ("prompt_tokens", "completion_tokens", "money", "seconds"):
            setattr(self, name, getattr(self, name) + line.get(name, 0))

    def metrics(self) -> dict[str, float]:
        asked = self.calls + self.hits
        names = ("calls", "hits", "unanswered", "money", "prompt_tokens", "completion_tokens")
        metrics = {name: getattr(self, name) for name in names} | (
            {"hit_rate": self.hits / asked} if asked else {}
        )
        return metrics | {
            f"failures/{kind}": count for kind, count in sorted(self.failures.items())
        }


class Ledger:
    """Every call, cache hit and failure: one JSON line each in a file, and sums by role.

    The file is read again when a run resumes and is never rewound: money spent on a step that is
    repeated stays spent. If it cannot be written, the sums in memory remain correct and `unwritten`
    counts the missing lines.
    """

    def __init__(
        self, path: str | os.PathLike | None = None, *, step: Callable[[], int] = lambda: 0
    ):
        self.path, self.step, self.unwritten = Path(path) if path else None, step, 0
        self._lock = threading.Lock()  # written by the client's thread, read by others
        self.total = accounts(ledger_lines(self.path))
        self._recent = accounts([])

    def add(self, what: str, role: str, model: str, **figures: Any) -> None:
        """Record one event. what: "call", "hit", "failure" (with its `kind`) or "unanswered"."""
        line = {"step": self.step(), "role": role, "model": model, "what": what, **figures}
        with self._lock:
            self.total[role].add(line)
            self._recent[role].add(line)
            if self.path is not None:
                try:
                    append_line(self.path, json.dumps(line))
                except OSError:
                    self.unwritten += 1

    @property
    def money(self) -> float:
        return sum(account.money for account in self.total.values())

    @property
    def tokens(self) -> int:
        return sum(
            account.prompt_tokens + account.completion_tokens for account in self.total.values()
        )

    def metrics(self) -> dict[str, float]:
        """Return `llm/<role>/<name>` and mean seconds per call since the last call of this method,
        and the money and tokens of the whole run so far."""
        with self._lock:
            recent, self._recent = self._recent, accounts([])
        metrics = {
            f"llm/{role}/{name}": value
            for role, a in recent.items()
            for name, value in a.metrics().items()
        }
        metrics |= {
            f"time/llm/{role}": a.seconds / a.calls for role, a in recent.items() if a.calls
        }
        return metrics | (
            {"llm/money": self.money, "llm/tokens": self.tokens} if self.total else {}
        )


def ledger_lines(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of a ledger file. Those that are damaged, as by a crash, are skipped with a
    warning."""
    if path is None or not path.is_file():
        return []
    lines = list(read_jsonl(path, make=_ledger_line, forgive="all"))
    written = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    if written > len(lines):
        log.warning("%d damaged lines of %s are left out of its sums", written - len(lines), path)
    return lines


def _ledger_line(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of a ledger. Raises ValueError if it is none."""
    texts = ("role", "what", "model") + (("kind",) if line.get("what") == "failure" else ())
    sums = ("step", "prompt_tokens", "completion_tokens", "money", "seconds")
    numbers = [line.get(name, 0) for name in sums]
    sound = all(
        isinstance(n, int | float) and math.isfinite(n) and not isinstance(n, bool) for n in numbers
    )
    if (
        "step" not in line
        or not sound
        or not all(isinstance(line.get(name), str) for name in texts)
    ):
        raise ValueError("this is not a line of a ledger")
    return line


def accounts(lines: Iterable[dict[str, Any]]) -> defaultdict[str, Account]:
    """Return the account of each role, summed over lines of a ledger."""
    total: defaultdict[str, Account] = defaultdict(Account)
    for line in lines:
        total[line["role"]].add(line)
    return total


class Rate:
    """A token bucket that refills over one minute: `take(n)` waits for n units. 0 per minute = no
    limit."""

    def __init__(self, per_minute: int):
        self.per_minute, self.level, self.at = per_minute, float(per_minute), time.monotonic()
        self._lock = asyncio.Lock()

    async def take(self, n: float) -> None:
        if not self.per_minute:
            return
        async with self._lock:  # first in, first out: small requests cannot starve a large one
            n = min(n, self.per_minute)
            while True:
                now = time.monotonic()
                self.level = min(
                    self.per_minute, self.level + (now - self.at) * self.per_minute / 60
                )
                self.at = now
                if self.level >= n:
                    self.level -= n
                    return
                await asyncio.sleep((n - self.level) * 60 / self.per_minute)

    def give_back(self, n: float) -> None:
        """Correct an estimate: n > 0 if it was too high, n < 0 if it was too low."""
        if self.per_minute:
            self.level = min(self.per_minute, self.level + n)


class Budget:
    """Money and tokens that may be spent; 0 = no limit.

    Calls in flight reserve their estimated cost. A question that would exceed the budget waits for
    them, because they usually cost less than was reserved; the budget counts as spent only if
    nothing is in flight.
    """

    def __init__(self, money: float, tokens: int, ledger: Ledger):
        self.money, self.tokens, self._ledger = money, tokens, ledger
        self._reserved_money, self._reserved_tokens, self._in_flight = 0.0, 0.0, 0
        self._settled = asyncio.Condition()

    def _short(self, money: float, tokens: float) -> str:
        """Return why a call with these estimates does not fit, "" if it does."""
        if self.money and self._ledger.money + self._reserved_money + money > self.money:
            return f"{self._ledger.money:.4f} of config.llm.budget_money={self.money:g} is spent"
        if self.tokens and self._ledger.tokens + self._reserved_tokens + tokens > self.tokens:
            return f"{self._ledger.tokens:,} of the {self.tokens:,} tokens in config.llm.budget_tokens are used"
        return ""

    @contextlib.asynccontextmanager
    async def reserve(self, money: float, tokens: float, spent: Callable[[str], Exception]):
        """Hold the estimates while the block runs. Raises spent(reason) if they do not fit."""
        async with self._settled:
            while short := self._short(money, tokens):
                if not self._in_flight:
                    raise spent(
                        f"{short}, and the next question would need about {money:.4f} and {tokens:,.0f} tokens"
                    )
                await self._settled.wait()
            self._reserved_money += money
            self._reserved_tokens += tokens
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._settled:
                self._reserved_money -= money
                self._reserved_tokens -= tokens
                self._in_flight -= 1
                self._settled.notify_all()
