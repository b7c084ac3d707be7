"""The process in which `envs.check` runs a world: `python -m envs.check_child SPEC`. Reports on
stdout, a line each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from envs.check import STARTS, child
from envs.conformance import Problem


def main() -> None:
    """Do what the spec says, and report ["check" | "call" | "problem" | "done", what] as it
    happens."""
    reports = os.dup(1)
    os.dup2(2, 1)  # what the world prints goes to stderr

    def report(kind: str, what: Any) -> None:
        data = (
            json.dumps([kind, vars(what) if isinstance(what, Problem) else what]).encode() + b"\n"
        )
        while data:
            data = data[os.write(reports, data) :]

    try:
        report("done", child(json.loads(sys.argv[1]), report))
    except Exception as error:
        report("problem", Problem("starts", f"{type(error).__name__}: {error}", STARTS))
        report("done", ["starts"])


if __name__ == "__main__":
    main()
