"""The command line: flags, overrides, and messages about all mistakes in them."""

import argparse
import contextlib
import copy
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from evolver.config import plugs
from evolver.config.config_file import ConfigError, load
from evolver.config.keys import assign, flat, unknown_key
from evolver.config.paths import resolve
from evolver.config.values import literal, misfit, read

MODES = {
    "train": "train, resuming a run that is in the workdir",
    "eval": "evaluate config.model.path on config.eval.split",
    "explore": "invent tasks and write them to tasks.jsonl in the workdir",
    "pool": "make an experience pool from rollouts of the policy in the workdir",
    "evolve": "from a world to an agent that has learned it: check, explore, split, imitate, train,"
    " report",
    "plan": "print the resolved config and what would run; with --target, what it needs there and"
    " how long it takes",
}
USAGE = "flags are --config, --workdir, --mode, --target and --config.KEY=VALUE"


def flags(program: str = "run.py") -> argparse.ArgumentParser:
    """Return the parser of the flags besides overrides. program: the command that takes them."""
    parser = argparse.ArgumentParser(
        usage=f"{program} --config=FILE[:ARGUMENT] [--config.KEY=VALUE ...] [flags]",
        add_help=False, allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    modes = "; ".join(f"{mode}: {about}" for mode, about in MODES.items())
    parser.add_argument("--config", default="", help="FILE or FILE:ARGUMENT")
    parser.add_argument("--workdir", default="", help="default: runs/<name of the config>")
    parser.add_argument("--mode", default="train", choices=MODES, help=modes)
    parser.add_argument("--target", default="", help="plan for these devices, such as h100:8")
    parser.add_argument(
        "--help", nargs="?", const="", help="print this; --help=WORD searches the config keys"
    )
    return parser


class Command(NamedTuple):
    """A parsed command line. `config` is None when there is none to check."""

    config: ConfigDict | None = None
    workdir: str = ""
    mode: str = ""
    target: str = ""
    problems: Sequence[str] = ()
    sought: str | None = None  # the word of --help=WORD, "" without one


def parse(argv: Sequence[str]) -> Command:
    """Parse the command line. An override that cannot be applied is reported and left out, so that
    the rest of the config is still checked. `--noconfig.KEY` sets a key to False."""
    words = [re.sub(r"^--noconfig\.(.+)", r"--config.\1=False", word) for word in argv[1:]]
    overrides = [word for word in words if word.startswith("--config.")]
    try:
        given, strays = flags().parse_known_args([w for w in words if w not in overrides])
    except argparse.ArgumentError as error:
        return Command(problems=[f"{error}; {USAGE}"])
    path, *argument = given.config.split(":", 1)
    plugs.look_in(resolve(path).absolute().parent, Path.cwd())
    problems = [f"{word}: not a flag; values are given as --config.key=value" for word in strays]
    config = None
    try:
        if path:
            config = load(path, *argument)
            found = [override(config, word) for word in sorted(overrides, key=is_argument)]
            problems += filter(None, found)
        elif given.help is None:
            problems.append("--config is missing, for example --config=configs/quickstart.py")
    except ConfigError as error:
        problems.append(str(error))
    parts = [Path(path).stem, *(re.sub(r"[^\w.=-]+", "_", text) for text in argument)]
    parts += [] if given.mode in ("train", "plan") else [given.mode]
    default = str(Path("runs") / "-".join(filter(None, parts)))
    workdir = os.path.expanduser(given.workdir) or default
    return Command(config, workdir, given.mode, given.target, problems, given.help)


def is_argument(word: str) -> bool:
    """Return True for an override of a plug's argument, which comes after that of its name."""
    return ".args." in word.partition("=")[0]


def override(config: ConfigDict, word: str) -> str:
    """Apply --config.KEY=VALUE and return what is wrong with it, "" if nothing is."""
    name, equals, text = word.partition("=")
    key = name.removeprefix("--config.")
    known = flat(config)
    if is_argument(word):
        return set_argument(config, key, text)
    if any(other.startswith(f"{key}.") for other in known):
        return f"config.{key} is a group of keys; give one a value: --config.{key}.KEY=VALUE"
    if key not in known:
        return unknown_key(key, known)
    before = known[key]
    kind = type(before)
    value = text if kind is str else read(text if equals else "true", kind)
    if kind is tuple:
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
    if rule := misfit(value, kind):
        return f"config.{key} must be {rule}; {text!r} is not"
    assign(config, key, value)
    arguments = f"{key.removesuffix('name')}args"
    if key.endswith(".name") and arguments in known and value != before:
        assign(config, arguments, {})  # those of the file belong to another plug
    return ""


def set_argument(config: ConfigDict, key: str, text: str) -> str:
    """Set an argument of a plug or a world, and return what is wrong, "" if nothing is. Its
    signature decides on the value when the whole config is checked."""
    group, _, argument = key.partition(".args.")
    known = flat(config)
    given = known.get(f"{group}.args")
    if given is None:
        groups = ", ".join(key.removesuffix(".args") for key in known if key.endswith(".args"))
        return f"config.{group}.args: there is no such key; these take arguments: {groups}"
    value = text if isinstance(given.get(argument), str) else literal(text)
    with contextlib.suppress(KeyError, plugs.PlugError):  # a world, or the check reports it
        takes = plugs.settable(plugs.load(group, known[f"{group}.name"]))
        value = read(text, takes[argument].annotation)
    *outer, last = argument.split(".")  # an argument may be a dict, as env.args.worlds is
    inner = given = copy.deepcopy(given)
    for name in outer:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[last] = value
    assign(config, f"{group}.args", given)
    return ""
