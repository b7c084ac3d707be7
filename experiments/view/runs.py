"""The files of a run as JSON values for the pages: one function per resource, and indexes of
rollouts that grow.

Nothing here writes to a workdir. A damaged file is read as far as it goes; what cannot be read is
told, with its line.
"""

import contextlib
import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic

from envs.values import Json
from envs.world import Task
from evolver.config.paths import resolve
from evolver.files import formats
from evolver.files.formats import LARGEST, Checked, Count, Label, found
from evolver.files.lines import read_jsonl
from evolver.files.rollout_files import COPIED, RolloutFile, rollout_files, told
from evolver.files.workdir import Workdir, metrics_of, plain
from evolver.llm.store import accounts, ledger_line
from models.files import BrokenFile
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
    "navigating.extractor.name", "loss.old_logp", "loss.fast", "loss.guided_prompt",
)  # fmt: skip

WATCHED = (
    "metrics.jsonl", "eval.jsonl", "llm.jsonl", "tasks.jsonl", "experience/experiences.jsonl",
    ".view/replay.json",
)  # fmt: skip

WITHOUT_TOKENIZER = (
    "only the ids of tokens are shown: neither policy/ in the workdir nor the config's "
    "model.tokenizer and model.path hold a tokenizer.json"
)
_LONG = re.compile(r"\d{16}")


class ComparedLabels(Checked):
    """Turns with one pair of labels, and where they are: (name of a file, row)."""

    judge: Label
    replay: Label
    turns: Count
    rollouts: list[Annotated[tuple[str, Count], pydantic.Strict(False)]]


class Comparison(Checked):
    """`.view/replay.json`, see `experiments.view.replay.compare`."""

    rollouts: Count
    skipped: Count
    both: Count
    agreed: Count
    table: list[ComparedLabels]


COMPARISON = pydantic.TypeAdapter(Comparison)


