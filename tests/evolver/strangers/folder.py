"""A folder of text files. What is written is seen by reading a path that was refused before."""

import random

NAMES = ("plan.md", "todo.txt", "ideas.md", "log.txt", "readme.md", "draft.txt")
TEXTS = ("buy milk", "call Bob at 5", "the sky is blue", "version 2")
_files: dict[str, str] = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    _files.clear()
    for name in rng.sample(NAMES, 4):
        _files[rng.choice(("/", "/plans/", "/letters/")) + name] = rng.choice(TEXTS)


def ls() -> list[str]:
    """List all files."""
    return sorted(_files)


def read(path: str) -> str:
    """Read a file."""
    return _files[path]


def write(path: str, text: str) -> str:
    """Write a file, which may be new."""
    _files[path] = text
    return f"wrote {len(text)} characters"


def move(source: str, target: str) -> str:
    """Move a file to a new path."""
    if target in _files:
        raise FileExistsError(target)
    _files[target] = _files.pop(source)
    return "moved"


def remove(path: str) -> str:
    """Remove a file."""
    del _files[path]
    return "removed"
