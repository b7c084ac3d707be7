"""Config files: Python files with `get_config(arg)`, found, run and told where they are wrong."""

import runpy
import traceback
from pathlib import Path

from ml_collections import ConfigDict

from evolver.config.paths import ROOT, resolve
from evolver.config.values import hint
from evolver.files.workdir import plain


class ConfigError(ValueError):
    """A config file that cannot be used; the message says why, and in which line."""


def load(path: str, *argument: str) -> ConfigDict:
    """Return the config that a file makes, with an argument or without one. Raises ConfigError."""
    file = str(resolve(path))
    if not Path(file).is_file():
        known = (*Path().glob("configs/*.py"), *ROOT.glob("configs/*.py"))
        near = hint(Path(path).name, [file.name for file in known])
        near = near.replace("mean ", "mean configs/")
        raise ConfigError(f"--config={path}: there is no such file{near}")
    try:
        get_config = runpy.run_path(file).get("get_config")
        if get_config is None:
            raise ConfigError("the file defines no get_config()")
        config = get_config(*argument)
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"get_config() returned {config!r}; it must return the config")
        plain(config.to_dict())  # does not end if the config contains itself
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [getattr(error, "lineno", None)]
        lines += [frame.lineno for frame in frames if frame.filename == file]
        where = f", line {lines[-1]}" if lines[-1] else ""
        why = reason(error)
        if isinstance(error, RecursionError):
            why = "the config contains itself"
        raise ConfigError(f"{path}{where}: {why}") from error
    return config


def reason(error: BaseException) -> str:
    """Return what an exception says, with its type where that tells more than the text."""
    if isinstance(error, NotImplementedError) and not str(error):
        return "its class does not define a method that a world needs (envs.world.World)"
    text = str(error)
    if len(text) > 500:  # ml_collections shows the whole config before it says which key is meant
        text = f"{text.partition('. ')[0]}. {text.splitlines()[-1]}"
    known = isinstance(error, ValueError | OSError | ImportError | NotImplementedError)
    if known and text and not isinstance(error, UnicodeError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")
