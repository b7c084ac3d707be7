"""Check an environment against the World contract: `python -m envs.check my_module:MyEnv` (docs/environments.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from envs import conformance
from envs.source import MODES, Source, serving
from envs.world import WorldError


def main(argv: list[str] | None = None) -> int:
    """Run the conformance suite and print each failure with its reason. Return 0 if all checks pass, else 1."""
    parser = argparse.ArgumentParser(prog="python -m envs.check", description=__doc__.split("\n")[0])
    parser.add_argument("env", help="my_module:MyEnv or a registered name")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON arguments of the environment")
    parser.add_argument("--split", default="train")
    parser.add_argument("--tasks", type=int, default=5, help="number of tasks to try")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["inprocess", "worker"])
    args = parser.parse_args(argv)
    failed = 0
    for mode in args.modes:
        try:
            names, problems = _run(mode, args)
        except (WorldError, ValueError, ImportError, AttributeError) as error:
            names, problems = ["starts"], [conformance.Problem("starts", str(error), "The environment can be made.")]
        failures = {problem.check for problem in problems}
        failed += len(failures)
        print(f"{args.env}, {mode}: {len(names) - len(failures)} of {len(names)} checks passed")
        for problem in problems:
            print(f"  {problem}")
    return 1 if failed else 0


def _run(mode: str, args: argparse.Namespace) -> tuple[list[str], list[conformance.Problem]]:
    with contextlib.ExitStack() as stack:
        url = (
            stack.enter_context(serving(args.env, json.dumps(args.kwargs), "--workers", "1")) if mode == "http" else ""
        )
        workers = {"workers": 1} if mode == "worker" else {}
        source = stack.enter_context(Source(args.env, args.kwargs, mode=mode, url=url, **workers))
        return conformance.run(source.world, split=args.split, limit=args.tasks)


if __name__ == "__main__":
    sys.exit(main())
