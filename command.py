"""The command `evolver` of the installed package: a word for each thing to do, then the flags of
the program behind it.

    evolver train --config=configs/quickstart.py      # as `python run.py --config=...`
    evolver plan --config=configs/appworld_14b.py --target=h100:8
    evolver view runs/quickstart
    evolver serve --model=runs/quickstart/policy
    evolver check my_world:MyWorld

Configs that ship with the package are found from any directory; files of the working directory come
first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

from evolver.config.cli import MODES
from evolver.config.plugs import look_in

# {word: (module with main(argv), what it does)}: programs with flags of their own
PROGRAMS = {
    "view": (
        "experiments.view.__main__",
        "look at runs in a browser, as text, or as a bundle of files",
    ),
    "serve": ("rl.engines.serve.server", "serve a trained policy over HTTP"),
    "check": ("envs.check", "check an environment against the contract"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the programs and return its exit code; 2 for a word that names none."""
    words = sys.argv[1:] if argv is None else argv
    word, rest = (words[0], words[1:]) if words else ("--help", [])
    if word != "view":  # which looks at folders of others, and `view .` would run their code
        look_in(Path.cwd())  # where the user's own worlds and ideas are, as with `python -m`
    if word in MODES:
        import run

        return run.main([f"evolver {word}", *rest, f"--mode={word}"])
    if word in PROGRAMS:
        try:
            program = importlib.import_module(PROGRAMS[word][0])
        except ModuleNotFoundError as error:  # a package that only some programs need
            print(f"evolver {word}: {error}", file=sys.stderr)
            return 1
        return program.main(rest)
    if word == "--version":
        print(importlib.metadata.version("evolver"))
        return 0
    about = {word: what for word, what in MODES.items()} | {
        word: what for word, (_, what) in PROGRAMS.items()
    }
    lines = [f"  evolver {word:8} {what}" for word, what in about.items()]
    if word in ("--help", "-h", "help"):
        print(
            __doc__,
            *lines,
            "",
            "`evolver train --help` lists the flags, `--help=WORD` the config keys.",
            sep="\n",
        )
        return 0
    print(
        f"evolver {word}: there is no such command; these exist:", *lines, sep="\n", file=sys.stderr
    )
    return 2
