"""Packages that only some workflows need: a file of requirements in a clone, an extra of the
installed package."""

import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def is_missing(package: str) -> bool:
    """Return True if a package is not installed."""
    return importlib.util.find_spec(package) is None


def how_to_install(name: str, *options: str) -> str:
    """Return the command that installs requirements/NAME.txt: in a clone with that file, elsewhere
    as an extra.

    options: of pip, such as "--no-deps". What needs some has no extra, which can have none.
    """
    file = ROOT / "requirements" / f"{name}.txt"
    if file.is_file():
        path = os.path.relpath(file) if Path.cwd().is_relative_to(ROOT) else file
        return " ".join(["pip install", *options, f"-r {path}"])
    try:
        extras = importlib.metadata.metadata("evolver").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        extras = []
    if name in extras:
        return f"pip install 'evolver[{name}]'"
    command = " ".join(["pip install", *options, f"-r requirements/{name}.txt"])
    return f"in a clone of Evolver, {command}"


def load(module: str, name: str) -> Any:
    """Return a module of a package in requirements/NAME.txt. Raises ModuleNotFoundError with how to
    install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # something else that the package needs
        raise ModuleNotFoundError(
            f"{module} is not installed: {how_to_install(name)}", name=error.name
        ) from None
