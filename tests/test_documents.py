"""The documents: their links lead somewhere, and the programs that they name accept the commands as
written."""

import argparse
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import PROGRAMS
from configs import base, imitation
from evolver.config.cli import parse
from evolver.config.keys import key_problems
from tests.configs import mistakes
from tests.test_contracts import ROOT, failures, files, name_of, python_files

ELSEWHERE = ("my_", "<", "thermostat", "lending")  # files that the reader writes


def documents() -> list[Path]:
    return [p for p in files() if p.suffix == ".md"]


def commands(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the words of the commands of `python` and `evolver` in a document's blocks of code,
    without comments."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(
        r"^(?: {4,})?((?:\w+=\S+ )*(?:python|evolver|pip|make) .*)$", text, flags=re.MULTILINE
    ):
        for part in shlex.join(shlex.split(line, comments=True)).replace("'&&'", "\n").split("\n"):
            words = [word for word in shlex.split(part) if word != "&"]
            while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            elsewhere = any(mark in " ".join(words) for mark in ELSEWHERE)
            if words[0] in ("python", "evolver") and not elsewhere:
                yield tuple(words)


COMMANDS = list(dict.fromkeys(itertools.chain.from_iterable(map(commands, documents()))))
# programs that take a config alone
CONFIGS = {"run.py": base, "train": base, "-m experiments.imitation": imitation}
RUNS = [words for words in COMMANDS if {words[1], " ".join(words[1:3])} & CONFIGS.keys()]
PARSED = [words for words in COMMANDS if words not in RUNS and words[2] != "pytest"]


def test_links_in_the_documents_resolve():
    wrong = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
        for found in re.findall(r"\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"", text):
            target = "".join(found)
            here = not re.match(r"[a-z]+:|#", target)
            if here and not (path.parent / target.split("#")[0]).exists():
                wrong.append(f"{name_of(path)} -> {target}")
    assert not wrong, failures(wrong)


def test_commands_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    wrong = []
    for path in [*documents(), *python_files("configs"), ROOT / ".ci" / "run"]:
        text = path.read_text(encoding="utf-8")
        code = re.findall(
            r"`([^`\n]+)`|^(?: {4}|\t)?(?:\$ )?((?:make|python) .*)$", text, flags=re.MULTILINE
        )
        for command in ("".join(pair) for pair in code):
            unknown = set(re.findall(r"^make\s+([^\s=]+)(?:\s|$)", command)) - targets
            scripts = re.findall(r"(?:^python |--config=)([\w/]+\.py)", command)
            if unknown or not all((ROOT / script).exists() for script in scripts):
                wrong.append(f"{name_of(path)}: {command}")
    assert not wrong, failures(wrong)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_run_in_the_documents_has_a_sound_config(words):
    """The checkpoints, servers and interpreters that it names are the reader's."""
    program = words[1] if words[1] in CONFIGS else " ".join(words[1:3])
    command = parse([program, *words[1 + len(program.split()) :]])
    assert not command.problems and command.config is not None
    if program == "-m experiments.imitation":
        assert not key_problems(command.config, imitation.Config)
    else:
        assert not mistakes(command.config, command.mode)


class Accepted(BaseException):
    """Raised where a program has read its arguments and would begin, with those that it leaves to
    the config."""


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize("words", PARSED, ids=" ".join)
def test_a_program_in_the_documents_accepts_its_arguments(words, monkeypatch):
    program, first, *rest = words
    module = PROGRAMS[first][0] if program == "evolver" else rest.pop(0)
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, *args, **kwargs):
        raise Accepted(original(self, *args, **kwargs)[1])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(sys, "argv", [module, *rest])
    with pytest.raises(Accepted) as accepted:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    monkeypatch.undo()
    (flags,) = accepted.value.args
    if module in ("experiments.retrieval", "experiments.judging"):  # others are of the config
        assert not parse([module, *(word for word in rest if word.startswith("--config"))]).problems
    else:
        assert not flags
