"""The workdir of a run: its files, written and read back.

A workdir holds `config.json` (resolved config, git revision, versions), `metrics.jsonl` (one line
per step), `trajectories/step_000012.jsonl.gz` and `held_out_000010.jsonl.gz` (one line per rollout,
see `evolver.files.rollout_files`), `eval/step_000010.json`, `tasks.jsonl`, `checkpoints/`,
`experience/` (the pool), `llm.jsonl` (calls to language models), `policy/` (Hugging Face format),
`summary.md` and `curve.png`. `--mode=eval` appends to `eval.jsonl`. While a run writes, `lock`
names its process.
"""

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from envs.values import text
from envs.world import Task, repeated
from evolver.files import formats
from evolver.files.formats import Record
from evolver.files.lines import KeptLines, append_line, read_jsonl
from evolver.files.rollout_files import ENDING, write_rollouts
from models.files import BrokenFile, loads, read_whole, write_atomically
from rl.evaluation import Scores

PACKAGES = (
    "evolver", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers",
    "safetensors", "usearch",
)  # fmt: skip

log = logging.getLogger(__name__)


class WorkdirInUse(Exception):
    """Another process writes to the workdir."""


class Workdir:
    """Reads and writes the files of one run. Nothing is created before the first write.

    Only one of several processes writes; in the others `writes` is False and writing does nothing.
    """

    def __init__(self, path: str | Path, *, writes: bool = True):
        self.path = Path(path)
        self.writes = writes
        self._held = -1
        self.task_lines = KeptLines(ascii=False)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the workdir during the block. Raises WorkdirInUse if
        one already does.

        The operating system drops the lock of a process that dies, so no lock is ever stale.
        """
        if not self.writes:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        number = self._held = self._lock()
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n"
        try:
            os.truncate(number, 0)
            os.write(number, holder.encode())
            yield
        finally:
            self._held = -1
            if self._is_here(number):
                (self / "lock").unlink(missing_ok=True)
            os.close(number)
            with contextlib.suppress(OSError):  # not empty: the run has written something
                self.path.rmdir()

    def _lock(self) -> int:
        """Return the descriptor of the locked file `lock`."""
        path = self / "lock"
        while True:
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(number, 200).decode("utf-8", "replace").strip()
                os.close(number)
                raise WorkdirInUse(
                    f"--workdir={self.path} is in use by {holder or 'another process'}: wait for it"
                    " or stop it, or choose another --workdir"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                text = "%s cannot be locked (%s): let no other run use it"
                log.warning(text, path, error.strerror)
                return number
            if self._is_here(number):
                return number
            os.close(number)  # its last owner has just deleted it

    def _is_here(self, number: int) -> bool:
        """Return True if `lock` is the open file of this number."""
        try:
            return os.fstat(number).st_ino == os.stat(self / "lock").st_ino
        except FileNotFoundError:
            return False

    def gone(self) -> str:
        """Return a message if the workdir was deleted or moved away since it was locked, "" if
        not."""
        if self._held < 0 or self._is_here(self._held):
            return ""
        return f"{self.path} was deleted or moved away while this run wrote to it"

    def _ready(self) -> bool:
        """Return True if this process writes. Raises FileNotFoundError if the workdir has gone
        since it was locked: it would be made again without what came before."""
        if gone := self.gone():
            raise FileNotFoundError(gone)
        return self.writes

    def _write(self, name: str, text: str) -> None:
        if self._ready():
            write_atomically(self / name, text)

    def _append(self, name: str, line: str) -> None:
        if self._ready():
            append_line(self / name, line, sync=True)

    def _read(self, name: str, **options: Any) -> list[Record]:
        path = self / name
        return list(read_jsonl(path, **options)) if path.exists() else []

    # --- written and read back --------------------------------------------------------------------

    def claim(self, config: Record, mode: str = "train") -> None:
        """Write `config.json`. A resumed run replaces the config, whose resumable keys may differ,
        keeps the first revision and adds its own. Other modes, which may share the workdir of a
        run, write `config.<mode>.json`."""
        now = provenance()
        given = {"config": plain(config)}
        record = given | {"seed": config.get("seed")} | now
        if mode == "train" and (before := self.config()):
            if before | now | given == before:
                return
            record = before | given | {"resumed": [*before.get("resumed", []), now]}
        self._write(_config_name(mode), json.dumps(record, indent=2, sort_keys=True) + "\n")

    def config(self, mode: str = "train") -> Record | None:
        """Return the record that `claim` wrote for a mode, None if there is none or if another
        program wrote it. Raises BrokenFile for one that is damaged, and OSError."""
        path = self / _config_name(mode)
        if not path.exists():
            return None
        content = read_whole(path)
        try:
            record = loads(content)
            ours = isinstance(record, dict) and isinstance(record.get("config"), dict)
            return formats.valid(formats.RUN, record) if ours else None
        except ValueError as error:
            raise BrokenFile(f"{path}: {error}") from None

    def log_metrics(self, step: int, metrics: Record) -> None:
        """Append one line and flush it to disk, so that it is there before the checkpoint of the
        step."""
        self._append("metrics.jsonl", _metrics_line({"step": step, **metrics}))

    def metrics(self) -> list[Record]:
        """Return the lines of `metrics.jsonl`, without a last line that a crash cut short.

        Raises BrokenFile, with the line, if one holds no step or a value that is not a number.
        """
        return self._read("metrics.jsonl", make=metrics_of, forgive="last")

    def log_trajectories(self, step: int | str, records: Iterable[Record]) -> None:
        """Write `trajectories/step_000012.jsonl.gz` and its index, or files of the given name, such
        as "held_out_000010", for rollouts that are none of a step's own."""
        if self._ready():
            name = step if isinstance(step, str) else f"step_{step:06d}"
            path = self / f"trajectories/{name}{ENDING}"
            write_rollouts(path, [plain(record) for record in records])

    def log_evaluation(self, record: Record) -> None:
        """Append the result of `--mode=eval` to `eval.jsonl`."""
        self._append("eval.jsonl", json.dumps(plain(record)))

    def evaluations(self) -> list[Record]:
        """Return the lines of `eval.jsonl`, oldest first; "scores" of each holds one `Scores` per
        seed, as a dict.

        Lines that a crash cut short are left out.
        """
        return self._read("eval.jsonl", forgive="all")

    def log_scores(self, step: int, scores: Scores) -> None:
        """Write `eval/step_000010.json`."""
        self._write(f"eval/step_{step:06d}.json", json.dumps(dataclasses.asdict(scores)) + "\n")

    def scores(self) -> dict[int, Scores]:
        """Return {step: scores}, ascending. Files that cannot be read are left out, with a
        warning."""
        found = {}
        for path in sorted((self / "eval").glob("step_*.json")):
            try:
                found[int(path.stem.removeprefix("step_"))] = _scores_of(loads(read_whole(path)))
            except (ValueError, TypeError) as error:
                log.warning("%s is damaged and left out: %s", path, error)
        return found

    def log_tasks(self, tasks: Iterable[Task], card: str = "") -> None:
        """Write `tasks.jsonl` and, if there is a card, `tasks.md`, which describes the invented
        tasks."""
        if card:
            self._write("tasks.md", card)
        lines = self.task_lines.of([vars(task) for task in tasks])
        self._write("tasks.jsonl", "".join(f"{line}\n" for line in lines))

    def rewind(self, step: int, *, finished: bool = True) -> None:
        """Delete what was written after `step`, because those steps are played again. Unless
        `finished`, the line and the evaluation of `step` itself will be written again, too."""
        if not self.writes:
            return
        last = step if finished else step - 1
        if (self / "metrics.jsonl").exists():
            lines = [_metrics_line(line) for line in self.metrics() if line["step"] <= last]
            write_atomically(self / "metrics.jsonl", "".join(lines))
        # The rollouts of a step are complete when its update is done, its evaluation is not.
        kept = {"trajectories/step": step, "trajectories/extra": step}
        kept |= {"trajectories/held_out": last, "eval/step": last}
        for name, latest in kept.items():
            for path in self.path.glob(f"{name}_*"):
                number = re.search(r"_(\d+)\.", path.name)
                if number and int(number[1]) > latest:
                    path.unlink()
        for path in self.path.rglob("*.tmp"):  # left by a process that died while writing
            if re.search(r"\.[0-9a-f]+\.tmp$", path.name):
                path.unlink()


