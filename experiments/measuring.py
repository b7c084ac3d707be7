"""The command line of a measurement that plays with the policy of a config and trains nothing."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from configs import base
from configs.keys import use
from envs.commands import parser_of
from evolver.build import Run, RunError, open_run
from evolver.config import cli, plugs
from evolver.config.checks import problems as config_problems
from evolver.processes.interrupt import Interrupted, RunEnds
from models.files import write_atomically
from rl.seeds import seed_of
from run import refused


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def shuffled(run: Run, values: Any, *purpose: str) -> np.ndarray:
    """Return an array, or the numbers below one, in a random order. purpose: as `seed_of` takes
    it."""
    return np.random.default_rng(seed_of(run.config.seed, *purpose)).permutation(values)


def several(config: Any, key: str, names: Sequence[str]) -> list[str]:
    """Make the config open what any of these plugs of `key` needs, and return what is wrong with
    them."""
    chosen, found = config[key], []
    if config.hosts.count != 1:
        found.append("config.hosts.count must be 1: one process measures")
    for name in names:
        found += plugs.problems(key, name, chosen.args.to_dict() if name == chosen.name else {})
    asking = [name for name in names if not found and getattr(plugs.load(key, name), "roles", None)]
    if asking and chosen.name not in asking:
        use(chosen, asking[0])  # so that the run opens a client for its role
    return found


def main(
    measure: Callable[..., str],
    problems: Callable[..., list[str]],
    words: Sequence[str],
    least: dict[str, int],
    goes_on: bool = False,
) -> int:
    """Check everything, measure, print the text and write it to WORKDIR/NAME.md, where NAME is that
    of the module.

    measure: takes the run, and the values of its other parameters from the command line. problems:
    takes the config, which it prepares, the workdir and these values, and returns what is wrong.
    least: the smallest values of arguments. goes_on: an interrupted measurement goes on where it
    was cut off.

    Return the exit code: 0 done, 1 failed, 2 nothing was started, 3 ended early, 130 interrupted.
    """
    logging.set_verbosity(logging.ERROR)
    parser = parser_of(measure, skip=("run",), epilog="--config.KEY=VALUE as for run.py")
    name = parser.prog.rpartition(".")[2]
    parser.add_argument("--config", required=True, help="FILE or FILE:ARGUMENT")
    parser.add_argument("--workdir", default=f"runs/{name}")
    given, overrides = parser.parse_known_args(words)
    parameters = inspect.signature(measure).parameters
    values = {n: p.default for n, p in parameters.items() if n != "run"} | vars(given)
    path, workdir = values.pop("config"), values.pop("workdir")
    command = cli.parse([name, f"--config={path}", f"--workdir={workdir}", *overrides])
    config, found = command.config, [*command.problems]
    found += [f"--{word} must be at least {n}" for word, n in least.items() if values[word] < n]
    if config is not None:
        found += problems(config, workdir, **values)
        found += config_problems(config, base.Config, workdir, "pool")
    if config is None or found:
        return refused(found)
    try:
        with open_run(config, workdir) as run:
            run.workdir.claim(config.to_dict(), name)
            text = measure(run, **values)
            run.progress.close()
    except (RunError, RunEnds) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 3
    except (Interrupted, KeyboardInterrupt):
        print("\ninterrupted" + "; the same command goes on from here" * goes_on, file=sys.stderr)
        return 130
    write_atomically(Path(workdir) / f"{name}.md", text)
    print(text)
    return 0
