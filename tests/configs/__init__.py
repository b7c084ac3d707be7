"""Tests of configs, and what they share with tests of commands and plans."""

import importlib

from configs import base
from evolver.config import cli, plugs
from evolver.config.checks.contradictions import contradictions
from evolver.config.keys import key_problems


def config_of(name, *overrides):
    """Return a config, "quickstart" or "quickstart:grpo", with overrides such as "steps=4"."""
    name, *argument = name.split(":")
    return changed(importlib.import_module(f"configs.{name}").get_config(*argument), *overrides)


def changed(config, *overrides):
    """Return the config after overrides such as "steps=4"."""
    for override in overrides:
        assert not cli.override(config, f"--config.{override}")
    return config


def mistakes(config, mode="train"):
    """Return what is wrong with a config wherever it runs."""
    keys = key_problems(config, base.Config).values()
    return [*keys, *plugs.problems_in(config), *contradictions(config, mode, plugged=True)]
