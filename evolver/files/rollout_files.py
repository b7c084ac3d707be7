"""Rollouts on disk: compressed lines of JSON, and beside each file an index that can be read
without them.

`trajectories/step_000012.jsonl.gz` holds one line per rollout. It is a sequence of gzip members of
about MEMBER bytes of text each, which `zcat` and every gzip reader take as one file, and of which a
reader that knows the index decompresses only the one that it needs. `step_000012.index.json.gz`
holds what lists, filters and tables show. Both are written once and never appended to.
"""

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from envs.toolcalls import parse, spoken
from envs.world import Task
from evolver.files import formats
from evolver.files.formats import Record
from models.files import LONGEST, BrokenFile, opened, read_whole, write_atomically
from rl.trajectory import StopReason, Trajectory, Turn

ENDING = ".jsonl.gz"
FORMAT = "evolver-rollouts-1"  # changes with the columns of an index
MEMBER = 1 << 18  # bytes of text after which another gzip member starts
LEVEL = 6  # of the compression: level 9 takes three times as long and saves 2%
MAX_CHARS = 300  # of a query, an error and an abstention's reason in the index
# Of a file; an archive of 1 MB can hold 1 GB of text.
MOST_TEXT = 1 << 30
MOST_LINES = 1 << 20
MOST_TOLD = 20  # faults of a file that are told one by one
MOST_BROKEN = 1000  # lines that cannot be read, after which a file is none of rollouts

# The columns of an index that a record has too; the others are computed from it.
COPIED = ("task", "draw", "rollout", "origin", "difficulty", "stop", "score", "success", "fate")


def record_of(trajectory: Trajectory, *, fate: str) -> Record:
    """Return a rollout as a readable record: text and token ids, each token once (`prompt` holds
    the new ones only).

    fate: "trained", or the reason why not; "sampled" or "greedy" for a held-out rollout.
    Log-probabilities have four decimals. Turns that trained have, per token, `gap` (log-probability
    by the learner before the update minus that by the engine, in nats) and `ratio` (probability at
    the token's update over that before it) and, where a recipe weighed tokens, `advantages`.
    """
    turns = []
    seen: list[int] = []
    for turn in trajectory.turns:
        turns.append(_turn_record(turn, seen))
        seen = turn.prompt + turn.completion.tokens
    task = trajectory.task
    evaluation = trajectory.evaluation
    expected = expected_answer(task)
    injected = zip(trajectory.experience, trajectory.injected, strict=True)
    shaped = {} if trajectory.reward is None else {"reward": trajectory.reward}
    return {
        "task": task.id,
        "rollout": trajectory.rollout,
        "draw": trajectory.draw,
        "origin": task.origin,
        "world": task.env,
        "difficulty": task.difficulty,
        "query": task.query,
        "expected": expected,
        "given": given_answer(trajectory) if expected else "",
        "stop": trajectory.stop.value,
        "score": evaluation.score,
        "success": evaluation.success,
        **shaped,
        "components": evaluation.components,
        "fate": fate,
        "experience": [{"id": id, "content": text} for id, text in injected],
        "error": trajectory.error,
        "seed": trajectory.seed,
        "messages": trajectory.messages,
        "turns": turns,
    }


def expected_answer(task: Task) -> str:
    """Return the answer that the verifier of a task expects, or else the last turn of its reference
    if that calls no tool; "" if none is known."""
    if "answer" in task.verifier:
        answer = task.verifier["answer"]
        answer = answer.get("value") if isinstance(answer, dict) else answer
        return "" if answer is None else str(answer)
    last = task.reference[-1] if task.reference else ""
    turn = parse(last)
    return "" if turn.calls or turn.errors else spoken(last)


def given_answer(trajectory: Trajectory) -> str:
    """Return the answer that ended a rollout: the one that the world reports, or else the text of
    its last turn if that called no tool; "" if it ended in another way."""
    if trajectory.stop is not StopReason.DONE or not trajectory.turns:
        return ""
    last = trajectory.turns[-1]
    answer = last.info.get("answer")
    if answer is not None:
        return str(answer)
    return "" if last.info.get("calls") else spoken(last.action)


