"""The command line of a measurement that plays with the policy of a config and trains nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from configs import base
from configs.keys import use
from evolver.build import Run, RunError, open_run
from evolver.config import cli, plugs
from evolver.config.checks import problems as config_problems
from evolver.processes.interrupt import Interrupted, RunEnds
from models.files import write_atomically


def parser(doc: str, workdir: str) -> argparse.ArgumentParser:
    """Return a parser of --config and --workdir, which leaves --config.KEY=VALUE to `command`."""
    found = argparse.ArgumentParser(
        description=doc.partition("\n\n")[0],
        epilog="--config.KEY=VALUE as for run.py",
        allow_abbrev=False,
    )
    found.add_argument("--config", required=True, help="FILE or FILE:ARGUMENT")
    found.add_argument("--workdir", default=workdir)
    return found


def several(config: Any, key: str, names: Sequence[str]) -> list[str]:
    """Make the config open what any of these plugs of `key` needs, and return what is wrong with
    them."""
    chosen = config[key]
    found = (
        ["config.hosts.count must be 1: one process measures"] if config.hosts.count != 1 else []
    )
    for name in names:
        found += plugs.problems(key, name, chosen.args.to_dict() if name == chosen.name else {})
    asking = [name for name in names if not found and getattr(plugs.load(key, name), "roles", None)]
    if asking and chosen.name not in asking:
        use(chosen, asking[0])  # so that the run opens a client for its role
    return found


def main(
    name: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    least: dict[str, int],
    problems: Callable[[Any, argparse.Namespace], list[str]],
    measure: Callable[[Run, argparse.Namespace], str],
    goes_on: bool = False,
) -> int:
    """Check everything, measure, print the text and write it to WORKDIR/<name>.md.

    least: the smallest values of arguments. problems: prepares the config, and returns what is
    wrong with it. goes_on: an interrupted measurement goes on where it was cut off.

    Return the exit code: 0 done, 1 failed, 2 nothing was started, 3 ended early, 130 interrupted.
    """
    logging.set_verbosity(logging.ERROR)
    args, overrides = parser.parse_known_args(argv[1:])
    command = cli.parse(
        [argv[0], f"--config={args.config}", f"--workdir={args.workdir}", *overrides]
    )
    config, found = command.config, [*command.problems]
    found += [f"--{word} must be at least {n}" for word, n in least.items() if vars(args)[word] < n]
    if config is not None:
        found += problems(config, args)
        found += config_problems(config, base.Config, args.workdir, "pool")
    if config is None or found:
        print(*found, sep="\n", file=sys.stderr)
        return 2
    try:
        with open_run(config, args.workdir) as run:
            run.workdir.claim(config.to_dict(), config.seed, name)
            text = measure(run, args)
            run.progress.close()
    except RunError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except RunEnds as end:
        print(f"\n{end}", file=sys.stderr)
        return 3
    except (Interrupted, KeyboardInterrupt):
        print("\ninterrupted" + "; the same command goes on from here" * goes_on, file=sys.stderr)
        return 130
    write_atomically(Path(args.workdir) / f"{name}.md", text)
    print(text)
    return 0