def _config_name(mode: str) -> str:
    return "config.json" if mode == "train" else f"config.{mode}.json"


def metrics_of(record: Record) -> Record:
    """Return a line of `metrics.jsonl`. Raises ValueError if it is none."""
    step = record.get("step")
    if type(step) is not int or step < 0:
        rule = "a line of metrics has a step, a whole number from 0"
        raise ValueError(f"{rule}; this one has {step!r}")
    for name, value in record.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"the value of {name} is not a number: {str(value)[:80]!r}")
    return record


def _metrics_line(metrics: Record) -> str:
    """Return one line of JSON: `step` first, then the other keys, sorted. Equal runs give equal
    bytes."""
    ordered = {"step": metrics["step"], **dict(sorted(metrics.items()))}
    return json.dumps(plain(ordered), allow_nan=False) + "\n"


def _scores_of(record: Any) -> Scores:
    """Return the scores of a file in `eval/`. Raises ValueError and TypeError if it holds none."""
    scores = Scores(**record)
    tasks = range(len(scores.tasks))
    difficulties = scores.difficulty_N
    success_N = [sum(success_R) for success_R in scores.success_NR]
    # numpy refuses to make an array of lists whose shapes differ
    np.asarray([tasks, success_N, difficulties, scores.greedy_N or tasks], np.float64)
    np.asarray([scores.score_NR, scores.success_NR], np.float64)
    if len(scores.worlds) not in (0, len(scores.tasks)):
        raise ValueError("worlds: not as many as tasks")
    return scores


def read_tasks(path: str | Path) -> list[Task]:
    """Return the tasks of a JSON-lines file. Raises BrokenFile, which names the first line that
    cannot be read."""
    tasks = list(read_jsonl(path, make=Task.from_dict))
    if twice := repeated(tasks):
        raise BrokenFile(f"{path}: the task id {twice[0]} appears more than once")
    return tasks


def plain(value: Any) -> Any:
    """Return JSON values: numpy values become Python's, and non-finite floats None, because JSON
    has none. Names lose lone surrogates, with which no line of metrics could be read again."""
    if type(value) in (int, str, bool, NoneType):  # nearly all: trajectories are lists of tokens
        return value
    if isinstance(value, dict):
        return {text(str(k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance() -> Record:
    """Return the git revision of this code (None if it is not in a clone), versions and
    platform."""
    root = Path(__file__).parents[2]
    revision = None
    versions = {}
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if (root / ".git").exists():  # an installed package may lie inside a clone of something else
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(git, capture_output=True, text=True, timeout=10)
            revision = found.stdout.strip() or None
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "git": revision,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
    }