@dataclass
class Entry:
    """One file of rollouts: its signature tells a changed file, and its description is empty until
    it is read."""

    file: RolloutFile
    signature: tuple[int, int]  # bytes, time of the last change in ns
    text: bytes = b""  # the description as JSON: the index, with name, kind and step in front

    @functools.cached_property
    def described(self) -> Json:
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
        self.wrong: dict[str, list[str]] = {}  # file: what of it could not be read the last time
        self._lock = threading.RLock()
        self._tasks: tuple[tuple[int, ...], list[Json]] = (), []

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
        file, text, unfit = entry.file, None, []
        try:
            text = file.index_text()
        except BrokenFile as error:
            unfit = [f"{error}; the index was made again"]
        if text is None:
            index = file.make_index()
            faults = [self._named(fault) for fault in unfit + index["faults"]]
            text = encoded(index | {"faults": faults})
        head = encoded({"name": file.path.name, "kind": file.kind, "step": file.step})
        return head[:-1] + b"," + text[1:]

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
        files = b",".join(entry.text for entry in self.entries[begin:stop])
        return head[:-1] + b',"files":[' + files + b"]}"

    def index(self) -> Json:
        """Return the whole index, as JSON values.

        "files" are those of the indexes on disk, each with its "name", "kind", "step" and
        "members": (offset, bytes, rollouts) of its parts.
        """
        with self._lock:
            self.refresh()
            return json.loads(self._answer(0, self.load(), 0))

    def records(self, file: int, member: int) -> list[Json]:
        """Return the rollouts of one part of a file, see "members" of the index: as many as the
        index says. In place of one that cannot be read, its row of the index, with the error that
        says why. Raises LookupError, BrokenFile and OSError."""
        with self._lock:
            if not self.entries:  # a page that outlived its server
                self.refresh()
            entry = self.entries[file]
            if not entry.text:
                self.load([file])
            index = entry.described
            offset, length, rows = index["members"][member]
        before = sum(count for _, _, count in index["members"][:member])
        lines = entry.file.lines(offset, length, before + 1)
        if "broken" in index:  # it was made from those that can be read, and says so of the others
            return [line for line in lines if isinstance(line, dict)]
        lines += ["its index says that there is another rollout"] * (rows - len(lines))
        return [
            line if isinstance(line, dict) else _unread(index, before + row, line)
            for row, line in enumerate(lines[:rows])
        ]

    def chunk(self, file: int, member: int) -> Json:
        """Return the rollouts of one part of a file, and {token id: its text}, {} if no tokenizer
        is found; half a character of UTF-8 is U+FFFD."""
        records, tokenizer = self.records(file, member), self._tokenizer
        if tokenizer is None:
            return {"records": records, "pieces": {}, "without_pieces": WITHOUT_TOKENIZER}
        turns = itertools.chain.from_iterable(record["turns"] for record in records)
        ids = set(itertools.chain.from_iterable(turn["prompt"] + turn["tokens"] for turn in turns))
        known = range(tokenizer.vocab_size)
        pieces = {id: tokenizer.decode([id]) if id in known else "" for id in sorted(ids)}
        return {"records": records, "pieces": pieces, "without_pieces": ""}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's policy, from the workdir or from where the config found it;
        nothing is downloaded."""
        config = self.config()
        own = str((self.workdir / "policy").absolute())
        for path in (own, *(found(config, f"config.model.{k}") for k in ("tokenizer", "path"))):
            # The config may hold anything, and texts that are no possible path.
            with contextlib.suppress(TokenizerError, OSError, ValueError, TypeError):
                place = resolve(path)
                if path and (place / "tokenizer.json").is_file():
                    return Tokenizer.load(place)
        return None

    # --- everything else --------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return what changes when the run writes: sizes and times of its files."""
        self.refresh()
        sizes = [len(self.entries), self.generation]
        for name in WATCHED:
            sizes += self._signature(name)
        return sizes

    def now(self) -> list[Json]:
        """Return what each process of the run is doing, as it has written it last, and the seconds
        since then."""
        found = []
        for path in sorted(self.workdir.path.glob("now*.json")):
            with contextlib.suppress(OSError, ValueError):  # the run ends, or writes it again
                age = time.time() - path.stat().st_mtime
                told = json.loads(path.read_bytes())
                found += [{**told, "age": age}] if isinstance(told, dict) else []
        return found

    def _signature(self, name: str) -> tuple[int, ...]:
        """Return what changes with a file: size and time of the last change; () without one."""
        try:
            stat = (self.workdir / name).stat()
        except OSError:
            return ()
        return stat.st_size, stat.st_mtime_ns

    def overview(self) -> Json:
        """Return facts of the config, {metric: value per line} of `metrics.jsonl`, evaluations of
        `--mode=eval`, and the accounts of language models by role."""
        record = self.config()
        lines = self._lines("metrics.jsonl", metrics_of)
        names = sorted(set().union(*lines))
        self.all_tasks()
        self.experience()
        mechanisms = ("questioning", "navigating", "attributing")
        config = record.get("config")
        return {
            "name": self.name,
            "path": str(self.workdir.path),
            "seed": record.get("seed"),
            "git": record.get("git"),
            "facts": {
                key: value
                for key in FACTS
                if isinstance(value := found(config, key), str | int | float) and value != ""
            },
            "mechanisms": [name for name in mechanisms if found(config, f"{name}.enabled")],
            "metrics": {name: [line.get(name) for line in lines] for name in names},
            "evaluations": self._lines("eval.jsonl", fitting(formats.JSON_OBJECT)),
            "replayed": self._lines(".view/replay.json", fitting(COMPARISON)),
            "accounts": {
                role: {**vars(account), "failures": dict(account.failures)}
                for role, account in sorted(accounts(self._lines("llm.jsonl", ledger_line)).items())
            },
            "wrong": list(map(self._named, itertools.chain(*self.wrong.values()))),
        }

    def _named(self, fault: str) -> str:
        """Return a message without the path of the workdir, which no bundle tells others."""
        return fault.replace(f"{self.workdir.path}/", "")

    def config(self) -> Json:
        """Return the record in `config.json`, {} without one."""
        self.wrong["config.json"] = []
        try:
            record = self.workdir.config()
            if record is None and (self.workdir / "config.json").exists():
                raise BrokenFile("config.json: not the record of a run")
        except (OSError, BrokenFile) as error:
            self.wrong["config.json"].append(str(error))
            record = None
        return record or {}

    def _lines(self, name: str, make: Callable[[Any], Any]) -> list[Any]:
        """Return the lines of a file that can be read; the others are told in `wrong`."""
        found: list[Any] = []
        wrong: list[str] = []
        try:
            found = list(read_jsonl(self.workdir / name, make=make, forgive="all", wrong=wrong))
        except FileNotFoundError:
            pass
        except (OSError, BrokenFile) as error:
            wrong.append(str(error))
        self.wrong[name] = told(wrong)
        return found

    def tasks(self) -> list[Json]:
        """Return the tasks without their verifiers and references."""
        return [
            {k: v for k, v in task.items() if k not in ("verifier", "reference")}
            for task in self.all_tasks()
        ]

    def task_details(self, number: int) -> list[Json]:
        """Return the whole records of TASKS tasks, from TASKS * number on."""
        return self.all_tasks()[TASKS * number : TASKS * (number + 1)]

    def all_tasks(self) -> list[Json]:
        """Return the records of `tasks.jsonl`, which is read again when it has changed."""
        signature = self._signature("tasks.jsonl")
        with self._lock:
            if self._tasks[0] != signature:
                found = self._lines("tasks.jsonl", Task.from_dict)
                self._tasks = signature, [task.to_dict() for task in found]
            return self._tasks[1]

    def experience(self) -> list[Json]:
        """Return the experience pool."""
        found = self._lines("experience/experiences.jsonl", _experience_of)
        return [experience for experience in found if experience]