def _turn_record(turn: Turn, seen: list[int]) -> Record:
    """Return a turn as a record. seen: the tokens of the turns before it."""
    continues = bool(seen) and turn.prompt[: len(seen)] == seen
    record = {
        "action": turn.action,
        "label": turn.label,
        "reason": turn.reason,
        "advantage": round(float(turn.advantage), 6),
        "reward": turn.reward,
        "observation": turn.observation,
        "info": turn.info,
        "stop": turn.completion.stop,
        "version": turn.completion.version,
        "prompt": turn.prompt[len(seen) :] if continues else turn.prompt,
        "continues": continues,
        "tokens": turn.completion.tokens,
        "logprobs": _rounded(turn.completion.logprobs, 4),
    }
    if turn.given:
        record["given"] = True
    if turn.outcome_advantage is not None:
        record["outcome_advantage"] = round(turn.outcome_advantage, 6)
    if turn.gap is not None:
        record["gap"] = _rounded(turn.gap, 5)
    if turn.ratio is not None:
        record["ratio"] = _rounded(turn.ratio, 4)
    if turn.weighed is not None:
        record["advantages"] = _rounded(turn.weighed, 6)
    return record


def _rounded(values: Iterable[float], digits: int) -> list[float]:
    # + 0.0: no -0.0, which takes another character
    return [round(float(x), digits) + 0.0 for x in values]


# --- files ----------------------------------------------------------------------------------------


def index_path(path: Path) -> Path:
    """Return the path of the index that belongs to a file of rollouts."""
    return path.with_name(path.name.removesuffix(ENDING) + ".index.json.gz")


def write_rollouts(path: Path, records: Sequence[Record]) -> None:
    """Write JSON records to a file `*.jsonl.gz`, and its index. Equal records give equal bytes."""
    parts: list[list[bytes]] = [[]]  # the lines of each member
    for record in records:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        if sum(map(len, parts[-1])) >= MEMBER:
            parts.append([])
        parts[-1].append(line.encode("utf-8", "surrogatepass"))
    members = []
    body = b""
    for part in parts:
        data = gzip.compress(b"".join(part), LEVEL, mtime=0)
        members.append((len(body), len(data), len(part)))
        body += data
    write_atomically(path, body)
    index = index_of(records) | {"members": members, "bytes": len(body)}
    write_atomically(index_path(path), gzip.compress(json.dumps(index).encode(), LEVEL, mtime=0))


def index_of(records: Sequence[Record]) -> Record:
    """Return {"format", "count", "columns": {name: one value per record}, "queries": {task: its
    words}}."""
    rows = [_row(record) for record in records]
    columns = {name: [*map(itemgetter(name), rows)] for name in formats.Columns.__annotations__}
    queries = {record["task"]: record["query"][:MAX_CHARS] for record in records}
    return {"format": FORMAT, "count": len(records), "columns": columns, "queries": queries}


def _row(record: Record) -> Record:
    """Return the values of a record in the columns of an index."""
    turns = record["turns"]
    components = record["components"]
    labels = [turn["label"] for turn in turns]
    advantages = [turn["advantage"] for turn in turns]
    known = turns and None not in advantages  # an infinite one is null in a record
    reasons = {turn["reason"][:MAX_CHARS] for turn in turns if not turn["label"]}
    return {
        **{name: record[name] for name in COPIED},
        "world": record.get("world", ""),
        "experience": [experience["id"] for experience in record["experience"]],
        "error": record["error"][:MAX_CHARS],
        "turns": len(turns),
        "tokens": sum(len(turn["tokens"]) for turn in turns),
        "good": labels.count(1),
        "bad": labels.count(-1),
        "judged": components.get("judged"),
        "verified": components.get("verified"),
        "advantage": round(sum(advantages) / len(turns), 6) if known else None,
        "abstained": sorted(reasons - {""}),
    }


