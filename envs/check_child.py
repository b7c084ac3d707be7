"""The process in which `envs.check` runs a world: `python -m envs.check_child SPEC`. Reports on
stdout, a line each."""

import json
import os
import sys
from typing import Any

from envs import conformance
from envs.check import STARTS
from envs.conformance import Problem
from envs.source import Source
from envs.values import Json


def work(spec: Json, report: Any) -> Any:
    """Run the suite, or play the episodes that two processes compare."""
    mode, url = spec["mode"], spec.get("url", "")
    workers: Json = {"workers": 1} if mode == "worker" else {}
    choice = {"split": spec["split"], "limit": spec["limit"]}
    with Source(spec["env"], spec["kwargs"], mode=mode, url=url, **workers) as source:
        if spec["do"] == "suite":
            return conformance.run(source.world, **choice, skip=spec["skip"], journal=report)[0]

        def make() -> conformance.Watched:
            return conformance.Watched(source.world(), lambda call: report("call", call))

        return conformance.episodes(make, **choice)


def main() -> None:
    """Do what the spec says, and report ["check" | "call" | "problem" | "done", what] as it
    happens."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the world prints goes to stderr

    def report(kind: str, what: Any) -> None:
        what = vars(what) if isinstance(what, Problem) else what
        reports.write(json.dumps([kind, what]).encode() + b"\n")
        reports.flush()

    try:
        report("done", work(json.loads(sys.argv[1]), report))
    except Exception as error:
        report("problem", Problem("starts", f"{type(error).__name__}: {error}", STARTS))
        report("done", ["starts"])


if __name__ == "__main__":
    main()
