"""The files of a run as JSON values for the pages: one function per resource, and indexes of
rollouts that grow.

Nothing here writes to a workdir. A damaged file is read as far as it goes; what is missing is
counted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolver.config.paths import resolve
from evolver.files.rollout_files import RolloutFile, index_of, rollout_files
from evolver.files.workdir import Workdir, plain
from evolver.llm.store import accounts, ledger_lines
from models.files import read_jsonl
from models.tokenizer import Tokenizer, TokenizerError

BUDGET = (
    0.5  # seconds that one request may spend on reading indexes; the page asks again for the rest
)
PART = 2 << 20  # bytes after which an answer to such a request ends: about 10,000 rollouts
TASKS = 64  # tasks per resource of details: verifiers are long
FACTS = (
    "env.name", "model.path", "model.preset", "advantage.name", "loss.name", "rollout.tasks",
    "rollout.group", "steps", "eval.split", "eval.rollouts", "eval.temperature",
    "rollout.temperature", "attributing.judge.name", "questioning.explorer.name",
    "navigating.extractor.name", "loss.old_logp", "loss.guided_prompt",
)  # fmt: skip


@dataclass
class Entry:
    """One file of rollouts: its signature tells a changed file, and its description is empty until
    it is read."""

    file: RolloutFile
    signature: tuple[int, int]  # bytes, time of the last change in ns
    text: bytes = b""  # the description as JSON: the index, with name, kind and step in front

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        if not self.text:
            raise LookupError(f"{self.file.path.name} has vanished")
        return json.loads(self.text)


class Run:
    """One workdir, read again whenever it has changed. Safe to use from several threads."""

    def __init__(self, path: str | Path, name: str = ""):
        self.workdir = Workdir(path)
        self.name = name or self.workdir.path.resolve().name
        self.entries: list[Entry] = []
        self.generation = (
            0  # grows when files that were indexed have changed or vanished, as when a run resumes
        )
        self._lock = threading.RLock()
        self._tokenizer: Tokenizer | None = None
        self._without_tokenizer = ""  # why there is none
        self._pieces: dict[int, str] = {}
        self._tasks: tuple[tuple[int, int], list[dict[str, Any]]] = (0, 0), []

    # --- rollouts ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Find new files of rollouts, in the order of their arrival; start over if known ones have
        changed."""
        with self._lock:
            found: dict[str, Entry] = {}
            for file in rollout_files(self.workdir.path):
                with contextlib.suppress(OSError):  # replaced or deleted meanwhile
                    stat = file.path.stat()
                    found[file.path.name] = Entry(file, (stat.st_size, stat.st_mtime_ns))
            for entry in self.entries:
                now = found.pop(entry.file.path.name, None)
                if now is None or now.signature != entry.signature:
                    self.entries, self.generation = [], self.generation + 1
                    return self.refresh()
            self.entries += found.values()

    def load(
        self,
        numbers: Iterable[int] | None = None,
        budget: float = float("inf"),
        most: float = float("inf"),
    ) -> int:
        """Read the indexes of files, of all unless `numbers` are given, one after the other.

        It ends after about `budget` seconds or `most` bytes, but not before the first file, and at
        a file that has vanished. Returns how many of `numbers`, from the first, have an index.
        """
        with self._lock:
            began, done, size = time.monotonic(), 0, 0
            for number in range(len(self.entries)) if numbers is None else numbers:
                entry = self.entries[number]
                if done and (time.monotonic() - began > budget or size > most):
                    break
                try:
                    entry.text = entry.text or self._text(entry)
                except FileNotFoundError:  # the next refresh starts over
                    break
                done, size = done + 1, size + len(entry.text)
            return done

    def _text(self, entry: Entry) -> bytes:
        """Return the description of a file as JSON."""
        file, text = entry.file, entry.file.index_text()
        if text is None:
            text = encoded(self._made_index(entry))
        elif b"NaN" in text or b"Infinity" in text:  # which no browser reads
            text = encoded(json.loads(text))
        head = encoded({"name": file.path.name, "kind": file.kind, "step": file.step})
        return head[:-1] + b"," + text[1:]

    def _made_index(self, entry: Entry) -> dict[str, Any]:
        """Return the index of a file that has none beside it, made from its rollouts."""
        try:
            return entry.file.make_index()
        except PermissionError:  # shown as a line that cannot be read
            return index_of([]) | {"broken": 1, "members": []}

    def index_text(self, first: int = 0, end: int = 0, generation: int = -1) -> bytes:
        """Return a part of the index as JSON for a page that holds the files from `first` to `end`,
        without `end`.

        New files come first, then those before `first`, the newest first, so that a page can show
        the latest rollouts of a long run while it reads the others. {"generation", "first": number
        of the first file in "files", "pending": number of files that are neither here nor with the
        page}. A page of another generation holds nothing.
        """
        with self._lock:
            self.refresh()
            count = len(self.entries)
            if generation != self.generation or not 0 <= first <= end <= count:
                first = end = count
            if end < count:
                begin, stop = end, end + self.load(range(end, count), BUDGET, PART)
            else:
                begin, stop = first - self.load(range(first - 1, -1, -1), BUDGET, PART), first
            return self._answer(begin, stop, count - (end - first) - (stop - begin))

    def _answer(self, begin: int, stop: int, pending: int) -> bytes:
        head = encoded({"generation": self.generation, "first": begin, "pending": pending})
        return (
            head[:-1]
            + b',"files":['
            + b",".join(entry.text for entry in self.entries[begin:stop])
            + b"]}"
        )

    def index(self) -> dict[str, Any]:
        """Return the whole index, as JSON values.

        "files" are those of the indexes on disk, each with its "name", "kind", "step" and
        "members": (offset, bytes, rollouts) of its parts.
        """
        with self._lock:
            self.refresh()
            return json.loads(self._answer(0, self.load(), 0))

    def records(self, file: int, member: int) -> list[dict[str, Any]]:
        """Return the rollouts of one part of a file, see "members" of the index. Raises LookupError
        and OSError."""
        with self._lock:
            if not self.entries:  # a page that outlived its server
                self.refresh()
            entry = self.entries[file]
            if not entry.text:
                self.load([file])
            offset, length, _ = entry.described["members"][member]
        return entry.file.member(offset, length)

    def chunk(self, file: int, member: int) -> dict[str, Any]:
        """Return the rollouts of one part of a file, and {token id: its text}, {} if no tokenizer
        is found."""
        records = self.records(file, member)
        turns = [turn for record in records for turn in record["turns"]]
        ids = {id for turn in turns for id in turn["prompt"] + turn["tokens"]}
        return {
            "records": records,
            "pieces": self.pieces(ids),
            "without_pieces": self._without_tokenizer,
        }

    def pieces(self, ids: set[int]) -> dict[int, str]:
        """Return the text of token ids; half a character of UTF-8 is U+FFFD."""
        tokenizer = self.tokenizer()
        if tokenizer is None:
            return {}
        for id in ids - self._pieces.keys():
            self._pieces[id] = tokenizer.decode([id]) if 0 <= id < tokenizer.vocab_size else ""
        return {id: self._pieces[id] for id in sorted(ids)}

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run's policy, from the workdir or from where the config found
        it; nothing is downloaded."""
        if self._tokenizer is None and not self._without_tokenizer:
            model = ((self.workdir.config() or {}).get("config") or {}).get("model") or {}
            places = [
                self.workdir / "policy",
                *(resolve(str(model[k])) for k in ("tokenizer", "path") if model.get(k)),
            ]
            for place in places:
                if (place / "tokenizer.json").is_file():
                    with contextlib.suppress(TokenizerError):
                        self._tokenizer = Tokenizer.load(place)
                        return self._tokenizer
            self._without_tokenizer = (
                "only the ids of tokens are shown: neither policy/ in the workdir nor the config's "
                "model.tokenizer and model.path hold a tokenizer.json"
            )
        return self._tokenizer

    # --- everything else --------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return what changes when the run writes: sizes and times of its files."""
        self.refresh()
        sizes = [len(self.entries), self.generation]
        for name in (
            "metrics.jsonl",
            "eval.jsonl",
            "llm.jsonl",
            "tasks.jsonl",
            "experience/experiences.jsonl",
            ".view/replay.json",
        ):
            with contextlib.suppress(OSError):
                stat = (self.workdir / name).stat()
                sizes += [stat.st_size, stat.st_mtime_ns]
        return sizes

    def overview(self) -> dict[str, Any]:
        """Return facts of the config, {metric: value per line} of `metrics.jsonl`, evaluations of
        `--mode=eval`, and the accounts of language models by role."""
        record = self.workdir.config() or {}
        lines = self.workdir.metrics()
        names = sorted({name for line in lines for name in line})
        path = self.workdir / "eval.jsonl"
        evaluations = list(read_jsonl(path, forgive="all")) if path.is_file() else []
        path = self.workdir / ".view" / "replay.json"
        replayed = list(read_jsonl(path, forgive="all")) if path.is_file() else []
        replayed = [
            found
            for found in replayed
            if all("rollouts" in cell for cell in found.get("table", [{}]))
        ]
        mechanisms = ("questioning", "navigating", "attributing")
        config = record.get("config") or {}
        return {
            "name": self.name,
            "path": str(self.workdir.path),
            "seed": record.get("seed"),
            "git": record.get("git"),
            "facts": {
                key: value for key in FACTS if (value := found(config, key)) not in (None, "")
            },
            "mechanisms": [name for name in mechanisms if found(config, f"{name}.enabled")],
            "metrics": plain({name: [line.get(name) for line in lines] for name in names}),
            "evaluations": plain(evaluations),
            "replayed": plain(replayed),
            "accounts": {
                role: {**vars(account), "failures": dict(account.failures)}
                for role, account in sorted(
                    accounts(ledger_lines(self.workdir / "llm.jsonl")).items()
                )
            },
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks without their verifiers and references."""
        return plain(
            [
                {k: v for k, v in task.items() if k not in ("verifier", "reference")}
                for task in self.all_tasks()
            ]
        )

    def task_details(self, number: int) -> list[dict[str, Any]]:
        """Return the whole records of TASKS tasks, from TASKS * number on."""
        return plain(self.all_tasks()[TASKS * number : TASKS * (number + 1)])

    def all_tasks(self) -> list[dict[str, Any]]:
        """Return the records of `tasks.jsonl`, which is read again when it has changed."""
        path = self.workdir / "tasks.jsonl"
        if not path.is_file():
            return []
        stat = path.stat()
        with self._lock:
            if self._tasks[0] != (stat.st_size, stat.st_mtime_ns):
                found = [
                    task
                    for task in read_jsonl(path, forgive="all")
                    if isinstance(task.get("id"), str)
                ]
                self._tasks = (stat.st_size, stat.st_mtime_ns), found
            return self._tasks[1]

    def experience(self) -> list[dict[str, Any]]:
        """Return the experience pool."""
        path = self.workdir / "experience" / "experiences.jsonl"
        found = read_jsonl(path, forgive="all") if path.is_file() else ()
        return plain([experience for experience in found if isinstance(experience.get("id"), str)])


def found(config: Any, key: str) -> Any:
    """Return the value at "a.b.c" of nested dicts, None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def named(folders: list[str]) -> list[Run]:
    """Return one run per folder, with names that differ: of equal last parts, the whole path."""
    runs = [Run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.workdir.path)
    return runs


def problems(folders: list[str]) -> list[str]:
    """Return one sentence per folder that holds nothing to show."""
    wrong = []
    for folder in folders:
        workdir = Workdir(folder)
        if not workdir.path.is_dir():
            wrong.append(f"{folder}: there is no such directory")
        elif not any(
            (workdir / n).exists()
            for n in ("metrics.jsonl", "trajectories", "eval.jsonl", "config.json")
        ):
            hint = [p.name for p in sorted(workdir.path.iterdir()) if (p / "config.json").is_file()]
            inside = f"; it holds the workdirs {', '.join(hint[:9])}" if hint else ""
            wrong.append(
                f"{folder}: not the workdir of a run: "
                f"it has neither metrics.jsonl nor trajectories/{inside}"
            )
    return wrong


def encoded(value: Any) -> bytes:
    """Return a value as JSON in ASCII: lone surrogates, which a model's text may hold, have no
    UTF-8."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (
        ValueError
    ):  # a figure that is not finite; looking for it in every index would take longer than the rest
        return json.dumps(plain(value), separators=(",", ":")).encode("ascii")
