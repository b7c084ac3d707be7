"""The workdir of a run: its files, written and read back.

A workdir holds `config.json` (resolved config, git revision, versions), `metrics.jsonl` (one line per step),
`trajectories/step_000012.jsonl.gz` and `held_out_000010.jsonl.gz` (one line per rollout, see `evolver.records`),
`eval/step_000010.json`, `tasks.jsonl`, `checkpoints/`, `experience/` (the pool), `llm.jsonl` (calls to language
models), `policy/` (Hugging Face format), `summary.md` and `curve.png`. `--mode=eval` appends to `eval.jsonl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envs.world import Task
from evolver.records import step_of, write_rollouts
from models.files import BrokenFile, read_jsonl, write_atomically
from rl.evaluation import Scores

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors", "usearch")


class Workdir:
    """Reads and writes the files of one run. Nothing is created before the first write.

    Only one of several processes writes; in the others `writes` is False and writing does nothing.
    """

    def __init__(self, path: str | Path, *, writes: bool = True):
        self.path, self.writes = Path(path), writes

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def claim(self, config: dict[str, Any], seed: int, mode: str = "train") -> None:
        """Write `config.json` once; a resumed run keeps it and adds its own revision and versions. Other modes,
        which may share the workdir of a run, write `config.<mode>.json`."""
        if not self.writes:
            return
        record = {"config": plain(config), "seed": seed, **provenance()}
        if mode != "train":
            write_atomically(self / f"config.{mode}.json", json.dumps(record, indent=2, sort_keys=True) + "\n")
            return
        before = self.config()
        if before is not None:
            now = {key: record[key] for key in ("git", "python", "platform", "versions")}
            if all(before.get(key) == value for key, value in now.items()) and before["config"] == record["config"]:
                return
            record = before | {"config": record["config"], "resumed": [*before.get("resumed", []), now]}
        write_atomically(self / "config.json", json.dumps(record, indent=2, sort_keys=True) + "\n")

    def config(self) -> dict[str, Any] | None:
        """Return the record in `config.json`, None if there is none or if another program wrote it."""
        path = self / "config.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without a last line that a crash cut short."""
        path = self / "metrics.jsonl"
        return list(read_jsonl(path, forgive="last")) if path.is_file() else []

    def rewind(self, step: int, *, booked: bool = True) -> None:
        """Delete what was written after `step`, because those steps are played again. Unless `booked`, the line and the
        evaluation of `step` itself will be written again, too."""
        if not self.writes:
            return
        last = step if booked else step - 1
        if (self / "metrics.jsonl").is_file():
            kept = [line for line in self.metrics() if line["step"] <= last]
            write_atomically(self / "metrics.jsonl", "".join(metrics_line(line) for line in kept))
        for path in (self / "eval").glob("step_*"):
            name = re.fullmatch(r"step_(\d+)\.json(\.\w+\.tmp)?", path.name)
            if name and (name[2] or int(name[1]) > last):  # .tmp: left by a process that died while writing
                path.unlink()
        for path in (self / "trajectories").glob("*_*"):
            name = step_of(path.name)
            if name and (path.suffix == ".tmp" or name[1] > (step if name[0] == "step" else last)):
                path.unlink()

    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one line and flush it to disk, so that it is there before the checkpoint of the step."""
        if not self.writes:
            return
        with open(self / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(metrics_line({"step": step, **metrics}))
            file.flush()
            os.fsync(file.fileno())

    def log_trajectories(self, step: int | str, records: Iterable[dict[str, Any]]) -> None:
        """Write `trajectories/step_000012.jsonl.gz` and its index, or files of the given name, such as
        "held_out_000010", for rollouts that no step trained on."""
        if not self.writes:
            return
        name = step if isinstance(step, str) else f"step_{step:06d}"
        write_rollouts(self / f"trajectories/{name}.jsonl.gz", (plain(record) for record in records))

    def log_scores(self, step: int, scores: Scores) -> None:
        """Write `eval/step_000010.json`."""
        if not self.writes:
            return
        path = self / f"eval/step_{step:06d}.json"
        write_atomically(path, json.dumps(dataclasses.asdict(scores)) + "\n")

    def log_evaluation(self, record: dict[str, Any]) -> None:
        """Append the result of `--mode=eval` to `eval.jsonl`."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self / "eval.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")

    def scores(self) -> dict[int, Scores]:
        """Return {step: scores}, ascending."""
        found = {}
        for path in sorted((self / "eval").glob("step_*.json")):
            found[int(path.stem.removeprefix("step_"))] = Scores(**json.loads(path.read_text(encoding="utf-8")))
        return found

    def log_tasks(self, tasks: Iterable[Task]) -> None:
        """Write `tasks.jsonl`."""
        if not self.writes:
            return
        write_atomically(
            self / "tasks.jsonl", "".join(json.dumps(t.to_dict(), ensure_ascii=False) + "\n" for t in tasks)
        )


def metrics_line(metrics: dict[str, Any]) -> str:
    """Return one line of JSON: `step` first, then the other keys, sorted. Equal runs give equal bytes."""
    ordered = {"step": metrics["step"]} | {key: metrics[key] for key in sorted(metrics) if key != "step"}
    return json.dumps(plain(ordered), allow_nan=False) + "\n"


def read_tasks(path: str | Path) -> list[Task]:
    """Return the tasks of a JSON-lines file. Raises BrokenFile, which names the first line that cannot be read."""
    tasks: list[Task] = list(read_jsonl(path, make=Task.from_dict))
    twice = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise BrokenFile(f"{path}: the task id {twice[0]} appears more than once")
    return tasks


def plain(value: Any) -> Any:
    """Return JSON values: numpy values become Python's, and non-finite floats None, because JSON has none."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance() -> dict[str, Any]:
    """Return the git revision of this code (None outside a repository), versions and platform."""
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10)
        revision = found.stdout.strip() if found.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        revision = None
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"git": revision, "python": platform.python_version(), "platform": platform.platform(), "versions": versions}
