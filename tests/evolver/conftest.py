"""Runs of the tiny policy, a client whose language models are scripts, and the documented world."""

import contextlib
import importlib
from pathlib import Path

import pytest

from tests.evolver.chat_server import client
from tests.evolver.runs import go


@pytest.fixture
def finish(tiny, tmp_path):
    """Play a run of the tiny policy to its end, and return its workdir, which has this name."""

    def play(name, *words):
        assert go(tiny, tmp_path / name, *words) == 0
        return tmp_path / name

    return play


@pytest.fixture
def ends(tiny, tmp_path, capsys):
    """Play a run of the tiny policy that ends with this exit code, and return its message, which is
    no traceback."""

    def play(code, *words):
        assert go(tiny, tmp_path / "run", *words) == code
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return play


@pytest.fixture
def chat_of():
    """Clients whose every role is answered by a script, and which take no failure for the end."""
    with contextlib.ExitStack() as stack:

        def make(script, **limits):
            limits = {"attempts": 2, "failures": 1000, "deadline": 120.0} | limits
            return stack.enter_context(client(script, limits=limits, role={"max_tokens": 500}))

        yield make


@pytest.fixture(scope="session")
def thermostat(tmp_path_factory):
    """The class of the example in docs/environments.md, of a module that can be imported."""
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("docs")
    source = page.partition("```python\n")[2].partition("```")[0]
    (folder / "thermostat_of_the_docs.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("thermostat_of_the_docs").Thermostat
