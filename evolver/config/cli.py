"""The command line: flags, overrides, and messages about all mistakes in them.

`ml_collections.config_flags` applies `--config.a.b=value` and stops at the first mistake. Here each
override is first tried alone, so that all mistakes are reported together.
"""

from __future__ import annotations

import ast
import difflib
import linecache
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from evolver.config import plugs
from evolver.config.checks import flat, unknown_key
from evolver.config.paths import ROOT, resolve
from evolver.config.renamed import RENAMED

MODES = {
    "train": "train, resuming a run that is in the workdir",
    "eval": "evaluate config.model.path on config.eval.split",
    "explore": "invent tasks and write them to tasks.jsonl in the workdir",
    "pool": "make an experience pool from rollouts of the policy in the workdir",
    "plan": "print the resolved config and what would run; with --target, what it needs there and how long it takes",
}
USAGE = "flags are --config, --workdir, --mode, --target and --config.KEY=VALUE"


def define(argv: list[str]) -> flags.FlagValues:
    """Return the flags of one call; config_flags looks for overrides in `argv`."""
    values = flags.FlagValues()
    sys.modules.pop(
        "config_config", None
    )  # or config_flags would execute the file in an earlier one's namespace
    config_flags.DEFINE_config_file(
        "config", help_string="FILE or FILE:ARGUMENT", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string(
        "workdir",
        None,
        "directory of the run; default: runs/<name of the config>",
        flag_values=values,
    )
    described = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
    flags.DEFINE_enum("mode", "train", list(MODES), described, flag_values=values)
    flags.DEFINE_string(
        "target", "", "plan for these devices, for example h100:8", flag_values=values
    )
    flags.DEFINE_bool(
        "help", False, "print this; --help=WORD searches the config keys", flag_values=values
    )
    values.mark_as_parsed()
    return values


class Command(NamedTuple):
    """A parsed command line. `config` is None when there is none to check."""

    config: ConfigDict | None = None
    workdir: str = ""
    mode: str = ""
    target: str = ""
    problems: tuple[str, ...] = ()
    sought: str = ""  # the word of --help=WORD


def parse(argv: list[str]) -> Command:
    """Parse the command line. An override that cannot be applied is reported and left out, so that
    the rest of the config is still checked."""
    overrides, rest, problems = [], [], []
    sought = [token.partition("=")[2] for token in argv[1:] if re.match(r"--?help=", token)]
    for token in argv[1:]:
        if re.match(r"--?help=", token):
            continue
        (overrides if re.match(r"--?(no)?config\.", token) else rest).append(token)
    rest = placed(rest)
    base = [argv[0], *rest]
    plugs.look_in(Path(config_path(rest)).absolute().parent, Path.cwd())
    try:
        values = define(base)
        extra = values(base)[1:]
        problems += [
            f"{word}: not a flag; values are given as --config.key=value" for word in extra
        ]
    except (Exception, SystemExit) as error:
        about_config = "parsing config file" in str(error) or not isinstance(error, flags.Error)
        return Command(
            problems=(config_error(rest, error) if about_config else f"{error}; {USAGE}",)
        )
    if values.help:
        return Command(mode="help", problems=(values.module_help(__name__),))
    if sought:
        return search_command(sought[-1], values)
    if not config_path(rest):
        return Command(
            problems=("--config is missing, for example --config=configs/quickstart.py",)
        )
    try:
        if not isinstance(values.config, ConfigDict):
            raise TypeError(
                f"get_config() returned {values.config!r}; it must return the config, a ConfigDict"
            )
        known = flat(values.config)  # a missing file is only noticed when the config is used
    except (Exception, SystemExit) as error:
        return Command(problems=(config_error(rest, error),))
    good, arguments = [], []
    for token in overrides:
        if found := re.fullmatch(r"--?config\.((?:\w+\.)*args)\.(\w+)=(.*)", token, re.DOTALL):
            arguments.append(found.groups())
            continue
        token = whole(token, known)
        problem = try_override(base, token)
        problems += [problem] if problem else []
        good += [] if problem else [token]
    try:
        config = values.config
        names = {key: value for key, value in flat(config).items() if key.endswith(".name")}
        values = define([*base, *good])
        values([*base, *good])
        config = values.config
        problems += set_arguments(config, names, arguments)
    except (Exception, SystemExit) as error:
        return Command(problems=(*problems, config_error(rest, error)))
    problems += target_problems(values.target, values.mode)
    return Command(config, workdir_of(values), values.mode, values.target, tuple(problems))


def search_command(word: str, values: flags.FlagValues) -> Command:
    """Return the command of `--help=WORD`; its config is None without --config."""
    if values["config"].value is None:
        return Command(mode="help", sought=word)
    try:
        config = values.config
        len(config)
    except Exception as error:
        return Command(
            problems=(config_error([f"--config={values['config'].config_filename}"], error),)
        )
    return Command(config, mode="help", sought=word)


def set_arguments(
    config: ConfigDict, names: dict[str, str], arguments: list[tuple[str, str, str]]
) -> list[str]:
    """Apply each ("GROUP.args", ARGUMENT, TEXT) of `arguments` to the config and return the
    problems.

    names: the plug names in the file, {"GROUP.name": name}. If an override chose another plug, the
    arguments in the file belong to the old one and are dropped first.
    """
    groups = {key: value for key, value in groups_of(config).items() if "args" in value}
    for key, group in groups.items():
        if group.name != names.get(f"{key}.name"):
            group.args = ConfigDict()
            group.args.unlock()
    problems = []
    for path, argument, text in arguments:
        group = groups.get(path.rpartition(".")[0])
        if group is None:
            problems.append(
                f"config.{path}: there is no such key; these take arguments: {', '.join(groups)}"
            )
        else:
            value = text if isinstance(group.args.get(argument), str) else literal(text)
            value = whole_argument(path.rpartition(".")[0], group.name, argument, value)
            with group.args.ignore_type():  # the signature decides about the type
                group.args[argument] = value
    return problems


def groups_of(config: ConfigDict, prefix: str = "") -> dict[str, ConfigDict]:
    """Return {"rollout": its ConfigDict, "engine.vllm": ...} of every group of keys."""
    groups = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict) and key != "args":
            groups |= {prefix + key: value} | groups_of(value, f"{prefix}{key}.")
    return groups


