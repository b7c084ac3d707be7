"""`--help=WORD` finds keys with what they mean, and every key means something."""

import re

import pytest

import run
from configs import base
from evolver.config import help, plugs
from evolver.config.keys import keys_of


def test_every_key_has_a_meaning():
    keys = keys_of(base.Config)
    assert not [name for name, key in keys.items() if not key.meaning]
    assert keys["questioning.explorer.name"].meaning.startswith("Explores and writes tasks")
    assert keys["engine.in_flight"].meaning.endswith("or keep them going.")  # two lines


@pytest.mark.parametrize("word", ["advantage", "ADVANTAGE", "drop_below"])
def test_a_word_finds_keys_and_arguments_with_type_default_and_meaning(word, capsys):
    assert run.main(["run.py", f"--help={word}"]) == 0
    shown = capsys.readouterr().out
    assert "config.advantage.args.drop_below (float; at least 0) = 0.0, of loop" in shown
    if word != "drop_below":
        assert "config.advantage.name (str) = 'grpo'\n    grpo, rloo" in shown
        bounds = "(float; at least 0 and at most 1000)"
        assert f"config.advantage.synthetic {bounds} = 1.0\n    Factor on the advantages" in shown
    assert not re.search("Annotated|typing", shown)


def test_every_argument_of_a_plug_means_something_and_a_word_shows_those_that_it_concerns(capsys):
    for key in plugs.KINDS:
        lines = list(help.arguments(key, key))
        for number, line in enumerate(lines):
            if line.startswith(f"{key}.args."):
                argument = line.partition(" (")[0].rpartition(".")[2]
                about = [text for text in lines[:number] if text.startswith(f"{key}.name=")][-1]
                assert "\n    " in line or re.search(rf"\b{argument}\b", about), line
    assert run.main(["run.py", "--help=alpha"]) == 0
    shown = capsys.readouterr().out
    alpha = "config.advantage.args.alpha (float; at least 0 and at most 1000) = 0.1, of adca"
    assert f"{alpha}\n    weight of the labels" in shown
    assert "alpha_steps" in shown and "label_value (" not in shown


def test_the_defaults_are_those_of_the_config_and_a_word_that_finds_nothing_says_so(capsys):
    assert run.main(["run.py", "--config=configs/quickstart.py", "--help=rollout.group"]) == 0
    assert "config.rollout.group (int; at least 1 and at most 4096) = 8" in capsys.readouterr().out
    assert run.main(["run.py", "--help=zebra"]) == 0
    assert "'zebra'" in capsys.readouterr().out
    assert run.main(["run.py", "--config=configs/none.py", "--help=zebra"]) == 2
    assert "there is no such file" in capsys.readouterr().err
