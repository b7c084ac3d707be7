"""Check an environment against the World contract: `python -m envs.check my_module:MyEnv`
(docs/environments.md).

The checks run in a process of their own, which reports each call before it makes it. So a world
that hangs or ends its process is found like any other, with the call that did it, and the checks go
on with the next one.
"""

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from envs import commands, conformance
from envs.conformance import Problem
from envs.process import Piped, child_environment, kill
from envs.source import Mode, serving
from envs.values import Json
from envs.world import WorldError

AGREES = "agrees_between_processes"
WHY_AGREE = (
    "Two processes play the same episode, whatever the seed of their hashes, because a run resumes"
    " in another process than it was interrupted in: the order of a set must decide nothing."
)
START_S = 120.0  # for the interpreter, imports and workers, before the first call
STARTS = "The environment can be made."


def check(
    env: str,
    *,
    kwargs: Json | None = None,
    split: str = "train",
    tasks: int = 5,
    modes: tuple[Mode, ...] = ("inprocess", "worker"),
    timeout: float = 60.0,
) -> int:
    """Run the conformance suite and print each failure with its reason.

    env: my_module:MyEnv or a registered name
    kwargs: JSON arguments of the environment
    tasks: number of tasks to try
    timeout: seconds that one call may take
    """
    failed = 0
    for mode in modes:
        spec: Json = {"env": env, "kwargs": kwargs or {}, "split": split, "limit": tasks}
        try:
            names, problems = run(spec | {"mode": mode}, timeout)
        except (WorldError, ValueError, OSError) as error:
            names, problems = ["starts"], [Problem("starts", str(error), STARTS)]
        failures = {problem.check for problem in problems}
        failed += len(failures)
        print(f"{env}, {mode}: {len(names) - len(failures)} of {len(names)} checks passed")
        for problem in problems:
            print(f"  {problem}")
    return min(failed, 1)


def run(spec: Json, timeout: float) -> tuple[list[str], list[Problem]]:
    """Run the suite in child processes, the next one after each that hung or died. Return (checks,
    problems).

    spec: env, kwargs, split, limit and mode. timeout: seconds for one call.
    """
    with contextlib.ExitStack() as stack:
        if spec["mode"] == "http":
            options = ("--workers", "1", "--step_s", str(timeout), "--reset_s", str(timeout))
            service = serving(spec["env"], json.dumps(spec["kwargs"]), *options)
            spec = spec | {"url": stack.enter_context(service)}
        names, problems = _suite(spec, timeout)
        broken = {problem.check for problem in problems}
        if spec["mode"] != "http" and not broken & {"starts", "tasks"}:
            names = [*names, AGREES]
            if what := _disagreement(spec, timeout):
                problems.append(Problem(AGREES, what, WHY_AGREE))
    return names, problems


def _suite(spec: Json, timeout: float) -> tuple[list[str], list[Problem]]:
    problems: list[Problem] = []
    skip: list[str] = []
    reasons = {check.__name__: conformance.why(check) for check in conformance.CHECKS}
    while True:
        check, call = "starts", "the import"
        for kind, what in _reports({**spec, "skip": skip, "do": "suite"}, timeout):
            if kind == "check":
                check = what
                skip.append(what)
            elif kind == "call":
                call = what
            elif kind == "problem":
                problems.append(Problem(**what))
            elif kind == "done":
                return what, problems
            else:  # "lost"
                problems.append(Problem(check, f"{call} {what}", reasons.get(check, STARTS)))
        if check not in reasons:  # before the first check: there is nothing to go on with
            return [check], problems


def _disagreement(spec: Json, timeout: float) -> str:
    """Return where two processes with other hashes play other episodes, "" if nowhere, or why that
    cannot be told."""
    played, call = [], ""
    for seed in ("1", "2"):
        for kind, what in _reports({**spec, "do": "episodes"}, timeout, PYTHONHASHSEED=seed):
            if kind == "call":
                call = what
            elif kind == "done":
                played.append(what)
            else:
                return f"{call} {what}"
    return conformance.first_difference(*played)


def _reports(spec: Json, timeout: float, **environment: str) -> Iterator[tuple[str, Any]]:
    """Yield the reports of a child process, and at last "done" or "lost" with what became of it."""
    process = Piped(
        [sys.executable, "-m", "envs.check_child", json.dumps(spec)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        env=child_environment(**environment),
    )  # fmt: skip
    try:
        for line in _lines(process.stdout.fileno(), timeout):
            kind, what = json.loads(line)
            yield kind, what
            if kind == "done":
                return
        process.wait(timeout)
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield "lost", f"ended the process ({how})"
    except (TimeoutError, subprocess.TimeoutExpired):
        yield "lost", f"did not return within {timeout:g} s"
    finally:
        kill(process)


def _lines(descriptor: int, timeout: float) -> Iterator[bytes]:
    """Yield the lines of a pipe. Raises TimeoutError if one takes over `timeout` seconds, or the
    first over START_S."""
    rest, allowed = b"", max(timeout, START_S)
    while True:
        until = time.monotonic() + allowed
        allowed = timeout
        while b"\n" not in rest:
            if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(descriptor, 1 << 20)
            if not data:
                return
            rest += data
        line, _, rest = rest.partition(b"\n")
        yield line


main = functools.partial(commands.called, check)  # returns the exit code


if __name__ == "__main__":
    sys.exit(main())
