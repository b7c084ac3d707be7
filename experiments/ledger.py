"""The record of a grid, `grid.jsonl`: a line for each attempt at a run, with the scores."""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from envs.values import Json
from evolver.files import formats
from evolver.files.lines import append_line, read_jsonl
from evolver.llm.store import accounts, ledger_lines
from experiments import compare

INTERRUPTED = 130  # the exit code of a run that goes on with the same command


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run, a line of the record. code: the exit code, None of no attempt. scores:
    {step: scores}; an evaluation of its own counts as step 0."""

    run: str
    command: list[str]
    code: int | None
    seconds: float
    git: str | None = None
    money: float = 0.0
    scores: compare.Curve = field(default_factory=dict)


ATTEMPT: pydantic.TypeAdapter[Attempt] = pydantic.TypeAdapter(Attempt)
NEVER = Attempt("", [], None, 0.0)


class Ledger:
    """The attempts at the runs of a grid, `grid.jsonl`."""

    def __init__(self, folder: Path):
        self.path = folder / "grid.jsonl"
        self._stat: tuple[int, int] | None = None  # of the file that was read
        self._attempts: dict[str, list[Attempt]] = {}

    def attempts(self, name: str) -> list[Attempt]:
        """Return the attempts at a run, oldest first; lines that are damaged, as by a crash, are
        left out."""
        stat = self.path.stat() if self.path.is_file() else None
        seen = (stat.st_mtime_ns, stat.st_size) if stat else None
        if seen != self._stat:
            self._stat, self._attempts = seen, {}
            make = functools.partial(formats.valid, ATTEMPT)
            for attempt in read_jsonl(self.path, make=make, forgive="all") if stat else ():
                self._attempts.setdefault(attempt.run, []).append(attempt)
        return self._attempts.get(name, [])

    def last(self, name: str) -> Attempt:
        """Return the last attempt at a run, NEVER if there was none."""
        return next(reversed(self.attempts(name)), NEVER)

    def curve(self, name: str) -> compare.Curve:
        """Return {step: scores} of a finished run, {} of another."""
        attempt = self.last(name)
        return attempt.scores if attempt.code == 0 else {}

    def add(self, **record: Any) -> None:
        """Append one attempt."""
        append_line(self.path, json.dumps(record, separators=(",", ":")))

    def finished(self, name: str, command: Sequence[str]) -> bool:
        """Return True if the last attempt at a run succeeded, with this command as it is
        recorded."""
        attempt = self.last(name)
        return attempt.code == 0 and attempt.command == command

    def seconds(self, names: Iterable[str]) -> float:
        """Return the seconds of all attempts at some runs."""
        attempts = itertools.chain.from_iterable(map(self.attempts, names))
        return sum(attempt.seconds for attempt in attempts)


def outcome(workdir: Path) -> Json:
    """Return what the ledger keeps of a run: its scores, what language models cost, and the
    revision of the code."""
    money = sum(account.money for account in accounts(ledger_lines(workdir / "llm.jsonl")).values())
    scores = {step: asdict(scores) for step, scores in compare.collect(workdir).items()}
    return {"git": revision(workdir), "money": money, "scores": scores}


def revision(workdir: Path) -> str | None:
    """Return the revision of the code that the run in a workdir was started with, None if there is
    no record of it."""
    for path in sorted(workdir.glob("config*.json")):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8")).get("git")
    return None
