"""The code, versions and settings that all processes of a run share."""

import hashlib
from pathlib import Path
from typing import Any

import rl
from evolver.config.checks.workdir import RESUMABLE
from evolver.config.keys import flat
from evolver.files.workdir import provenance

ROOMS = ("evolver", "rl", "models", "envs")


def identity(config: Any) -> dict[str, str]:
    """Return {file, version or key: what it is} of everything that decides what a process computes.
    Keys that may change when a run resumes may differ between its hosts, too."""
    root = Path(rl.__file__).parents[1]
    found = {}
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    about = provenance()
    found |= {f"version of {name}": text for name, text in about["versions"].items()}
    found["version of Python"] = about["python"]
    for name, value in flat(config).items():
        if not name.startswith(RESUMABLE):
            found[f"config.{name}"] = repr(value)
    return found
