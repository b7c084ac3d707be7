"""Storage and limits of the language-model client: cached answers, a ledger of their cost, rate
limits and a budget."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evolver.files.lines import append_line, read_jsonl
from evolver.llm.questions import BudgetSpent, Json, Record
from evolver.metrics import Metrics
from models.files import read_whole, write_atomically

log = logging.getLogger(__name__)
SUMS = ("prompt_tokens", "completion_tokens", "money", "seconds")  # figures of a ledger's line


class Cache:
    """Answers on disk, one small file each, named by the hash of the whole question. Runs may share
    a folder.

    A damaged file counts as absent. A failed write (a full disk) must never end a run.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)

    def path(self, key: str) -> Path:
        """Return the file of a question."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"

    def get(self, key: str) -> Any:
        """Return the record of a question, None if there is no readable one."""
        try:
            return json.loads(read_whole(self.path(key)))
        except (OSError, ValueError, RecursionError):
            return None

    def put(self, key: str, record: Record) -> bool:
        """Write the record of a question. Return False if the write failed."""
        try:  # in ASCII, as answers may hold lone surrogates
            write_atomically(self.path(key), json.dumps(record))
        except OSError:
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
    failures: Counter[str] = field(default_factory=Counter)  # failed attempts by kind

    def add(self, line: Json) -> None:
        """Add one line of the ledger."""
        what = line["what"]
        if what == "failure":
            self.failures[line["kind"]] += 1
        self.calls += what == "call"
        self.hits += what == "hit"
        self.unanswered += what == "unanswered"
        for name in SUMS:
            setattr(self, name, getattr(self, name) + line.get(name, 0))

    def metrics(self, role: str) -> Metrics:
        """Return `llm/<role>/<name>` and the mean seconds per call."""
        names = ("calls", "hits", "unanswered", "money", "prompt_tokens", "completion_tokens")
        metrics = {f"llm/{role}/{name}": getattr(self, name) for name in names}
        if asked := self.calls + self.hits:
            metrics[f"llm/{role}/hit_rate"] = self.hits / asked
        for kind, count in sorted(self.failures.items()):
            metrics[f"llm/{role}/failures/{kind}"] = count
        if self.calls:
            metrics[f"time/llm/{role}"] = self.seconds / self.calls
        return metrics


class Ledger:
    """Every call, cache hit and failure: one JSON line each in a file, and sums by role.

    The file is read again when a run resumes and is never rewound: money spent on a step that is
    repeated stays spent. If it cannot be written, the sums in memory remain correct and `unwritten`
    counts the missing lines. All processes of a run write to one file; the sums are of what any of
    them had spent before this start, and of what this one has spent since.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        self.path = Path(path) if path else None
        self.step: Callable[[], int] = lambda: 0  # the training step that is going on
        self.unwritten: Counter[str] = Counter()  # of the lines of this ledger, and of the cache
        self._lock = threading.Lock()  # written by the client's thread, read by others
        self.total = accounts(ledger_lines(self.path))
        self._recent = accounts([])
        self.before = {"llm/money": self.money, "llm/tokens": self.tokens}  # until this start

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
                    self.unwritten["ledger"] += 1

    @property
    def money(self) -> float:
        """The money of the whole run so far."""
        return sum(account.money for account in self.total.values())

    @property
    def tokens(self) -> int:
        """The tokens of the whole run so far, of prompts and answers."""
        return sum(a.prompt_tokens + a.completion_tokens for a in self.total.values())

    def metrics(self) -> Metrics:
        """Return `llm/<role>/<name>` and mean seconds per call since the last call of this method,
        the money and tokens of the whole run so far, and counts of failed writes."""
        with self._lock:
            recent = self._recent
            self._recent = accounts([])
        metrics: Metrics = {}
        for role, account in recent.items():
            metrics |= account.metrics(role)
        if self.total:
            metrics |= {"llm/money": self.money, "llm/tokens": self.tokens}
        for name, count in self.unwritten.items():
            metrics[f"llm/unwritten/{name}"] = count
        return metrics


