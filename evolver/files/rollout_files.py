"""Rollouts on disk: compressed lines of JSON, and beside each file an index that can be read
without them.

`trajectories/step_000012.jsonl.gz` holds one line per rollout. It is a sequence of gzip members of
about MEMBER bytes of text each, which `zcat` and every gzip reader take as one file, and of which a
reader that knows the index decompresses only the one that it needs. `step_000012.index.json.gz`
holds what lists, filters and tables show. Both are written once and never appended to.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from models.files import BrokenFile, write_atomically
from rl.trajectory import Trajectory, Turn

ENDING = ".jsonl.gz"
FORMAT = "evolver-rollouts-1"  # changes with the columns of an index
MEMBER = 1 << 18  # bytes of text after which another gzip member starts
LEVEL = 6  # of the compression: level 9 takes three times as long and saves 2%
MAX_CHARS = 300  # of a query, an error and an abstention's reason in the index

# The columns of an index, one value per rollout: those that a record has too, and those that are
# computed from it.
COPIED = ("task", "draw", "rollout", "origin", "difficulty", "stop", "score", "success", "fate")
COMPUTED = (
    "experience", "error", "turns", "tokens", "good", "bad", "judged", "verified", "advantage",
    "abstained",
)  # fmt: skip


def record_of(trajectory: Trajectory, *, fate: str) -> dict[str, Any]:
    """Return a rollout as a readable record: text and token ids, each token once (`prompt` holds
    the new ones only).

    fate: "trained", or the reason why not; "sampled" or "greedy" for a held-out rollout.
    Log-probabilities have four decimals. Turns that trained have, per token, `gap` (log-probability
    by the learner before the update minus that by the engine, in nats) and `ratio` (probability at
    the token's update over that before it).
    """
    turns: list[dict[str, Any]] = []
    seen: list[int] = []
    for turn in trajectory.turns:
        turns.append(_turn_record(turn, seen))
        seen = turn.prompt + turn.completion.tokens
    task, evaluation = trajectory.task, trajectory.evaluation
    injected = zip(trajectory.experience, trajectory.injected, strict=True)
    return {
        "task": task.id,
        "rollout": trajectory.rollout,
        "draw": trajectory.draw,
        "origin": task.origin,
        "difficulty": task.difficulty,
        "query": task.query,
        "stop": trajectory.stop.value,
        "score": evaluation.score,
        "success": evaluation.success,
        "components": evaluation.components,
        "fate": fate,
        "experience": [{"id": id, "content": text} for id, text in injected],
        "error": trajectory.error,
        "seed": trajectory.seed,
        "messages": trajectory.messages,
        "turns": turns,
    }


def _turn_record(turn: Turn, seen: list[int]) -> dict[str, Any]:
    """Return a turn as a record. seen: the tokens of the turns before it."""
    continues = bool(seen) and turn.prompt[: len(seen)] == seen
    record = {
        "action": turn.action,
        "label": turn.label,
        "reason": turn.reason,
        "advantage": round(float(turn.advantage), 6),
        "observation": turn.observation,
        "info": turn.info,
        "stop": turn.completion.stop,
        "version": turn.completion.version,
        "prompt": turn.prompt[len(seen) :] if continues else turn.prompt,
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
    # + 0.0: no -0.0, which takes another character
    return [round(float(x), digits) + 0.0 for x in values]


# --- files ----------------------------------------------------------------------------------------


def index_path(path: Path) -> Path:
    """Return the path of the index that belongs to a file of rollouts."""
    return path.with_name(path.name.removesuffix(ENDING) + ".index.json.gz")


def write_rollouts(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write JSON records to a file `*.jsonl.gz`, and its index. Equal records give equal bytes."""
    parts: list[list[bytes]] = [[]]  # the lines of each member
    for record in records:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        if sum(map(len, parts[-1])) >= MEMBER:
            parts.append([])
        parts[-1].append(line.encode("utf-8", "surrogatepass"))
    members, body = [], b""
    for part in parts:
        data = gzip.compress(b"".join(part), LEVEL, mtime=0)
        members.append((len(body), len(data), len(part)))
        body += data
    write_atomically(path, body)
    index = index_of(records) | {"members": members, "bytes": len(body)}
    write_atomically(index_path(path), gzip.compress(json.dumps(index).encode(), LEVEL, mtime=0))


def index_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"format", "count", "columns": {name: one value per record}, "queries": {task: its
    words}}."""
    rows = [_row(record) for record in records]
    columns = {name: [row[name] for row in rows] for name in COPIED + COMPUTED}
    queries = {record["task"]: record["query"][:MAX_CHARS] for record in records}
    return {"format": FORMAT, "count": len(records), "columns": columns, "queries": queries}


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a record in the columns of an index."""
    turns, components = record["turns"], record["components"]
    labels = [turn["label"] for turn in turns]
    advantages = [turn["advantage"] for turn in turns]
    reasons = {turn["reason"][:MAX_CHARS] for turn in turns if not turn["label"]}
    return {
        **{name: record[name] for name in COPIED},
        "experience": [experience["id"] for experience in record["experience"]],
        "error": record["error"][:MAX_CHARS],
        "turns": len(turns),
        "tokens": sum(len(turn["tokens"]) for turn in turns),
        "good": labels.count(1),
        "bad": labels.count(-1),
        "judged": components.get("judged"),
        "verified": components.get("verified"),
        "advantage": round(sum(advantages) / len(turns), 6) if turns else None,
        "abstained": sorted(reasons - {""}),
    }


