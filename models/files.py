"""Files that survive a crash, by atomic replacement, and reading that never hangs or grows."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 1 << 26  # bytes of a line, or of a file that is read at once


class BrokenFile(ValueError):
    """A file that cannot be read; the message names the file and the line."""


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory; it replaces `path` when the block succeeds.

    At any moment, also after a power failure, `path` holds its old content or the new one. Missing
    directories are created. The temporary file has the suffix `.tmp` and is deleted when the block
    fails.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a directory to disk: without this a power failure may undo a renaming that the caller
    builds on."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some network file systems cannot flush directories
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Replace the content of a file: text in UTF-8, or bytes."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any) -> None:
    """Replace the content of a file by a JSON value, for people to read."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


class Written:
    """A list of JSON values that are written already, within a value for `dumps`."""

    def __init__(self, values: Sequence[str]):
        self.values = values


def dumps(value: Any) -> str:
    """Return the JSON text of a value in which lists may be `Written`."""
    found: list[Written] = []
    mark = secrets.token_hex()

    def place(held: Any) -> str:
        if not isinstance(held, Written):
            raise TypeError(f"Object of type {type(held).__name__} is not JSON serializable")
        found.append(held)
        return f"{mark}{len(found) - 1}"

    text = json.dumps(value, default=place)
    for n, held in enumerate(found):
        text = text.replace(f'"{mark}{n}"', f"[{', '.join(held.values)}]", 1)
    return text


def opened(path: str | Path) -> BinaryIO:
    """Return a file that is open for reading. Raises BrokenFile for a pipe or a device, whose end
    may never come, and for a directory, and OSError."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise BrokenFile(f"{path} is a directory and not a regular file")
    if not stat.S_ISREG(mode):
        raise BrokenFile(f"{path} is not a regular file")
    return open(path, "rb")


def read_whole(path: str | Path) -> bytes:
    """Return the bytes of a file. Raises BrokenFile if it is no regular one or has more than
    LONGEST, and OSError."""
    with opened(path) as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise BrokenFile(f"{path} has more than {LONGEST:,} bytes")
    return content


def read_text(path: str | Path) -> str:
    """Return the text of a file. Raises what `read_whole` does, and BrokenFile if it is not
    UTF-8."""
    try:
        return read_whole(path).decode()
    except UnicodeDecodeError as error:
        raise BrokenFile(f"{path} is not UTF-8 text ({error})") from None


def loads(text: str | bytes) -> Any:
    """Return a JSON value. Raises ValueError for a text that is none, that is nested too deeply, or
    that holds what fails where it is used: a whole number that no float can hold, or half a
    surrogate pair."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_whole)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair") from None


def _whole(digits: str) -> int:
    if len(digits) > 300:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
