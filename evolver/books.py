"""The books of a run: what lies in its workdir, and what it tells the person who waits for it.

A workdir holds `config.json` (resolved config, git revision, versions), `metrics.jsonl` (one line per step),
`trajectories/step_000012.jsonl` (one line per rollout), `eval/step_000010.json`, `tasks.jsonl`, `checkpoints/`,
`experience/` (the pool), `policy/` (Hugging Face format), `summary.md` and `curve.png`.

What a clock had a part in is logged under `time/`. What else is no function of config and seed: docs/metrics.md.
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
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from envs.world import Task
from rl.evaluation import Scores
from rl.trajectory import StopReason, Trajectory

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors", "usearch")


class BrokenFile(ValueError):
    """A file that was written by hand or by a run, and cannot be read; the message names it and the line."""


def write_atomically(path: Path, text: str) -> None:
    """The file holds its old content or the new one, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def plain(value: Any) -> Any:
    """JSON without surprises: numpy scalars to Python's, non-finite floats to null (JSON has none)."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance() -> dict[str, Any]:
    """Where the numbers come from: git revision of this code (None outside a repository), versions, machine."""
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


class Workdir:
    """Reads and writes the files of one run. Nothing is created before the first write.

    Of several processes one writes; in the others (`writes` False) what would write does nothing.
    """

    def __init__(self, path: str | Path, *, writes: bool = True):
        self.path, self.writes = Path(path), writes

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def claim(self, config: dict[str, Any], seed: int, mode: str = "train") -> None:
        """Write `config.json`, once; a resumed run keeps the first and adds its own revision and versions. What another
        mode did here, perhaps beside a run, is in `config.<mode>.json`."""
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
        """The record in `config.json`, None where no run has been: other programs' files have that name, too."""
        path = self / "config.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, a last line cut short by a crash left out."""
        return list(read_jsonl(self / "metrics.jsonl", forgive_last=True)) if (self / "metrics.jsonl").is_file() else []

    def rewind(self, step: int, *, booked: bool = True) -> None:
        """Forget what was written after `step`, for those steps are played again. Unless `booked`, the line and the
        evaluation of `step` itself are about to be written again too."""
        if not self.writes:
            return
        last = step if booked else step - 1
        if (self / "metrics.jsonl").is_file():
            kept = [line for line in self.metrics() if line["step"] <= last]
            write_atomically(self / "metrics.jsonl", "".join(metrics_line(line) for line in kept))
        for folder, keep in (("trajectories", step), ("eval", last)):
            for path in (self / folder).glob("step_*"):
                step_of = re.fullmatch(r"step_(\d+)\.jsonl?(\.tmp)?", path.name)
                if step_of and (step_of[2] or int(step_of[1]) > keep):  # .tmp: of a process that died while it wrote
                    path.unlink()

    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one line; it is on disk before the checkpoint of the step is."""
        if not self.writes:
            return
        with open(self / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(metrics_line({"step": step, **metrics}))
            file.flush()
            os.fsync(file.fileno())

    def log_trajectories(self, step: int | str, records: Iterable[dict[str, Any]]) -> None:
        """`trajectories/step_000012.jsonl`, or a name of its own for what belongs to no step."""
        if not self.writes:
            return
        path = self / f"trajectories/{step if isinstance(step, str) else f'step_{step:06d}'}.jsonl"
        write_atomically(path, "".join(json.dumps(plain(r), ensure_ascii=False) + "\n" for r in records))

    def log_scores(self, step: int, scores: Scores) -> None:
        if not self.writes:
            return
        path = self / f"eval/step_{step:06d}.json"
        write_atomically(path, json.dumps(dataclasses.asdict(scores)) + "\n")

    def log_evaluation(self, record: dict[str, Any]) -> None:
        """Append what `--mode=eval` found to `eval.jsonl`."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self / "eval.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")

    def scores(self) -> dict[int, Scores]:
        """Evaluations by step, ascending."""
        found = {}
        for path in sorted((self / "eval").glob("step_*.json")):
            found[int(path.stem.removeprefix("step_"))] = Scores(**json.loads(path.read_text(encoding="utf-8")))
        return found

    def log_tasks(self, tasks: Iterable[Task]) -> None:
        if not self.writes:
            return
        write_atomically(
            self / "tasks.jsonl", "".join(json.dumps(t.to_dict(), ensure_ascii=False) + "\n" for t in tasks)
        )


