"""The command line: flags, overrides and what is wrong with them.

`ml_collections.config_flags` applies `--config.a.b=value` and stops at the first mistake; here each override is first
tried alone, so that all mistakes are said together.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from evolver.config import flat, suggestion

MODES = {
    "train": "learn, and resume what is in the workdir",
    "eval": "evaluate config.model.path on config.eval.split",
    "explore": "invent tasks and write them to tasks.jsonl in the workdir",
    "pool": "make an experience pool from rollouts of the policy in the workdir",
    "plan": "print the resolved config and what would run; with --target, what it needs there and how long it takes",
}
USAGE = "flags are --config, --workdir, --mode, --target and --config.KEY=VALUE"


def define(argv: list[str]) -> flags.FlagValues:
    """The flags of one call; `argv` is where config_flags looks for overrides."""
    values = flags.FlagValues()
    sys.modules.pop("config_config", None)  # config_flags executes a file into what an earlier one of that name left
    config_flags.DEFINE_config_file("config", help_string="FILE or FILE:ARGUMENT", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "where the run lives; default: runs/<name of the config>", flag_values=values)
    described = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
    flags.DEFINE_enum("mode", "train", list(MODES), described, flag_values=values)
    flags.DEFINE_string("target", "", "plan for these devices, for example h100:8", flag_values=values)
    flags.DEFINE_bool("help", False, "print this", flag_values=values)
    values.mark_as_parsed()
    return values


def parse(argv: list[str]) -> tuple[Any, str, str, str, list[str]]:
    """(config, workdir, mode, target, problems). An override that cannot be applied is named and left out, so that the
    rest of the config is checked all the same; config is None when there is none to check."""
    overrides, rest, problems = [], [], []
    tokens = iter(argv[1:])
    for token in tokens:
        (overrides if re.match(r"--?(no)?config\.", token) else rest).append(token)
    base, config = [argv[0], *rest], None
    try:
        values = define(base)
        extra = values(base)[1:]
        problems += [f"{word}: not a flag; values are given as --config.key=value" for word in extra]
    except Exception as error:
        about_config = "parsing config file" in str(error) or not isinstance(error, flags.Error)
        return None, "", "", "", [config_error(rest, error) if about_config else f"{error}; {USAGE}"]
    if values.help:
        return None, "", "help", "", [values.module_help(__name__)]
    if values["config"].value is None:
        return None, "", "", "", ["--config is missing, for example --config=configs/quickstart.py"]
    good, free = [], {}
    for token in overrides:
        if found := re.match(r"--?config\.env\.args\.(\w+)=(.*)", token, re.DOTALL):
            free[found[1]] = found[2]
            continue
        problem = try_override(base, token)
        problems += [problem] if problem else []
        good += [] if problem else [token]
    try:
        values = define([*base, *good])
        values([*base, *good])
        config = values.config
        len(config)  # a missing file is only noticed when the config is used
        with config.unlocked():
            for key, text in free.items():
                config.env.args[key] = text if isinstance(config.env.args.get(key), str) else literal(text)
    except Exception as error:
        return None, "", "", "", [*problems, config_error(rest, error)]
    problems += target_problems(values.target, values.mode)
    return config, workdir_of(values), values.mode, values.target, problems


def literal(text: str) -> Any:
    """What `text` says in Python's notation for numbers, strings, tuples and so on; else the text itself. For arguments
    of worlds, whose names and types only the world knows."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def target_problems(target: str, mode: str) -> list[str]:
    """What is wrong with --target."""
    if not target:
        return []
    from evolver.plan import targets

    try:
        targets.parse(target)
    except targets.TargetError as error:
        return [str(error)]
    return [] if mode == "plan" else [f"--target={target} is for --mode=plan; --mode={mode} runs on this machine"]


def try_override(base: list[str], token: str) -> str | None:
    """What is wrong with one --config.key=value, None if nothing."""
    name, _, value = token.partition("=")
    key = re.sub(r"^--?(no)?config\.", "", name)
    try:
        values = define([*base, token])
        extra = values([*base, token])[1:]
        return f"{extra[0]}: not a flag; values are given as --config.key=value" if extra else None
    except Exception:
        plain = define(base)
        plain(base)
        known = flat(plain.config)
        if any(name.startswith(key + ".") for name in known):
            return f"config.{key} is a group of keys; give one of them a value: --config.{key}.KEY=VALUE"
        if key not in known:
            return f"config.{key}: there is no such key.{suggestion(key, list(known))}"
        return f"config.{key} must be of type {type(known[key]).__name__}; {value!r} is not"


def config_error(words: list[str], error: Exception) -> str:
    """Why a config file could not be read, with its line where the mistake is in the file itself."""
    joined = " ".join(words).replace("--config ", "--config=")
    path = next((w.partition("=")[2] for w in joined.split() if re.match(r"--?config=", w)), "").partition(":")[0]
    if not Path(path).is_file():
        near = difflib.get_close_matches(Path(path).name, [p.name for p in Path("configs").glob("*.py")], n=1)
        hint = f" Did you mean configs/{near[0]}?" if near else ""
        return f"--config={path}: there is no such file.{hint}"
    cause: BaseException = error
    lines = [f.lineno for f in traceback.extract_tb(cause.__traceback__) if Path(f.filename) == Path(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    text = str(error).strip()
    if "Error whilst parsing config file" in text:
        inner = re.findall(rf'File "[^"]*{re.escape(Path(path).name)}", line (\d+)', text)
        lines = [int(line) for line in inner] or lines
        text = text.splitlines()[-1].partition(": ")[2]
    key = re.search(r'Key "(\w+)" does not exist', text)
    if key:
        near = re.search(r'Did you mean "(\w+)"', text)
        text = f"there is no key {key[1]}." + (f" Did you mean {near[1]}?" if near else "")
    where = f", line {lines[-1]}" if lines else ""
    return f"{path}{where}: {text or type(error).__name__}"


def workdir_of(values: flags.FlagValues) -> str:
    """--workdir, or runs/<name of the config>; what is not training gets a directory of its own."""
    if values.workdir:
        return values.workdir
    path, _, argument = values["config"].config_filename.partition(":")
    name = "-".join([Path(path).stem, *([re.sub(r"[^\w.=-]+", "_", argument)] if argument else [])])
    return str(Path("runs") / (name if values.mode in ("train", "plan") else f"{name}-{values.mode}"))
