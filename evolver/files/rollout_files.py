"""Rollouts on disk: compressed lines of JSON, and beside each file an index that can be read
without them.

`trajectories/step_000012.jsonl.gz` holds one line per rollout. It is a sequence of gzip members of
about MEMBER bytes of text each, which `zcat` and every gzip reader take as one file, and of which a
reader that knows the index decompresses only the one that it needs. `step_000012.index.json.gz`
holds what lists, filters and tables show. Both are written once and never appended to. Files
without an index, and uncompressed `.jsonl`, can be read too.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.files import BrokenFile, write_atomically
from rl.trajectory import Trajectory, Turn

FORMAT = "evolver-rollouts-1"
MEMBER = 1 << 18  # bytes of text after which another gzip member starts
LEVEL = 6  # of the compression: level 9 takes three times as long and saves 2%
SHOWN = 300  # characters of a query and of an abstention's reason that the index keeps
_NAME = re.compile(r"(step|held_out)_(\d+)\.(?:jsonl(?:\.gz)?|index\.json\.gz)(\.\w+\.tmp)?")

# The columns of an index: one value per rollout, or None where a file of an earlier version lacks
# it.
COLUMNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "task": lambda r: r["task"],
    "draw": lambda r: r.get("draw"),
    "rollout": lambda r: r.get("rollout"),
    "origin": lambda r: r.get("origin"),
    "difficulty": lambda r: r.get("difficulty"),
    "stop": lambda r: r.get("stop"),
    "score": lambda r: r.get("score"),
    "success": lambda r: r.get("success"),
    "fate": lambda r: r.get("fate"),
    "experience": lambda r: [e["id"] for e in r.get("experience") or ()],
    "error": lambda r: (r.get("error") or "")[:SHOWN],
    "turns": lambda r: len(r.get("turns") or ()),
    "tokens": lambda r: sum(len(turn.get("tokens") or ()) for turn in r.get("turns") or ()),
    "good": lambda r: sum(turn.get("label") == 1 for turn in r.get("turns") or ()),
    "bad": lambda r: sum(turn.get("label") == -1 for turn in r.get("turns") or ()),
    "judged": lambda r: (r.get("components") or {}).get("judged"),
    "verified": lambda r: (r.get("components") or {}).get("verified"),
    "advantage": lambda r: _mean([turn.get("advantage") or 0.0 for turn in r.get("turns") or ()]),
    "abstained": lambda r: sorted(
        {
            str(turn["reason"])[:SHOWN]
            for turn in r.get("turns") or ()
            if not turn.get("label") and turn.get("reason")
        }
    ),
}

_HEAD = (
    b'{"format": "%s"' % FORMAT.encode()
)  # what the text of an index starts with, and the columns that it holds
_NAMES = [f'"{name}": ['.encode() for name in COLUMNS]


def record_of(trajectory: Trajectory, *, fate: str) -> dict[str, Any]:
    """Return a rollout as a readable record: text and token ids, each token once (`prompt` holds
    the new ones only).

    fate: "trained", or the reason why not; "sampled" or "greedy" for a held-out rollout.
    Log-probabilities have four decimals. Turns that trained have, per token, `gap` (log-probability
    by the learner before the update minus that by the engine, in nats) and `ratio` (probability at
    the token's update over that before it).
    """
    turns, seen = [], []
    for turn in trajectory.turns:
        grows = turn.prompt[: len(seen)] == seen
        turns.append(
            _turn_record(
                turn, turn.prompt[len(seen) :] if grows else turn.prompt, bool(seen) and grows
            )
        )
        seen = turn.prompt + turn.completion.tokens
    task, injected = trajectory.task, zip(trajectory.experience, trajectory.injected, strict=True)
    return {
        "task": task.id,
        "rollout": trajectory.rollout,
        "draw": trajectory.draw,
        "origin": task.origin,
        "difficulty": task.difficulty,
        "query": task.query,
        "stop": trajectory.stop.value,
        "score": trajectory.evaluation.score,
        "success": trajectory.evaluation.success,
        "components": trajectory.evaluation.components,
        "fate": fate,
        "experience": [{"id": id, "content": text} for id, text in injected],
        "error": trajectory.error,
        "seed": trajectory.seed,
        "messages": trajectory.messages,
        "turns": turns,
    }


def _turn_record(turn: Turn, prompt: list[int], continues: bool) -> dict[str, Any]:
    record = {
        "action": turn.action,
        "label": turn.label,
        "reason": turn.reason,
        "advantage": round(float(turn.advantage), 6),
        "observation": turn.observation,
        "info": turn.info,
        "stop": turn.completion.stop,
        "version": turn.completion.version,
        "prompt": prompt,
        "continues": continues,
        "tokens": turn.completion.tokens,
        "logprobs": _rounded(turn.completion.logprobs, 4),
    }
    if turn.gap is not None:
        record["gap"] = _rounded(turn.gap, 5)
    if turn.ratio is not None:
        record["ratio"] = _rounded(turn.ratio, 4)
    return record


def _rounded(values: Iterable[float], digits: int) -> list[float]:
    return [
        round(float(x), digits) + 0.0 for x in values
    ]  # + 0.0: no -0.0, which takes another character


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


# --- files ----------------------------------------------------------------------------------------


def index_path(path: Path) -> Path:
    """Return the path of the index that belongs to a file of rollouts."""
    return path.with_name(f"{stem_of(path)}.index.json.gz")


def stem_of(path: Path) -> str:
    """Return the name of a file of rollouts without its endings: "step_000012"."""
    return path.name.partition(".jsonl")[0]


def step_of(name: str) -> tuple[str, int] | None:
    """Return ("step" or "held_out", the step) that a file's name states, None for another name.

    Indexes count, and temporary files that a process left behind.
    """
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def write_rollouts(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write JSON records to a file `*.jsonl.gz`, and its index. Equal records give equal bytes."""
    records = list(records)
    members, body, lines, size = [], [], [], 0

    def flush() -> None:
        nonlocal lines, size
        data = gzip.compress(b"".join(lines), LEVEL, mtime=0)
        members.append([sum(map(len, body)), len(data), len(lines)])
        body.append(data)
        lines, size = [], 0

    for record in records:
        lines.append(
            (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        )
        size += len(lines[-1])
        if size >= MEMBER:
            flush()
    if lines or not body:
        flush()
    write_atomically(path, b"".join(body))
    index = index_of(records) | {"members": members, "bytes": sum(map(len, body))}
    write_atomically(index_path(path), gzip.compress(json.dumps(index).encode(), LEVEL, mtime=0))


def index_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"format", "count", "columns": {name: one value per record}, "queries": {task: its
    words}}."""
    columns = {name: [value(record) for record in records] for name, value in COLUMNS.items()}
    queries = {record["task"]: str(record.get("query") or "")[:SHOWN] for record in records}
    return {"format": FORMAT, "count": len(records), "columns": columns, "queries": queries}


@dataclass(frozen=True)
class RolloutFile:
    """A file of rollouts, with an index beside it: see `read_index` and `make_index`."""

    path: Path

    @property
    def kind(self) -> str:
        """The part of the run: "step" (training), "held_out", or the file's own name, such as
        "eval"."""
        found = step_of(self.path.name)
        return found[0] if found else stem_of(self.path)

    @property
    def step(self) -> int | None:
        found = step_of(self.path.name)
        return found[1] if found else None

    def index_text(self) -> bytes | None:
        """Return the JSON of the index on disk, None if there is none for the file as it is now.

        It is looked at but not parsed, which for the files of a long run would take most of the
        time to open it.
        """
        try:
            text = gzip.decompress(index_path(self.path).read_bytes())
            fits = text.startswith(_HEAD) and text.endswith(
                b'"bytes": %d}' % self.path.stat().st_size
            )
        except (OSError, EOFError, zlib.error):
            return None
        return text if fits and all(name in text for name in _NAMES) else None

    def read_index(self) -> dict[str, Any] | None:
        """Return the index on disk, None if there is none for the file as it is now."""
        text = self.index_text()
        return None if text is None else json.loads(text)

    def make_index(self) -> dict[str, Any]:
        """Return an index made from the rollouts themselves. A line that cannot be read is left
        out; `broken` counts such lines, and `lines` has the numbers of the others."""
        found = list(self.numbered())
        good = [
            (number, record) for number, record in found if record is not None and _fits(record)
        ]
        index = index_of([record for _, record in good])
        return index | {"broken": len(found) - len(good), "lines": [number for number, _ in good]}

    def numbered(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield (number from 0, record) of each line; None for a line that is not a JSON object."""
        data = unpacked(self.path.read_bytes())
        for number, line in enumerate(part for part in data.split(b"\n") if part.strip()):
            yield number, _record(line)

    def member(self, offset: int, length: int) -> list[dict[str, Any] | None]:
        """Return the records of one gzip member, see "members" of the index."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            data = unpacked(file.read(length))
        return [_record(line) for line in data.split(b"\n") if line.strip()]


def _fits(record: dict[str, Any]) -> bool:
    """Return True if an index can be made of a record: its fields are of the right types."""
    try:
        hash(record["task"])
        index_of([record])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return (
        record | {"turns": record.pop("steps")} if "steps" in record else record
    )  # as turns were called once


def unpacked(data: bytes) -> bytes:
    """Return the text of gzip members; data that is not compressed is returned as it is. Of a file
    that is cut short, what can be read is returned."""
    if data[:2] != b"\x1f\x8b":
        return data
    parts = []
    while data:
        reader = zlib.decompressobj(wbits=31)
        try:
            parts.append(reader.decompress(data))
        except zlib.error:
            break
        data = reader.unused_data.lstrip(b"\0") if reader.eof else b""
    return b"".join(parts)


def rollout_files(folder: str | Path) -> list[RolloutFile]:
    """Return the files of rollouts in `trajectories/` of a workdir: training and held-out by step,
    then the others."""
    paths = [
        p for p in Path(folder).glob("trajectories/*") if p.name.endswith((".jsonl", ".jsonl.gz"))
    ]
    files = [RolloutFile(path) for path in paths]
    return sorted(
        files, key=lambda f: (f.step is None, f.step or 0, f.kind != "held_out", f.path.name)
    )


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file of rollouts, `.jsonl.gz` or `.jsonl`. Raises BrokenFile, with
    the line, and OSError.

    A path without an ending finds either file.
    """
    path = Path(path)
    if not path.is_file():
        path = next(
            (
                p
                for p in (path.with_name(path.name + e) for e in (".jsonl.gz", ".jsonl"))
                if p.is_file()
            ),
            path,
        )
    records = []
    for number, record in RolloutFile(path).numbered():
        if record is None:
            raise BrokenFile(f"{path}, line {number + 1}: not a JSON object")
        records.append(record)
    return records
