"""What the chat client keeps: answers on disk, a ledger of what they cost, and how much it may still ask for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Reply:
    """An answer. `parsed` is the JSON in it where a schema was asked for."""

    text: str
    parsed: Any = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "stop"  # "stop" | "length" | what else the server says
    cached: bool = False


class Cache:
    """Answers on disk, a small file each, named by the hash of the whole question.

    A file that is cut or edited counts as absent. One that cannot be written (a full disk) is counted and done
    without: a cache must never end a run.
    """

    def __init__(self, folder: str | os.PathLike | None):
        self.folder = Path(folder) if folder else None
        self.unwritten = 0

    def path(self, question: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"

    def get(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """What was put for this question, None if nothing readable is there."""
        if self.folder is None:
            return None
        try:
            record = json.loads(self.path(question).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def put(self, question: dict[str, Any], record: dict[str, Any]) -> bool:
        """Whether it is on disk now, whole."""
        if self.folder is None:
            return True
        path, temporary = self.path(question), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                temporary = file.name
                json.dump(record, file, ensure_ascii=False)
            os.replace(temporary, path)
        except (OSError, UnicodeError):  # a model may write lone surrogates, which no file takes
            self.unwritten += 1
            if temporary:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)
            return False
        return True


@dataclass
class Account:
    """What one role has used."""

    calls: int = 0  # answered by a server
    hits: int = 0  # answered by the cache, or by an equal question on its way
    unanswered: int = 0  # given up
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0  # of the calls, one after the other
    failures: Counter = dataclasses.field(default_factory=Counter)  # attempts that failed, by kind

    def metrics(self) -> dict[str, float]:
        asked = self.calls + self.hits
        counted = {name: getattr(self, name) for name in ("calls", "hits", "unanswered", "money")}
        counted |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        counted |= {"hit_rate": self.hits / asked} if asked else {}
        return counted | {f"failures/{kind}": count for kind, count in sorted(self.failures.items())}


class Ledger:
    """Every call, hit and failure: a line each in a file, which is read again when a run goes on, and sums by role.

    The file is what a budget is held against, so it is appended to at once and never rewound: money that was spent on
    a step that is played again stays spent. Where it cannot be written, the sums in memory go on and `unwritten`
    counts the lines.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, step: Callable[[], int] = lambda: 0):
        self.path, self.step, self.unwritten = Path(path) if path else None, step, 0
        self._lock = threading.Lock()  # booked by the client's thread, read by others
        self.total: dict[str, Account] = defaultdict(Account)
        for line in ledger_lines(self.path):
            _book(self.total[line["role"]], line)
        self._recent: dict[str, Account] = defaultdict(Account)

    def add(self, what: str, role: str, model: str, **figures: Any) -> None:
        """Book one event. what: "call", "hit", "failure" (with its `kind`) or "unanswered"."""
        line = {"step": self.step(), "role": role, "model": model, "what": what, **figures}
        with self._lock:
            _book(self.total[role], line)
            _book(self._recent[role], line)
            if self.path is not None:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with open(self.path, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                except OSError:
                    self.unwritten += 1

    @property
    def money(self) -> float:
        return sum(account.money for account in self.total.values())

    @property
    def tokens(self) -> int:
        return sum(account.prompt_tokens + account.completion_tokens for account in self.total.values())

    def metrics(self) -> dict[str, float]:
        """`llm/<role>/<figure>` since the last call, mean seconds of a call, and the money of the whole run so far."""
        with self._lock:
            recent, self._recent = self._recent, defaultdict(Account)
        found = {f"llm/{role}/{name}": value for role, a in recent.items() for name, value in a.metrics().items()}
        found |= {f"time/llm/{role}": a.seconds / a.calls for role, a in recent.items() if a.calls}
        return found | {"llm/money": self.money, "llm/tokens": self.tokens} if self.total else found


def ledger_lines(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a ledger file; one that was cut short by a crash is passed over."""
    found = []
    if path is not None and path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and {"role", "what", "step", "model"} <= set(line):
                    found.append(line)
    return found


def _book(account: Account, line: dict[str, Any]) -> None:
    what = line["what"]
    if what == "failure":
        account.failures[line["kind"]] += 1
    elif what in ("hit", "unanswered"):
        account.hits += what == "hit"
        account.unanswered += what == "unanswered"
    account.calls += what == "call"
    for name in ("prompt_tokens", "completion_tokens", "money", "seconds"):  # a useless answer is paid for all the same
        setattr(account, name, getattr(account, name) + line.get(name, 0))


class Rate:
    """A token bucket over one minute: `take(n)` waits until n units are there. 0 per minute = no limit."""

    def __init__(self, per_minute: int):
        self.per_minute, self.level, self.at = per_minute, float(per_minute), time.monotonic()
        self._lock = asyncio.Lock()

    async def take(self, n: float) -> None:
        if not self.per_minute:
            return
        async with self._lock:  # first come, first served: a large request is not starved by small ones
            n = min(n, self.per_minute)
            while True:
                now = time.monotonic()
                self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
                self.at = now
                if self.level >= n:
                    self.level -= n
                    return
                await asyncio.sleep((n - self.level) * 60 / self.per_minute)

    def give_back(self, n: float) -> None:
        """Correct an estimate: n > 0 was too much, n < 0 too little."""
        if self.per_minute:
            self.level = min(self.per_minute, self.level + n)


class Budget:
    """Money and tokens that may be spent; 0 = as much as it takes.

    What is on its way is reserved at its estimate. A question that would not fit waits for those before it, which
    usually cost less than was reserved; only then is the budget spent.
    """

    def __init__(self, money: float, tokens: int, ledger: Ledger):
        self.money, self.tokens, self._ledger = money, tokens, ledger
        self._reserved_money, self._reserved_tokens, self._on_their_way = 0.0, 0.0, 0
        self._settled = asyncio.Condition()

    def _short(self, money: float, tokens: float) -> str:
        if self.money and self._ledger.money + self._reserved_money + money > self.money:
            return f"{self._ledger.money:.4f} of the {self.money:g} of config.llm.budget_money are spent"
        if self.tokens and self._ledger.tokens + self._reserved_tokens + tokens > self.tokens:
            return (
                f"{self._ledger.tokens:,} of the {self.tokens:,} tokens that config.llm.budget_tokens allows are used"
            )
        return ""

    @contextlib.asynccontextmanager
    async def reserve(self, money: float, tokens: float, spent: Callable[[str], Exception]):
        """Hold the estimate while the block runs. Raises spent(why) where it does not fit."""
        async with self._settled:
            while short := self._short(money, tokens):
                if not self._on_their_way:
                    raise spent(f"{short}, and the next question would need about {money:.4f} and {tokens:,.0f} tokens")
                await self._settled.wait()
            self._reserved_money += money
            self._reserved_tokens += tokens
            self._on_their_way += 1
        try:
            yield
        finally:
            async with self._settled:
                self._reserved_money -= money
                self._reserved_tokens -= tokens
                self._on_their_way -= 1
                self._settled.notify_all()


# --- structured answers ----------------------------------------------------------------------------------------------


def read_json(text: str, schema: dict[str, Any]) -> Any:
    """The first JSON value in `text` that fits `schema`. Raises ValueError saying why there is none.

    Models wrap JSON in fences and prose, so every place where one could begin is tried; what a model thinks before
    `</think>` is not its answer.
    """
    text = text.rpartition("</think>")[2]
    decoder, problem, start = json.JSONDecoder(), "there is no JSON in the answer", 0
    for _ in range(100):
        places = [place for place in (text.find("{", start), text.find("[", start)) if place >= 0]
        if not places:
            break
        start = min(places)
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start, problem = start + 1, "the JSON in the answer is broken or cut"
            continue
        problem = misfit(value, schema)
        if not problem:
            return value
        start = end
    raise ValueError(problem)


def misfit(value: Any, schema: dict[str, Any], where: str = "the answer") -> str:
    """Why a JSON value does not fit a schema, "" if it does. Knows type, enum, properties, required, items."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, _TYPES[k]) and (k == "boolean") == isinstance(value, bool) for k in kinds):
        return f"{where} is not of type {' or '.join(kinds)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is no finite number"
    if "enum" in schema and _folded(value) not in map(_folded, schema["enum"]):
        return f"{where} is none of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where} has no '{name}'"
        pairs = [(inner, schema.get("properties", {}).get(name, {}), name) for name, inner in value.items()]
    else:
        pairs = [(inner, schema.get("items", {}), "an item") for inner in value] if isinstance(value, list) else []
    return next((why for inner, rule, name in pairs if (why := misfit(inner, rule, f"'{name}' of {where}"))), "")


def _folded(value: Any) -> Any:
    """Without a schema of its own to obey, a model writes "Good" for "GOOD"."""
    return value.casefold() if isinstance(value, str) else value


_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
_TYPES["null"] = type(None)
