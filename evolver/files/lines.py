"""JSON-lines files that survive a crash, with errors that name the line."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from models.files import LONGEST, BrokenFile, loads, opened


class KeptLines:
    """The JSON of records that nobody changes, such as tasks. It is kept, because a run that holds
    very many of them writes them again at each of its checkpoints."""

    def __init__(self, *, ascii: bool = True):
        """ascii: escape all other characters."""
        self._ascii = ascii
        # by the identity of a record, which nothing else has while it is held here
        self._kept: dict[int, tuple[Any, str]] = {}

    def of(self, records: Sequence[Any]) -> list[str]:
        """Return the JSON of each record; that of others is forgotten, if they are many."""
        if len(self._kept) > 2 * len(records):
            self._kept = {id(r): self._kept[id(r)] for r in records if id(r) in self._kept}
        for record in records:
            if id(record) not in self._kept:
                line = json.dumps(record, ensure_ascii=self._ascii)
                self._kept[id(record)] = record, line
        return [self._kept[id(record)][1] for record in records]


def append_line(path: str | Path, line: str, *, sync: bool = False) -> None:
    """Append a line to a file and flush it, with `sync` to disk; missing directories are created.

    A last line that a crash or a full disk cut short is ended first: the new line would be lost
    with it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        # One byte: reading all of /dev/full would never end.
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(start + line.rstrip("\n").encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())


def read_jsonl(
    path: str | Path,
    *,
    make: Callable[[dict[str, Any]], Any] = dict,
    forgive: str = "none",
    wrong: list[str] | None = None,
) -> Iterator[Any]:
    """Yield make(record) for each line of a JSON-lines file of objects; empty lines are skipped.

    forgive: which lines that cannot be read are skipped: "none", "last" (a crash cut it short) or
    "all", of which `wrong` gets a message each, except of a last line that was cut short. Raises
    BrokenFile, with file and line, for any other such line or a file without lines, and OSError.
    """
    with opened(path) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST + 1)
            if not line:
                return
            long = len(line) > LONGEST
            try:
                if long:
                    raise ValueError(f"it has more than {LONGEST:,} bytes; the rest is not read")
                if not line.strip():
                    continue
                record = loads(line)
                if not isinstance(record, dict):
                    raise ValueError("the line is not a JSON object")
                result = make(record)
            except (TypeError, ValueError, RecursionError) as error:
                cut = not line.endswith(b"\n") and not long
                if forgive == "none" or (forgive == "last" and not cut):
                    raise BrokenFile(f"{path}, line {number}: {error}") from None
                if wrong is not None and not cut:
                    wrong.append(f"{Path(path).name}, line {number}: {error}")
                if long:
                    return
            else:
                yield result
