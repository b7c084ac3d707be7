"""The package: what `pip install .` installs, and the command `evolver`."""

import ast
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import command
from envs import packages, process
from evolver.config import cli
from tests.test_contracts import files, name_of, python_files, tree_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DYNAMIC = PROJECT["tool"]["setuptools"]["dynamic"]
# Not extras: what needs an environment of its own, what is installed with --no-deps, and what only
# a clone can use.
NO_EXTRA = {
    *("appworld", "launch", "textworld", "vllm"),
    *("bfcl", "pretrained"),
    *("dev", "parity", "templates"),
}


def test_requirements_are_stated_once_and_every_extra_is_one_of_them():
    assert DYNAMIC["dependencies"]["file"] == ["requirements.txt"]
    extras = {name: entry["file"] for name, entry in DYNAMIC["optional-dependencies"].items()}
    files = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    assert extras == {name: [f"requirements/{name}.txt"] for name in extras}
    assert set(extras) | NO_EXTRA == set(files)
    assert not [name for name in extras if "\n-" in files[name]]  # setuptools reads no options


def test_the_command_has_a_word_for_each_program(stderr, stdout, monkeypatch):
    module, _, name = PROJECT["project"]["scripts"]["evolver"].partition(":")
    assert getattr(importlib.import_module(module), name) is command.main
    assert command.main([]) == 0
    said = stdout()
    for word in ("train", "eval", "plan", "view", "serve", "check"):
        assert f"evolver {word} " in said
    assert command.main(["fly"]) == 2 and "there is no such command" in stderr()
    for module, _ in command.PROGRAMS.values():
        assert callable(importlib.import_module(module).main)
    monkeypatch.setitem(command.PROGRAMS, "serve", ("no.such_module", ""))
    assert command.main(["serve"]) == 1
    assert stderr() == "evolver serve: No module named 'no'\n"
    monkeypatch.setattr("experiments.view.__main__.main", lambda words: words)
    assert command.main(["view", "a", "--text"]) == ["a", "--text"]


def test_a_mode_is_a_word_and_configs_are_found_from_any_directory(
    tiny, tmp_path, monkeypatch, stdout
):
    monkeypatch.chdir(tmp_path)
    assert command.main(["plan", f"--config={tiny}", "--config.steps=7"]) == 0
    assert "steps = 7" in stdout()
    found = cli.parse(["run.py", "--config=configs/quickstart.py:grpo", "--mode=plan"])
    assert not found.problems and found.workdir == os.path.join("runs", "quickstart-grpo")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.py").write_text("raise ValueError('my own')")
    assert "line 1: my own" in cli.parse(["", "--config=configs/quickstart.py"]).problems[0]
    (problem,) = cli.parse(["run.py", "--config=configs/bfcl_tyni.py"]).problems
    assert "did you mean configs/bfcl_tiny.py?" in problem


def test_another_interpreter_sees_this_code_and_nothing_else_of_where_it_is_installed(
    tmp_path, monkeypatch
):
    assert process.code_folder() == str(ROOT)
    site = tmp_path / "site-packages"
    (site / "foreign").mkdir(parents=True)
    monkeypatch.setattr(process, "ROOT", site)
    folder = Path(process.code_folder.__wrapped__())
    assert sorted(path.name for path in folder.iterdir()) == sorted(process.OURS)
    assert (folder / "envs").readlink() == site / "envs"


def test_what_is_missing_is_named_as_it_can_be_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    how = packages.how_to_install
    assert how("llm") == "pip install -r ../requirements/llm.txt"
    assert how("bfcl", "--no-deps") == "pip install --no-deps -r ../requirements/bfcl.txt"
    monkeypatch.chdir(tmp_path)
    assert how("llm") == f"pip install -r {ROOT}/requirements/llm.txt"
    monkeypatch.setattr(packages, "ROOT", tmp_path)  # as in site-packages
    named = {"Provides-Extra": [*DYNAMIC["optional-dependencies"]]}
    installed = types.SimpleNamespace(get_all=named.get)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: installed)
    assert how("llm") == "pip install 'evolver[llm]'"
    hint = "in a clone of Evolver, pip install --no-deps -r requirements/bfcl.txt"
    assert how("bfcl", "--no-deps") == hint
    missing = r"no_such_world is not installed: pip install 'evolver\[mcp\]'"
    with pytest.raises(ModuleNotFoundError, match=missing):
        packages.load("no_such_world", "mcp")
    assert packages.load("json.decoder", "mcp").JSONDecoder


def test_messages_name_no_file_that_the_package_lacks():
    for path in python_files("envs", "evolver", "rl"):
        values = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
        texts = [value for value in values if isinstance(value, str) and "pip install" in value]
        wrong = [text for text in texts if "requirements/" in text and "\n" not in text]
        assert path.name == "packages.py" or not wrong, name_of(path)  # docstrings may


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_code_and_runs_elsewhere(tmp_path):
    pytest.importorskip(
        "setuptools", minversion="77", reason="`make test-slow` installs requirements/dev.txt"
    )
    code = (*process.OURS, "command.py")
    beside = ("requirements", "requirements.txt", "pyproject.toml", "README.md", "LICENSE")
    names = list(map(name_of, files()))
    wanted = {name for name in names if name.split("/")[0] in (*code, *beside)}
    for name in wanted:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet"]
    pip += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, "./clone"], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("evolver-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if ".dist-info/" not in name}
        packed.extractall(tmp_path / "site-packages")
    assert held == {name for name in wanted if name.split("/")[0] in code}
    main = "import sys; from command import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", main, "plan", "--config=configs/quickstart.py"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "parameters" in done.stdout, done.stderr