def fitting(kind: Any) -> Callable[[Any], Any]:
    """Return a function that returns a value of a format, or raises ValueError."""
    return functools.partial(formats.valid, kind)


def _experience_of(line: Json) -> Json:
    """Return an experience, {} for the line in front of them. Raises ValueError for other lines."""
    return {} if "format" in line else formats.valid(formats.EXPERIENCE, line)


def _unread(index: Json, row: int, why: str) -> Json:
    """Return what is shown of a rollout whose line cannot be read."""
    record = {name: index["columns"][name][row] for name in COPIED}
    empty: dict[str, list[Any]] = {"experience": [], "messages": [], "turns": []}
    query = index["queries"].get(record["task"], "")
    error = f"{index['name']}: {why}"
    return record | empty | {"query": query, "components": {}, "error": error, "seed": None}


def named(folders: list[str]) -> list[Run]:
    """Return one run per folder, with names that differ: of equal last parts, the whole path."""
    runs = [Run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.workdir.path)
    return runs


PARTS = ("metrics.jsonl", "trajectories", "eval.jsonl", "config.json")  # of any workdir


def problems(folders: list[str]) -> list[str]:
    """Return one sentence per folder that holds nothing to show."""
    wrong = []
    for folder in folders:
        workdir = Workdir(folder)
        if not workdir.path.is_dir():
            wrong.append(f"{folder}: there is no such directory")
        elif not any((workdir / name).exists() for name in PARTS):
            hint = [p.name for p in sorted(workdir.path.iterdir()) if (p / "config.json").is_file()]
            inside = f"; it holds the workdirs {', '.join(hint[:9])}" if hint else ""
            wrong.append(
                f"{folder}: not the workdir of a run: "
                f"it has neither metrics.jsonl nor trajectories/{inside}"
            )
    return wrong


def encoded(value: Any) -> bytes:
    """Return a value as JSON in ASCII: lone surrogates, which a model's text may hold, have no
    UTF-8. Whole numbers that JavaScript would round become texts."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a figure that is not finite, which is rare: a search for one costs more
        text = json.dumps(plain(value), separators=(",", ":"))
    if _LONG.search(text):
        text = json.dumps(_exact(value), separators=(",", ":"))
    return text.encode("ascii")


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {int} and max(map(abs, value)) <= LARGEST:
            return value  # as nearly all tokens are, which are most of what is encoded
        return [_exact(inner) for inner in value]
    return str(value) if isinstance(value, int) and abs(value) > LARGEST else value