def ledger_lines(path: Path | None) -> list[Json]:
    """Return the lines of a ledger file. Those that are damaged, as by a crash, are skipped with a
    warning."""
    if path is None or not path.is_file():
        return []
    lines = list(read_jsonl(path, make=ledger_line, forgive="all"))
    damaged = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n")) - len(lines)
    if damaged:
        log.warning("%d damaged lines of %s are left out of its sums", damaged, path)
    return lines


def ledger_line(line: Json) -> Json:
    """Return a line of a ledger. Raises TypeError or ValueError if it is none."""
    texts = ["role", "what", "model"]
    if line.get("what") == "failure":
        texts.append("kind")
    sound = all(isinstance(line.get(name), str) for name in texts)
    numbers = [line.get("step"), *(line.get(name, 0) for name in SUMS)]
    if not (sound and all(map(math.isfinite, numbers))):
        raise ValueError("this is not a line of a ledger")
    return line


def accounts(lines: Iterable[Json]) -> defaultdict[str, Account]:
    """Return the account of each role, summed over lines of a ledger."""
    total: defaultdict[str, Account] = defaultdict(Account)
    for line in lines:
        total[line["role"]].add(line)
    return total


class Rate:
    """A token bucket that holds what may be taken in a minute, and refills in one. 0 per minute =
    no limit."""

    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self.full_at = 0.0  # on the monotonic clock; every unit that is taken postpones it
        self._lock = asyncio.Lock()

    async def take(self, units: float) -> None:
        """Wait until the bucket holds so many units, at most all of it, and take them."""
        if not self.per_minute:
            return
        async with self._lock:  # first in, first out: small requests cannot starve a large one
            now = time.monotonic()
            cost = 60 * min(1, units / self.per_minute)
            self.full_at = max(self.full_at, now) + cost
            await asyncio.sleep(self.full_at - 60 - now)

    def give_back(self, units: float) -> None:
        """Correct an estimate: units > 0 if it was too high, < 0 if it was too low."""
        if self.per_minute:
            self.full_at -= 60 * units / self.per_minute


@dataclass
class Budget:
    """Money and tokens that may be spent; 0 = no limit.

    Calls in flight reserve their estimated cost. A question that would exceed the budget waits for
    them, because they usually cost less than was reserved; the budget counts as spent only if
    nothing is in flight.
    """

    money: float
    tokens: int
    ledger: Ledger

    def __post_init__(self) -> None:
        self._reserved: list[tuple[float, float]] = []  # (money, tokens) of each call in flight
        self._settled = asyncio.Condition()

    def _lack(self, money: float, tokens: float) -> str:
        """Return why calls with these estimates do not fit, "" if they do."""
        spent = self.ledger.money
        used = self.ledger.tokens
        if self.money and spent + money > self.money:
            return f"{spent:.4f} of config.llm.budget_money={self.money:g} is spent"
        if self.tokens and used + tokens > self.tokens:
            return f"{used:,} of the {self.tokens:,} tokens in config.llm.budget_tokens are used"
        return ""

    @contextlib.asynccontextmanager
    async def reserve(self, money: float, tokens: float) -> AsyncIterator[None]:
        """Hold the estimates of a call while the block runs. Raises BudgetSpent if they do not
        fit."""
        call = (money, tokens)
        async with self._settled:
            while lack := self._lack(*map(sum, zip(call, *self._reserved))):
                if not self._reserved:
                    raise BudgetSpent(
                        f"{lack}, and the next question would need about {money:.4f} and"
                        f" {tokens:,.0f} tokens"
                    )
                await self._settled.wait()
            self._reserved.append(call)
        try:
            yield
        finally:
            async with self._settled:
                self._reserved.remove(call)
                self._settled.notify_all()
