"""Tests of configs, and what they share with tests of commands."""

from configs import base
from evolver.config import plugs
from evolver.config.checks.contradictions import contradictions
from evolver.config.keys import key_problems


def mistakes(config, mode="train"):
    """Return what is wrong with a config wherever it runs."""
    found = list(key_problems(config, base.Config).values())
    for plug in plugs.in_config(config):
        found += plugs.problems(*plug)
    return [*found, *contradictions(config, mode)]
