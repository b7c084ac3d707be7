"""Configs are data: every key is documented once, every variant is short and made of known keys."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import base
from evolver.config import (
    AT_LEAST_ONE,
    CHOICES,
    FRACTIONS,
    POSITIVE,
    contradictions,
    flat,
    shape_problems,
    value_problems,
)

ROOT = Path(__file__).parents[2]
FILES = [p for p in sorted((ROOT / "configs").glob("*.py")) if p.stem not in ("__init__", "base")]
ARGUMENTS = {"quickstart": ("grpo", "q", "qn", "qa", "all")}
VARIANTS = [(p.stem, argument) for p in FILES for argument in (None, *ARGUMENTS.get(p.stem, ()))]


def load(name: str, argument: str | None) -> ConfigDict:
    module = importlib.import_module(f"configs.{name}")
    return module.get_config() if argument is None else module.get_config(argument)


@pytest.mark.parametrize("name,argument", VARIANTS)
def test_a_variant_is_made_of_known_keys_with_sound_values(name, argument):
    config = load(name, argument)
    assert not list(shape_problems(config, base.get_config()))
    assert not list(value_problems(config))
    assert not list(contradictions(config, "train"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_variant_is_short_and_opens_with_its_command(path):
    text = path.read_text()
    assert text.count("\n") < 120
    assert f"--config=configs/{path.name}" in ast.get_docstring(ast.parse(text))


def test_the_base_is_sound_apart_from_having_no_policy():
    config = base.get_config()
    assert not list(value_problems(config)) and not list(contradictions(config, "train"))


def test_every_key_of_the_base_says_what_it_means():
    lines = (ROOT / "configs/base.py").read_text().splitlines()
    keys = [line for line in lines if re.match(r"    \w+\.\w+ = ", line) and "ConfigDict()" not in line]
    assert len(keys) >= len(flat(base.get_config())) - 1
    assert not [line for line in keys if "#" not in line]


def test_lists_are_not_used_because_flags_cannot_override_them():
    assert not [name for name, value in flat(base.get_config()).items() if isinstance(value, list)]


def test_every_key_is_read_by_the_code():
    sources = [*(ROOT / "evolver").glob("*.py"), ROOT / "run.py"]
    text = "\n".join(p.read_text() for p in sources if p.stem not in ("config", "plan"))
    for name in flat(base.get_config()):
        key = name.rpartition(".")[2]
        assert re.search(rf"\.{key}\b|\"{key}\"", text) or name.startswith("mesh."), f"nothing reads config.{name}"


def test_the_tables_of_the_validation_name_real_keys():
    known = flat(base.get_config())
    for name in [*CHOICES, *AT_LEAST_ONE, *POSITIVE, *FRACTIONS]:
        assert name in known, name


def test_choices_are_those_of_the_code():
    from models.qwen import PRESETS
    from rl.losses import AGGREGATES

    assert CHOICES["model.preset"] == tuple(PRESETS)
    assert CHOICES["loss.aggregate"] == AGGREGATES


def test_an_argument_no_config_knows_is_refused():
    for name in (*ARGUMENTS, "base"):
        with pytest.raises(ValueError, match="nonsense"):
            load(name, "nonsense")