def metrics_line(metrics: dict[str, Any]) -> str:
    """One line: `step` first, then the keys in order; floats as `repr` writes them, so equal runs are equal bytes."""
    ordered = {"step": metrics["step"]} | {key: metrics[key] for key in sorted(metrics) if key != "step"}
    return json.dumps(plain(ordered), allow_nan=False) + "\n"


def read_jsonl(path: str | Path, *, forgive_last: bool = False, make: Callable[[Any], Any] = dict) -> Iterator[Any]:
    """Yields what `make` makes of each object of a JSON-lines file; BrokenFile names file and line where it cannot."""
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            record = make(record)
        except (TypeError, ValueError) as error:
            if forgive_last and number == len(lines):
                return
            raise BrokenFile(f"{path}, line {number}: {error}") from None
        yield record


def read_tasks(path: str | Path) -> list[Task]:
    """Tasks of a JSON-lines file; BrokenFile names the first broken line."""
    tasks: list[Task] = list(read_jsonl(path, make=Task.from_dict))
    twice = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise BrokenFile(f"{path}: the task id {twice[0]} appears more than once")
    return tasks


# ------------------------------------------------------------------------------------------------ one line per rollout


def trajectory_record(trajectory: Trajectory, *, fate: str) -> dict[str, Any]:
    """A rollout as people read it: each token once (a step's `prompt` holds what is new), text beside the ids.

    `fate` is "trained" or why not.
    """
    steps, seen = [], []
    for step in trajectory.steps:
        grows = step.prompt[: len(seen)] == seen
        steps.append(
            {
                "action": step.action,
                "label": step.label,
                "advantage": round(float(step.advantage), 6),
                "observation": step.observation,
                "info": step.info,
                "stop": step.completion.stop,
                "version": step.completion.version,
                "prompt": step.prompt[len(seen) :] if grows else step.prompt,
                "continues": bool(seen) and grows,
                "tokens": step.completion.tokens,
                "logprobs": [round(float(x), 6) for x in step.completion.logprobs],
            }
        )
        seen = step.prompt + step.completion.tokens
    task, told = trajectory.task, zip(trajectory.experience, trajectory.told, strict=True)
    return {
        "task": task.id,
        "rollout": trajectory.rollout,
        "origin": task.origin,
        "difficulty": task.difficulty,
        "query": task.query,
        "stop": trajectory.stop.value,
        "score": trajectory.evaluation.score,
        "success": trajectory.evaluation.success,
        "components": trajectory.evaluation.components,
        "fate": fate,
        "experience": [{"id": id, "content": text} for id, text in told],
        "error": trajectory.error,
        "seed": trajectory.seed,
        "messages": trajectory.messages,
        "steps": steps,
    }


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """What the rollouts of a step were like; `stop/*` is one-hot, so its sum is the number of rollouts."""
    stops = Counter(t.stop for t in trajectories)
    metrics: dict[str, float] = {f"stop/{reason.value}": stops[reason] for reason in StopReason}
    kinds = {"original": [], "synthetic": [], "guided": [], "unguided": []}
    for t in trajectories:
        kinds[t.task.origin].append(t)
        kinds["guided" if t.guided else "unguided"].append(t)
    for kind, members in {"": trajectories, **kinds}.items():
        suffix = f"/{kind}" if kind else ""
        metrics[f"rollout/count{suffix}"] = len(members)
        if members:
            metrics[f"rollout/success{suffix}"] = mean(t.evaluation.success for t in members)
            metrics[f"rollout/score{suffix}"] = mean(t.outcome for t in members)
    generated = [len(s.completion.tokens) for t in trajectories for s in t.steps]
    metrics["rollout/steps"] = mean(len(t.steps) for t in trajectories)
    metrics["rollout/tokens"] = sum(generated)
    metrics["rollout/tokens_per_step"] = mean(generated)
    metrics["rollout/parse_errors"] = mean(bool(s.info.get("parse_error")) for t in trajectories for s in t.steps)
    return metrics