def whole(token: str, known: dict[str, Any]) -> str:
    """Return an override of an integer key with its value as an integer: sweeps write 16 as
    16.0."""
    found = re.fullmatch(r"(--?config\.([\w.]+)=)(-?\d+)\.0*", token)
    return found[1] + found[3] if found and type(known.get(found[2])) is int else token


def whole_argument(key: str, name: str, argument: str, value: Any) -> Any:
    """Return the value of a plug's argument, as an integer if it is a whole number and the
    signature takes no float."""
    if not (isinstance(value, float) and value.is_integer() and key in plugs.KINDS):
        return value
    try:
        parameter = plugs.settable(plugs.load(key, name)).get(argument)
    except plugs.PlugError:
        return value  # reported by the check of the config
    wrong = parameter is not None and plugs.misfit(value, parameter.annotation)
    return int(value) if wrong and not plugs.misfit(int(value), parameter.annotation) else value


def literal(text: str) -> Any:
    """Return the value of a Python literal (a number, string, tuple ...); other text is returned as
    it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def target_problems(target: str, mode: str) -> list[str]:
    """Return what is wrong with --target."""
    if not target:
        return []
    from evolver.plan import targets

    try:
        targets.parse(target)
    except targets.TargetError as error:
        return [str(error)]
    return (
        []
        if mode == "plan"
        else [f"--target={target} is for --mode=plan; --mode={mode} runs on this machine"]
    )


def try_override(base: list[str], token: str) -> str | None:
    """Return what is wrong with one --config.key=value, None if nothing is."""
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
        if key not in known and key in RENAMED:
            return unknown_key(key, list(known))
        if any(name.startswith(key + ".") for name in known):
            return f"config.{key} is a group of keys; give one of them a value: --config.{key}.KEY=VALUE"
        if key not in known:
            return unknown_key(key, list(known))
        return f"config.{key} must be of type {type(known[key]).__name__}; {value!r} is not"


def placed(words: list[str]) -> list[str]:
    """Return the flags with the path of a config that ships with this code, unless the working
    directory has such a file."""
    path = config_path(words)
    where = str(resolve(path)) if path else ""
    if where == path:
        return words
    return [
        re.sub(rf"^(--?config=)?{re.escape(path)}(?=:|$)", lambda m: (m[1] or "") + where, word)
        for word in words
    ]


def config_path(words: list[str]) -> str:
    """Return the path of the config file that the flags name, without its argument; "" if they name
    none."""
    for word, after in zip(words, [*words[1:], ""]):
        name, equals, path = word.partition("=")
        if name in ("--config", "-config"):
            return (path if equals else after).partition(":")[0]
    return ""


def config_error(words: list[str], error: BaseException) -> str:
    """Return why a config file could not be read, with the line number if the mistake is in the
    file itself."""
    path = config_path(words)
    if not Path(path).is_file():
        known = {
            p.name for folder in (Path("configs"), ROOT / "configs") for p in folder.glob("*.py")
        }
        near = difflib.get_close_matches(Path(path).name, known, n=1)
        hint = f" Did you mean configs/{near[0]}?" if near else ""
        return f"--config={path}: there is no such file.{hint}"
    lines = [
        f.lineno
        for f in traceback.extract_tb(error.__traceback__)
        if Path(f.filename) == Path(path)
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    text = str(error).strip()
    if "Error whilst parsing config file" in text:
        inner = re.findall(rf'File "[^"]*{re.escape(Path(path).name)}", line (\d+)', text)
        lines = [int(line) for line in inner] or lines
        text = text.splitlines()[-1].partition(": ")[2]
    if old := renamed_on_line(path, lines):
        text = f"config.{old} has been renamed: use {RENAMED[old]}"
    elif key := re.search(r'Key "(\w+)" does not exist', text):
        near = re.search(r'Did you mean "(\w+)"', text)
        text = f"there is no key {key[1]}." + (f" Did you mean {near[1]}?" if near else "")
    elif near := re.search(r'Did you mean "(\w+)" instead of "(\w+)"', text):
        text = f"there is no key {near[2]}. Did you mean {near[1]}?"
    elif "no attribute 'get_config'" in text:
        text = "the file defines no get_config()"
    elif isinstance(error, RecursionError):
        text = "the config contains itself"
    elif isinstance(error, SystemExit):
        text = f"the file calls sys.exit({error.code!r})"
    elif casted := re.search(
        r"override field '(\w+)'.*?\. (.*) is of original type", text, re.DOTALL
    ):
        text = f"{casted[1]} must keep its type; it is set to {casted[2][:80]}"
    elif isinstance(error, KeyError) and error.args:
        text = str(error.args[0])  # its str() would be quoted
    where = f", line {lines[-1]}" if lines else ""
    return f"{path}{where}: {text or type(error).__name__}"


def renamed_on_line(path: str, lines: list[int]) -> str:
    """Return the old key that the last of `lines` of a config file assigns, "" if there is none."""
    source = linecache.getline(path, lines[-1]) if lines else ""
    assigned = {match[1] for match in re.finditer(r"\b\w+\.([\w.]+)\s*=[^=]", source)}
    return next((key for key in RENAMED if key in assigned), "")


def workdir_of(values: flags.FlagValues) -> str:
    """Return --workdir, or runs/<name of the config>, to which eval, explore and pool append their
    mode."""
    if values.workdir:
        return os.path.expanduser(values.workdir)
    path, _, argument = values["config"].config_filename.partition(":")
    name = "-".join([Path(path).stem, *([re.sub(r"[^\w.=-]+", "_", argument)] if argument else [])])
    return str(
        Path("runs") / (name if values.mode in ("train", "plan") else f"{name}-{values.mode}")
    )