class RolloutFile:
    """A file of rollouts with an index beside it.

    kind: the part of the run: "step" (training), "extra" (see `Recipe.extra`), "held_out", or the
    file's own name, such as "eval". step: None for the last of these.
    """

    def __init__(self, path: Path):
        self.path = path
        name = path.name.removesuffix(ENDING)
        numbered = re.fullmatch(r"(step|held_out|extra)_([0-9]{1,15})", name)
        self.kind = numbered[1] if numbered else name
        self.step = int(numbered[2]) if numbered else None

    def index_text(self) -> bytes | None:
        """Return the JSON of the index on disk, None if there is none for the file as it is now.
        Raises BrokenFile if there is one that is no index."""
        path = index_path(self.path)
        try:
            text = zlib.decompressobj(wbits=31).decompress(read_whole(path), LONGEST)
            size = self.path.stat().st_size
        except (OSError, zlib.error, BrokenFile):
            return None
        # The format stands first and the size of the file last: no JSON is read of an old index.
        if not text.startswith(b'{"format": "%s"' % FORMAT.encode()):
            return None
        if not text.endswith(b'"bytes": %d}' % size):
            return None
        try:
            index = formats.valid(formats.INDEX, text)
            lengths = {name: len(column) for name, column in index["columns"].items()}
            lengths["members"] = sum(rows for _, _, rows in index["members"])
            if wrong := [name for name, length in lengths.items() if length != index["count"]]:
                raise ValueError(f"{wrong[0]}: not as many rollouts as count says")
        except ValueError as error:
            raise BrokenFile(f"{path.name}: {error}") from None
        return text

    def make_index(self) -> Record:
        """Return an index made from the rollouts themselves, of one member. `broken` is the number
        of lines that cannot be read, which are left out, and `faults` says why. Raises
        FileNotFoundError."""
        lines: list[Record | str]
        size = self.path.stat().st_size  # raises if the file, which was listed, is gone
        try:
            lines = self.lines(0, size)
        except FileNotFoundError:
            raise
        except (OSError, BrokenFile) as error:
            lines = [str(error)]
        sound = [line for line in lines if isinstance(line, dict)]
        faults = [line for line in lines if isinstance(line, str)]
        members = [(0, size, len(sound))] if sound else []
        broken = {"broken": len(faults), "faults": told(faults)}
        return index_of(sound) | {"members": members} | broken

    def lines(self, offset: int, length: int, first: int = 1) -> list[Record | str]:
        """Return the records of one gzip member, see "members" of the index, whose first line has a
        number. In place of a line that cannot be read, what is wrong with it. Raises BrokenFile and
        OSError."""
        with opened(self.path) as file:
            file.seek(offset)
            return list(_records(io.BytesIO(file.read(min(length, MOST_TEXT))), first))


def _records(file: BinaryIO, first: int = 1) -> Iterator[Record | str]:
    """Yield the record of each line of gzip members, or what is wrong with the line. Ends where
    they cannot be unpacked, or hold more than a file of rollouts does."""
    text = gzip.GzipFile(fileobj=file)
    size = 0
    broken = 0
    for number in itertools.count(first):
        try:
            line = text.readline(LONGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            yield f"line {number}: {error}"
            return
        size += len(line)
        if len(line) > LONGEST or size > MOST_TEXT or number - first > MOST_LINES:
            yield f"line {number}: from here on there is more text than a file of rollouts has"
            return
        if not line:
            return
        if line.strip():
            try:
                yield _record(line)
            except ValueError as error:
                yield f"line {number}: {error}"
                broken += 1
                if broken == MOST_BROKEN:
                    yield f"line {number}: so many lines cannot be read that this is the last one"
                    return


def _record(line: bytes) -> Record:
    """Return the record of a line. Raises ValueError for a line that is none."""
    try:
        value = json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return formats.valid(formats.ROLLOUT, value)


def told(faults: list[str]) -> list[str]:
    """Return the first of many messages, and how many more there are."""
    more = len(faults) - MOST_TOLD
    return faults if more <= 0 else [*faults[:MOST_TOLD], f"and {more} more lines"]


def rollout_files(folder: str | Path) -> list[RolloutFile]:
    """Return the files of rollouts in `trajectories/` of a workdir: training and held-out by step,
    then the others."""
    files = [RolloutFile(path) for path in Path(folder).glob(f"trajectories/*{ENDING}")]
    return sorted(
        files, key=lambda f: (f.step is None, f.step or 0, f.kind != "held_out", f.path.name)
    )


def read_rollouts(path: str | Path) -> list[Record]:
    """Return the records of a file of rollouts. Raises BrokenFile, with the line, and OSError."""
    found = []
    with opened(path) as file:
        for record in _records(file):
            if isinstance(record, str):
                raise BrokenFile(f"{path}, {record}")
            found.append(record)
    return found