def mean(values: Iterable[float]) -> float:
    """The mean, 0 for nothing."""
    values = [float(v) for v in values]
    return math.fsum(values) / len(values) if values else 0.0


# ------------------------------------------------------------------------------------------------------------ progress


class Progress:
    """Tells how far the run is: one line that renews itself on a terminal; elsewhere a line per step, and one every
    half minute while a step lasts."""

    def __init__(self, steps: int, *, done: int = 0, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.steps = steps
        self.live = self.stream.isatty()
        self.every = 0.2 if self.live else 30.0
        self.shown, self.figures = time.monotonic(), ""
        self.begin(done)

    def begin(self, done: int) -> None:
        """`done` steps are behind us."""
        self.done = max(done, 0)
        self.marks: list[float] = []  # when each step ended; the first one compiles, so time is counted from its end

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """Say what is going on now, with a count where there is one."""
        now = time.monotonic()
        if now - self.shown < self.every and not (self.live and done == 0):
            return
        self.shown = now
        count = f" {done}/{of}" if of else ""
        line = f"step {min(self.done + 1, self.steps)}/{self.steps} · {name}{count}{self.figures}{self.eta()}"
        if not self.live:
            self.say(line)
            return
        self.stream.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
        self.stream.flush()

    def step(self, step: int, **figures: str) -> None:
        """A step is done; `figures` are shown beside it, and on the live line until the next one."""
        self.done = step
        self.marks += [time.monotonic()] if step else []
        self.figures = "".join(f" · {name.replace('_', ' ')} {value}" for name, value in figures.items())
        self.say(f"step {step}/{self.steps}{self.figures}{self.eta()}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.shown = time.monotonic()
        self.stream.write(("\r\x1b[2K" if self.live else "") + text + "\n")
        self.stream.flush()

    def eta(self) -> str:
        """How long the rest takes if it goes on as the last ten steps did; "" while that is a guess."""
        recent = self.marks[-11:]
        if len(recent) < 2 or self.done >= self.steps:
            return ""
        left = (recent[-1] - recent[0]) / (len(recent) - 1) * (self.steps - self.done)
        return f" · {clock(left)} left"


def clock(seconds: float) -> str:
    """90 -> "1:30"; 4000 -> "1:06:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


# ---------------------------------------------------------------------------------------------------- other log books


class Sinks:
    """Copies of the metrics for W&B and TensorBoard. Packages are imported only when asked for."""

    def __init__(
        self, workdir: Path, config: dict[str, Any], *, wandb: str, project: str, tensorboard: bool, id: str = ""
    ):
        """`wandb` is "off", "offline" or "online"; `id` continues an earlier run of this workdir."""
        self.run, self.writer = None, None
        if wandb != "off":
            import wandb as client

            try:
                self.run = client.init(
                    project=project, name=workdir.name, dir=str(workdir), mode=wandb, config=plain(config),
                    id=id or None, resume="allow", settings=client.Settings(silent=True),
                )  # fmt: skip
            except Exception as error:  # no key, no network: the client has its own zoo of errors
                raise OSError(
                    f"W&B did not start ({error}); config.log.wandb=offline needs neither key nor network"
                ) from None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.writer = SummaryWriter(str(workdir / "tensorboard"))

    @property
    def id(self) -> str:
        """What `id` has to be for a resumed run to go on in the same W&B run."""
        return self.run.id if self.run else ""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        numbers = {key: value for key, value in plain(metrics).items() if isinstance(value, int | float)}
        if self.run:
            self.run.log(numbers, step=step)
        if self.writer:
            for key, value in numbers.items():
                self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self.run:
            self.run.finish()
        if self.writer:
            self.writer.close()
