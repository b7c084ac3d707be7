"""The workdir of a run: its files, written and read back.

A workdir holds `config.json` (resolved config, git revision, versions), `metrics.jsonl` (one line
per step), `trajectories/step_000012.jsonl.gz` and `held_out_000010.jsonl.gz` (one line per rollout,
see `evolver.files.rollout_files`), `eval/step_000010.json`, `tasks.jsonl`, `checkpoints/`,
`experience/` (the pool), `llm.jsonl` (calls to language models), `policy/` (Hugging Face format),
`summary.md` and `curve.png`. `--mode=eval` appends to `eval.jsonl`. While a run writes, `lock`
names its process.
"""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from envs.values import text
from envs.world import Task
from evolver.files.rollout_files import step_of, write_rollouts
from models.files import BrokenFile, append_line, loads, read_jsonl, write_atomically
from rl.evaluation import Scores

PACKAGES = (
    "evolver", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors", "usearch"
)  # fmt: skip

log = logging.getLogger(__name__)


class WorkdirInUse(Exception):
    """Another process writes to the workdir."""


class Workdir:
    """Reads and writes the files of one run. Nothing is created before the first write.

    Only one of several processes writes; in the others `writes` is False and writing does nothing.
    """

    def __init__(self, path: str | Path, *, writes: bool = True):
        self.path, self.writes, self._held = Path(path), writes, -1

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
        try:
            os.truncate(number, 0)
            os.write(
                number,
                f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n".encode(),
            )
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
            except OSError as error:
                holder = os.read(number, 200).decode("utf-8", "replace").strip()
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    log.warning(
                        "%s cannot be locked (%s): make sure that no other run uses it",
                        path,
                        error.strerror,
                    )
                    return number
                os.close(number)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise WorkdirInUse(
                    f"--workdir={self.path} is in use by {holder or 'another process'}: wait for it or stop it, or"
                    " choose another --workdir"
                ) from None
            if self._is_here(number):
                return number
            os.close(number)  # its last owner has just deleted it

    def _is_here(self, number: int) -> bool:
        """Return True if `lock` is the open file of this number."""
        try:
            return os.fstat(number).st_ino == os.stat(self / "lock").st_ino
        except FileNotFoundError:
            return False

    def _ready(self) -> bool:
        """Return True if this process writes. Raises FileNotFoundError if the workdir has gone
        since it was locked: it would be made again without what came before."""
        if gone := self.gone():
            raise FileNotFoundError(gone)
        return self.writes

    def gone(self) -> str:
        """Return a message if the workdir was deleted or moved away since it was locked, "" if
        not."""
        here = self._held < 0 or self._is_here(self._held)
        return "" if here else f"{self.path} was deleted or moved away while this run wrote to it"

    def claim(self, config: dict[str, Any], seed: int, mode: str = "train") -> None:
        """Write `config.json`. A resumed run replaces the config, whose resumable keys may differ,
        keeps the first revision and adds its own. Other modes, which may share the workdir of a
        run, write `config.<mode>.json`."""
        if not self.writes:
            return
        record = {"config": plain(config), "seed": seed, **provenance()}
        if mode != "train":
            write_atomically(
                self / f"config.{mode}.json", json.dumps(record, indent=2, sort_keys=True) + "\n"
            )
            return
        before = self.config()
        if before is not None:
            now = {key: record[key] for key in ("git", "python", "platform", "versions")}
            if (
                all(before.get(key) == value for key, value in now.items())
                and before["config"] == record["config"]
            ):
                return
            record = before | {
                "config": record["config"],
                "resumed": [*before.get("resumed", []), now],
            }
        write_atomically(self / "config.json", json.dumps(record, indent=2, sort_keys=True) + "\n")

    def config(self, mode: str = "train") -> dict[str, Any] | None:
        """Return the record that `claim` wrote for a mode, None if there is none or if another
        program wrote it."""
        path = self / ("config.json" if mode == "train" else f"config.{mode}.json")
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return (
            record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without a last line that a crash cut short.

        Raises BrokenFile, with the line, if one holds no step or a value that is not a number.
        """
        path = self / "metrics.jsonl"
        return list(read_jsonl(path, make=_metrics_of, forgive="last")) if path.is_file() else []

    def rewind(self, step: int, *, booked: bool = True) -> None:
        """Delete what was written after `step`, because those steps are played again. Unless
        `booked`, the line and the evaluation of `step` itself will be written again, too."""
        if not self.writes:
            return
        last = step if booked else step - 1
        if (self / "metrics.jsonl").is_file():
            kept = [line for line in self.metrics() if line["step"] <= last]
            write_atomically(self / "metrics.jsonl", "".join(metrics_line(line) for line in kept))
        for path in (self / "eval").glob("step_*"):
            name = re.fullmatch(r"step_(\d+)\.json(\.\w+\.tmp)?", path.name)
            if name and (
                name[2] or int(name[1]) > last
            ):  # .tmp: left by a process that died while writing
                path.unlink()
        for path in (self / "trajectories").glob("*_*"):
            name = step_of(path.name)
            if name and (path.suffix == ".tmp" or name[1] > (step if name[0] == "step" else last)):
                path.unlink()

    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one line and flush it to disk, so that it is there before the checkpoint of the
        step."""
        if not self._ready():
            return
        append_line(self / "metrics.jsonl", metrics_line({"step": step, **metrics}), sync=True)

    def log_trajectories(self, step: int | str, records: Iterable[dict[str, Any]]) -> None:
        """Write `trajectories/step_000012.jsonl.gz` and its index, or files of the given name, such
        as "held_out_000010", for rollouts that no step trained on."""
        if not self._ready():
            return
        name = step if isinstance(step, str) else f"step_{step:06d}"
        write_rollouts(
            self / f"trajectories/{name}.jsonl.gz", (plain(record) for record in records)
        )

    def log_scores(self, step: int, scores: Scores) -> None:
        """Write `eval/step_000010.json`."""
        if not self._ready():
            return
        path = self / f"eval/step_{step:06d}.json"
        write_atomically(path, json.dumps(dataclasses.asdict(scores)) + "\n")

    def log_evaluation(self, record: dict[str, Any]) -> None:
        """Append the result of `--mode=eval` to `eval.jsonl`."""
        if not self._ready():
            return
        append_line(self / "eval.jsonl", json.dumps(plain(record)))

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines of `eval.jsonl`, oldest first; "scores" of each holds one `Scores` per
        seed, as a dict.

        Lines that a crash cut short are left out.
        """
        path = self / "eval.jsonl"
        return list(read_jsonl(path, forgive="all")) if path.is_file() else []

    def scores(self) -> dict[int, Scores]:
        """Return {step: scores}, ascending. Files that cannot be read are left out, with a
        warning."""
        found, damaged = {}, []
        for path in sorted((self / "eval").glob("step_*.json")):
            try:
                found[int(path.stem.removeprefix("step_"))] = _scores_of(loads(path.read_bytes()))
            except (ValueError, TypeError):
                damaged.append(path.name)
        if damaged:
            log.warning(
                "%d damaged files in %s are left out: %s",
                len(damaged),
                self / "eval",
                ", ".join(damaged),
            )
        return found

    def log_tasks(self, tasks: Iterable[Task]) -> None:
        """Write `tasks.jsonl`."""
        if not self._ready():
            return
        write_atomically(
            self / "tasks.jsonl",
            "".join(json.dumps(t.to_dict(), ensure_ascii=False) + "\n" for t in tasks),
        )


def _metrics_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl`. Raises ValueError if it is none."""
    step = record.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(
            f"a line of metrics has a step, a whole number from 0; this one has {step!r}"
        )
    if odd := [name for name, value in record.items() if not isinstance(value, int | float | None)]:
        raise ValueError(f"the value of {odd[0]} is not a number: {str(record[odd[0]])[:80]!r}")
    return record


def _scores_of(record: Any) -> Scores:
    """Return the scores of a file in `eval/`. Raises ValueError and TypeError if it holds none."""
    scores = Scores(**record)
    tasks, rollouts = np.shape(
        np.asarray(scores.success_NR, np.float64).reshape(len(scores.tasks), -1)
    )
    lists = {
        "score_NR": (tasks, rollouts),
        "difficulty_N": (tasks,),
        "greedy_N": (tasks if scores.greedy_N else 0,),
    }
    for name, shape in lists.items():
        if np.asarray(getattr(scores, name), np.float64).shape != shape:
            raise ValueError(f"{name} is not of shape {shape}")
    return scores


def metrics_line(metrics: dict[str, Any]) -> str:
    """Return one line of JSON: `step` first, then the other keys, sorted. Equal runs give equal
    bytes."""
    ordered = {"step": metrics["step"]} | {
        key: metrics[key] for key in sorted(metrics) if key != "step"
    }
    return json.dumps(plain(ordered), allow_nan=False) + "\n"


def read_tasks(path: str | Path) -> list[Task]:
    """Return the tasks of a JSON-lines file. Raises BrokenFile, which names the first line that
    cannot be read."""
    tasks: list[Task] = list(read_jsonl(path, make=Task.from_dict))
    twice = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
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


def provenance() -> dict[str, Any]:
    """Return the git revision of this code (None if it is not in a clone), versions and
    platform."""
    root, revision = Path(__file__).parents[2], None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if (root / ".git").exists():  # an installed package may lie inside a clone of something else
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(git, capture_output=True, text=True, timeout=10)
            revision = found.stdout.strip() if found.returncode == 0 else None
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "git": revision,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
    }