class RolloutFile:
    """A file of rollouts with an index beside it.

    kind: the part of the run: "step" (training), "held_out", or the file's own name, such as
    "eval". step: None for the last of these.
    """

    def __init__(self, path: Path):
        self.path = path
        name = path.name.removesuffix(ENDING)
        numbered = re.fullmatch(r"(step|held_out)_(\d+)", name)
        self.kind = numbered[1] if numbered else name
        self.step = int(numbered[2]) if numbered else None

    def index_text(self) -> bytes | None:
        """Return the JSON of the index on disk, None if there is none for the file as it is now.

        It is looked at but not parsed, which for the files of a long run would take most of the
        time to open it.
        """
        try:
            text = gzip.decompress(index_path(self.path).read_bytes())
            end = b'"bytes": %d}' % self.path.stat().st_size
        except (OSError, EOFError, zlib.error):
            return None
        head = b'{"format": "%s"' % FORMAT.encode()
        return text if text.startswith(head) and text.endswith(end) else None

    def make_index(self) -> dict[str, Any]:
        """Return an index made from the rollouts themselves, of one member. `broken` is the number
        of lines that cannot be read, which are left out."""
        data = self.path.read_bytes()
        found = _records(data)
        sound = [record for record in found if record is not None]
        members = [(0, len(data), len(sound))]
        return index_of(sound) | {"members": members, "broken": len(found) - len(sound)}

    def member(self, offset: int, length: int) -> list[dict[str, Any]]:
        """Return the records of one gzip member, see "members" of the index."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            data = file.read(length)
        return [record for record in _records(data) if record is not None]


def _records(data: bytes) -> list[dict[str, Any] | None]:
    """Return the record of each line in gzip members; None for a line that is no record of a
    rollout."""
    return [_record(line) for line in _unpacked(data).split(b"\n") if line.strip()]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
        index_of([record])
    # what a line that somebody edited, or that a crash cut, makes of reading it
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record


def _unpacked(data: bytes) -> bytes:
    """Return the text of gzip members; of one that is cut short, what can be read."""
    text = b""
    while data:
        reader = zlib.decompressobj(wbits=31)
        try:
            text += reader.decompress(data)
        except zlib.error:
            break
        data = reader.unused_data
    return text


def rollout_files(folder: str | Path) -> list[RolloutFile]:
    """Return the files of rollouts in `trajectories/` of a workdir: training and held-out by step,
    then the others."""
    files = [RolloutFile(path) for path in Path(folder).glob(f"trajectories/*{ENDING}")]
    return sorted(
        files, key=lambda f: (f.step is None, f.step or 0, f.kind != "held_out", f.path.name)
    )


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file of rollouts. Raises BrokenFile, with the line, and OSError."""
    records = []
    for number, record in enumerate(_records(Path(path).read_bytes()), 1):
        if record is None:
            raise BrokenFile(f"{path}, line {number}: not the JSON object of a rollout")
        records.append(record)
    return records
